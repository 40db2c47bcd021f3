// Python views of blocks of shared memory: buffers that are read in place, and loans that a writer fills in
// place. The effect of a view on the ring is described in ring_memory.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "ring.hpp"

namespace flowchan {

namespace nb = nanobind;

// Both grow by one at a fork: the first in the child, the second in the parent.
extern uint64_t fork_count, children_forked;

// This process's hold on a block, which ends with its last view.
struct Block {
    std::shared_ptr<Ring> ring;
    Slot* slot;
    const char* begin;  // the payload, which does not move while the block is held
    uint64_t size;
    std::atomic<bool> put = false;  // the loan is in the channel, or one thread is putting it
    nb::object array;               // on loan: a weak reference to the NumPy array over it
    uint64_t forks = fork_count, children = children_forked;

    Block(std::shared_ptr<Ring> ring, Slot* slot);
    Block(const Block&) = delete;
    ~Block();
};

// Memory that implements Python's buffer protocol, with the owner that keeps it valid.
struct View {
    std::shared_ptr<Block> block;  // null: the memory is this process's own
    std::shared_ptr<char> memory;  // its own memory, or a mapping of the block
    char* at = nullptr;
    uint64_t size = 0;
    bool writable = false;

    static nb::object over(std::shared_ptr<Block> block, const char* at,
                           uint64_t size);                                    // read-only, in place
    static nb::object of(uint64_t address, uint64_t size, nb::object owner);  // read-only, kept by its owner
    static nb::object copy_of(const char* at, uint64_t size);                 // read-only
};

// Return a writable view of the same bytes that does not change them for others. The kernel copies pages as
// they are written, from a private mapping of the block, so bytes that are only read are never copied.
nb::object private_view(nb::handle view);

// Return the loan in `loans` that contains `at`, preferring one that has not been put. Drop expired ones.
std::shared_ptr<Block> loan_with(std::vector<std::weak_ptr<Block>>& loans, const void* at);

// Return whether `at` is in a block of the ring that this process looks at now, whatever was there before.
bool is_in_view(const Ring& ring, const void* at);

extern PyType_Slot view_slots[];

}  // namespace flowchan
