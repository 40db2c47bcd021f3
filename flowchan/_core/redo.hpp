// The redo record: makes a critical section on shared memory happen wholly or not at all, even if its process
// is killed.
//
// Algorithm (write-ahead redo logging, as in databases). A change to the shared state is a list of (word, new
// value) pairs. The list is first written to the record. The record is then marked as valid, applied, and
// cleared. A process that takes the lock from a dead owner looks at the record. A valid record was written
// completely, so it is applied (again). If the record is not valid, no part of it was applied, and nothing
// needs to be done. The values are absolute, so applying them twice has the same effect as applying them
// once.
//
// Why compiler fences are enough. A process that reads a dead owner's record gets the lock from the kernel,
// after the owner was descheduled for the last time. All stores that the owner executed are visible by then,
// although they may have left its core in another order. So only the order in which the owner executed them
// matters. This is the program's order, provided that the compiler does not change it. The same holds for
// processors with a weaker store order than x86_64: a core stops between two instructions, and everything
// before them has happened. The kernel marks the lock of a dead thread with a full barrier (dmb ish on
// aarch64), in the dying thread itself.
//
// The ring has several records, so that the cache lines of a record stay with the core that uses it. Writers
// use other records than readers. Different processes use different records, as far as the number of records
// allows. The choice of a record affects only speed. Only the lock's holder writes a record, and it clears
// the record before it unlocks, so at most one is valid. A process that finds the owner dead looks at all
// records.
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
    volatile uint64_t valid;  // number of entries, or 0 if nothing must be redone
    Entry entry[MOST];

    template <class Words>
    void apply(const Words& words, uint64_t n) const {
        for (uint64_t i = 0; i < n; ++i) {
            // Atomic, because Traits<Ring>::ready in blocking.hpp reads some words as hints without the lock.
            // Relaxed, because a reader that acts on a hint takes the lock and checks the word again.
            std::atomic_ref(*words.at(entry[i].offset)).store(entry[i].value, std::memory_order_relaxed);
            fault_point();
        }
    }
    // Apply the record after its owner died. If the record is damaged, that is, if an entry refers to a word
    // that is not in `words`, change nothing and return false.
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

// A change under construction. Reads see the old values until `commit`. `Words` converts between words and
// their offsets.
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
