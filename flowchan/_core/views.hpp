// Blocks of shared memory as Python sees them: buffers that are read where the writer put them, and memory on
// loan that a writer fills in place. What a view means for the ring is in ring_memory.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "ring.hpp"

namespace flowchan {

namespace nb = nanobind;

// Grow by one at a fork: in the child, and in the parent.
extern uint64_t fork_count, children_forked;

// This process's hold on a block: it is given back when the last view of it goes.
struct Block {
    std::shared_ptr<Ring> ring;
    Slot* slot;
    const char* begin;  // the payload, which does not move while the block is held
    uint64_t size;
    std::atomic<bool> put =
        false;         // was on loan and is in the channel now, or just being put: one thread only does that
    nb::object array;  // on loan: a weak reference to the NumPy array over it
    uint64_t forks = fork_count, children = children_forked;

    Block(std::shared_ptr<Ring> ring, Slot* slot);
    Block(const Block&) = delete;
    ~Block();
};

// A piece of memory that speaks Python's buffer protocol, and what keeps it there.
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

// The same bytes, writable, without changing them for anybody else: pages are copied as they are written (by
// the kernel, from a private mapping of the block), so what is only read is never copied.
nb::object private_view(nb::handle view);

// The loan that `at` lies in, of those that `loans` remembers, rather one that has not been put; drops the
// ones that are gone.
std::shared_ptr<Block> loan_with(std::vector<std::weak_ptr<Block>>& loans, const void* at);

// Whether `at` lies in a block of the ring that this process looks at now, whatever was there before.
bool is_in_view(const Ring& ring, const void* at);

extern PyType_Slot view_slots[];

}  // namespace flowchan
