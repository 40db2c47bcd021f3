// Frame: an item that is about to be written to a ring. It lists the pieces of memory that make up the
// payload.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace flowchan {

// How a payload is encoded. The numbers are stored in shared memory, so never reuse a number.
enum Kind : uint64_t {
    DIRECT = 1,  // a small built-in value (direct_values.hpp)
    BYTES = 2,   // the bytes of a `bytes` object
    PICKLE = 3,  // a pickle without buffers
    // a pickle and its out-of-band buffers, preceded by a table: u64 count, then u64 offset and u64 size per
    // part
    BUFFERS = 4,
    // PIN bytes, then the format of BUFFERS. The PIN bytes start with a u64 id and the u64 id of the fd
    // bundle (or 0). The first id names an object. The process that put the item keeps this object alive as
    // long as the item exists.
    PINNED = 5,
    // PIN bytes, then the format of BUFFERS. The PIN bytes start with a u64 0 and the u64 id of the fd
    // bundle, whose descriptors travel with the item.
    BUNDLE = 6,
    // the u64 id of a reference to an output on another host (references.hpp)
    REFERENCE = 7,
};

// Return whether an item of this kind must stay in its slot while it is decoded. The slot of any other item
// is copied and freed before decoding.
inline bool needs_its_slot(uint64_t kind) { return kind == PINNED || kind == BUNDLE; }

// Return whether a batched get must leave items of this kind to single gets.
inline bool is_taken_singly(uint64_t kind) { return needs_its_slot(kind) || kind == REFERENCE; }

constexpr uint64_t PIN = 64;

struct Frame {
    static constexpr uint64_t SMALL = 256;
    struct Piece {
        const void* at;
        uint64_t size;
        uint64_t offset;  // from the start of the payload
    };
    uint64_t kind = DIRECT;
    uint64_t size = 0;
    uint64_t small_size = 0;
    char small[SMALL];          // the payload of DIRECT
    Piece one{};                // the payload of BYTES, PICKLE, and any item received as one piece
    std::vector<Piece> pieces;  // the payload of BUFFERS
    uint64_t deaths = 0;        // how many remote workers died while they held the item
    // The worker that a large output is for, plus one. 0: the next stage has no keys. ROUTE_UNKNOWN: only the
    // owner's process can choose the worker, so the output must not stay on its host (references.hpp).
    static constexpr uint32_t ROUTE_UNKNOWN = UINT32_MAX;
    uint32_t route = 0;
    uint64_t bundle = 0;  // id of the descriptors that travel with the item, or 0
    std::vector<int> descriptors;
    mutable int refused = 0;  // errno of a failed attempt to send the descriptors, or 0

    void write(char* to) const {
        if (one.at) {
            memcpy(to, one.at, one.size);
        } else if (kind == DIRECT) {
            memcpy(to, small, small_size);
        } else {
            for (const Piece& p : pieces) memcpy(to + p.offset, p.at, p.size);
        }
    }
};

}  // namespace flowchan
