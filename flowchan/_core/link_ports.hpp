// The two ends of a port whose worker runs on another host: Source takes items out of a ring here, to be sent;
// Sink puts what was received into a ring here. Each belongs to a line of a Link (link.hpp), under whose mutex
// all of it is called; none of it touches Python.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "blocking.hpp"
#include "sleeping.hpp"
#include "wire.hpp"

namespace flowchan {

// The lock of a ring, got without the GIL; whom its operations woke is woken when it is dropped.
class Holding {
  public:
    explicit Holding(Ring& ring) : ring_(ring) {
        if (!ring.lock(false)) ring.lock(true);
    }
    ~Holding() {
        ring_.unlock();
        ring_.wake(wakes);
    }
    Holding(const Holding&) = delete;
    Wakes wakes;

  private:
    Ring& ring_;
};

// A place at a ring's gate that is kept over many sleeps, until it is called.
class Stand {
  public:
    Stand(Ring& ring, Side side, uint32_t session) : ring_(ring), caller_{side, this, session} {}
    // With the ring's lock held. `number`: of the item whose turn is awaited.
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

constexpr uint64_t MOST_AHEAD = 1 << 16;  // items under way to a worker, or waiting for room here

// How many items a worker elsewhere may have ahead, besides what it waits for. One, unless it would wait for
// the next item longer than it takes for one: then as many as it finishes in a few round trips. So nobody
// holds many items that others could begin with, however fast or far the worker is.
class Window {
  public:
    uint64_t size() const { return uint64_t(size_); }
    // What home hears of the worker: it waits for an item; none is under way either (`starved`); it has some
    // in hand meanwhile (`gathers`).
    void hear(bool starved, bool waits, bool gathers, uint64_t ahead, uint64_t done, int64_t round_trip);
    void shrink() { size_ = 1; }
    // From how long on a worker is slow with an item: then waiting for the next one costs it little.
    static int64_t slow(int64_t round_trip) { return 16 * round_trip + 4'000'000; }

  private:
    double size_ = 1;
    uint64_t done_ = 0;  // at the last look
    int64_t at_ = 0;
    bool starved_ = false;  // since then
};

// How many outputs may be under way: as many as the other side finds room for in a few round trips.
class Allowance {
  public:
    static constexpr uint64_t LEAST = 1024;
    uint64_t most() const { return most_; }
    void hear(uint64_t used, int64_t round_trip);

  private:
    uint64_t most_ = LEAST, used_ = 0;  // at the last look
    int64_t at_ = 0;
};

// How many bytes may be under way, and one item more: as many as the other side gets through in two round trips.
// Those of an idle wire: on a busy one a round trip takes the longer the more is under way.
class ByteWindow {
  public:
    static constexpr uint64_t LEAST = 4 << 20, MOST = 64 << 20;
    uint64_t size() const { return size_; }
    // The other side is done with that much, of so much under way.
    void free(uint64_t bytes, uint64_t under_way) {
        freed_ += bytes;
        full_ = full_ || under_way >= size_;
    }
    void look(uint64_t most, int64_t round_trip);

  private:
    uint64_t size_ = LEAST, freed_ = 0;  // since the last look
    int64_t at_ = 0;
    bool full_ = false;  // it was, since then
};

class Source {
  public:
    static constexpr uint64_t MORE = 64;
    struct Entry {
        const char* at;
        uint64_t size, number, key;
        uint8_t kind, deaths;
    };
    // Those on lease, oldest first, in a ring that grows: a std::deque would go to malloc for every dozen.
    class Entries {
      public:
        uint64_t size() const { return end_ - begin_; }
        bool empty() const { return begin_ == end_; }
        Entry& operator[](uint64_t i) { return all_[(begin_ + i) & (all_.size() - 1)]; }
        const Entry& operator[](uint64_t i) const { return all_[(begin_ + i) & (all_.size() - 1)]; }
        const Entry& back() const { return (*this)[size() - 1]; }
        void push_back(const Entry& entry) {
            if (size() == all_.size()) grow();
            end_ += 1;
            (*this)[size() - 1] = entry;
        }
        void drop_oldest(uint64_t n) { begin_ += n; }
        void drop_newest(uint64_t n) { end_ -= n; }

      private:
        void grow();
        std::vector<Entry> all_;  // a power of two of them, or none
        uint64_t begin_ = 0, end_ = 0;
    };

    Source(std::shared_ptr<Ring> ring, uint32_t session, bool alone);
    ~Source();

    // The outputs for the items have turns. Then none is taken behind one with a higher number: its output
    // would be awaited while it can't come before the other's, for which there may be no room. Who gave it
    // back, or its successor, has none that is higher.
    bool ascending = false;
    bool is_held_back() const {
        return ascending && !entries.empty() && ring->is_next_before(entries.back().number);
    }

    // Takes what is inside, as far as so many entries are allowed. Whether anything changed.
    bool take(uint64_t most);
    void free_oldest(uint64_t n);
    void leave();  // nobody wants more: what is left goes back
    // Over a new connection; until the other side has said what it has got, nothing counts as sent.
    void connect() {
        known = told = recall_said = false;
        sent = base;
    }
    void hear_got(uint64_t got);  // over a new connection, it is sent again from there
    bool has_unsent() const { return known && !recalling && sent < base + entries.size(); }
    Entry& unsent() { return entries[sent - base]; }
    uint64_t first_key();  // of what is not yet sent: no item before it can be done; Slot::KEYLESS: none
    // Home: who neither waits for an item nor works on one gets none, and what is there goes back for others.
    bool on_demand = false;
    // Home: so many items at most. A worker that gathers, and has all of them in hand, gets more, however many.
    uint64_t allowed_ahead() const {
        if (on_demand && !starved && !in_hand) return 0;
        const bool gathers = starved && in_hand && in_hand == entries.size();
        return std::max(window.size(), gathers ? in_hand + MORE : 0);
    }
    bool wants(uint64_t most) const {
        return ending == Ending::Open && !left && !refused && !recalling && entries.size() < most &&
               (bytes < byte_window.size() || in_hand >= entries.size());
    }
    bool has_more() const {  // a hint, without the lock
        return std::atomic_ref(ring->header().head).load(std::memory_order_relaxed) != 0 ||
               std::atomic_ref(ring->session(reader.session).again_head).load(std::memory_order_relaxed) != 0;
    }
    bool stand();  // at the gate; false: something is there already
    bool take_run(uint64_t most, Wakes& wakes);
    bool take_one(Wakes& wakes);
    void see_end(Step step);  // what a take found

    const std::shared_ptr<Ring> ring;
    ReaderState reader;
    Stand gate;
    Entries entries;  // on lease here: from item `base` on, those before `sent` are under way
    uint64_t base = 0, sent = 0, bytes = 0, done = 0;
    Window window;        // home
    Allowance allowance;  // away
    ByteWindow byte_window;
    void look_at_bytes(int64_t round_trip) { byte_window.look(ring->most_inside(), round_trip); }
    bool known = false;  // over this connection the other side has said what it has got
    bool left = false;
    bool refused = false, refused_told = false;  // an item that can't go to another host was found
    bool told = false;                           // the ending, over this connection
    Ending ending = Ending::Open;
    std::string cause;
    // Home: what the worker has begun, and whether it waits for more; whether it takes no more.
    uint64_t in_hand = 0;
    bool starved = false, leaving = false;
    // Home: items that the worker has not begun while others wait for some are recalled (C8).
    bool recalling = false, recall_said = false;
    int64_t progress_at = 0;  // when the worker last finished one, or got one to begin with
    bool may_recall() const {
        return (in_hand > 0 || on_demand) && entries.size() > in_hand && !recalling && !left;
    }
    bool should_recall(int64_t round_trip) const;
    void hear_recalled(uint64_t got);
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
        std::vector<char> payload;
    };

    Sink(std::shared_ptr<Ring> ring, const WriterState& writer, bool follows, bool replays);
    ~Sink();

    bool left_alone() const { return over || refuses; }  // what still comes goes nowhere
    // Puts as the output for item number `number` of the ring that the worker reads (Slot::KEYLESS: none).
    Step put(const Received& item, uint64_t number, Wakes& wakes);
    Step begin(uint64_t number);  // Done: it is to be skipped
    Step done_with(uint64_t number, Wakes& wakes);
    void end(Ending ending, const std::string& cause);
    bool look();   // without the lock: whether the channel has ended under it
    void stand();  // where it waits for room, or for its turn

    const std::shared_ptr<Ring> ring;
    WriterState writer;
    const bool follows, replays;
    bool on_demand = false;  // away: only who waits is in want of an item
    Stand gate;
    // There was no room for them. The other side sends no more than it may (Source::wants).
    std::deque<Staged> staged;
    uint64_t staged_bytes = 0;
    bool stage(const Received& item, std::vector<char> payload);  // false: too many
    void unstage();
    void forget_staged();
    uint64_t got = 0, used = 0, settled = 0;
    bool over = false;      // its session has ended, or its channel
    bool refuses = false;   // an item came that the ring can't take; its channel is about to be broken
    bool recalled = false;  // away: to be said
    void recall();
    bool dirty = true;             // the other side does not know this yet
    Ending coming = Ending::Open;  // what comes when all is put
    std::string coming_cause;

    // Away: what the worker has done with it, as last told.
    struct Progress {
        uint64_t done = 0, in_hand = 0;
        uint8_t flags = 0;
        bool operator==(const Progress&) const = default;
    } told, seen;
    Progress look_at_worker();  // as `seen`
    bool stand_for_worker();    // false: it has gone on since then
    // A quick worker with enough to go on with is left alone until then. To be called at each of its items
    // would cost more than a cheap item does, for the worker too, and home gains nothing by hearing of each.
    int64_t alone_until = 0;
    void has_told();

  private:
    static constexpr int64_t ALONE_NS = 100'000;
    static constexpr uint64_t ENOUGH = 2;
    uint64_t inside_ = 0;  // when last looked at
    int64_t told_at_ = 0;
};

Frame frame_of(const Received& item);

}  // namespace flowchan
