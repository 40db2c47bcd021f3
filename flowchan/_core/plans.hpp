// Plans: how a group runs an operation, by an algorithm, a piece size and the use of the caches.
//
// The fastest plan depends on the processor. On a virtual machine it changes within seconds, because the
// cores move. Two cores with a common cache read each other's lines ten times as fast as two cores without
// one. Small pieces are still in the cache of a core when they are read again. The first lines of large
// pieces have moved to a cache that both cores reach. Data that bypasses the caches is equally fast for all
// readers. One core cannot use the whole memory bandwidth, so a member reads faster with two threads while
// others only wait.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowchan {

// Numbers of the operations; flowchan/collective/operations.py has their names.
enum Doing : uint32_t { BARRIER = 1, BROADCAST, REDUCE, ALLREDUCE, REDUCE_SCATTER, ALLGATHER, ALLTOALL = 9 };
constexpr uint32_t OPERATIONS = 16;  // larger than all of these numbers

// Any: the fastest.
enum class Algorithm : uint8_t { Any, Exchange, Slices, Chunks, Direct };

constexpr size_t BIG = 512 * 1024;     // bytes of a big slot, and of a piece of larger data
constexpr size_t LITTLE = 128 * 1024;  // bytes of a small piece

struct Plan {
    Algorithm algorithm;
    size_t piece;             // largest piece in bytes
    bool shows_past = false;  // writes for others bypass the caches
    bool keeps_past = false;  // writes for this member bypass the caches
    bool by_two = false;      // two threads per member read
};
constexpr Plan PLANS[] = {{Algorithm::Exchange, LITTLE},    {Algorithm::Exchange, BIG},
                          {Algorithm::Exchange, BIG, true}, {Algorithm::Slices, LITTLE},
                          {Algorithm::Slices, BIG},         {Algorithm::Slices, BIG, true},
                          {Algorithm::Chunks, LITTLE},      {Algorithm::Chunks, BIG},
                          {Algorithm::Chunks, BIG, true},   {Algorithm::Chunks, BIG, false, true},
                          {Algorithm::Direct, BIG},         {Algorithm::Direct, BIG, false, false, true}};
constexpr uint32_t ALL_PLANS = sizeof PLANS / sizeof *PLANS;

// Returns a bit for each plan for which `is_so` returns true.
template <class F>
constexpr uint32_t plans_where(F is_so) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < ALL_PLANS; ++i) found |= uint32_t(is_so(PLANS[i])) << i;
    return found;
}
constexpr uint32_t plans_of(Algorithm algorithm) {
    return plans_where([=](const Plan& one) { return one.algorithm == algorithm; });
}

// Number of size classes for which trials find the fastest plan. A class reaches up to twice its lower bound,
// and the last one has no upper bound.
constexpr uint32_t TRIED = 16, UNTRIED = TRIED;

}  // namespace flowchan
