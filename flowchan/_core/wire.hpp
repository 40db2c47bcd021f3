// The frames that two hosts exchange over a link after both have proved that they know the run's secret.
//
// A connection is a sequence of frames. A frame has a head and, for some types, a payload. Each frame is for
// one port of one stream (link.hpp): input ports carry items to a worker, and output ports carry its outputs
// back. All types except ITEM and OUT report an absolute state. Only the latest report counts, so a new
// connection needs no log of the old connection.
//
// All numbers are little-endian. Received data is checked before use, because the other side may run another
// version or be hostile.
#pragma once

#include <cstdint>
#include <cstring>

namespace flowchan {

enum class FrameType : uint8_t {
    // worker side -> owner side: the stream is open; the owner side replies with the state of all its ports
    OPEN = 1,
    ITEM = 2,   // owner side -> worker side, input port: item n of the stream
    OUT = 3,    // worker side -> owner side, output port: an output for item n, or for no item (KEYLESS)
    INPUT = 4,  // worker side -> owner side, input port: a = items got, b = done, n = leased; flags
    // owner side -> worker side, output port: a = got, b = used, n = total puts granted (limited streams
    // only), flags; with BREAK, the payload is the cause
    OUTPUT = 5,
    // sender of items -> receiver: no more items will come; with BREAK, the payload is the cause
    END = 6,
    PING = 7,  // n = time on the sender's clock
    PONG = 8,  // n = the value from the PING
    // owner side -> worker side, input port: give back all items that the worker has not taken
    RECALL = 9,
    // worker side -> owner side, output port: n = 1 while a writer waits for room, otherwise 0
    WANT = 10,
    // receiver of items -> sender, once per connection, before the port's first INPUT or OUTPUT. An earlier
    // connection has delivered the first `a` bytes of item n, so the next frame has only the rest.
    PART = 11,
    // An item may be a reference to an output that stays where it was made (references.hpp). An OUT frame
    // then has a `Kept` as its payload. An ITEM frame has a `Location`, followed by an address.

    // owner side -> worker side, input port: the payload is the output behind item n, or its location
    MOVED = 12,
    // worker side -> owner side, input port: the output behind item n cannot be fetched
    UNREACHABLE = 13,
    // owner side -> worker side, output port: send output n in full
    PULL = 14,
    // worker side -> owner side, output port: output n, with its kind in the flags
    PULLED = 15,
};

// Return whether a frame is addressed to the sender of the port's items, not to their receiver.
inline bool is_for_sender(FrameType type) {
    return type == FrameType::INPUT || type == FrameType::OUTPUT || type == FrameType::PART ||
           type == FrameType::UNREACHABLE || type == FrameType::PULL;
}

inline bool is_about_reference(FrameType type) { return type >= FrameType::MOVED; }

// An output that stays on the worker's host. `route`: see Frame::route.
struct Kept {
    uint64_t size;
    uint32_t kind, route;
};

// Items of this size or more are sent without a copy, or stay where they were made.
constexpr uint64_t LARGE = 64 << 10;
constexpr uint64_t REFERENCE_KIND = 7;       // the value of REFERENCE in frame.hpp
constexpr uint64_t MOST_LOCATION = 1 << 10;  // largest size of a location in bytes

enum Flag : uint8_t {
    STARVED = 1,     // INPUT: the worker waits and has no item
    USERS = 2,       // INPUT: user code is processing the leased items (R10)
    UNPICKLED = 4,   // INPUT: an item is being unpickled
    NO_MORE = 8,     // INPUT, OUTPUT: no reader will take more items
    BREAK = 16,      // INPUT, OUTPUT, END: the channel broke; the payload is the cause
    IS_OUTPUT = 32,  // END: this is an output port
    REMAKES = 128,   // OUTPUT: the worker has an urgent item, so its outputs may exceed all windows
    RECALLED = 64,   // INPUT: reply to RECALL; `got` counts only items that the worker has taken
};

struct Head {
    uint64_t size;  // size of the payload in bytes
    uint64_t n;
    uint32_t stream;
    uint16_t port;
    FrameType type;
    uint8_t flags;   // ITEM and OUT: kind of the item (frame.hpp) plus its deaths << 3
    uint64_t a = 0;  // unused in ITEM and OUT
    uint64_t b = 0;

    static constexpr uint64_t SHORT = 24, LONG = 40;
    static constexpr uint64_t MOST_DEATHS = 31;

    bool carries_item() const { return type == FrameType::ITEM || type == FrameType::OUT; }
    uint64_t length() const { return carries_item() ? SHORT : LONG; }
    uint64_t kind() const { return flags & 7; }
    uint64_t deaths() const { return flags >> 3; }
};
static_assert(sizeof(Head) == Head::LONG && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

constexpr uint64_t MOST_CAUSE = 1 << 24;  // largest size of a cause in bytes
constexpr uint64_t MOST_ITEM = uint64_t(1) << 46;

inline bool is_valid_item(const Head& head) {
    if (head.kind() == REFERENCE_KIND) return head.size <= MOST_LOCATION;
    return head.kind() >= 1 && head.kind() <= 4 && head.size <= MOST_ITEM;
}

// Return whether the fields of a head are valid for its type.
inline bool is_valid(const Head& head) {
    switch (head.type) {
        case FrameType::ITEM:
        case FrameType::OUT:
            return is_valid_item(head);
        case FrameType::MOVED:
            return is_valid_item(head);
        case FrameType::PULLED:
            return head.kind() != REFERENCE_KIND && is_valid_item(head);
        case FrameType::INPUT:
        case FrameType::OUTPUT:
            return head.size <= (head.flags & BREAK ? MOST_CAUSE : 0) && head.b <= head.a;
        case FrameType::END:
            return head.size <= (head.flags & BREAK ? MOST_CAUSE : 0);
        case FrameType::OPEN:
        case FrameType::PING:
        case FrameType::PONG:
        case FrameType::RECALL:
        case FrameType::WANT:
        case FrameType::PART:
        case FrameType::UNREACHABLE:
        case FrameType::PULL:
            return head.size == 0;
    }
    return false;
}

}  // namespace flowchan
