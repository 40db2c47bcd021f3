// The redo record: makes a critical section on shared memory happen wholly or not at all, even if its process
// is killed.
//
// Algorithm (write-ahead redo logging, as in databases). A change to the shared state is a list of (word, new
// value). It is first written to the record, then the record is marked valid, then it is applied, then it is
// cleared. A process that takes the lock of a dead owner looks at the record. If it is valid, it was written
// completely, so it is applied (again). If it is not valid, no part of it was applied, so there is nothing to
// do. Values are absolute, so applying twice is the same as applying once.
//
// Why compiler fences are enough. The reader of a dead owner's record gets the lock from the kernel, after
// the owner was descheduled for good. All stores that the owner executed are visible then, in whatever order
// they left its core. Only the order in which the owner executed them matters, and that is the program's
// order once the compiler is kept from changing it. The same holds on processors that order stores less than
// x86_64 does: a core stops between two instructions, and everything before them has happened. The kernel
// marks the lock of a dead thread with a full barrier (on aarch64 dmb ish), in the dead thread itself.
//
// There are several records, so that the lines of a record stay in the cache of its user. Writers and readers
// have different ones, and so have processes as far as there are enough. The choice of a record affects only
// speed. Only the holder of the lock writes a record and leaves it cleared, so at most one is valid. A
// process that finds the owner dead looks at all of them.
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
    volatile uint64_t valid;  // number of entries, 0 when there is nothing to redo
    Entry entry[MOST];

    template <class Words>
    void apply(const Words& words, uint64_t n) const {
        for (uint64_t i = 0; i < n; ++i) {
            // Atomic because some words are read without the lock, as hints (Traits<Ring>::ready in
            // blocking.hpp is the partner). Relaxed because a reader that acts on a hint takes the lock and
            // looks again.
            std::atomic_ref(*words.at(entry[i].offset)).store(entry[i].value, std::memory_order_relaxed);
            fault_point();
        }
    }
    // Apply the record after its owner died. Return false, with nothing done, if the record is damaged: an
    // entry names a word that is not in `words`.
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

// A change under construction. Reads of the state between `set` calls see the old values. `Words` converts
// between words and their offsets.
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
