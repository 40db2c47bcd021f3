// Layout of the shared memory of one `processes` channel.
//
//   | Header | Session x SESSIONS | Group x groups | blocks -> ...            ... <- slots |
//
// The memory is one unnamed memfd, so the kernel frees it when its last user ends (C12). The file is as long
// as the channel could ever need, but only parts of it are allocated. The allocated parts are some of the
// session records, the bytes up to `reserved_low`, and the bytes from `reserved_high` on. `fallocate`
// allocates each further part of the file before it is used. If memory is exhausted, that call fails, so no
// access can ever raise SIGBUS. Free lists keep freed blocks and slots for reuse, often while the caches
// still have them. No memory is returned to the kernel before the channel ends. Each process maps everything
// before the blocks, and all existing blocks and slots (windows.hpp).
//
// An item occupies a slot, plus a block if it does not fit into the slot. Slots are linked by their offsets
// in the file; offset 0 is the header and therefore means "none". The FIFO is the list from `head` to `tail`.
// At any time, a slot is in exactly one of these places:
// - the free list
// - the FIFO
// - a group, where it is parked until its turn
// - the lease list of a session
// - with one session that copies data into it (FILLING)
// - with one session that copies data out of it, views it or fills it in place (HELD)
// Wherever the slot is, one session may also view it, and is then its viewer (ring_memory.cpp).
//
// Passing an item from one core to another mainly costs the transfer of cache lines. Words that change
// together are therefore adjacent. If no caller waits, a put or a get moves three lines. The first contains
// the lock, the second the ends and counts of the FIFO, and the third the start of the slot. A put into a
// nonempty FIFO also moves the line of the previous slot. Words changed only by readers have their own cache
// lines. So do words changed only by writers, and redo records (redo.hpp).
#pragma once

#include <pthread.h>

#include <algorithm>
#include <span>

#include "redo.hpp"
#include "transport.hpp"
#include "waiting.hpp"

namespace flowchan {

constexpr uint64_t MAGIC = 0x6e616863776f6c66;  // "flowchan"
constexpr uint64_t VERSION = 12;
// One record per port, plain user or HOLDER. Number 0 is unused.
constexpr uint32_t SESSIONS = 4096 + 256;
constexpr uint32_t RECORDS = 16;  // redo records
constexpr uint64_t PAGE = 4096;   // unit for reserving blocks, whatever the kernel's page size
// Largest step for reserving block memory. Slot memory is reserved page by page.
constexpr uint64_t GROW = 1 << 16;
constexpr uint64_t UNIT = 64;      // blocks are aligned to this size, and their sizes are multiples of it
constexpr uint32_t CLASSES = 136;  // four block sizes per doubling, from 64 B to 64 B << 34

enum class SlotState : uint64_t { Free, Inside, Parked, Leased, Filling, Held };

// A participant: a port, or a process that uses the channel without a port.
struct alignas(64) Session {
    // HOLDER: the process has closed its channel or port, but still views blocks.
    enum Role : uint64_t { NONE = 0, PLAIN = 1, READER = 2, WRITER = 3, RESUME = 4, HOLDER = 5 };
    uint64_t role;
    uint64_t pid;
    uint64_t started;  // start time of the process; with the pid, it identifies the process
    // counts the uses of this record; an old handle therefore cannot end a newer session
    uint64_t generation;
    uint64_t supervised;  // nonzero: only a supervisor may end this session
    uint64_t lease_head;  // reader: list of leased items
    uint64_t lease_tail;
    uint64_t leased;
    uint64_t committed_item;  // writer: number of the last processed input item, plus one (0: none)
    // Writer: how many outputs for that item are in this ring. RESUME: the same count, left by a dead worker.
    uint64_t committed_count;
    uint64_t views;  // how many slots this session views
    // Nonzero: the process forked while it had views. Its children may use these views even after it dies.
    uint64_t forked;
    // How many threads of this session wait in each queue. If the process dies, the queues' counts are
    // reduced by these numbers. These counts need no redo, and neither do the queues.
    uint32_t in_reader_queue;
    uint32_t in_writer_queue;
    // Writer of an ordered stage, while it waits for its turn. `awaits`: number of its item plus one, or 0 if
    // it is not waiting. `word`: the futex word on which it sleeps. `called`: it has been woken.
    uint64_t awaits;
    std::atomic<uint32_t> word;
    uint32_t called;
    // Reader: the kind of code that processes its leased items. Only the reader's process writes this word,
    // without the lock (R10). A death is blamed on the item only if it happened in user code or while
    // unpickling.
    enum At : uint64_t { OURS = 0, UNPICKLING = 1, USERS = 2 };
    uint64_t at;
    // Reader: items that its dead predecessors held, and the kind of code (see At) in which the last
    // predecessor died. No other session may take these items.
    uint64_t reserved_head, reserved_tail, reserved, reserved_at;
    // Number of leased items that the reader has started, counting from the oldest. 0 means that it has
    // started all of them. A link writes this for its remote worker. A worker that has a run writes this
    // itself (ring_runs.cpp).
    uint64_t begun;
    uint64_t run_limit;  // reader with a run: number of leased items that it may start; otherwise 0

    uint64_t run_seen;  // number of the item that a reader with a run was processing at the last check
    PortClock clock;    // time spent waiting; needs no redo
    uint64_t orders;    // reader: see Orders

    uint64_t suspects() const { return begun && begun < leased ? begun : leased; }
};

// A slot keeps its block permanently: the two enter and leave the free list of the block's class together. A
// block therefore contains only payload, and may be filled while it is still on its free list.
struct alignas(64) Slot {
    static constexpr uint64_t KEYLESS = UINT64_MAX;
    static constexpr uint64_t INLINE = 80;  // the first 16 bytes share a cache line with the fields above
    uint64_t next;
    static constexpr uint64_t REPLAY = 1 << 5, NUMBERED = 1 << 6, LOANED = 1 << 7, DEATH = uint64_t(1) << 40;
    static constexpr uint64_t PLACE_BITS = 0x1f | 0xffff << 8, VIEW_BITS = uint64_t(0xffff) << 24 | LOANED;
    static uint64_t owned_by(uint32_t session) { return uint64_t(session) << 8; }
    static uint64_t viewed_by(uint32_t session) { return uint64_t(session) << 24; }
    // SlotState | REPLAY | NUMBERED | LOANED | owner session << 8 | viewer session << 24 | deaths << 40
    uint64_t state;
    uint64_t size;  // size of the payload in bytes
    // Items leave the channel in the order of these numbers. An item gets its number when it is first taken.
    // Before that, an output has the number of its input item, and any other item has KEYLESS.
    uint64_t number;
    uint32_t kind;      // encoding of the payload, see frame.hpp
    uint32_t cls;       // block class, or 0 without a block; never changes
    uint64_t block;     // offset of the block, or 0; never changes
    char data[INLINE];  // the payload, if it fits here; otherwise Frame::route

    SlotState place() const { return SlotState(state & 0x1f); }
    uint32_t owner() const { return uint32_t(state >> 8 & 0xffff); }
    bool numbered() const { return state & NUMBERED; }
    // All outputs for this item were put, but another host lost some of them.
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

// Outputs for input item i of an ordered stage, parked in groups[i % n] until turn i.
struct Group {
    uint64_t head, tail, count;
    uint64_t complete;  // nonzero: item i gets no more outputs
};

// Set once, before any process uses the channel.
struct Constants {
    uint64_t magic, version;
    uint64_t capacity, max_bytes;
    uint64_t length;  // length of the file
    uint64_t groups;  // number of groups
    uint64_t groups_at, blocks_at;
};

struct Header : Constants {
    // The file is allocated up to `reserved_low` and from `reserved_high` on. No redo is needed, because
    // these are written after fallocate.
    uint64_t reserved_low, reserved_high;
    uint64_t reserved_sessions;  // how many session records are allocated; also needs no redo

    alignas(64) pthread_mutex_t mutex;
    // Process that took the lock last: a hint for turn_taking.hpp. It shares the mutex's cache line even on
    // aarch64, where a mutex has 48 bytes.
    uint64_t had_by;
    // How much a process must map before it follows any offset. `map_blocks_to` only grows, and
    // `map_slots_from` only shrinks. Both are written before any offset into the new memory, so they need no
    // redo. They are next to the mutex, because each process reads them right after locking it.
    uint64_t map_blocks_to, map_slots_from;
    // --- everything below: only accessed under the mutex and only changed by a Change, unless stated ---
    // Every put and every get writes these words.
    alignas(64) uint64_t head;
    uint64_t tail;         // meaningless while head is 0
    uint64_t puts, takes;  // the channel contains puts - takes items
    uint64_t bytes_in, bytes_out;
    uint64_t slots_used;           // slots that are in no free list
    uint64_t free_slots[CLASSES];  // heads of the free lists; [0] lists the slots without a block

    // Every put and every get reads these words, but they rarely change.
    alignas(64) uint64_t state;
    uint64_t slots_at;    // slots extend from here to the end of the file, and grow down
    uint64_t blocks_top;  // blocks extend from blocks_at to here, and grow up
    // nonzero: an impossible value was found; set together with BROKEN and never cleared
    uint64_t damaged;
    // Limit on the bytes in the channel; if it is 0, max_bytes applies. A larger item waits until the channel
    // is empty. No redo is needed, because the word is set before another process gets the channel.
    uint64_t share;
    // Nonzero: a writer waits for bytes, not for places. No redo is needed, because the writer sets the word
    // again with each attempt.
    uint64_t short_of_memory;
    // pid of a process that died with a counted writer open, or 0. At the end of such a channel, readers get
    // Broken.
    uint64_t cut_off;
    uint64_t resumes;  // number of sessions with role RESUME

    alignas(64) uint64_t claimed;  // how many places in the channel FILLING slots have claimed
    uint64_t parked, turn;
    uint64_t writers, readers;   // how many counted ports are open
    uint64_t cause, cause_size;  // offset and size of the pickled cause of the state BROKEN
    // Nonzero: the only writer is a link, which must learn of each finished item and each waiting reader.
    uint64_t notify_writer;
    // Nonzero: items go to another host, so none of their memory may stay on a device of this host. No redo
    // is needed, because the word is set before another process gets the channel.
    uint64_t leaves;
    // Nonzero: an item keeps the number of the input item that it was made for. No redo is needed, because
    // the word is set before another process gets the channel.
    uint64_t keeps_numbers;
    // Nonzero: a reader has had a run. No redo is needed, because the word is set before the run begins and
    // never cleared.
    uint64_t has_runs;
    uint64_t runs_checked_ns;  // when runs were last checked for slow items; a hint
    // Nonzero: the readers wake waiting writers only when half of the capacity is free (ReaderState::lazy).
    // No redo is needed, because the word is never cleared.
    uint64_t lazy;
    std::atomic<uint32_t> nap;  // 1 while a reader naps (Ring::begin_nap); a futex word, which needs no redo
    // The first process that had a session, and a flag that is nonzero if any other process has had one. No
    // redo is needed, because each process writes these words before it uses its session.
    uint64_t first_user, has_more_users;

    alignas(64) uint64_t numbered;  // how many items have a number
    uint64_t leased;                // leased items of all sessions
    uint64_t viewed_bytes;          // bytes in viewed slots, except loaned ones

    alignas(64) WaitQueue reader_queue;  // wait queues need no redo, see waiting.hpp
    WaitQueue writer_queue;
    // When a process last searched for dead sessions. This is a hint that orders no other memory access. Each
    // call reads it, so its cache line has no other word that changes often.
    alignas(64) std::atomic<uint64_t> swept_ns;
    Redo redo[RECORDS];

    int64_t inside() const { return int64_t(puts - takes); }
    // The session records follow the header directly. Access only allocated records.
    Session* records() { return reinterpret_cast<Session*>(this + 1); }
    std::span<Session> sessions() { return {records(), std::min<uint64_t>(reserved_sessions, SESSIONS)}; }
};

// Block classes. Class 0 means "no block". Classes 1 to 4 have 64, 128, 192 and 256 bytes; from there on,
// each doubling has four classes. `class_of` returns the smallest class that fits `size` bytes.
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

// From this class on, a block shares no page with another block, so readers may use it in place. Copying a
// smaller block is cheaper than tracking its views.
constexpr uint32_t VIEWABLE = 28;  // 16 KB

}  // namespace flowchan
