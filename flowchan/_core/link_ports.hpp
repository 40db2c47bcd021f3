// The two classes behind a remote worker's port. A Source takes items out of a local ring for the link to
// send. A Sink puts received items into a local ring. They are parts of a Link's stream (link.hpp). Their
// functions run under the link's mutex and never touch Python.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "blocking.hpp"
#include "references.hpp"
#include "sleeping.hpp"
#include "wire.hpp"

namespace flowchan {

// Locks a ring without needing the GIL. After unlocking, it performs the wake-ups that the operations have
// requested.
class RingLock {
  public:
    explicit RingLock(Ring& ring) : ring_(ring) {
        if (!ring.lock(false)) ring.lock(true);
    }
    ~RingLock() {
        ring_.unlock();
        ring_.wake(wakes);
    }
    RingLock(const RingLock&) = delete;
    Wakes wakes;

  private:
    Ring& ring_;
};

// An entry in a ring's wait queue. The entry stays there across sleeps until the ring wakes it.
class KeptPlace {
  public:
    KeptPlace(Ring& ring, Side side, uint32_t session) : ring_(ring), caller_{side, this, session} {}
    // Call this under the ring's lock. If `ordered` is set, wait for the turn of item `number`.
    void enter(bool ordered, uint64_t number) {
        if (entered_) return;
        caller_.ordered = ordered;
        caller_.number = number;
        Traits<Ring>::enter(ring_, caller_, waiting_, false, false);
        entered_ = true;
    }
    void leave() {
        if (std::exchange(entered_, false)) Traits<Ring>::leave(ring_, caller_, waiting_, false);
    }
    bool entered() const { return entered_; }
    bool changed() { return entered_ && word().load(std::memory_order_relaxed) != waiting_.seen; }
    WaitedWord waited() { return {waiting_.seen, reinterpret_cast<uint64_t>(&word()), FUTEX_WORD_32, 0}; }

  private:
    std::atomic<uint32_t>& word() { return Traits<Ring>::word(ring_, caller_, waiting_); }
    Ring& ring_;
    Caller caller_;
    Traits<Ring>::Waiting waiting_{};
    bool entered_ = false;
};

enum class Ending : uint8_t { Open, Drained, Broke };

// limit for items in transit to a worker or waiting for room on this side
constexpr uint64_t MOST_AHEAD = 1 << 16;

// How many items a remote worker may hold in advance, besides the one it is waiting for. One item in advance
// is normally enough. The window grows if the worker would wait longer for an item than it takes to process
// one. Even then, it covers only the items that the worker finishes in a few round trips. So even a fast or
// distant worker does not hoard items that other workers could start.
class Window {
  public:
    uint64_t size() const { return uint64_t(size_); }
    // Update the window from the worker's state. `waits`: the worker waits for an item. `starved`: it waits,
    // and no item is in transit to it. `gathers`: it keeps its items while it waits for more.
    void update(bool starved, bool waits, bool gathers, uint64_t ahead, uint64_t done, int64_t round_trip);
    void shrink() { size_ = 1; }
    // Return the time per item above which a worker counts as slow. For a slow worker, the wait for the next
    // item is short compared with the processing.
    static int64_t slow(int64_t round_trip) { return 16 * round_trip + 4'000'000; }

  private:
    double size_ = 1;
    uint64_t done_ = 0;  // value of `done` at the last update
    int64_t at_ = 0;
    bool starved_ = false;  // the worker was starved at some point since the last update
};

// How many outputs may be in transit: as many as the other side can make room for in a few round trips.
class Allowance {
  public:
    static constexpr uint64_t LEAST = 1024;
    uint64_t most() const { return most_; }
    void update(uint64_t used, int64_t round_trip);

  private:
    uint64_t most_ = LEAST, used_ = 0;  // `used_`: value of `used` at the last update
    int64_t at_ = 0;
};

// How many bytes may be in transit, in addition to one item. The window covers what the other side processes
// in two round trips of an idle connection. Round trips of a busy connection would mislead, because they
// lengthen with the bytes in transit.
class ByteWindow {
  public:
    static constexpr uint64_t LEAST = 4 << 20, MOST = 64 << 20;
    uint64_t size() const { return size_; }
    // Record that the other side has finished `bytes` bytes when `under_way` bytes were in transit.
    void free(uint64_t bytes, uint64_t under_way) {
        freed_ += bytes;
        full_ = full_ || under_way >= size_;
    }
    void update(uint64_t most, int64_t round_trip);

  private:
    uint64_t size_ = LEAST, freed_ = 0;  // `freed_`: bytes finished since the last update
    int64_t at_ = 0;
    bool full_ = false;  // the window was full at some point since the last update
};

class Source {
  public:
    static constexpr uint64_t MORE = 64, FETCHES = 4, MOST_FETCHES = 16;
    // How long a reader leaves an item for a reader on the host that has it.
    static constexpr int64_t LEAVE_NS = 20'000'000;
    // How many bytes of outputs a worker may keep on its host. If one worker were far ahead of the others,
    // the next outputs in the channel would all be on its host. All readers would then wait for the
    // connection to that host.
    static constexpr uint64_t MOST_KEPT = 8 << 20;
    struct Entry {
        const char* at;
        uint64_t size, number, key;
        uint8_t kind, deaths;
        // For outputs that stay on the worker's host; only the owner side uses these (references.hpp).
        // `is_replay`: the item's outputs replace lost outputs. `outputs`: how many outputs have arrived.
        bool is_replay = false;
        bool is_urgent = false;  // see `urgent`
        uint32_t outputs = 0;
        // how many of the item's outputs are on the worker's host
        uint32_t references = 0;
        // If the item is itself a reference: how many of its moves were reported to the other side.
        uint64_t moves = 0;
        uint32_t route = 0;  // worker side: see Frame::route

        uint64_t reference() const {
            uint64_t id;
            memcpy(&id, at, sizeof id);
            return id;
        }
    };
    // The leased items, oldest first. The circular buffer grows on demand; a std::deque would call malloc for
    // every few items.
    class Entries {
      public:
        uint64_t size() const { return end_ - begin_; }
        bool empty() const { return begin_ == end_; }
        Entry& operator[](uint64_t i) { return all_[(begin_ + i) & (all_.size() - 1)]; }
        const Entry& operator[](uint64_t i) const { return all_[(begin_ + i) & (all_.size() - 1)]; }
        const Entry& back() const { return (*this)[size() - 1]; }
        // Add an empty entry at the end, and return it.
        Entry& append() {
            if (size() == all_.size()) grow();
            end_ += 1;
            return (*this)[size() - 1] = {};
        }
        void drop_oldest(uint64_t n) { begin_ += n; }
        void drop_newest(uint64_t n) { end_ -= n; }

      private:
        void grow();
        std::vector<Entry> all_;  // its size is 0 or a power of two
        uint64_t begin_ = 0, end_ = 0;
    };

    Source(std::shared_ptr<Ring> ring, uint32_t session, bool alone);
    ~Source();

    // True if outputs must be put in the order of their items. The source then takes no item that precedes
    // one of its leased items. The output for the earlier item would have to be put first, but would be sent
    // behind an output that may wait for room. Another worker can always take the earlier item: the worker
    // that gave it back, or its replacement, has no later item. Replays are an exception, because their
    // outputs are not put.
    bool ascending = false;
    bool is_held_back() const {
        if (!ascending || ring->is_replay_next()) return false;
        uint64_t n = entries.size();
        while (n > held() && entries[n - 1].is_replay) n -= 1;
        return n > held() && ring->is_next_before(entries[n - 1].number);
    }

    // Take items from the ring until there are `most` entries. Return whether anything changed.
    bool take(uint64_t most);
    // Owner side: take part in the choice of a reader for each reference.
    void join(Link* link);
    void update_demand(uint64_t most);
    // Return whether to take the item at the head of the ring. If another reader should take it, wake that
    // reader. Call this while holding the ring's lock.
    bool wants_head(uint64_t most);
    // Return the time at which to stop leaving the item at the head to another reader, or INT64_MAX.
    int64_t leaves_until() const {
        const bool wants_any = demand.load(std::memory_order_relaxed) == Demand::Any;
        return leaves_head && wants_any && has_more() ? left_at + LEAVE_NS : INT64_MAX;
    }
    void free_oldest(uint64_t n);
    // Owner side: record that all items before `upto` are finished and that their outputs have been put.
    // Their leases then end in order, each as soon as none of the item's outputs remains on the worker's
    // host.
    void settle(uint64_t upto);
    bool free_settled();  // returns whether a lease has ended
    // Return the number of leased items that are not settled yet.
    uint64_t active() const { return entries.size() - held(); }
    uint64_t held() const { return settled > base ? settled - base : 0; }
    void release(uint64_t key);  // call when an output for item `key` has left the worker's host
    // Owner side: check whether the next item is a replay. Call this after outputs were lost.
    void look_for_replay();
    void give_back_replays();  // owner side: call when the worker's host has lost outputs
    void leave();              // call when the reader is gone; gives back the remaining items
    // Start over on a new connection. No item counts as sent until the other side has reported what it
    // received.
    void connect() {
        known = end_sent = recall_sent = want_sent = false;
        demand = Demand::None;
        sent = base;
        part = {};
        pulls.clear();
        // The items may refer to outputs whose current locations the other side does not know.
        for (uint64_t i = 0; i < entries.size(); ++i) entries[i].moves = UINT64_MAX;
    }
    void resume_after(uint64_t got);  // on a new connection: sends the items after `got` again
    bool has_unsent() const { return known && !recalling && sent < base + entries.size(); }
    Entry& unsent() { return entries[sent - base]; }
    // Return the input item of the first unsent output, or Slot::KEYLESS if there is none. Until that output
    // is sent, neither this item nor any later one can finish.
    uint64_t first_key();
    // Owner side: send nothing to a worker that is neither waiting for an item nor processing one. Its items
    // go back to the ring for other workers.
    bool on_demand = false;
    // Owner side: return how many items may be sent in advance. A worker that is gathering items is always
    // sent more once it has received everything sent so far.
    uint64_t allowed_ahead() const {
        if (on_demand && !starved && !started) return 0;
        const bool gathers = starved && started && started == active();
        // Fetch outputs from several hosts at once, because other readers may keep one of the hosts busy.
        const uint64_t ahead = active() && entries.back().kind == REFERENCE ? fetches : 0;
        // Always take a replay. The worker's other outputs may wait for room while the readers that would
        // make room wait for the outputs of the replay.
        const uint64_t replays = replay_waits ? active() + 1 : 0;
        return std::max({window.size(), ahead, replays, gathers ? started + MORE : 0});
    }
    // Return how many bytes may be in transit, or may stay on this host for the other side.
    uint64_t most_bytes() const {
        if (remakes) return UINT64_MAX;
        if (lends) {
            const uint64_t few = FETCHES * (active() ? entries.back().size : 0);
            return std::min(std::max(MOST_KEPT, few), ring->most_inside() / 2);
        }
        const uint64_t wide = std::min(byte_window.size() * (fetches / FETCHES), ByteWindow::MOST);
        return std::max(byte_window.size(), std::min(wide, ring->most_inside()));
    }
    // `local`: outputs on the reader's host are not fetched, so twice as many may be sent ahead. The reader
    // then needs no remote outputs while it waits for its next local one.
    bool wants(uint64_t most, bool local = false) const {
        const uint64_t times = local ? 2 : 1;
        return ending == Ending::Open && !left && !refused && !recalling && active() < times * most &&
               (bytes / times < most_bytes() || started >= active());
    }
    bool has_more() const {  // only a hint, because it reads without the lock
        return std::atomic_ref(ring->header().head).load(std::memory_order_relaxed) != 0 ||
               std::atomic_ref(ring->session(reader.session).reserved_head).load(std::memory_order_relaxed) !=
                   0;
    }
    bool enter_queue(uint64_t most);  // enters the wait queue; false: there is already work
    bool take_run(uint64_t most, Wakes& wakes);
    bool take_one(Wakes& wakes);
    Entry& add(const char* at, uint64_t size, uint64_t number, uint64_t key, uint8_t kind, uint64_t deaths,
               bool is_replay);
    void handle_take(Step step);  // acts on the result of a take

    const std::shared_ptr<Ring> ring;
    ReaderState reader;
    KeptPlace queue_place;
    Entries entries;  // leased items, starting at item `base`; those before `sent` are in transit
    uint64_t base = 0, sent = 0, bytes = 0, done = 0;
    uint64_t settled = 0;  // owner side: see settle()
    // Owner side: number of active items whose outputs must arrive even if the worker already keeps too many
    // bytes. These are replays, and items that precede one the worker has already taken. Readers may not be
    // able to finish the kept outputs before these arrive.
    uint64_t urgent = 0;
    uint64_t highest = 0;         // owner side: the highest number of an item taken so far
    bool remakes = false;         // worker side: an item is urgent
    bool replay_waits = false;    // owner side: see look_for_replay()
    bool lends = false;           // worker side: large outputs stay here; the owner gets references to them
    std::vector<uint64_t> pulls;  // worker side: outputs that the owner wants in full after all
    Window window;                // owner side
    // Owner side: how many outputs are fetched ahead; grows while the worker waits for fetches.
    uint64_t fetches = FETCHES;
    void update_fetches(bool starved);
    // Owner side: for the choice of a reader (references.hpp). `has_references`: an item was a reference.
    Link* link = nullptr;
    std::atomic<Demand> demand{Demand::None};
    bool has_references = false;
    bool leaves_head = false;     // this reader leaves the item at the head to another reader
    uint64_t left_reference = 0;  // the last reference left to another reader; `left_at`: since when
    int64_t left_at = 0;
    Allowance allowance;  // worker side
    ByteWindow byte_window;
    void update_byte_window(int64_t round_trip) { byte_window.update(ring->most_inside(), round_trip); }
    // the first bytes of an item; an earlier connection has delivered them to the other side
    struct Part {
        uint64_t item = 0, size = 0;
        auto operator<=>(const Part&) const = default;
    } part, largest_part;  // `part`: on this connection; `largest_part`: the largest so far
    bool set_part(uint64_t item, uint64_t size);  // false: the other side claims an impossible part
    uint64_t acknowledged = 0;                    // how many items the other side has acknowledged
    bool owes() const { return !left && acknowledged < base + entries.size(); }
    bool known = false;  // the other side has reported over this connection what it received
    bool left = false;
    // an item cannot be sent to another host; the event was reported
    bool refused = false, refused_reported = false;
    bool end_sent = false;  // the end of the channel was sent over this connection
    Ending ending = Ending::Open;
    std::string cause;
    // Owner side: how many items the worker has started, whether it waits for more, and whether it is
    // leaving.
    uint64_t started = 0;
    bool starved = false, leaving = false;
    // Owner side: recall items that the worker has not started if other workers wait for items (C8).
    bool recalling = false, recall_sent = false;
    // when the worker last finished an item, or last got an item while it had none
    int64_t progress_at = 0;
    bool may_recall() const {
        return (started > 0 || on_demand) && active() > started && !recalling && !left;
    }
    bool should_recall(int64_t round_trip) const;
    void handle_recalled(uint64_t got);
    // worker side: the last WANT frame reported a writer that waits for room
    bool want_sent = false;
    // Return how many items were taken in total, minus those given back.
    uint64_t taken() const { return base + entries.size(); }
};

struct Received {
    uint64_t key;
    uint64_t kind, deaths, size;
    const char* at;
};

class Sink {
  public:
    struct Staged {
        uint64_t key, kind, deaths;
        uint64_t output;  // owner side: the output's number among all outputs of the stream
        // the item's bytes; on the worker side, a REFERENCE has the output's location here until the output
        // is fetched
        std::vector<char> payload;
        // worker side: the fetch failed; the owner side has been informed
        bool unreachable = false, unreachable_sent = false;
    };

    Sink(std::shared_ptr<Ring> ring, const WriterState& writer, bool follows, bool replays);
    ~Sink();

    bool drops_items() const { return over || refuses; }  // later items are dropped
    // Put the item as an output for item `number` of the worker's input ring. Slot::KEYLESS means that it is
    // an output for no item at all.
    Step put(const Received& item, uint64_t number, Wakes& wakes);
    Step begin(uint64_t number);  // Done: the caller must skip this output
    // Result of the last put: whether it was skipped, and the output's index among the outputs for its input
    // item.
    bool skipped = false;
    uint64_t index = 0;
    Step done_with(uint64_t number, Wakes& wakes);
    void end(Ending ending, const std::string& cause);
    bool check_ended();  // call without the lock; true if the channel has just ended
    void enter_queue();  // waits for room or for a turn

    const std::shared_ptr<Ring> ring;
    WriterState writer;
    const bool follows, replays;
    bool on_demand = false;  // worker side: the worker needs an item only while it waits for an item
    // Owner side: `limited`: the other side may only put into granted room. `wanted`: it waits for more room.
    bool limited = false, wanted = false;
    // Return whether the sink waits for room or for a turn. `settling`: an item of the stream waits for its
    // turn before it can finish.
    bool waits_to_put(bool settling) const {
        return !over && (!staged.empty() || settling || waits_for_room());
    }
    bool waits_for_room() const { return wanted && !over && staged.empty() && limit_sent <= used; }
    uint64_t limit_sent = 0;
    bool has_room(uint64_t prefetched);
    uint64_t limit(uint64_t prefetched) const {  // call while holding the ring's lock
        return used + std::max(ring->free_places(), prefetched) - prefetched;
    }
    KeptPlace queue_place;
    // Items that wait for room in the ring. The other side limits how many it sends (Source::wants).
    std::deque<Staged> staged;
    uint64_t staged_bytes = 0;
    bool stage(const Received& item, std::vector<char> payload);  // false: too many items are staged
    void unstage();
    void forget_staged();
    uint64_t got = 0, used = 0, settled = 0;
    // Owner side: the outputs that have arrived, starting with number `released`. Empty until one of them is
    // a reference. The referenced output stays on the worker's host until the owner releases the reference.
    struct Lent {
        uint64_t reference = WAITING;  // 0: no reference
        uint64_t key = 0;
    };
    static constexpr uint64_t WAITING = UINT64_MAX;  // the output has not been put yet
    std::deque<Lent> lent;
    bool is_lent = false;
    bool remakes_sent = false;  // owner side: the last report had the flag REMAKES
    uint64_t released = 0;
    uint64_t freed() const { return is_lent ? released : used; }
    void begin_lending();
    // Count an output that was put, or that no reader needs any more.
    void count_used(uint64_t output, uint64_t reference, uint64_t key);
    void drop(uint64_t output, uint64_t key);  // call for each item that is dropped
    void forget_reference(uint64_t reference);
    bool has_readers() const {
        return ring->seen_state() != BROKEN &&
               std::atomic_ref(ring->header().readers).load(std::memory_order_relaxed) > 0;
    }
    // The bytes of item `got` that arrived before the connection broke. The rest arrives over the next one.
    std::vector<char> part;
    bool part_reported = false;  // the part was reported over this connection
    bool over = false;           // the session or the channel has ended
    bool refuses = false;   // the ring cannot accept an item that arrived, so the channel will soon be broken
    bool recalled = false;  // worker side: the recall must be acknowledged
    void recall();
    bool dirty = true;                  // the other side does not know the current state
    Ending pending_end = Ending::Open;  // how the sink ends after everything is put
    std::string pending_cause;

    // Worker side: the worker's progress through the items in the ring.
    struct Progress {
        uint64_t done = 0, started = 0;
        uint8_t flags = 0;
        bool operator==(const Progress&) const = default;
    } last_sent, seen;
    Progress read_progress();  // returns the worker's progress, and stores it in `seen`
    // Returns false if the worker has progressed since the last read_progress().
    bool enter_queue_for_worker();
    // Until this time, do not watch a fast worker that has enough items. Waking this thread for each cheap
    // item would cost both threads more than the item. The owner side does not need a report per item either.
    int64_t unwatched_until = 0;
    void mark_progress_sent();

  private:
    static constexpr int64_t UNWATCHED_NS = 100'000;
    static constexpr uint64_t ENOUGH = 2;
    uint64_t inside_ = 0;  // value at the last read_progress()
    int64_t progress_sent_at_ = 0;
};

Frame frame_of(const Received& item);

}  // namespace flowchan
