// What two hosts say to each other over a link, once both have proved that they know the run's secret.
//
// A connection is a stream of frames: a head, and for some types a payload behind it. A frame speaks of one
// port of one line (link.hpp): input ports carry items to a worker, output ports what it puts. Everything but
// ITEM and OUT is absolute state, so that the latest frame is all that counts, and a new connection needs no
// log of the old one.
//
// All numbers are little-endian. Whatever comes from the other side is checked before it is used: it may be
// of another version, or hostile.
#pragma once

#include <cstdint>
#include <cstring>

namespace flowchan {

enum class Say : uint8_t {
    OPEN = 1,    // away: the line is open here; home answers with the state of all its ports
    ITEM = 2,    // home -> away, input port: item n of the line
    OUT = 3,     // away -> home, output port: an output made for item n, or for none (KEYLESS)
    INPUT = 4,   // away -> home, of an input port: a = got, b = done, n = in hand, flags
    OUTPUT = 5,  // home -> away, of an output port: a = got, b = used, flags; when BROKEN with the cause
    END = 6,     // from whom items come to whom they go: none will come; BROKEN with the cause
    PING = 7,    // n = the sender's clock
    PONG = 8,    // n as it came
    RECALL = 9,  // home -> away, of an input port: what the worker has not taken is wanted back
};

enum Flag : uint8_t {
    STARVED = 1,     // INPUT: the worker waits, and nothing is left for it here
    USERS = 2,       // INPUT: what is in hand is with the user's code (R10)
    UNPICKLED = 4,   // INPUT: it is being unpickled
    NO_MORE = 8,     // INPUT, OUTPUT: nobody takes items there any more
    BREAK = 16,      // INPUT, OUTPUT, END: the channel broke; the payload is its cause
    IS_OUTPUT = 32,  // END: of an output port
    RECALLED = 64,   // INPUT: as RECALL asked, `got` counts only what the worker has taken
};

struct Head {
    uint64_t size;  // of the payload
    uint64_t n;
    uint32_t line;
    uint16_t port;
    Say say;
    uint8_t flags;   // ITEM and OUT: the kind of the item (frame.hpp), and its deaths << 3
    uint64_t a = 0;  // not sent with ITEM and OUT
    uint64_t b = 0;

    static constexpr uint64_t SHORT = 24, LONG = 40;
    static constexpr uint64_t MOST_DEATHS = 31;

    bool carries_item() const { return say == Say::ITEM || say == Say::OUT; }
    uint64_t length() const { return carries_item() ? SHORT : LONG; }
    uint64_t kind() const { return flags & 7; }
    uint64_t deaths() const { return flags >> 3; }
};
static_assert(sizeof(Head) == Head::LONG && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

constexpr uint64_t MOST_CAUSE = 1 << 24;  // bytes of a cause
constexpr uint64_t MOST_ITEM = uint64_t(1) << 46;

// Whether a head can be right, by itself.
inline bool is_right(const Head& head) {
    switch (head.say) {
        case Say::ITEM:
        case Say::OUT:
            return head.kind() >= 1 && head.kind() <= 4 && head.size <= MOST_ITEM;
        case Say::INPUT:
        case Say::OUTPUT:
            return head.size <= (head.flags & BREAK ? MOST_CAUSE : 0) && head.b <= head.a;
        case Say::END:
            return head.size <= (head.flags & BREAK ? MOST_CAUSE : 0);
        case Say::OPEN:
        case Say::PING:
        case Say::PONG:
        case Say::RECALL:
            return head.size == 0;
    }
    return false;
}

}  // namespace flowchan
