// Plans for a group's operations. A plan consists of an algorithm, a piece size, and flags for data that
// bypasses the caches.
//
// The fastest plan depends on the processor. On a virtual machine, it may change within seconds, because the
// hypervisor moves virtual cores. Two cores that share a cache read each other's lines ten times as fast as
// two cores that do not.
//
// When a core reads a small piece again, the piece is still in that core's own cache. The first lines of a
// large piece have already moved to a cache that several cores share. Data that bypasses the caches is
// equally fast for all readers.
//
// A single core cannot use the full memory bandwidth. A member therefore reads faster with two threads, as
// long as the other members only wait.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowchan {

// Numbers of the operations; flowchan/collective/operations.py has their names.
enum Doing : uint32_t { BARRIER = 1, BROADCAST, REDUCE, ALLREDUCE, REDUCE_SCATTER, ALLGATHER, ALLTOALL = 9 };
constexpr uint32_t OPERATIONS = 16;  // greater than all of these numbers

// Any: use the fastest algorithm.
enum class Algorithm : uint8_t { Any, Exchange, Slices, Chunks, Direct };

constexpr size_t BIG = 512 * 1024;     // size of a big slot, and of the pieces of larger data, in bytes
constexpr size_t LITTLE = 128 * 1024;  // size of a small piece in bytes

struct Plan {
    Algorithm algorithm;
    size_t piece;             // largest piece in bytes
    bool shows_past = false;  // data for other members bypasses the caches
    bool keeps_past = false;  // data for this member bypasses the caches
    bool by_two = false;      // each member reads with two threads
};
constexpr Plan PLANS[] = {{Algorithm::Exchange, LITTLE},    {Algorithm::Exchange, BIG},
                          {Algorithm::Exchange, BIG, true}, {Algorithm::Slices, LITTLE},
                          {Algorithm::Slices, BIG},         {Algorithm::Slices, BIG, true},
                          {Algorithm::Chunks, LITTLE},      {Algorithm::Chunks, BIG},
                          {Algorithm::Chunks, BIG, true},   {Algorithm::Chunks, BIG, false, true},
                          {Algorithm::Direct, BIG},         {Algorithm::Direct, BIG, false, false, true}};
constexpr uint32_t ALL_PLANS = sizeof PLANS / sizeof *PLANS;

// Returns the plans that satisfy `is_so`, one bit each.
template <class F>
constexpr uint32_t plans_where(F is_so) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < ALL_PLANS; ++i) found |= uint32_t(is_so(PLANS[i])) << i;
    return found;
}
constexpr uint32_t plans_of(Algorithm algorithm) {
    return plans_where([=](const Plan& one) { return one.algorithm == algorithm; });
}

// How many size classes have their own trials. Each class ends at twice its lower bound, except for the last
// class, which is unbounded.
constexpr uint32_t TRIED = 16, UNTRIED = TRIED;

}  // namespace flowchan
