// Python views of blocks in shared memory: buffers that are read in place, and loans that a writer fills in
// place. See ring_memory.cpp for their effect on the ring.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "ring.hpp"

namespace flowchan {

namespace nb = nanobind;

// A fork increments the first in the child, and the second in the parent.
extern uint64_t fork_count, children_forked;

// A block that this process views. The last view releases it.
struct Block {
    std::shared_ptr<Ring> ring;
    Slot* slot;
    const char* begin;  // the payload, which does not move while this object exists
    uint64_t size;
    std::atomic<bool> put = false;  // the loan is in the channel, or a thread is putting it
    nb::object array;               // for a loan: a weak reference to the NumPy array on it
    uint64_t forks = fork_count, children = children_forked;

    Block(std::shared_ptr<Ring> ring, Slot* slot);
    Block(const Block&) = delete;
    ~Block();
};

// Memory that supports Python's buffer protocol, and the owner that keeps it valid.
struct View {
    std::shared_ptr<Block> block;  // null: the memory is not in a block
    std::shared_ptr<char> memory;  // private memory, or a private mapping of the block
    char* at = nullptr;
    uint64_t size = 0;
    bool writable = false;

    // returns a read-only view in place
    static nb::object over(std::shared_ptr<Block> block, const char* at, uint64_t size);
    // returns a read-only view that keeps `owner` alive
    static nb::object of(uint64_t address, uint64_t size, nb::object owner);
    static nb::object copy_of(const char* at, uint64_t size);  // returns a read-only view of a copy
};

// Return a writable, copy-on-write view of the same bytes. Other users do not see changes to it. It is a
// private mapping of the block, so the kernel copies only the pages that are written.
nb::object private_view(nb::handle view);

// Return the loan in `loans` that contains `at`, preferably one that was not put. Remove expired loans.
std::shared_ptr<Block> loan_with(std::vector<std::weak_ptr<Block>>& loans, const void* at);

// Return whether `at` is in a block of the ring that this process is viewing now. Earlier contents of the
// address do not matter.
bool is_in_view(const Ring& ring, const void* at);

extern PyType_Slot view_slots[];

}  // namespace flowchan
