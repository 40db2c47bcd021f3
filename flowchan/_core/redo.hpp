// The redo record makes a critical section on shared memory atomic. Even if the process is killed in the
// middle, either all changes happen or none does.
//
// Algorithm (write-ahead redo logging, as in databases). A change to the shared state is a list of (word, new
// value) pairs. The process first writes the list to the record. It then marks the record as valid, applies
// it, and clears it. A process that takes the lock from a dead owner checks the record. A valid record is
// complete, so the process applies it, perhaps for the second time. This does no harm, because the values are
// absolute. If the record is not valid, no part of the change was applied, so there is nothing to repair.
//
// Compiler fences are enough. The kernel passes on a dead owner's lock only after the owner has been
// descheduled for the last time. All stores that the owner executed are then visible, even if they left its
// core in a different order. So only the order of execution matters. It is the program order, as long as the
// compiler does not reorder stores.
//
// The same argument holds on processors with a weaker store order than x86_64. A core stops between two
// instructions, and everything before them has happened. When a thread dies, the kernel marks the thread's
// lock from within that thread, with a full barrier (dmb ish on aarch64).
//
// The ring has several records, so that a record's cache lines stay with the core that uses it. Writers and
// readers use different records. Different processes also use different records, as long as there are enough
// of them. The choice affects only speed. Only the holder of the lock writes a record, and clears it before
// unlocking. At most one record is therefore valid, and a process that finds the owner dead checks them all.
#pragma once

#include "faults.hpp"

#include <atomic>
#include <cassert>
#include <cstdint>

namespace flowchan {

inline void keep_order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

struct alignas(64) Redo {
    static constexpr uint32_t MOST = 24;
    struct Entry {
        uint64_t offset;
        uint64_t value;
    };
    volatile uint64_t valid;  // number of entries; 0: nothing to redo
    Entry entry[MOST];

    template <class Words>
    void apply(const Words& words, uint64_t n) const {
        for (uint64_t i = 0; i < n; ++i) {
            // Atomic, because Traits<Ring>::ready in blocking.hpp reads some words without the lock. Relaxed,
            // because these reads are hints, which a reader checks again under the lock.
            std::atomic_ref(*words.at(entry[i].offset)).store(entry[i].value, std::memory_order_relaxed);
            fault_point();
        }
    }
    // Apply the record of a dead owner. If an entry refers to a word outside of `words`, the record is
    // damaged. In that case, change nothing and return false.
    template <class Words>
    bool recover(const Words& words) {
        const uint64_t n = valid;
        if (n == 0) return true;
        bool right = n <= MOST;
        for (uint64_t i = 0; right && i < n; ++i)
            right = entry[i].offset % 8 == 0 && words.has(entry[i].offset);
        if (right) apply(words, n);
        keep_order();
        valid = 0;
        fault_point();
        return right;
    }
};

// A change while it is being composed. Reads return the old values until `commit`. `Words` converts words to
// offsets and back.
template <class Words>
class ChangeOf {
  public:
    ChangeOf(Redo& redo, const Words& words) : redo_(redo), words_(words) {}

    void set(uint64_t& word, uint64_t value) {
        assert(n_ < Redo::MOST);
        redo_.entry[n_].offset = words_.offset(&word);
        redo_.entry[n_].value = value;
        n_ += 1;
    }
    void commit() {
        fault_point();
        keep_order();
        redo_.valid = n_;
        keep_order();
        fault_point();
        redo_.apply(words_, n_);
        keep_order();
        redo_.valid = 0;
        keep_order();
        fault_point();
        n_ = 0;
    }

  private:
    Redo& redo_;
    const Words& words_;
    uint64_t n_ = 0;
};

}  // namespace flowchan
