// Python views of blocks in shared memory: buffers that are read in place, and loans that a writer fills in
// place. See ring_memory.cpp for their effect on the ring.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "ring.hpp"

namespace flowchan {

namespace nb = nanobind;

// A fork increments `fork_count` in the child, and `children_forked` in the parent.
extern uint64_t fork_count, children_forked;

// A block that this process views. It is released with its last view.
struct Block {
    std::shared_ptr<Ring> ring;
    Slot* slot;
    const char* begin;  // the payload; it does not move while this object exists
    uint64_t size;
    std::atomic<bool> put = false;  // the loan was put, or a thread is putting it
    nb::object array;               // loans only: a weak reference to the NumPy array on this memory
    uint64_t forks = fork_count, children = children_forked;

    Block(std::shared_ptr<Ring> ring, Slot* slot);
    Block(const Block&) = delete;
    ~Block();
};

// Memory with Python's buffer protocol, together with its owner.
struct View {
    std::shared_ptr<Block> block;  // null if the memory is not in a block
    std::shared_ptr<char> memory;  // private memory, or a private mapping of the block
    char* at = nullptr;
    uint64_t size = 0;
    bool writable = false;

    // returns a read-only view, without copying
    static nb::object over(std::shared_ptr<Block> block, const char* at, uint64_t size);
    // returns a read-only view, which keeps `owner` alive
    static nb::object of(uint64_t address, uint64_t size, nb::object owner);
    static nb::object copy_of(const char* at, uint64_t size);  // returns a read-only view of a copy
};

// Return a writable view of the same bytes, whose changes are visible to no other user. It is a private
// mapping of the block, so the kernel copies only the pages that are written.
nb::object private_view(nb::handle view);

// Return the loan that contains `at`, preferably one that was not put yet. Remove expired loans from `loans`.
std::shared_ptr<Block> loan_with(std::vector<std::weak_ptr<Block>>& loans, const void* at);

// Return whether this process now views the ring's block at `at`. A view of another block that was at this
// address earlier does not count.
bool is_in_view(const Ring& ring, const void* at);

extern PyType_Slot view_slots[];

}  // namespace flowchan
