// Ring: the FIFO of a `processes` channel in shared memory, with leases and committed counts (layout.hpp has
// the data, ring.cpp the mapping and the lock, ring_sessions.cpp who takes part, ring_memory.cpp slots,
// blocks and views, ring_items.cpp puts and takes, ring_runs.cpp several of them at once, ring_leases.cpp what
// readers have in hand, ring_turns.cpp the order of outputs, ring_fd_bundles.cpp descriptors that travel with
// items).
//
// Nothing here touches a Python object, so all of it may run with or without the GIL. Two rules keep threads
// from deadlocking: the lock is never held while the GIL is being waited for, and nothing that can call
// Python runs under it.
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

// What a supervisor has told a reader, as bits. The reader obeys when it has no item in hand.
enum Orders : uint32_t {
    RETIRE = 1,      // to this port alone the channel is drained from now on
    KEEP_TURNS = 2,  // its outputs have turns from now on: its stage gets more workers
};

// What a port remembers between two operations. Everything that must survive its process lies in Session.
struct ReaderState {
    uint32_t session = 0;
    mutable PortClock clock;       // between threads; a ring has it in the session
    uint64_t number = UINT64_MAX;  // of the first item in hand, or the last that was; before that UINT64_MAX
    uint32_t in_hand = 0;
    uint32_t orders = 0;       // threads: see Orders; of a ring they are in Session
    bool keeps_turns = false;  // it has obeyed KEEP_TURNS
    bool lazy =
        false;  // a stage's reader. It wakes writers when a quarter of the places is free, not for each place:
                // its next item matters more than the writer's, and their slices bound the delay.
    bool alone =
        false;  // what others have in hand never comes to it, so it does not wait for that at the end
    bool once =
        false;  // a death counts against the item in hand until that is finished, not only in the user's
                // code: nothing is begun twice
};
struct WriterState {
    uint32_t session = 0;
    mutable PortClock clock;  // as a reader's
    bool ordered = false;     // outputs for item i wait for i's turn
    bool single = false;      // each item has exactly one output, so the output also completes the item
    bool keyed = false;       // outputs belong to the item `number`, as numbered by the reader it follows
    uint64_t number = 0;
    uint64_t count = 0;  // outputs made for it so far, those skipped included
    uint64_t skip = 0;   // of them a dead predecessor has put already

    // Counts one more output, and says whether it is one of those, which are not put again.
    bool skips() {
        if (!keyed || count >= skip) return false;
        count += 1;
        return true;
    }
    // Whether its output has completed the item already (`single`).
    bool has_passed(uint64_t item) const { return !keyed && count > 0 && number == item; }
};

// An item that was taken: either copied to `local`, or still in shared memory and to be given back by
// `release`.
struct Taken {
    static constexpr uint64_t LOCAL = 4096;
    uint64_t kind = 0;
    uint64_t size = 0;
    uint64_t deaths = 0;  // how many workers have died with it in hand, in the user's code or unpickling it
    bool kills_who_unpickles = false;  // it was being unpickled when the last of them died
    uint64_t number = 0;
    uint64_t made_for = 0;  // the item of its writer's input that it is an output of, or Slot::KEYLESS
    const char* at = nullptr;
    Slot* held = nullptr;  // plain get of a large item: release() it after reading
    bool viewed = false;   // the session is the viewer of `slot` now: unview() it some time
    Slot* slot = nullptr;
    char local[LOCAL];
};

// What a process needs to map a ring that another one has created. Without its socket no descriptors travel
// through it.
struct RingHandle {
    int fd;
    int socket = -1;
};

class Ring : public std::enable_shared_from_this<Ring> {
  public:
    Ring(uint64_t capacity, uint64_t max_bytes);  // creates; throws std::system_error, std::bad_alloc
    explicit Ring(RingHandle handle);  // maps what another process created; takes over the descriptors
    ~Ring();
    Ring(const Ring&) = delete;

    int fd() const { return fd_; }
    int socket() const { return socket_; }
    uint64_t offset_of_payload(const void* p) const {
        return windows_.offset_in_window(p);
    }  // without the lock too
    Slot* slot_at(uint64_t offset) const { return at<Slot>(offset); }
    Header& header() { return *h_; }
    std::span<Session> sessions() { return h_->sessions(); }

    // The lock. `lock` says false if it could not get it without waiting and `patient` is false.
    bool lock(bool patient);
    void unlock() {
        fault_point();
        lock_.unlock();
    }
    void wake(const Wakes& w) {
        fault_point();
        if (w.readers && w.ranks)
            futex_wake_first(w.ranks, h_->reader_gate.seq, w.readers);
        else if (w.readers)
            futex_wake(h_->reader_gate.seq, w.readers, true);
        if (w.writers) futex_wake(h_->writer_gate.seq, w.writers, true);
        w.wake_words(true);
    }

    // --- items; all under the lock ---
    Step try_put(const Frame& frame, WriterState* writer, Wakes& wakes);
    Step claim(const Frame& frame, WriterState* writer, uint32_t session,
               Slot*& slot);  // large put, first half
    Step publish(const Frame& frame, Slot* slot, WriterState* writer,
                 Wakes& wakes);  // large put, second half
    void unclaim(Slot* slot, Wakes& wakes);
    void write(const Frame& frame, Slot* slot) {  // between them, unlocked
        if (slot->size == frame.size && payload_exists(slot)) frame.write(payload(slot));
    }
    Step try_take(Taken& taken, ReaderState* reader, uint32_t session, Wakes& wakes);
    struct Small {  // to be put
        uint64_t kind, deaths, size;
        const char* at;
    };
    struct InRun {
        Slot* slot;
        uint64_t made_for;
    };
    uint64_t put_run(const Small* items, uint64_t count, Wakes& wakes);  // several at a time
    uint64_t take_run(ReaderState& reader, InRun* run, uint64_t count, uint64_t most_bytes, Wakes& wakes);
    void release(Slot* slot, Wakes& wakes);  // of a HELD slot
    void put_back(Taken& taken, ReaderState* reader,
                  Wakes& wakes);            // it was taken last, and can't be received now
    void unview(Slot* slot, Wakes& wakes);  // its viewer has let go of it
    Step loan(uint64_t size, uint32_t session,
              Slot*& slot);  // memory to be filled in place, outside the FIFO
    Step put_loan(Slot* slot, const Frame& frame, WriterState* writer, Wakes& wakes);
    std::vector<Held> held() const;
    std::vector<uint64_t> pinned() const;
    int open_parcel(uint64_t id,
                    std::vector<int>& descriptors);  // its descriptors are this process's too; 0 or an errno
    void drop_parcels();                             // those in front whose items exist no more
    void acknowledge(ReaderState& reader, Wakes& wakes);  // all items in hand are finished
    void acknowledge_oldest(uint32_t session, uint64_t n, Wakes& wakes);
    void give_back_newest(uint32_t session, uint64_t n, Wakes& wakes);  // of what a reader has on lease
    // Whether what would be taken next was given back, and comes before item `number`.
    bool is_next_before(uint64_t number) const {
        const Slot* slot = h_->head && slot_exists(h_->head) ? at<Slot>(h_->head) : nullptr;
        return slot && slot->numbered() && slot->number < number;
    }
    uint64_t take_back(Wakes& wakes);  // what was put and has never been taken; how many it were
    Step item_done(WriterState& writer, Wakes& wakes);             // no more outputs for writer.number
    void begin_item(WriterState& writer, uint64_t number);         // first output for it is about to come
    uint32_t await_turn(Session& s, uint64_t number, bool again);  // gives what its word is now
    void have_turn(Session& s);                                    // it waits no more
    void call_turns(Wakes& wakes);                                 // those whose turn has come
    void turn_is(uint64_t number, Wakes& wakes);  // no item before that one has outputs to come
    uint64_t first_unfinished() const;            // of the items that were taken, and of those to come
    void order(uint32_t session, Orders what, Wakes& wakes);
    bool has_room(uint64_t size) const {
        const bool fits = h_->bytes_in - h_->bytes_out + size <= most_inside() || h_->puts == h_->takes;
        return fits && h_->puts - h_->takes + h_->parked + h_->claimed < capacity_;
    }
    uint64_t most_inside() const {
        return h_->share ? std::min(h_->share, max_bytes_) : max_bytes_;
    }  // a larger item: alone
    bool fits(uint64_t size) const { return size <= max_bytes_; }
    // Whether an item of this size would be the first in some memory, while others give memory back. `late`: it
    // has waited for that as long as it is worth.
    bool lacks_warm_memory(uint64_t size, bool late);
    bool at_end() const { return h_->state == CLOSED && h_->leased == 0 && nothing_coming(); }
    bool at_end_for(const ReaderState* reader) const;
    uint64_t inside() const { return h_->state == BROKEN ? 0 : h_->puts - h_->takes; }
    uint64_t& share() { return h_->share; }
    Counts counts() const;
    bool drained() const { return at_end() && !h_->cut_off; }
    bool broken() const { return h_->state == BROKEN || (at_end() && h_->cut_off); }

    // --- the channel; all under the lock ---
    void close(Wakes& wakes);
    // `in_short`: the cause, where there is no memory for all of it.
    void break_(const std::string& cause, Wakes& wakes, const std::string& in_short = {});
    void unbreak();  // closed in place of broken, for who alone has it: what was inside can be taken
    std::string cause() const;

    // --- sessions; all under the lock ---
    uint32_t open_session(Session::Role role, Wakes& wakes);  // throws std::length_error when all are taken
    void adopt(uint32_t session);                             // it belongs to the calling process from now on
    void end_session(uint32_t session, bool finished, Wakes& wakes, bool died = false);
    uint64_t seen_state() const {
        return std::atomic_ref(h_->state).load(std::memory_order_acquire);  // without the lock
    }
    // Ends unsupervised sessions of dead processes, if nobody has done so lately; also the hint, without the
    // lock, that it is time to.
    void sweep(Wakes& wakes);
    bool is_sweep_due() const {
        const int64_t ago = coarse_now_ns() - int64_t(h_->swept_ns.load(std::memory_order_relaxed));
        return ago < 0 || ago >= SLICE_NS * 4 / 5;
    }
    // What a dead reader had in hand, to its successor.
    void hand_on(uint32_t from, uint32_t to, bool all = false, bool blame = true);
    std::vector<Slot*> in_hand(uint32_t session) const;          // what a reader has on lease, oldest first
    std::vector<uint64_t> to_try_again(uint32_t session) const;  // the numbers of what is its alone
    void begin_again(ReaderState& reader);
    // Ends the session of a writer that died. If it had put outputs for one of `items`, which will be worked
    // on again, that is remembered, so that they are not put twice.
    void retire_writer(uint32_t session, const std::vector<uint64_t>& items, Wakes& wakes);
    const char* payload_of(Slot* slot) const { return payload(slot); }
    Session& session(uint32_t index) const { return h_->records()[index < SESSIONS ? index : 0]; }
    bool is_blind() const { return blind_; }  // this process can't map all that it must see of the channel

    Spin spin;
    Pace pace;

  private:
    Windows windows_;
    Header* h_ = nullptr;
    SharedLock lock_;
    int fd_ = -1, socket_ = -1;
    bool blind_ = false;
    Peers peers_;
    // What never changes, as it was when this process first saw it: damage to the header does not reach it.
    uint64_t length_ = 0, capacity_ = 0, max_bytes_ = 0, groups_ = 1, groups_at_ = 0, blocks_at_ = 0,
             blocks_end_ = 0;
    template <class T>
    T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(windows_.slots() + offset);
    }  // of a slot
    uint64_t offset(const void* p) const { return windows_.offset(p); }
    Group& group(uint64_t number) {
        return reinterpret_cast<Group*>(windows_.header() + groups_at_)[number % groups_];
    }
    uint64_t finished() const { return h_->takes - std::min(h_->leased, h_->takes); }
    uint64_t finished_by_then_ = 0;  // when a put waited in vain for memory
    bool nothing_coming() const { return h_->head == 0 && h_->parked == 0 && h_->claimed == 0; }
    Step end() const { return h_->cut_off ? Step::Broken : Step::Drained; }
    void sweep_now(Wakes& wakes);
    void tell_end(Wakes& wakes);
    void close_with(Change& change, Wakes& wakes);
    void map(const Constants& constants, uint64_t blocks_end);
    void look_for_growth() {
        if (h_->map_blocks_to > windows_.blocks_to() || h_->map_slots_from < windows_.slots_from())
            see_growth();
    }
    void see_growth();
    bool reserve(uint64_t from, uint64_t upto) { return reserve_memory(fd_, from, upto); }
    bool reserve_sessions(uint32_t n);
    bool lock_without_mutex();
    void recover();
    bool redo();
    Redo& record(Side side) const;
    void drop_copies(uint32_t session, bool views, Wakes& wakes);
    bool still_looks(uint32_t session) const;
    uint32_t free_session(Wakes& wakes);
    uint64_t first_slot() const { return std::max(h_->slots_at, windows_.slots_from()); }
    void part(uint32_t session);

    Step room(const Frame& frame, const WriterState* writer);
    char* payload(Slot* slot) const { return slot->block ? windows_.block(slot->block) : slot->data; }
    Slot* take_slot(uint64_t size, Change& change);
    uint32_t free_class(uint32_t cls, uint32_t upto) const;
    Slot* new_slot(uint32_t cls, Change& change);
    Slot* new_bare_slot(Change& change);
    void free_slot(Slot* slot, Change& change);
    void put_away(Slot* slot, Change& change);
    using Span = std::pair<uint64_t, uint64_t>;  // of memory: where it begins, and ends
    bool find_used(std::vector<Span>& used, std::vector<Slot*>& free);
    void fill_free_lists(const std::vector<uint64_t>& heads, Change& change);
    void tidy(uint32_t cls);
    bool may_view(const Slot* slot) const;
    void forget_view(Session& s, Change& change);
    uint64_t view(uint64_t state, const Slot* slot, uint32_t session, Change& change);
    Step no_slot();
    void memory_freed(Wakes& wakes);
    bool send_parcel(const Frame& frame);
    bool slot_exists(uint64_t offset) const;
    bool payload_exists(const Slot* slot) const;
    bool memory_is_right() const;
    Step found_damage();
    void link(Slot* slot, WriterState* writer, Change& change);
    void finish_put(WriterState* writer, Wakes& wakes, bool parked);
    bool is_parked(const WriterState* w) const { return w && w->keyed && w->ordered && w->number > h_->turn; }
    void count_output(WriterState* writer, Change& change);
    void link_front(Slot* slot, Change& change);
    void advance(Wakes& wakes);
    static bool is_leased(const Slot* slot) {  // Inside: whoever was giving it back died before it was done
        return slot->place() == SlotState::Leased || slot->place() == SlotState::Inside;
    }
    bool head_is_right(const Session* session) const;
    void describe(Taken& taken, Slot* slot) const;
    void take_head(Taken& taken, ReaderState* reader, Session* leases, uint32_t session, Wakes& wakes);
    void lease(Slot* slot, uint64_t number, uint64_t state, Session& session, Change& change);
    bool count_deaths(uint64_t suspects, uint64_t most, uint64_t& last, uint64_t& rest);
    void free_leased(Session& s, uint64_t most, Wakes& wakes);
    uint64_t free_run(Session& s, uint64_t most);
    void give_back(Session& s, uint64_t n, Wakes& wakes);
    void give_back_between(Session& s, uint64_t n, Wakes& wakes);
    void give_back_again(Session& s, Wakes& wakes);
    Step take_again(Taken& taken, ReaderState& reader);
    bool reserve_low(uint64_t upto);
    bool reserve_high(uint64_t from);
    bool has_turn(uint64_t number, uint64_t more) const;
    void call_all_writers(Wakes& wakes);
    void call_writers(Wakes& wakes, const ReaderState* reader = nullptr, uint32_t places = 1) {
        if (h_->writer_gate.ordered) call_turns(wakes);
        if (!h_->writer_gate.waiting) return;
        if (!reader || !reader->lazy) return void(wakes.writers += h_->writer_gate.call(places));
        const uint64_t room = capacity_ - std::min(capacity_, h_->puts - h_->takes + h_->claimed);
        if (room >= std::max<uint64_t>(capacity_ / 4, 1))
            wakes.writers += h_->writer_gate.call(uint32_t(room));
    }
};

int socket_to_itself();

}  // namespace flowchan
