// The shared memory of one `processes` channel.
//
//   | Header | Session x SESSIONS | Group x groups | blocks -> ...            ... <- slots |
//
// One memfd holds it all. It has no name, so the kernel frees it with its last user (C12). Its length is the
// most it could ever need, but only `reserved_low`/`reserved_high` bytes are allocated, and so many records
// of sessions; `fallocate` adds more before it is touched, so that a full memory is an error where it
// happens, never a SIGBUS later. Freed blocks and slots go to free lists and are used again while still warm;
// memory is never given back before the channel ends. Each process maps what lies before the blocks, and of
// blocks and slots what there is (windows.hpp).
//
// An item is a slot, with a block when it does not fit into the slot. Slots are linked by offsets from the
// start of the file; offset 0 (the header) stands for "none". The FIFO is the list head..tail. A slot is
// always in exactly one place: the free list, the FIFO, a group (parked until its turn), a session's lease
// list, or owned singly by a session that copies into it (FILLING) or out of it, or looks at it, or fills it
// in place (HELD). Wherever it is, a session may be looking at it: its viewer (ring_memory.cpp).
//
// What an item costs between two cores is the cache lines that must move from one to the other, so words
// that change together lie together. While nobody waits, a put and a get each move: the lock's line, the
// line of the FIFO's ends and counts behind it, and the slot's first line; a put into an empty FIFO no
// other, else that of the slot before. What only readers or only writers write has lines of its own, and so
// have redo records (redo.hpp).
#pragma once

#include <pthread.h>

#include <algorithm>
#include <span>

#include "redo.hpp"
#include "transport.hpp"
#include "waiting.hpp"

namespace flowchan {

constexpr uint64_t MAGIC = 0x6e616863776f6c66;  // "flowchan"
constexpr uint64_t VERSION = 8;
// Ports, and plain users and HOLDERs beside them; number 0 is nobody's.
constexpr uint32_t SESSIONS = 4096 + 256;
constexpr uint32_t RECORDS = 16;    // of redo
constexpr uint64_t PAGE = 4096;     // by which blocks are laid out, whatever the kernel's is
constexpr uint64_t GROW = 1 << 16;  // blocks are reserved in steps of up to this, and slots a page at a time
constexpr uint64_t UNIT = 64;       // blocks are multiples of it and aligned to it
constexpr uint32_t CLASSES = 136;   // block sizes, four to a doubling: 64 B << 34

enum class SlotState : uint64_t { Free, Inside, Parked, Leased, Filling, Held };

// One participant: the plain user of a process, or a port. Only `pid`s are ever looked at from outside.
struct alignas(64) Session {
    // HOLDER: its channel or port was closed, but its process still looks at blocks.
    enum Role : uint64_t { NONE = 0, PLAIN = 1, READER = 2, WRITER = 3, RESUME = 4, HOLDER = 5 };
    uint64_t role;
    uint64_t pid;
    uint64_t started;     // the process's start time: with the pid it names one process for ever
    uint64_t generation;  // of this record: an old handle of a reused record must not end the new user
    uint64_t supervised;  // a supervisor ends this session, nobody else may
    uint64_t lease_head;  // reader: the items in hand
    uint64_t lease_tail;
    uint64_t leased;
    uint64_t committed_item;  // writer: number of the input item last worked on, plus one (0: none) ...
    uint64_t
        // ... and how many of its outputs are in this ring. RESUME: the same, of a dead worker
        committed_count;
    uint64_t views;   // slots that it is the viewer of
    uint64_t forked;  // its process was forked while it looked: a child may look on when it is dead
    // How many of its threads stand at each gate: what to take off the gates when it dies. No redo, as for
    // the gates.
    uint32_t at_reader_gate;
    uint32_t at_writer_gate;
    // A writer of an ordered stage that waits for its turn: the number of its item plus one (0: it does not
    // wait), the futex word it sleeps on (its partner is the sleeper's compare in the kernel), and whether it
    // has been called.
    uint64_t awaits;
    std::atomic<uint32_t> word;
    uint32_t called;
    // Reader: whose code runs for what it has in hand, written by its own process without the lock (R10):
    // only a death in the user's code, or while the item is being unpickled, is counted against the item.
    enum At : uint64_t { OURS = 0, UNPICKLING = 1, USERS = 2 };
    uint64_t at;
    // Reader: items with which its predecessors died, to be taken again by this session alone; and where the
    // last one died.
    uint64_t again_head, again_tail, again, again_at;
    // Reader: how many of the items on lease, from the oldest on, a worker elsewhere has begun to work on, for
    // which a link holds the leases; 0: all of them.
    uint64_t begun;
    PortClock clock;  // how long it has waited; no redo
    uint64_t orders;  // Reader: see Orders

    uint64_t suspects() const { return begun && begun < leased ? begun : leased; }
};

// A slot keeps its block for ever: both are freed into, and taken from, the free list of that block class
// together. So a block holds nothing but payload, and filling one that is still on its free list disturbs
// nobody.
struct alignas(64) Slot {
    static constexpr uint64_t KEYLESS = UINT64_MAX;
    static constexpr uint64_t INLINE = 80;  // the first 16 of them in the line of the words before
    uint64_t next;
    static constexpr uint64_t NUMBERED = 1 << 6, LOANED = 1 << 7, DEATH = uint64_t(1) << 40;
    static constexpr uint64_t PLACE_BITS = 0x3f | 0xffff << 8, VIEW_BITS = uint64_t(0xffff) << 24 | LOANED;
    static uint64_t owned_by(uint32_t session) { return uint64_t(session) << 8; }
    static uint64_t viewed_by(uint32_t session) { return uint64_t(session) << 24; }
    uint64_t
        state;  // SlotState | NUMBERED | LOANED | owner session << 8 | viewer session << 24 | deaths << 40
    uint64_t size;      // of the payload in bytes
    uint64_t number;    // i, given when first taken: items leave in the order of their numbers. Before that:
                        // of which item of its writer's input it is an output, or KEYLESS
    uint32_t kind;      // what frame.hpp says the payload is
    uint32_t cls;       // block class, 0 for none; never changes
    uint64_t block;     // offset of the block, 0 for none; never changes
    char data[INLINE];  // the payload, if there is no block

    SlotState place() const { return SlotState(state & 0x3f); }
    uint32_t owner() const { return uint32_t(state >> 8 & 0xffff); }
    bool numbered() const { return state & NUMBERED; }
    bool loaned() const { return state & LOANED; }
    uint32_t viewer() const { return uint32_t(state >> 24 & 0xffff); }
    uint64_t deaths() const { return state >> 40; }
    static uint64_t placed(uint64_t state, SlotState place, uint32_t owner = 0) {
        return (state & ~PLACE_BITS) | uint64_t(place) | owned_by(owner);
    }
    uint64_t with_place(SlotState place, uint32_t owner = 0) const { return placed(state, place, owner); }
};
static_assert(sizeof(Slot) == 128);

// Outputs for input item number i of an ordered stage, parked at groups[i % n] until i's turn comes.
struct Group {
    uint64_t head, tail, count;
    uint64_t complete;  // i has no more outputs to come
};

// What never changes.
struct Constants {
    uint64_t magic, version;
    uint64_t capacity, max_bytes;
    uint64_t length;  // of the file
    uint64_t groups;  // number of groups
    uint64_t groups_at, blocks_at;
};

struct Header : Constants {
    uint64_t reserved_low,
        reserved_high;           // allocated up to / from here; changed after fallocate, no redo needed
    uint64_t reserved_sessions;  // so many records are; likewise

    alignas(64) pthread_mutex_t mutex;
    // Number of the process that took the lock last: a hint for turn_taking.hpp. In the mutex's line, also where that
    // has 48 bytes (aarch64).
    uint64_t had_by;
    // What of the blocks and slots every process must map before it follows anything. They never shrink, and
    // come before what they announce; no redo needed. Beside the mutex, because everybody looks who takes it.
    uint64_t map_blocks_to, map_slots_from;
    // --- below: only under the mutex, only by a Change, unless said otherwise ---
    // What every put and get writes.
    alignas(64) uint64_t head;
    uint64_t tail;         // meaningless while head is 0
    uint64_t puts, takes;  // inside = puts - takes
    uint64_t bytes_in, bytes_out;
    uint64_t slots_used;           // slots in no free list
    uint64_t free_slots[CLASSES];  // heads of the free lists, [0] of the slots without a block

    // What every put and get reads, and what seldom changes.
    alignas(64) uint64_t state;
    uint64_t slots_at;    // slots grow down from the end of the mapping to here
    uint64_t blocks_top;  // blocks grow up from blocks_at to here
    uint64_t damaged;     // something here can't be right: set with BROKEN, never unset
    // Bytes that may be inside; a larger item passes alone. 0: as many as max_bytes. No redo: it is set
    // before anybody else has the channel.
    uint64_t share;
    // A writer waits for bytes, not for a place; needs no redo: it is set again on the next try.
    uint64_t short_of_memory;
    uint64_t cut_off;  // process that died with a counted writer open, 0: none; the end is no clean one then
    uint64_t resumes;  // sessions with role RESUME

    alignas(64) uint64_t claimed;  // places in the channel claimed by FILLING slots
    uint64_t parked, turn;
    uint64_t writers, readers;   // counted ports open now
    uint64_t cause, cause_size;  // block with the pickled cause of BROKEN
    // The one writer, a link, is to hear of each item that is finished, and of a reader that waits.
    uint64_t heard;
    // What is put goes to another host, so nothing of it may stay on a device of this one. No redo: it is set
    // before anybody else has the channel.
    uint64_t leaves;

    alignas(64) uint64_t numbered;  // how many items have got their number
    uint64_t leased;                // items on lease, over all sessions
    uint64_t viewed_bytes;          // of the slots with a viewer, those that are loaned left out

    alignas(64) Gate reader_gate;  // gates need no redo, see waiting.hpp
    Gate writer_gate;
    // When somebody last looked for dead sessions: a hint, no partner. Every call reads it, so it shares its
    // line with nothing that changes often.
    alignas(64) std::atomic<uint64_t> swept_ns;
    Redo redo[RECORDS];

    int64_t inside() const { return int64_t(puts - takes); }
    // The records behind the header; only those for which memory is allocated may be touched.
    Session* records() { return reinterpret_cast<Session*>(this + 1); }
    std::span<Session> sessions() { return {records(), std::min<uint64_t>(reserved_sessions, SESSIONS)}; }
};

// Block classes: 0 is "no block"; 1 to 4 are 64, 128, 192, 256 bytes; then four steps to each doubling.
// `class_of` is the smallest that holds `size`.
inline uint64_t class_size(uint32_t c) {
    if (c <= 4) return UNIT * c;
    uint32_t doubling = (c - 5) / 4, step = (c - 5) % 4;
    return (UNIT * 4 << doubling) / 4 * (5 + step);
}
inline uint32_t class_of(uint64_t size) {
    if (size <= Slot::INLINE) return 0;
    uint32_t c = 1;
    if (size > UNIT * 4) {
        uint32_t doubling = 63 - __builtin_clzll((size - 1) / (UNIT * 4));
        c = 5 + doubling * 4;
    }
    while (class_size(c) < size) ++c;
    return c;
}

// Blocks from this class on lie alone in their pages, and may be read in place by who takes them. Smaller
// ones are copied, which is cheaper than to keep account of their views.
constexpr uint32_t VIEWABLE = 28;  // 16 KB

}  // namespace flowchan
