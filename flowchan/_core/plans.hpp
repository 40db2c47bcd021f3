// How an operation of a group is done: in which way, in pieces of which size, and whether what it writes goes past
// the caches.
//
// Which one is the quickest differs by processor, and within seconds, for a virtual machine's cores move: two that
// have a cache in common read each other's lines at ten times the speed of two that have none. Small pieces are still
// in the cache next to a core when they are read again; of large ones the first lines have left it for one that
// both reach; what goes past the caches is as quick to read for everybody. One core can't read as fast as the
// memory gives: where others only wait, it goes faster by two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowchan {

// The numbers of the operations; flowchan/collective/operations.py has their names.
enum Doing : uint32_t { BARRIER = 1, BROADCAST, REDUCE, ALLREDUCE, REDUCE_SCATTER, ALLGATHER, ALLTOALL = 9 };
constexpr uint32_t OPERATIONS = 16;  // no number is as large

// Any: as is best.
enum class Way : uint8_t { Any, Exchange, Slices, Chunks, Direct };

constexpr size_t BIG = 512 * 1024;     // bytes of a big slot: of a piece of what is larger
constexpr size_t LITTLE = 128 * 1024;  // bytes of a small piece

struct Manner {
    Way way;
    size_t piece;             // bytes at most
    bool shows_past = false;  // what it writes for others goes past the caches
    bool keeps_past = false;  // what it writes for itself does
    bool by_two = false;      // two threads of each read
};
constexpr Manner MANNERS[] = {
    {Way::Exchange, LITTLE},         {Way::Exchange, BIG}, {Way::Exchange, BIG, true},
    {Way::Slices, LITTLE},           {Way::Slices, BIG},   {Way::Slices, BIG, true},
    {Way::Chunks, LITTLE},           {Way::Chunks, BIG},   {Way::Chunks, BIG, true},
    {Way::Chunks, BIG, false, true}, {Way::Direct, BIG},   {Way::Direct, BIG, false, false, true}};
constexpr uint32_t ALL_MANNERS = sizeof MANNERS / sizeof *MANNERS;

// A bit for each that is so.
template <class F>
constexpr uint32_t manners(F is_so) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < ALL_MANNERS; ++i) found |= uint32_t(is_so(MANNERS[i])) << i;
    return found;
}
constexpr uint32_t manners_of(Way way) {
    return manners([=](const Manner& one) { return one.way == way; });
}

// Kinds of sizes of which the quickest manner is found by trial, up to twice as much each; larger ones are like the
// last.
constexpr uint32_t TRIED = 16, UNTRIED = TRIED;

}  // namespace flowchan
