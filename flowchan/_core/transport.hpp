// The operations that a channel needs from every transport. Where transports differ more (references or
// bytes), each has its own function in puts.cpp, gets.cpp, channel.cpp and raising.cpp.
#pragma once

#include <concepts>
#include <cstdint>
#include <vector>

#include "waiting.hpp"

namespace flowchan {

enum State : uint64_t { OPEN = 0, CLOSED = 1, BROKEN = 2 };

// Counts of one moment.
struct Counts {
    uint64_t items_in, items_out, bytes_in, bytes_inside;
    uint64_t inside, leased, readers, writers;
    uint64_t waiting_readers, waiting_writers;
    int64_t read_wait_ns, write_wait_ns;  // total
    // part of write_wait_ns: for a turn, while no item was inside that a reader could take
    int64_t turn_wait_ns;
    int64_t readers_waiting_for_ns, writers_waiting_for_ns;  // how long there has always been a waiter
    uint64_t selecting;                                      // waiters that may continue without this channel
    uint64_t woken;                                          // waiters on their way
    bool short_of_bytes;                                     // a writer waits for bytes, not for a place
};

// The blocks that one process looks at or fills in place.
struct Held {
    uint64_t pid, blocks, bytes;
};

template <class M>
concept Transport = requires(M& m, const M& seen, Wakes& wakes) {
    { m.lock(false) } -> std::same_as<bool>;
    m.unlock();
    m.wake(wakes);
    // without the lock
    { seen.seen_state() } -> std::same_as<uint64_t>;
    { seen.is_sweep_due() } -> std::same_as<bool>;
    { seen.fd() } -> std::same_as<int>;  // needed by another process to share it; -1 for threads
    { seen.socket() } -> std::same_as<int>;
    // under the lock
    { seen.counts() } -> std::same_as<Counts>;
    { seen.held() } -> std::same_as<std::vector<Held>>;
    { seen.inside() } -> std::same_as<uint64_t>;
    { seen.drained() } -> std::same_as<bool>;
    { seen.broken() } -> std::same_as<bool>;
    m.sweep(wakes);
    m.close(wakes);
    { m.share() } -> std::same_as<uint64_t&>;
};

}  // namespace flowchan
