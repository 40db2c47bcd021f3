// LocalQueue: the FIFO of a `threads` channel. Items are references; nothing is copied.
//
// A circular buffer that doubles up to `capacity`, the gates of waiting.hpp, and the order of an ordered stage's outputs
// as in ring_items.cpp, with deques in place of lists of slots. A small futex mutex guards it; it does not rely on the
// GIL. Its operations move references and never drop one, because dropping could run any Python code under the lock.
// They run attached to the interpreter (GIL held), because the garbage collector looks at the items without the mutex.
#pragma once

#include <Python.h>

#include <deque>
#include <vector>

#include "ring.hpp"

namespace flowchan {

// 0 free, 1 taken, 2 taken and somebody sleeps. Drepper, "Futexes are tricky" (2011), mutex 2.
class Mutex {
public:
    void lock() {
        uint32_t seen = 0;
        if (word_.compare_exchange_strong(seen, 1, std::memory_order_acquire)) return;  // partner: unlock's release
        for (int i = 0; i < 100; ++i) {
            cpu_relax();
            seen = 0;
            if (word_.compare_exchange_weak(seen, 1, std::memory_order_acquire)) return;
        }
        while (word_.exchange(2, std::memory_order_acquire) != 0) futex_wait(word_, 2, SLICE_NS, false);
    }
    void unlock() {
        if (word_.exchange(0, std::memory_order_release) == 2) futex_wake(word_, 1, false);  // partner: lock's acquire
    }

private:
    std::atomic<uint32_t> word_{0};
};

class LocalQueue {
public:
    struct Item {
        PyObject* object;
        uint64_t size;  // counted against max_bytes; 0 when there is none
    };

    LocalQueue(uint64_t capacity, uint64_t max_bytes) : capacity_(capacity), max_bytes_(max_bytes) {}
    ~LocalQueue();

    bool lock(bool) {
        mutex_.lock();
        return true;
    }
    void unlock() { mutex_.unlock(); }
    void wake(const Wakes& w) {
        if (w.readers) futex_wake(reader_gate.seq, w.readers, false);
        if (w.writers) futex_wake(writer_gate.seq, w.writers, false);
    }

    // --- all under the lock; the same meaning as in Ring ---
    Step try_put(const Item& item, WriterState* writer, Wakes& wakes);  // takes over the reference when Done
    Step try_take(Item& item, ReaderState* reader, Wakes& wakes);       // hands the reference over
    void acknowledge(ReaderState& reader, Wakes& wakes);
    void give_back(const std::vector<Item>& items, ReaderState& reader, Wakes& wakes);  // takes over the references
    void begin_item(WriterState& writer, uint64_t number);
    Step item_done(WriterState& writer, Wakes& wakes);
    void close(Wakes& wakes);
    void break_(std::vector<PyObject*>& dropped, Wakes& wakes);  // the caller drops the references, unlocked
    void end_port(bool writer, Wakes& wakes);
    bool drained() const { return leased == 0 && nothing_coming(); }
    uint64_t inside() const { return count_; }

    int traverse(visitproc visit, void* arg);

    Gate reader_gate, writer_gate;
    uint64_t state = OPEN;
    PyObject* cause = nullptr;  // of BROKEN
    uint64_t puts = 0, takes = 0, bytes_in = 0, bytes_out = 0;
    uint64_t leased = 0, parked = 0, turn = 0, readers = 0, writers = 0;

private:
    struct Group {
        std::deque<Item> items;
        bool complete = false;
    };
    static constexpr uint64_t GROUPS = 4096;

    bool nothing_coming() const { return state == CLOSED && count_ == 0 && parked == 0; }
    void tell_end(Wakes& wakes) {
        if (nothing_coming()) wakes.readers += reader_gate.call_all();
    }
    void grow();
    void push(const Item& item);
    void advance(Wakes& wakes);
    bool is_parked(const WriterState* w) const { return w && w->keyed && w->ordered && w->number > turn; }
    uint32_t call_writers(const ReaderState* reader) {  // as in Ring
        if (!writer_gate.waiting) return 0;
        if (turn || parked) return writer_gate.call_all();
        if (!reader || !reader->lazy) return writer_gate.call(1);
        const uint64_t room = capacity_ - std::min(capacity_, count_);
        return room >= std::max<uint64_t>(capacity_ / 4, 1) ? writer_gate.call(uint32_t(room)) : 0;
    }

    Mutex mutex_;
    uint64_t capacity_, max_bytes_;
    std::vector<Item> buffer_;
    uint64_t head_ = 0, count_ = 0;
    bool short_of_bytes_ = false;  // a writer waits for bytes, not for a place
    std::deque<Group> groups_;  // groups_[i - turn], as long as the furthest parked i
};

}  // namespace flowchan
