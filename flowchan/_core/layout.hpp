// Layout of the shared memory of one `processes` channel.
//
//   | Header | Session x SESSIONS | Group x groups | blocks -> ...            ... <- slots |
//
// One memfd contains everything. It is unnamed, so the kernel frees it when its last user ends (C12). Its
// length is the largest size that the channel could need, but only `reserved_low`/`reserved_high` bytes and
// some session records are allocated. `fallocate` allocates more before it is used. If memory is exhausted,
// that call fails, so no later access causes a SIGBUS. Freed blocks and slots go to free lists, and are
// reused while they are still in the caches. Memory is not released before the channel ends. Each process
// maps everything before the blocks, and all blocks and slots that exist (windows.hpp).
//
// An item is a slot, plus a block if it does not fit into the slot. Slots are linked by offsets from the
// start of the file. Offset 0 (the header) means "none". The FIFO is the list head..tail. A slot is always in
// exactly one of these places:
// - the free list
// - the FIFO
// - a group (parked until its turn)
// - the lease list of a session
// - owned by one session that copies into it (FILLING)
// - owned by one session that copies out of it, views it or fills it in place (HELD)
// In any of these places, a session may also be viewing the slot: its viewer (ring_memory.cpp).
//
// The cost of passing an item between two cores is the number of cache lines that move from one core to the
// other. Therefore words that change together are next to each other. If no caller is waiting, a put and a
// get each move three lines. These are the lock's line, the next line with the FIFO's ends and counts, and
// the slot's first line. A put into an empty FIFO moves no other line; any other put also moves the line of
// the previous slot. Words that only readers or only writers write have their own lines. So do redo records
// (redo.hpp).
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
// For ports, plain users and HOLDERs. Number 0 is unused.
constexpr uint32_t SESSIONS = 4096 + 256;
constexpr uint32_t RECORDS = 16;  // redo records
constexpr uint64_t PAGE = 4096;   // granularity of blocks, regardless of the kernel's page size
// largest step in which blocks are reserved; slots are reserved one page at a time
constexpr uint64_t GROW = 1 << 16;
constexpr uint64_t UNIT = 64;      // size and alignment unit of blocks
constexpr uint32_t CLASSES = 136;  // number of block sizes, four per doubling, from 64 B to 64 B << 34

enum class SlotState : uint64_t { Free, Inside, Parked, Leased, Filling, Held };

// One participant: a port, or a process that uses the channel without a port. Other processes read only the
// `pid`.
struct alignas(64) Session {
    // HOLDER: the channel or port was closed, but the process still views blocks.
    enum Role : uint64_t { NONE = 0, PLAIN = 1, READER = 2, WRITER = 3, RESUME = 4, HOLDER = 5 };
    uint64_t role;
    uint64_t pid;
    uint64_t started;     // start time of the process; with the pid it identifies a process uniquely
    uint64_t generation;  // counts uses of this record, so that an old handle cannot end a newer session
    uint64_t supervised;  // only a supervisor may end this session
    uint64_t lease_head;  // reader: its leased items
    uint64_t lease_tail;
    uint64_t leased;
    uint64_t committed_item;  // writer: number of the last input item processed, plus one (0: none)
    // writer: how many outputs of that item are in this ring. RESUME: the same for a worker that has died
    uint64_t committed_count;
    uint64_t views;  // number of slots whose viewer is this session
    // its process forked while it had views: a child may still use them after the process has died
    uint64_t forked;
    // Number of threads of this session that are waiting in each wait queue. When the process dies, the
    // numbers are subtracted from the queues' counts. The numbers need no redo, and neither do the queues.
    uint32_t in_reader_queue;
    uint32_t in_writer_queue;
    // For a writer of an ordered stage that is waiting for its turn. `awaits` is the number of its item plus
    // one (0: not waiting). `word` is the futex word that it sleeps on; the kernel compares the word before
    // the writer sleeps. `called`: the writer was woken.
    uint64_t awaits;
    std::atomic<uint32_t> word;
    uint32_t called;
    // Reader: the code that is processing its leased items. Its own process writes this without the lock
    // (R10). Only a death in user code, or while the item is being unpickled, counts as a death caused by the
    // item.
    enum At : uint64_t { OURS = 0, UNPICKLING = 1, USERS = 2 };
    uint64_t at;
    // Reader: items that its predecessors held when they died, which no other session may take, and the code
    // in which the last predecessor died.
    uint64_t reserved_head, reserved_tail, reserved, reserved_at;
    // Reader whose leases a link holds: number of items that the remote worker has started, beginning with
    // the oldest (0: all of them).
    uint64_t begun;
    PortClock clock;  // time spent waiting; no redo
    uint64_t orders;  // reader: a set of Orders

    uint64_t suspects() const { return begun && begun < leased ? begun : leased; }
};

// A slot keeps its block permanently: both move together to and from the free list of that block class.
// Therefore blocks contain only payload, and a block can be filled while it is still on its free list.
struct alignas(64) Slot {
    static constexpr uint64_t KEYLESS = UINT64_MAX;
    static constexpr uint64_t INLINE = 80;  // the first 16 bytes share the cache line of the words above
    uint64_t next;
    static constexpr uint64_t REPLAY = 1 << 5, NUMBERED = 1 << 6, LOANED = 1 << 7, DEATH = uint64_t(1) << 40;
    static constexpr uint64_t PLACE_BITS = 0x1f | 0xffff << 8, VIEW_BITS = uint64_t(0xffff) << 24 | LOANED;
    static uint64_t owned_by(uint32_t session) { return uint64_t(session) << 8; }
    static uint64_t viewed_by(uint32_t session) { return uint64_t(session) << 24; }
    // SlotState | REPLAY | NUMBERED | LOANED | owner session << 8 | viewer session << 24 | deaths << 40
    uint64_t state;
    uint64_t size;  // size of the payload in bytes
    // Assigned at the first get; items leave the channel in the order of these numbers. Before that, it is
    // the number of the writer's input item for which this output was made, or KEYLESS.
    uint64_t number;
    uint32_t kind;      // encoding of the payload, see frame.hpp
    uint32_t cls;       // block class, or 0 without a block; never changes
    uint64_t block;     // offset of the block, or 0; never changes
    char data[INLINE];  // the payload of a slot without a block

    SlotState place() const { return SlotState(state & 0x1f); }
    uint32_t owner() const { return uint32_t(state >> 8 & 0xffff); }
    bool numbered() const { return state & NUMBERED; }
    // all outputs for this item have been put, but some that were on another host have been lost
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

// Outputs for input item number i of an ordered stage. They are parked in groups[i % n] until i's turn comes.
struct Group {
    uint64_t head, tail, count;
    uint64_t complete;  // nonzero: all outputs for i have been put
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
        reserved_high;           // allocated up to / from here; changed after fallocate, so no redo is needed
    uint64_t reserved_sessions;  // number of allocated records; needs no redo either

    alignas(64) pthread_mutex_t mutex;
    // Number of the process that took the lock last: a hint for turn_taking.hpp. It shares the mutex's cache
    // line, even on aarch64, where the mutex has 48 bytes.
    uint64_t had_by;
    // The part of the blocks and slots that a process must map before it follows any offset. `map_blocks_to`
    // never decreases and `map_slots_from` never increases. Both are written before any offset into the new
    // memory, so they need no redo. They are next to the mutex, because each process that locks it reads
    // them.
    uint64_t map_blocks_to, map_slots_from;
    // --- below: only under the mutex, only by a Change, unless said otherwise ---
    // Words that every put and get writes.
    alignas(64) uint64_t head;
    uint64_t tail;         // meaningless while head is 0
    uint64_t puts, takes;  // number of items inside = puts - takes
    uint64_t bytes_in, bytes_out;
    uint64_t slots_used;           // number of slots that are not in a free list
    uint64_t free_slots[CLASSES];  // heads of the free lists; [0] has the slots without a block

    // Words that every put and get reads, and that change rarely.
    alignas(64) uint64_t state;
    uint64_t slots_at;    // slots grow down from the end of the file to here
    uint64_t blocks_top;  // blocks grow up from blocks_at to here
    uint64_t damaged;     // nonzero: an impossible value was found. Set together with BROKEN, never cleared
    // Limit on the bytes in the channel; 0 means that max_bytes is the limit. A larger item enters only an
    // empty channel. This word needs no redo, because it is set before any other process has the channel.
    uint64_t share;
    // Nonzero: a writer is waiting for bytes, not for a place. This word needs no redo, because the writer's
    // next attempt sets it again.
    uint64_t short_of_memory;
    // pid of a process that died with a counted writer open, or 0; if set, the end is not clean
    uint64_t cut_off;
    uint64_t resumes;  // number of sessions with role RESUME

    alignas(64) uint64_t claimed;  // places in the channel that FILLING slots have claimed
    uint64_t parked, turn;
    uint64_t writers, readers;   // number of counted ports that are open now
    uint64_t cause, cause_size;  // offset and size of the pickled cause of BROKEN
    // The only writer, a link, must be notified of each finished item and each waiting reader.
    uint64_t notify_writer;
    // Items go to another host, so no part of an item may remain on a device of this host. This word needs no
    // redo, because it is set before any other process has the channel.
    uint64_t leaves;
    // An item keeps the number of the writer's input item that it is an output for. The word is set before
    // any other process has the channel, so it needs no redo.
    uint64_t keeps_numbers;

    alignas(64) uint64_t numbered;  // number of items that have a number
    uint64_t leased;                // number of leased items, over all sessions
    uint64_t viewed_bytes;          // bytes in slots that have a viewer, except for loaned slots

    alignas(64) WaitQueue reader_queue;  // wait queues need no redo, see waiting.hpp
    WaitQueue writer_queue;
    // Time of the last search for dead sessions: a hint, which orders no other memory access. Every call
    // reads it, so no word that changes often shares its cache line.
    alignas(64) std::atomic<uint64_t> swept_ns;
    Redo redo[RECORDS];

    int64_t inside() const { return int64_t(puts - takes); }
    // The session records that follow the header. Only allocated records may be accessed.
    Session* records() { return reinterpret_cast<Session*>(this + 1); }
    std::span<Session> sessions() { return {records(), std::min<uint64_t>(reserved_sessions, SESSIONS)}; }
};

// Block classes: 0 means "no block". Blocks of classes 1 to 4 have 64, 128, 192 and 256 bytes. Larger sizes
// have four classes per doubling. `class_of` returns the smallest class that can hold `size` bytes.
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

// Blocks from this class on share no pages with other blocks, and readers may read them in place. Smaller
// blocks are copied, which is cheaper than tracking their views.
constexpr uint32_t VIEWABLE = 28;  // 16 KB

}  // namespace flowchan
