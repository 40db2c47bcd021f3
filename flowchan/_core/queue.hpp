// LocalQueue: the FIFO of a `threads` channel. It stores references, so it never copies an item.
//
// A LocalQueue consists of a circular buffer, which doubles up to `capacity`, and the wait lists of
// wait_list.hpp. It orders the outputs of an ordered stage as ring_turns.cpp does, but with deques instead of
// linked slots. No operation drops a reference, because a destructor could run Python code under the lock.
// The calling thread must be attached to the interpreter (hold the GIL), because the garbage collector visits
// the items without the lock.
//
// In a build with a GIL, a thread holds it from lock to unlock, so no other lock is needed. A mutex needs two
// atomic operations, which would make a put 25 % slower. A free-threaded interpreter uses a small futex
// mutex.
#pragma once

#include <Python.h>

#include <algorithm>
#include <deque>
#include <vector>

#include "ring.hpp"
#include "wait_list.hpp"

namespace flowchan {

// 0: free, 1: locked, 2: locked, with threads that may be asleep. This is mutex 2 from Drepper, "Futexes are
// tricky" (2011).
class FutexMutex {
  public:
    void lock() {
        uint32_t seen = 0;
        if (word_.compare_exchange_strong(seen, 1, std::memory_order_acquire))
            return;  // pairs with the release in unlock
        for (int i = 0; i < 100; ++i) {
            cpu_relax();
            seen = 0;
            if (word_.compare_exchange_weak(seen, 1, std::memory_order_acquire)) return;
        }
        while (word_.exchange(2, std::memory_order_acquire) != 0) futex_wait(word_, 2, SLICE_NS, false);
    }
    void unlock() {
        if (word_.exchange(0, std::memory_order_release) == 2)
            futex_wake(word_, 1, false);  // pairs with the acquire in lock
    }

  private:
    std::atomic<uint32_t> word_{0};
};

struct HeldGil {
    void lock() {}
    void unlock() {}
};

#ifdef Py_GIL_DISABLED
using Mutex = FutexMutex;
#else
using Mutex = HeldGil;
#endif

class LocalQueue {
  public:
    struct Item {
        static constexpr uint64_t UNNUMBERED = UINT64_MAX;
        PyObject* object;
        uint64_t size;                 // counts against max_bytes and the share; 0 if there is neither
        uint64_t number = UNNUMBERED;  // assigned by the first take, as in Slot
    };

    LocalQueue(uint64_t capacity, uint64_t max_bytes) : capacity_(capacity), max_bytes_(max_bytes) {}
    ~LocalQueue();

    bool lock(bool) {
        mutex_.lock();
        return true;
    }
    void unlock() { mutex_.unlock(); }
    void wake(const Wakes& w) { w.wake_words(false); }

    // --- all under the lock, with the same meaning as in Ring ---
    // consumes the reference if the result is Done
    Step try_put(const Item& item, WriterState* writer, Wakes& wakes);
    // passes ownership of the reference to the caller
    Step try_take(Item& item, ReaderState* reader, Wakes& wakes);
    void acknowledge(ReaderState& reader, Wakes& wakes);
    // takes ownership of the references
    void give_back(const std::vector<Item>& items, ReaderState& reader, Wakes& wakes);
    void begin_item(WriterState& writer, uint64_t number);
    void start_turns_at(uint64_t number, Wakes& wakes);
    void order(ReaderState& reader, const void* port, Orders what, Wakes& wakes);
    Step item_done(WriterState& writer, Wakes& wakes);
    void close(Wakes& wakes);
    // Adds references to `dropped`. The caller must drop them after it has released the lock.
    void break_(PyObject* by, std::vector<PyObject*>& dropped, Wakes& wakes);
    void end_port(Side side, const void* port, Wakes& wakes);
    bool drained() const { return leased == 0 && is_exhausted(); }
    bool broken() const { return state == BROKEN; }
    uint64_t seen_state() const { return state; }
    uint64_t inside() const { return count_; }
    uint64_t& share() { return share_; }
    void keep_numbers() { keeps_numbers_ = true; }
    bool keeps_numbers() const { return keeps_numbers_; }
    Counts counts() const;
    // Return new references to up to `most` items, starting with item number `first`. The items stay in the
    // queue.
    std::vector<Item> peek(uint64_t first, uint64_t most);
    // Always empty: a thread dies only together with its process, and views never point into the queue.
    std::vector<Held> held() const { return {}; }
    bool is_sweep_due() const { return false; }
    int fd() const { return -1; }
    int socket() const { return -1; }
    void sweep(Wakes&) {}

    int traverse(visitproc visit, void* arg);

    WaitList& wait_list(Side side) { return side == Side::Reader ? reader_list : writer_list; }
    bool could_continue(const Caller& caller) const;  // whether the caller's operation would succeed now
    void wake_waiting(Side side, Wakes& wakes);       // wakes one caller whose operation would succeed now
    WaitList reader_list, writer_list;
    std::atomic<uint64_t> state = OPEN;  // only a hint for readers without the lock
    PyObject* cause = nullptr;           // exception that broke the channel
    uint64_t puts = 0, takes = 0, bytes_in = 0, bytes_out = 0;
    uint64_t leased = 0, parked = 0, turn = 0, readers = 0, writers = 0;
    bool short_of_bytes = false;  // a writer waits because max_bytes is reached

    // Return whether the worker must not take more items, because too many outputs wait for room.
    bool is_crowded() const { return state == OPEN && room() <= 1 && writer_list.with_turn() >= CROWD; }

    bool counts_bytes() const { return share_ || max_bytes_ != UINT64_MAX; }
    uint64_t most_inside() const { return share_ ? std::min(share_, max_bytes_) : max_bytes_; }

  private:
    struct Group {
        std::deque<Item> items;
        bool complete = false;
    };
    static constexpr uint64_t GROUPS = 4096;

    bool is_exhausted() const { return state == CLOSED && count_ == 0 && parked == 0; }
    void wake_at_end(Wakes& wakes) {
        if (is_exhausted()) reader_list.call_all(wakes);
    }
    void grow();
    void push(const Item& item);
    void count_output(WriterState& writer, Wakes& wakes);
    void put_back(const Item& item);
    Item& at(uint64_t place) { return buffer_[(head_ + place) & (buffer_.size() - 1)]; }
    void advance(Wakes& wakes);
    bool is_parked(const WriterState* w) const { return w && w->keyed && w->ordered && w->number > turn; }
    uint64_t room() const { return capacity_ - std::min(capacity_, count_ + parked); }
    bool has_turn(uint64_t number) const {  // returns whether an output of item `number` has room
        if (number == ANY_TURN) return room() > 1 || writer_list.with_turn() == 0;
        return number <= turn ? room() > 0 : number - turn < GROUPS && room() > 1;
    }
    void wake_turn(Wakes& wakes) {
        writer_list.wake_turn([&](uint64_t number) { return has_turn(number); }, wakes);
    }
    void wake_writers(const ReaderState* reader, Wakes& wakes) {  // see Ring::wake_writers
        if (!writer_list.waiting) return;
        if (short_of_bytes) writer_list.call_all(wakes);
        short_of_bytes = false;
        wake_turn(wakes);
        const uint64_t enough = reader && reader->lazy ? std::max<uint64_t>(capacity_ / 4, 1) : 1;
        if (room() >= enough) writer_list.call(wakes);
    }

    Mutex mutex_;
    uint64_t capacity_, max_bytes_;
    uint64_t share_ = 0;  // see Header::share
    std::vector<Item> buffer_;
    uint64_t head_ = 0, count_ = 0;
    uint64_t numbered_ = 0;       // how many items have a number
    bool keeps_numbers_ = false;  // see Header::keeps_numbers
    std::deque<Group> groups_;    // indexed by i - turn, up to the highest parked i
};

}  // namespace flowchan
