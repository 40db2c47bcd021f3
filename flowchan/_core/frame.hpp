// An item on its way into a ring: a few pieces of memory that are stored one after the other.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace flowchan {

// Encoding of a slot's payload. The numbers are written into shared memory: never reuse one.
enum Kind : uint64_t {
    DIRECT = 1,   // direct encoding of small built-ins (direct_values.hpp)
    BYTES = 2,    // the bytes of a `bytes` object
    PICKLE = 3,   // a pickle without buffers
    BUFFERS = 4,  // u64 count, then u64 offset and u64 size of each: a pickle, and its out-of-band buffers
    // u64 id, u64 id of its fd bundle or 0, PIN bytes in all, then as BUFFERS: the process that put the item
    // keeps an object alive for as long as the item exists
    PINNED = 5,
    // u64 0, u64 id of its fd bundle, PIN bytes in all, then as BUFFERS: descriptors travel with it
    BUNDLE = 6,
};

// The kinds whose items must exist while they are decoded: they are never copied out and freed first.
inline bool needs_its_slot(uint64_t kind) { return kind == PINNED || kind == BUNDLE; }

constexpr uint64_t PIN = 64;

struct Frame {
    static constexpr uint64_t SMALL = 256;
    struct Piece {
        const void* at;
        uint64_t size;
        uint64_t offset;  // in the payload
    };
    uint64_t kind = DIRECT;
    uint64_t size = 0;
    uint64_t small_size = 0;
    char small[SMALL];          // the payload of DIRECT
    Piece one{};                // the payload of BYTES and PICKLE, and of items that arrive in one piece
    std::vector<Piece> pieces;  // the payload of BUFFERS
    uint64_t deaths = 0;        // remote workers that died while they held the item
    uint64_t bundle = 0;        // id of the descriptors that travel with it, 0 for none
    std::vector<int> descriptors;
    mutable int refused = 0;  // the errno, if they could not be sent

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
