// Layout of the shared memory of one `processes` channel.
//
//   | Header | Session x SESSIONS | Group x groups | blocks -> ...            ... <- slots |
//
// One memfd holds everything. It has no name, so the kernel frees it with its last user (C12). Its length is
// the largest size that the channel could need. Only `reserved_low`/`reserved_high` bytes and some session
// records are allocated. `fallocate` adds more before it is touched, so a full memory causes an error at that
// call and never a SIGBUS later. Freed blocks and slots go to free lists and are reused while still in the
// caches. Memory is never returned before the channel ends. Each process maps everything before the blocks,
// and the blocks and slots that exist (windows.hpp).
//
// An item is a slot, plus a block when it does not fit into the slot. Slots are linked by offsets from the
// start of the file. Offset 0 (the header) means "none". The FIFO is the list head..tail. A slot is always in
// exactly one of these places:
// - the free list
// - the FIFO
// - a group (parked until its turn)
// - the lease list of a session
// - owned by one session that copies into it (FILLING)
// - owned by one session that copies out of it, looks at it or fills it in place (HELD)
// A session may be looking at a slot in any of these places: its viewer (ring_memory.cpp).
//
// The cost of an item between two cores is the number of cache lines that move from one to the other. So
// words that change together are next to each other. While no caller waits, a put and a get each move three
// lines. These are the lock's line, the next one with the FIFO's ends and counts, and the slot's first line.
// A put into an empty FIFO moves no other line; any other put also moves the line of the previous slot. Words
// that only readers or only writers write have their own lines, and so have redo records (redo.hpp).
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
// Ports, plus plain users and HOLDERs. Number 0 is unused.
constexpr uint32_t SESSIONS = 4096 + 256;
constexpr uint32_t RECORDS = 16;    // redo records
constexpr uint64_t PAGE = 4096;     // granularity of blocks, whatever page size the kernel has
constexpr uint64_t GROW = 1 << 16;  // blocks are reserved in steps of up to this, slots one page at a time
constexpr uint64_t UNIT = 64;       // size and alignment unit of blocks
constexpr uint32_t CLASSES = 136;   // block sizes, four to a doubling: 64 B << 34

enum class SlotState : uint64_t { Free, Inside, Parked, Leased, Filling, Held };

// One participant: the plain user of a process, or a port. Other processes look only at the `pid`.
struct alignas(64) Session {
    // HOLDER: its channel or port was closed, but its process still looks at blocks.
    enum Role : uint64_t { NONE = 0, PLAIN = 1, READER = 2, WRITER = 3, RESUME = 4, HOLDER = 5 };
    uint64_t role;
    uint64_t pid;
    uint64_t started;     // start time of the process: with the pid it identifies one process for all time
    uint64_t generation;  // of this record: an old handle of a reused record must not end the new session
    uint64_t supervised;  // only a supervisor may end this session
    uint64_t lease_head;  // reader: the leased items
    uint64_t lease_tail;
    uint64_t leased;
    uint64_t committed_item;  // writer: number of the last input item processed, plus one (0: none) ...
    uint64_t
        // ... and how many of its outputs are in this ring. RESUME: the same, of a dead worker
        committed_count;
    uint64_t views;   // slots that it is the viewer of
    uint64_t forked;  // its process forked while it looked: a child may still look after the process is dead
    // How many of its threads wait in each wait queue: subtracted from the queues when the process dies. Like
    // the queues, they need no redo.
    uint32_t in_reader_queue;
    uint32_t in_writer_queue;
    // For a writer of an ordered stage that waits for its turn. `awaits` is the number of its item plus one
    // (0: not waiting). `word` is the futex word that it sleeps on; its partner is the sleeper's compare in
    // the kernel. `called`: it was woken.
    uint64_t awaits;
    std::atomic<uint32_t> word;
    uint32_t called;
    // Reader: the code that runs for its leased items, written by its own process without the lock (R10).
    // Only a death in user code, or while the item is being unpickled, counts against the item.
    enum At : uint64_t { OURS = 0, UNPICKLING = 1, USERS = 2 };
    uint64_t at;
    // Reader: items that its predecessors held when they died, which only this session takes again; and the
    // code that the last predecessor died in.
    uint64_t reserved_head, reserved_tail, reserved, reserved_at;
    // Reader, if a link holds the leases: how many items, from the oldest on, the remote worker has started.
    // 0: all of them.
    uint64_t begun;
    PortClock clock;  // time spent waiting; no redo
    uint64_t orders;  // reader: see Orders

    uint64_t suspects() const { return begun && begun < leased ? begun : leased; }
};

// A slot keeps its block for good: both move together to and from the free list of that block class. So a
// block contains only payload, and filling a block that is still on its free list disturbs no other user.
struct alignas(64) Slot {
    static constexpr uint64_t KEYLESS = UINT64_MAX;
    static constexpr uint64_t INLINE = 80;  // the first 16 bytes are in the line of the words before
    uint64_t next;
    static constexpr uint64_t NUMBERED = 1 << 6, LOANED = 1 << 7, DEATH = uint64_t(1) << 40;
    static constexpr uint64_t PLACE_BITS = 0x3f | 0xffff << 8, VIEW_BITS = uint64_t(0xffff) << 24 | LOANED;
    static uint64_t owned_by(uint32_t session) { return uint64_t(session) << 8; }
    static uint64_t viewed_by(uint32_t session) { return uint64_t(session) << 24; }
    uint64_t
        state;  // SlotState | NUMBERED | LOANED | owner session << 8 | viewer session << 24 | deaths << 40
    uint64_t size;    // of the payload in bytes
    uint64_t number;  // i, assigned at the first get: items leave in the order of their numbers. Before that,
                      // the input item of its writer that it is an output of, or KEYLESS
    uint32_t kind;    // how the payload is encoded, see frame.hpp
    uint32_t cls;     // block class, 0 for none; never changes
    uint64_t block;   // offset of the block, 0 for none; never changes
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

// The words that never change.
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
    uint64_t reserved_sessions;  // this many records are allocated; no redo needed either

    alignas(64) pthread_mutex_t mutex;
    // Number of the process that took the lock last: a hint for turn_taking.hpp. It shares the mutex's line,
    // also where the mutex has 48 bytes (aarch64).
    uint64_t had_by;
    // The part of the blocks and slots that a process must map before it follows any offset. These words
    // never shrink, and they are written before what they announce, so they need no redo. They are next to
    // the mutex, because each process that takes it reads them.
    uint64_t map_blocks_to, map_slots_from;
    // --- below: only under the mutex, only by a Change, unless said otherwise ---
    // Words that every put and get writes.
    alignas(64) uint64_t head;
    uint64_t tail;         // meaningless while head is 0
    uint64_t puts, takes;  // inside = puts - takes
    uint64_t bytes_in, bytes_out;
    uint64_t slots_used;           // slots in no free list
    uint64_t free_slots[CLASSES];  // heads of the free lists, [0] of the slots without a block

    // Words that every put and get reads and that seldom change.
    alignas(64) uint64_t state;
    uint64_t slots_at;    // slots grow down from the end of the mapping to here
    uint64_t blocks_top;  // blocks grow up from blocks_at to here
    uint64_t damaged;     // an impossible value was found: set with BROKEN, never unset
    // Limit of the bytes inside, 0 for max_bytes; a larger item passes alone. It needs no redo: it is set
    // before any other process has the channel.
    uint64_t share;
    // A writer waits for bytes, not for a place. It needs no redo: the next try sets it again.
    uint64_t short_of_memory;
    uint64_t cut_off;  // the process that died with a counted writer open, 0: none; the end is not clean then
    uint64_t resumes;  // sessions with role RESUME

    alignas(64) uint64_t claimed;  // places in the channel claimed by FILLING slots
    uint64_t parked, turn;
    uint64_t writers, readers;   // counted ports open now
    uint64_t cause, cause_size;  // block with the pickled cause of BROKEN
    // The only writer, a link, must learn of each finished item and of each waiting reader.
    uint64_t notify_writer;
    // Items go to another host, so no part of them may stay on a device of this one. It needs no redo: it is
    // set before any other process has the channel.
    uint64_t leaves;

    alignas(64) uint64_t numbered;  // how many items have got their number
    uint64_t leased;                // items on lease, over all sessions
    uint64_t viewed_bytes;          // of the slots with a viewer, except loaned ones

    alignas(64) WaitQueue reader_queue;  // wait queues need no redo, see waiting.hpp
    WaitQueue writer_queue;
    // Time of the last search for dead sessions: a hint, no partner. Every call reads it, so no word that
    // changes often shares its line.
    alignas(64) std::atomic<uint64_t> swept_ns;
    Redo redo[RECORDS];

    int64_t inside() const { return int64_t(puts - takes); }
    // The records behind the header. Only allocated ones may be touched.
    Session* records() { return reinterpret_cast<Session*>(this + 1); }
    std::span<Session> sessions() { return {records(), std::min<uint64_t>(reserved_sessions, SESSIONS)}; }
};

// Block classes: 0 is "no block". 1 to 4 are 64, 128, 192, 256 bytes, and then there are four steps to each
// doubling. `class_of` is the smallest class that holds `size`.
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

// Blocks from this class on do not share pages, and readers may read them in place. Smaller ones are copied,
// which is cheaper than tracking their views.
constexpr uint32_t VIEWABLE = 28;  // 16 KB

}  // namespace flowchan
