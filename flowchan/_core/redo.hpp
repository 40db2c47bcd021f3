// The redo record makes a critical section on shared memory atomic: even if its process is killed, either all
// of it happens or nothing does.
//
// Algorithm (write-ahead redo logging, as in databases). A change to the shared state is a list of (word, new
// value) pairs. The process first writes the list to the record. It then marks the record as valid, applies
// it, and clears it. A process that takes the lock from a dead owner looks at the record. A valid record is
// complete, so the process applies it, perhaps for the second time. If the record is not valid, no part of
// the change was applied, so there is nothing to repair. The values are absolute, so applying them twice does
// no harm.
//
// Compiler fences are enough. A process gets the lock of a dead owner from the kernel, after the owner was
// descheduled for the last time. All stores that the owner executed are visible at that time, even if they
// left its core in a different order. So only the order in which the owner executed them matters. If the
// compiler does not change it, that is the order in the program. The same is true of processors with a weaker
// store order than x86_64: a core stops between two instructions, and everything before them has happened.
// When a thread dies, the kernel marks its lock in that thread, with a full barrier (dmb ish on aarch64).
//
// The ring has several records, so that the cache lines of a record stay with the core that uses it. Writers
// and readers use different records, and so do different processes, as long as there are enough records. The
// choice of a record affects only speed. Only the holder of the lock writes a record, and it clears the
// record before it unlocks. So at most one record is valid, and a process that finds the owner dead checks
// all of them.
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
    volatile uint64_t valid;  // number of entries, or 0 if there is nothing to redo
    Entry entry[MOST];

    template <class Words>
    void apply(const Words& words, uint64_t n) const {
        for (uint64_t i = 0; i < n; ++i) {
            // Atomic, because Traits<Ring>::ready in blocking.hpp reads some words without the lock, as
            // hints. Relaxed, because a reader that relies on a hint takes the lock and checks the word
            // again.
            std::atomic_ref(*words.at(entry[i].offset)).store(entry[i].value, std::memory_order_relaxed);
            fault_point();
        }
    }
    // Apply the record after its owner has died. The record is damaged if an entry refers to a word that is
    // not in `words`. In that case, change nothing and return false.
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

// A change that is being composed. Until `commit`, reads return the old values. `Words` converts between
// words and their offsets.
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
