// Ring: the FIFO of a `processes` channel in shared memory. The ring also records leases, and how many
// outputs each writer has committed.
//
// layout.hpp declares the data, and these files define the methods:
// - ring.cpp: the mapping and the lock
// - ring_sessions.cpp: the participants
// - ring_memory.cpp: allocation of slots and blocks, and views
// - ring_items.cpp: puts and gets
// - ring_runs.cpp: batched puts and gets
// - ring_leases.cpp: acknowledging leased items and giving them back
// - ring_turns.cpp: the output order of an ordered stage
// - ring_fd_bundles.cpp: file descriptors that travel with items
// - ring_peek.cpp: looking at items without taking them
//
// No method touches a Python object, so callers may run with or without the GIL. Two rules prevent deadlocks:
// no thread waits for the GIL while it holds the lock, and no code under the lock calls Python.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "frame.hpp"
#include "layout.hpp"
#include "lock.hpp"
#include "memory.hpp"
#include "process.hpp"
#include "turn_taking.hpp"
#include "windows.hpp"

namespace flowchan {

using Change = ChangeOf<Windows>;

// A supervisor's orders to a reader, one bit each. The reader obeys after it has finished its leased items.
enum Orders : uint32_t {
    RETIRE = 1,  // report the end of the channel to this port only
    // make the port's outputs wait for their turns, because the stage is about to get more workers
    KEEP_TURNS = 2,
};

// State of a port between operations. State that must outlive the process is in Session instead.
struct ReaderState {
    uint32_t session = 0;
    mutable PortClock clock;  // only for threads; a ring's session has its own clock
    // Number of the oldest leased item. After that lease ends, the number is kept until the next lease.
    // UINT64_MAX: nothing was ever leased.
    uint64_t number = UINT64_MAX;
    uint32_t leases = 0;
    uint32_t orders = 0;       // only for threads, see Orders; a ring stores its orders in Session
    bool keeps_turns = false;  // true once the reader has obeyed KEEP_TURNS
    // The reader of a stage wakes writers only when half of the capacity is free. It needs its own next
    // item sooner than the writers need room, and a sleeping writer checks again after each time slice
    // anyway.
    bool lazy = false;
    // Other readers never give back items to this port. At the end of the channel, the port therefore does
    // not wait for their leases.
    bool alone = false;
    // The processing of an item may start at most once. A worker's death therefore counts against its leased
    // item until the item is finished, even if the worker dies outside user code.
    bool once = false;
};
struct WriterState {
    uint32_t session = 0;
    mutable PortClock clock;  // only for threads, see ReaderState
    bool ordered = false;     // outputs for input item i wait for turn i
    bool single = false;  // each input item has exactly one output; putting that output completes the item
    // Each output is made for an input item, `number`. The reader that feeds this writer assigned the number.
    bool keyed = false;
    uint64_t number = 0;
    uint64_t count = 0;  // outputs made for this input item so far, including skipped ones
    uint64_t skip = 0;   // how many of these outputs a dead predecessor has already put

    // Count one more output. Return true if a predecessor has already put it, so the caller must skip it.
    bool skips() {
        if (!keyed || count >= skip) return false;
        count += 1;
        return true;
    }
    // For `single`: return whether the only output of this input item has been put, so the item is complete.
    bool has_passed(uint64_t item) const { return !keyed && count > 0 && number == item; }
};

// An item that a reader took. The payload is copied to `local`, or it stays in shared memory until
// `release`.
struct Taken {
    static constexpr uint64_t LOCAL = 4096;
    uint64_t kind = 0;
    uint64_t size = 0;
    // how many workers died holding the item, in user code or while unpickling it
    uint64_t deaths = 0;
    bool is_replay = false;        // see Slot::is_replay
    bool died_unpickling = false;  // the last worker that died was unpickling the item
    uint64_t number = 0;
    // For an output: the input item that the writer was processing. Slot::KEYLESS for any other item.
    uint64_t made_for = 0;
    const char* at = nullptr;
    Slot* held = nullptr;  // set by a plain get of a large item; call release() after reading
    bool viewed = false;   // this session views `slot`; call unview() later
    Slot* slot = nullptr;
    char local[LOCAL];
};

// An item that is in a channel or on lease, as peek() reports it without taking it.
struct Seen {
    uint64_t number, kind, size;
    bool leased;
    std::span<const char> copy;  // a copy of the payload; empty if it was not copied
};

// The descriptors that another process needs to map a ring. Without `socket`, the ring cannot carry
// descriptors.
struct RingHandle {
    int fd;
    int socket = -1;
};

class Ring : public std::enable_shared_from_this<Ring> {
  public:
    Ring(uint64_t capacity, uint64_t max_bytes);  // creates a ring; throws std::system_error, std::bad_alloc
    // maps a ring that another process created, and takes ownership of the descriptors
    explicit Ring(RingHandle handle);
    ~Ring();
    Ring(const Ring&) = delete;

    int fd() const { return fd_; }
    int socket() const { return socket_; }
    uint64_t offset_of_payload(const void* p) const {
        return windows_.offset_in_window(p);
    }  // may also be called without the lock
    Slot* slot_at(uint64_t offset) const { return at<Slot>(offset); }
    Header& header() { return *h_; }
    std::span<Session> sessions() { return h_->sessions(); }

    // Take the lock. If another user holds it and `patient` is false, return false at once.
    bool lock(bool patient);
    void unlock() {
        fault_point();
        lock_.unlock();
    }
    void wake(const Wakes& w) {
        fault_point();
        if (w.readers && w.ranks)
            futex_wake_first(w.ranks, h_->reader_queue.seq, w.readers);
        else if (w.readers)
            futex_wake(h_->reader_queue.seq, w.readers, true);
        if (w.writers) futex_wake(h_->writer_queue.seq, w.writers, true);
        w.wake_words(true);
    }

    // --- items; all under the lock ---
    Step try_put(const Frame& frame, WriterState* writer, Wakes& wakes);
    // A large put has two steps: `claim` reserves the memory, and `publish` appends the item to the FIFO.
    Step claim(const Frame& frame, WriterState* writer, uint32_t session, Slot*& slot);
    Step publish(const Frame& frame, Slot* slot, WriterState* writer, Wakes& wakes);
    void unclaim(Slot* slot, Wakes& wakes);
    // Copy the payload into the claimed slot. Call this between `claim` and `publish`, without the lock.
    void write(const Frame& frame, Slot* slot) {
        if (slot->size == frame.size && payload_exists(slot)) frame.write(payload(slot));
    }
    // `recalls`: if the channel is empty, take an item from another reader's run (ring_runs.cpp)
    Step try_take(Taken& taken, ReaderState* reader, uint32_t session, Wakes& wakes, bool recalls = true);
    struct Small {  // an item to put
        uint64_t kind, deaths, size;
        const char* at;
    };
    struct InRun {
        Slot* slot;
        uint64_t made_for;
    };
    uint64_t put_run(const Small* items, uint64_t count, Wakes& wakes);  // puts several items at once
    uint64_t take_run(ReaderState& reader, InRun* run, uint64_t count, uint64_t most_bytes, Wakes& wakes);
    // a run of one worker, which starts the items one by one; `start_in_run` needs no lock
    uint64_t begin_run(ReaderState& reader, InRun* run, Wakes& wakes);
    bool start_in_run(uint32_t session, uint64_t nth);
    bool may_start(ReaderState& reader);
    void cut_run(ReaderState& reader, bool keeps_current, Wakes& wakes);
    void finish_in_run(uint32_t session, uint64_t committed, Wakes& wakes);
    void release(Slot* slot, Wakes& wakes);  // frees a HELD slot
    // puts the most recently taken item back at the head, because the caller cannot receive it now
    void put_back(Taken& taken, ReaderState* reader, Wakes& wakes);
    void unview(Slot* slot, Wakes& wakes);  // ends a view when its user no longer needs the block
    // reserves a slot that the caller fills in place, outside the FIFO
    Step loan(uint64_t size, uint32_t session, Slot*& slot);
    Step put_loan(Slot* slot, const Frame& frame, WriterState* writer, Wakes& wakes);
    std::vector<Held> held() const;
    std::vector<uint64_t> pinned() const;
    // returns up to `most` items, starting with number `first`, with copies of their payloads in `room`
    std::vector<Seen> peek(uint64_t first, uint64_t most, std::span<char> room) const;
    // appends the bundle's descriptors, which then belong to the caller; returns 0 or an errno
    int open_bundle(uint64_t id, std::vector<int>& descriptors);
    void drop_bundles();  // drops the oldest bundles, up to the first one whose item still exists
    void acknowledge(ReaderState& reader, Wakes& wakes);  // finishes all leased items
    void acknowledge_oldest(uint32_t session, uint64_t n, Wakes& wakes);
    void give_back_newest(uint32_t session, uint64_t n, Wakes& wakes);  // gives back the newest leased items
    // gives back the oldest leased items as replays, because some of their outputs were put but then lost
    void give_back_replays(uint32_t session, uint64_t n, Wakes& wakes);
    // Return whether the next item to take was given back and comes before item `number`.
    bool is_next_before(uint64_t number) const {
        const Slot* slot = h_->head && slot_exists(h_->head) ? at<Slot>(h_->head) : nullptr;
        return slot && slot->numbered() && slot->number < number;
    }
    // Return the id of the reference at the head, or 0 if the head is an item or was given back.
    uint64_t reference_next() const;
    bool is_replay_next() const {
        return h_->head && slot_exists(h_->head) && at<Slot>(h_->head)->is_replay();
    }
    // removes all items that no reader has taken, and returns how many there were
    uint64_t take_back(Wakes& wakes);
    // records that all outputs for input item writer.number have been put
    Step item_done(WriterState& writer, Wakes& wakes);
    // call before putting the first output for the item
    void begin_item(WriterState& writer, uint64_t number);
    void wake_all_writers(Wakes& wakes);
    // starts a wait for turn `number`, and returns the current value of the session's futex word
    uint32_t await_turn(Session& s, uint64_t number, bool again);
    void end_turn_wait(Session& s);  // ends a wait that await_turn started
    void wake_turns(Wakes& wakes);   // wakes the writers whose turn has come
    // skips all turns before `number`, because those items will have no more outputs
    void start_turns_at(uint64_t number, Wakes& wakes);
    // returns the lowest number of an unfinished item, whether it was taken or not
    uint64_t first_unfinished() const;
    void order(uint32_t session, Orders what, Wakes& wakes);
    bool has_room(uint64_t size) const {
        const bool fits = h_->bytes_in - h_->bytes_out + size <= most_inside() || h_->puts == h_->takes;
        return fits && !is_withheld() && h_->puts - h_->takes + h_->parked + h_->claimed < capacity_;
    }
    // Allow only `puts` puts in total through this object, because the other side of the link accepts no
    // more. If the limit has risen, wake the writers. put_limit_ is the limit plus one; 0 means no limit.
    void allow(uint64_t puts, Wakes& wakes);
    bool is_limited() const { return put_limit_.load(std::memory_order_relaxed) != 0; }
    bool is_withheld() const {
        const uint64_t limit = put_limit_.load(std::memory_order_relaxed);
        return limit && h_->puts + h_->parked + h_->claimed + 1 >= limit;
    }
    // Return whether a writer waits only because of put_limit_.
    bool wants_more() const { return is_withheld() && h_->state == OPEN && h_->writer_queue.waiting > 0; }
    // Return whether a writer that found the channel full should put now. If not, it waits until half of the
    // channel is free.
    bool is_worth_waking() const { return !h_->lazy || free_half() || h_->state != OPEN; }
    // Let a reader that is never in a hurry sleep until half of the capacity is used, a writer waits, or the
    // channel ends. Return whether it may sleep. The reader sleeps on `nap`, with a time limit.
    bool begin_nap();
    void end_nap(Wakes& wakes) {
        if (!h_->nap.load(std::memory_order_relaxed)) return;
        h_->nap.store(0, std::memory_order_relaxed);
        wakes.add(h_->nap, true);
    }
    void count_nap(uint32_t session, int64_t ns) {  // adds the nap to the reader's waiting time
        this->session(session).clock.all.ns += ns;
        h_->reader_queue.waited_ns += ns;
    }
    uint64_t free_places() const {
        const uint64_t all = h_->puts - h_->takes + h_->parked + h_->claimed;
        return h_->state == OPEN && has_room(0) ? capacity_ - all : 0;
    }
    uint64_t most_inside() const {
        return h_->share ? std::min(h_->share, max_bytes_) : max_bytes_;
    }  // a larger item must wait until the ring is empty
    bool fits(uint64_t size) const { return size <= max_bytes_; }
    // Return whether an item of this size would need fresh memory although readers will soon free some.
    // `late`: the put has already waited for recycled memory as long as was worthwhile.
    bool lacks_warm_memory(uint64_t size, bool late);
    // Return whether a link fills this ring for the plain gets of a remote channel. The link reports an item
    // as finished only after this process has decoded it. Until then, the owner keeps the item in case this
    // process dies.
    bool is_filled_by_link() const { return h_->notify_writer; }
    void begin_decoding(uint64_t number) {
        if (is_filled_by_link()) decoding_.push_back(number);
    }
    void end_decoding(uint64_t number, Wakes& wakes);
    uint64_t first_undecoded();  // includes the head if it was put back; UINT64_MAX if all items are decoded
    bool at_end() const { return h_->state == CLOSED && h_->leased == 0 && is_exhausted(); }
    bool at_end_for(const ReaderState* reader) const;
    uint64_t inside() const { return h_->state == BROKEN ? 0 : h_->puts - h_->takes; }
    uint64_t& share() { return h_->share; }
    void keep_numbers() { h_->keeps_numbers = 1; }
    Counts counts() const;
    bool drained() const { return at_end() && !h_->cut_off; }
    bool broken() const { return h_->state == BROKEN || (at_end() && h_->cut_off); }

    // --- the channel; all under the lock ---
    void close(Wakes& wakes);
    // `in_short`: a shorter cause, used if there is not enough memory for the long cause.
    void break_(const std::string& cause, Wakes& wakes, const std::string& in_short = {});
    // turns a broken ring into a closed ring, so that its only user can take the remaining items
    void unbreak();
    std::string cause() const;

    // --- sessions; all under the lock ---
    // throws std::length_error if no session is free
    uint32_t open_session(Session::Role role, Wakes& wakes);
    void adopt(uint32_t session);  // moves the session to the calling process
    // Return whether only this process has ever had a session. May be called without the lock.
    bool is_used_here_only() const {
        return !std::atomic_ref(h_->has_more_users).load(std::memory_order_relaxed);
    }
    void end_session(uint32_t session, bool finished, Wakes& wakes, bool died = false);
    uint64_t seen_state() const {
        return std::atomic_ref(h_->state).load(std::memory_order_acquire);  // may be called without the lock
    }
    // End unsupervised sessions whose processes are dead, unless another user has just done so. Reading the
    // hint behind `is_sweep_due` needs no lock.
    void sweep(Wakes& wakes);
    bool is_sweep_due() const {
        const int64_t ago = coarse_now_ns() - int64_t(h_->swept_ns.load(std::memory_order_relaxed));
        return ago < 0 || ago >= SLICE_NS * 4 / 5;
    }
    // Reserve the leased items of a dead reader for its replacement.
    void reserve_for(uint32_t from, uint32_t to, bool all = false, bool blame = true);
    std::vector<Slot*> leased_slots(uint32_t session) const;  // oldest first
    std::vector<uint64_t> reserved_numbers(uint32_t session) const;
    void begin_again(ReaderState& reader);
    // End the session of a dead writer whose `items` will be processed again. The ring records how many
    // outputs the writer had put for each of them, so that no output is put twice.
    void retire_writer(uint32_t session, const std::vector<uint64_t>& items, Wakes& wakes);
    const char* payload_of(Slot* slot) const { return payload(slot); }
    static uint32_t route_of(const Slot* slot) {
        uint32_t route = 0;
        if (slot->block) memcpy(&route, slot->data, sizeof route);
        return route;
    }
    Session& session(uint32_t index) const { return h_->records()[index < SESSIONS ? index : 0]; }
    // Return whether part of the channel could not be mapped into this process.
    bool is_map_incomplete() const { return map_incomplete_; }

    Spin spin;
    TurnTaking turn_taking;

  private:
    Windows windows_;
    Header* h_ = nullptr;
    SharedLock lock_;
    int fd_ = -1, socket_ = -1;
    bool map_incomplete_ = false;
    std::vector<uint64_t> decoding_;  // numbers of the items that plain gets in this process are decoding
    bool decoding_seen_ = false;      // true if the link has seen `decoding_` nonempty
    // written under the lock; a reader without the lock gets only a hint
    std::atomic<uint64_t> put_limit_ = 0;
    Peers peers_;
    // Constants copied from the header when this process first mapped it. Later damage to the header then
    // cannot mislead this process.
    uint64_t length_ = 0, capacity_ = 0, max_bytes_ = 0, groups_ = 1, groups_at_ = 0, blocks_at_ = 0,
             blocks_end_ = 0;
    // Return the object at this offset, which must be inside a slot.
    template <class T>
    T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(windows_.slots() + offset);
    }
    uint64_t offset(const void* p) const { return windows_.offset(p); }
    Group& group(uint64_t number) {
        return reinterpret_cast<Group*>(windows_.header() + groups_at_)[number % groups_];
    }
    bool free_half() const {
        const uint64_t used = h_->puts - h_->takes + h_->claimed;
        return used + std::max<uint64_t>(capacity_ / 2, 1) <= capacity_;
    }
    uint64_t finished() const { return h_->takes - std::min(h_->leased, h_->takes); }
    uint64_t finished_before_wait_ = 0;  // value of finished() when a put last waited for memory in vain
    bool is_exhausted() const { return h_->head == 0 && h_->parked == 0 && h_->claimed == 0; }
    Step end() const { return h_->cut_off ? Step::Broken : Step::Drained; }
    void sweep_now(Wakes& wakes);
    void wake_at_end(Wakes& wakes);
    void close_with(Change& change, Wakes& wakes);
    void map(const Constants& constants, uint64_t blocks_end);
    void check_growth() {
        if (h_->map_blocks_to > windows_.blocks_to() || h_->map_slots_from < windows_.slots_from())
            map_growth();
    }
    void map_growth();
    bool reserve(uint64_t from, uint64_t upto) { return reserve_memory(fd_, from, upto); }
    bool reserve_sessions(uint32_t n);
    void note_user();
    bool lock_without_mutex();
    void recover();
    bool redo();
    Redo& record(Side side) const;
    void drop_copies(uint32_t session, bool views, Wakes& wakes);
    bool may_still_view(uint32_t session) const;
    uint32_t free_session(Wakes& wakes);
    uint64_t first_slot() const { return std::max(h_->slots_at, windows_.slots_from()); }
    void move_views(uint32_t session);

    Step room(const Frame& frame, const WriterState* writer);
    char* payload(Slot* slot) const { return slot->block ? windows_.block(slot->block) : slot->data; }
    Slot* take_slot(uint64_t size, Change& change);
    uint32_t free_class(uint32_t cls, uint32_t upto) const;
    Slot* new_slot(uint32_t cls, Change& change);
    Slot* new_bare_slot(Change& change);
    void free_slot(Slot* slot, Change& change);
    void push_free(Slot* slot, Change& change);
    using Span = std::pair<uint64_t, uint64_t>;  // first and last offset of a range of memory
    bool find_used(std::vector<Span>& used, std::vector<Slot*>& free);
    void fill_free_lists(const std::vector<uint64_t>& heads, Change& change);
    void rebuild_lists(uint32_t cls);
    bool may_view(const Slot* slot) const;
    void forget_view(Session& s, Change& change);
    uint64_t view(uint64_t state, const Slot* slot, uint32_t session, Change& change);
    Step no_slot();
    void memory_freed(Wakes& wakes);
    bool send_bundle(const Frame& frame);
    bool slot_exists(uint64_t offset) const;
    bool payload_exists(const Slot* slot) const;
    bool memory_is_valid() const;
    Step found_damage();
    void link(Slot* slot, WriterState* writer, Change& change);
    void finish_put(WriterState* writer, Wakes& wakes, bool parked);
    bool is_parked(const WriterState* w) const { return w && w->keyed && w->ordered && w->number > h_->turn; }
    void count_output(WriterState* writer, Change& change);
    bool find_place(uint64_t number, uint64_t& before, uint64_t& after) const;
    void link_between(Slot* slot, uint64_t before, uint64_t after, Change& change);
    void advance(Wakes& wakes);
    void turn_moved(Wakes& wakes);
    void wake_readers(uint64_t items, Wakes& wakes);
    static bool is_leased(const Slot* slot) { return slot->place() == SlotState::Leased; }
    bool head_is_valid(const Session* session) const;
    void describe(Taken& taken, Slot* slot) const;
    void take_head(Taken& taken, ReaderState* reader, Session* leases, uint32_t session, Wakes& wakes);
    void lease(Slot* slot, uint64_t number, uint64_t state, Session& session, Change& change);
    bool count_deaths(uint64_t suspects, uint64_t most, uint64_t& last, uint64_t& rest);
    void free_leased(Session& s, uint64_t most, Wakes& wakes);
    uint64_t free_run(Session& s, uint64_t most);
    // Taking a run assigns new numbers, so runs are impossible if the items must keep their numbers.
    bool can_take_runs() const { return h_->state < BROKEN && !map_incomplete_ && !h_->keeps_numbers; }
    bool recall(Session& s, bool all, Wakes& wakes);
    bool recall_any(uint32_t session, Wakes& wakes);
    bool has_items_for(const ReaderState* reader, uint32_t session, bool recalls, Wakes& wakes);
    void recall_from_slow(uint32_t session, Wakes& wakes);
    uint64_t all_started(uint64_t& unstarted) const;
    void give_back(Session& s, uint64_t n, Wakes& wakes);
    void give_back_from(Session& s, uint64_t kept, uint64_t p, uint64_t n, Wakes& wakes);
    void give_back_reserved(Session& s, Wakes& wakes);
    Step take_reserved(Taken& taken, ReaderState& reader);
    bool reserve_low(uint64_t upto);
    bool reserve_high(uint64_t from);
    bool has_turn(uint64_t number, uint64_t more) const;
    void wake_writers(Wakes& wakes, const ReaderState* reader = nullptr, uint32_t places = 1) {
        if (h_->writer_queue.ordered) wake_turns(wakes);
        if (!h_->writer_queue.waiting) return;
        if (!reader || !reader->lazy) return void(wakes.writers += h_->writer_queue.call(places));
        if (free_half()) wakes.writers += h_->writer_queue.call(uint32_t(capacity_));
    }
};

int socket_to_itself();

}  // namespace flowchan
