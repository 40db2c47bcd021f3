// Layout of the shared memory of one `processes` channel.
//
//   | Header | Session x SESSIONS | Group x groups | blocks -> ...            ... <- slots |
//
// The memory is one unnamed memfd, so the kernel frees it when its last user ends (C12). The file is as long
// as the channel could ever need, but only parts of it are allocated. These are some session records, and the
// bytes up to `reserved_low` and from `reserved_high`. The code calls `fallocate` before it uses more. If
// memory is exhausted, that call fails, so no later access raises SIGBUS. Freed blocks and slots go to free
// lists and are reused while they are still in the caches. No memory goes back to the kernel before the
// channel ends. Each process maps everything before the blocks, and all blocks and slots that exist
// (windows.hpp).
//
// An item occupies a slot, and also a block if it does not fit into the slot. Slots are linked by offsets
// from the start of the file. Offset 0 is the header, so it means "none". The FIFO is the list from `head` to
// `tail`. At any time, a slot is in exactly one of these places:
// - the free list
// - the FIFO
// - a group, where it is parked until its turn
// - the lease list of a session
// - held by one session that copies data into it (FILLING)
// - held by one session that copies data out of it, views it or fills it in place (HELD)
// In each of these places, one session may also view the slot. That session is its viewer (ring_memory.cpp).
//
// When an item passes from one core to another, the main cost is moving cache lines between them. Therefore
// words that change together are adjacent. If no caller waits, a put or a get moves three lines. The first
// has the lock, the second the ends and counts of the FIFO, and the third is the start of the slot. A put
// into an empty FIFO moves no other line. Any other put also moves the line of the previous slot. Words that
// only readers or only writers change have lines to themselves, and so do redo records (redo.hpp).
#pragma once

#include <pthread.h>

#include <algorithm>
#include <span>

#include "redo.hpp"
#include "transport.hpp"
#include "waiting.hpp"

namespace flowchan {

constexpr uint64_t MAGIC = 0x6e616863776f6c66;  // "flowchan"
constexpr uint64_t VERSION = 10;
// One record for each port, plain user or HOLDER. Number 0 is unused.
constexpr uint32_t SESSIONS = 4096 + 256;
constexpr uint32_t RECORDS = 16;  // redo records
constexpr uint64_t PAGE = 4096;   // unit in which blocks are reserved, independent of the kernel's page size
// Largest step in which memory for blocks is reserved. Memory for slots is reserved page by page.
constexpr uint64_t GROW = 1 << 16;
constexpr uint64_t UNIT = 64;      // blocks are aligned to this size and are multiples of it
constexpr uint32_t CLASSES = 136;  // four block sizes per doubling, from 64 B to 64 B << 34

enum class SlotState : uint64_t { Free, Inside, Parked, Leased, Filling, Held };

// A participant: a port, or a process that uses the channel without a port.
struct alignas(64) Session {
    // HOLDER: its channel or port is closed, but the process still views blocks.
    enum Role : uint64_t { NONE = 0, PLAIN = 1, READER = 2, WRITER = 3, RESUME = 4, HOLDER = 5 };
    uint64_t role;
    uint64_t pid;
    uint64_t started;     // start time of the process; pid and start time together identify a process
    uint64_t generation;  // counts uses of this record, so that an old handle cannot end a newer session
    uint64_t supervised;  // nonzero: only a supervisor may end this session
    uint64_t lease_head;  // reader: the list of its leased items
    uint64_t lease_tail;
    uint64_t leased;
    uint64_t committed_item;  // writer: number of the last input item processed, plus one (0: none)
    // Writer: number of outputs of that item in this ring. RESUME: the same number for a worker that has
    // died.
    uint64_t committed_count;
    uint64_t views;  // number of slots that this session views
    // The process forked while it had views. A child may still use these views after the process has died.
    uint64_t forked;
    // How many threads of this session wait in each wait queue. If the process dies, these numbers are
    // subtracted from the counts of the queues. Like the queues, they need no redo.
    uint32_t in_reader_queue;
    uint32_t in_writer_queue;
    // For a writer of an ordered stage that waits for its turn. `awaits` is the number of its item plus one,
    // or 0 if it does not wait. It sleeps on the futex word `word`. `called` is set when it has been woken.
    uint64_t awaits;
    std::atomic<uint32_t> word;
    uint32_t called;
    // Reader: the kind of code that is processing its leased items. Its own process writes this word without
    // the lock (R10). The item is blamed for a death only if the reader died in user code or while
    // unpickling.
    enum At : uint64_t { OURS = 0, UNPICKLING = 1, USERS = 2 };
    uint64_t at;
    // Reader: the items that its predecessors held when they died, and the code in which the last of them
    // died. No other session may take these items.
    uint64_t reserved_head, reserved_tail, reserved, reserved_at;
    // Reader whose leases a link holds: number of items that the remote worker has started, counted from the
    // oldest. 0 means all of them.
    uint64_t begun;
    PortClock clock;  // time spent waiting; needs no redo
    uint64_t orders;  // reader: see Orders

    uint64_t suspects() const { return begun && begun < leased ? begun : leased; }
};

// A slot and its block never separate: both enter and leave the free list of that block class together.
// Therefore a block contains only payload, and may be filled while it is still on its free list.
struct alignas(64) Slot {
    static constexpr uint64_t KEYLESS = UINT64_MAX;
    static constexpr uint64_t INLINE = 80;  // the first 16 bytes share a cache line with the words above
    uint64_t next;
    static constexpr uint64_t REPLAY = 1 << 5, NUMBERED = 1 << 6, LOANED = 1 << 7, DEATH = uint64_t(1) << 40;
    static constexpr uint64_t PLACE_BITS = 0x1f | 0xffff << 8, VIEW_BITS = uint64_t(0xffff) << 24 | LOANED;
    static uint64_t owned_by(uint32_t session) { return uint64_t(session) << 8; }
    static uint64_t viewed_by(uint32_t session) { return uint64_t(session) << 24; }
    // SlotState | REPLAY | NUMBERED | LOANED | owner session << 8 | viewer session << 24 | deaths << 40
    uint64_t state;
    uint64_t size;  // size of the payload in bytes
    // The first get assigns this number, and items leave the channel in the order of these numbers. Until
    // then, an output has the number of the input item that it was made for, and any other item has KEYLESS.
    uint64_t number;
    uint32_t kind;      // encoding of the payload, see frame.hpp
    uint32_t cls;       // block class, or 0 without a block; never changes
    uint64_t block;     // offset of the block, or 0; never changes
    char data[INLINE];  // the payload, if it is small enough to need no block

    SlotState place() const { return SlotState(state & 0x1f); }
    uint32_t owner() const { return uint32_t(state >> 8 & 0xffff); }
    bool numbered() const { return state & NUMBERED; }
    // All outputs for this item were put, but some of them were lost with another host.
    bool is_replay() const { return state & REPLAY; }
    bool loaned() const { return state & LOANED; }
    uint32_t viewer() const { return uint32_t(state >> 24 & 0xffff); }
    uint64_t deaths() const { return state >> 40; }
    static uint64_t placed(uint64_t state, SlotState place, uint32_t owner = 0) {
        return (state & ~PLACE_BITS) | uint64_t(place) | owned_by(owner);
    }
    uint64_t with_place(SlotState place, uint32_t owner = 0) const { return placed(state, place, owner); }
};
static_assert(sizeof(Slot) == 128);

// The outputs for input item i of an ordered stage, parked in groups[i % n] until it is i's turn.
struct Group {
    uint64_t head, tail, count;
    uint64_t complete;  // nonzero: no more outputs for i will be put
};

// Words that never change.
struct Constants {
    uint64_t magic, version;
    uint64_t capacity, max_bytes;
    uint64_t length;  // length of the file
    uint64_t groups;  // number of groups
    uint64_t groups_at, blocks_at;
};

struct Header : Constants {
    uint64_t reserved_low,
        reserved_high;           // the file is allocated up to / from here (written after fallocate, so it
                                 // needs no redo)
    uint64_t reserved_sessions;  // number of allocated records; needs no redo, for the same reason

    alignas(64) pthread_mutex_t mutex;
    // Number of the process that took the lock last: a hint for turn_taking.hpp. It fits into the mutex's
    // cache line even on aarch64, where a mutex has 48 bytes.
    uint64_t had_by;
    // The blocks and slots that a process must map before it follows any offset. `map_blocks_to` only grows
    // and `map_slots_from` only shrinks. Both are written before any offset into the new memory, so they need
    // no redo. They are next to the mutex, because each process reads them after locking it.
    uint64_t map_blocks_to, map_slots_from;
    // --- everything below: accessed only under the mutex and changed only by a Change, unless stated ---
    // Words that every put and get writes.
    alignas(64) uint64_t head;
    uint64_t tail;         // meaningless while head is 0
    uint64_t puts, takes;  // number of items inside = puts - takes
    uint64_t bytes_in, bytes_out;
    uint64_t slots_used;           // slots in use, i.e. in no free list
    uint64_t free_slots[CLASSES];  // heads of the free lists; [0] lists the slots without a block

    // Words that every put and get reads but that rarely change.
    alignas(64) uint64_t state;
    uint64_t slots_at;    // slots grow down from the end of the file to here
    uint64_t blocks_top;  // blocks grow up from blocks_at to here
    uint64_t damaged;     // nonzero: an impossible value was found; set together with BROKEN and never
                          // cleared
    // Largest number of bytes in the channel; 0 means that max_bytes is the limit. A larger item enters only
    // an empty channel. No redo is needed, because the word is set before another process gets the channel.
    uint64_t share;
    // Nonzero: a writer waits because of the limit on bytes, not because of the capacity. No redo is needed,
    // because the writer sets the word again in its next attempt.
    uint64_t short_of_memory;
    // pid of a process that died with a counted writer open, or 0. If set, readers get Broken at the end.
    uint64_t cut_off;
    uint64_t resumes;  // number of sessions with role RESUME

    alignas(64) uint64_t claimed;  // places that FILLING slots have claimed in the channel
    uint64_t parked, turn;
    uint64_t writers, readers;   // number of counted ports that are open
    uint64_t cause, cause_size;  // offset and size of the pickled cause of the state BROKEN
    // Nonzero: a link is the only writer, and must learn of each finished item and each waiting reader.
    uint64_t notify_writer;
    // Nonzero: items go to another host, so no part of an item may stay on a device of this host. No redo is
    // needed, because the word is set before another process gets the channel.
    uint64_t leaves;
    // Nonzero: an item keeps the number of the input item that it was made for. No redo is needed, because
    // the word is set before another process gets the channel.
    uint64_t keeps_numbers;

    alignas(64) uint64_t numbered;  // number of items that have been numbered
    uint64_t leased;                // number of leased items, over all sessions
    uint64_t viewed_bytes;          // bytes in viewed slots, without loaned slots

    alignas(64) WaitQueue reader_queue;  // wait queues need no redo, see waiting.hpp
    WaitQueue writer_queue;
    // Time at which a process last searched for dead sessions. This is a hint and orders no other memory
    // access. Every call reads it, so it shares its cache line with no word that changes often.
    alignas(64) std::atomic<uint64_t> swept_ns;
    Redo redo[RECORDS];

    int64_t inside() const { return int64_t(puts - takes); }
    // The session records directly follow the header. Only access allocated records.
    Session* records() { return reinterpret_cast<Session*>(this + 1); }
    std::span<Session> sessions() { return {records(), std::min<uint64_t>(reserved_sessions, SESSIONS)}; }
};

// Block classes. Class 0 means "no block", and classes 1 to 4 have 64, 128, 192 and 256 bytes. Above that,
// there are four classes per doubling. `class_of` returns the smallest class that fits `size` bytes.
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

// Blocks from this class on share no page with another block, so readers may read them in place. Smaller
// blocks are copied, because that is cheaper than tracking views of them.
constexpr uint32_t VIEWABLE = 28;  // 16 KB

}  // namespace flowchan
