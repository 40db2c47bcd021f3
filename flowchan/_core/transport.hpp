// The operations that a channel needs from every transport. All other operations have one function per
// transport, in puts.cpp, gets.cpp, channel.cpp and raising.cpp. They differ too much to share code, because
// one transport passes references and the other passes bytes.
#pragma once

#include <concepts>
#include <cstdint>
#include <vector>

#include "waiting.hpp"

namespace flowchan {

// Maximum number of items in a channel that one call of peek() visits.
constexpr uint64_t MOST_WALKED = 4096;

enum State : uint64_t { OPEN = 0, CLOSED = 1, BROKEN = 2 };

// A snapshot of a channel's counters.
struct Counts {
    uint64_t items_in, items_out, bytes_in, bytes_inside;
    uint64_t inside, leased, readers, writers;
    uint64_t waiting_readers, waiting_writers;
    int64_t read_wait_ns, write_wait_ns;  // sums over all calls
    // The part of write_wait_ns in which writers waited for their turn while the readers had no item.
    int64_t turn_wait_ns;
    // How long there has been at least one waiting call.
    int64_t readers_waiting_for_ns, writers_waiting_for_ns;
    uint64_t selecting;   // waiters that may continue without a change to this channel
    uint64_t woken;       // waiters that were woken but have not run yet
    bool short_of_bytes;  // a writer waits for bytes, not for places
};

// Blocks that one process views or fills in place.
struct Held {
    uint64_t pid, blocks, bytes;
};

template <class M>
concept Transport = requires(M& m, const M& seen, Wakes& wakes) {
    { m.lock(false) } -> std::same_as<bool>;
    m.unlock();
    m.wake(wakes);
    // Without the lock:
    { seen.seen_state() } -> std::same_as<uint64_t>;
    { seen.is_sweep_due() } -> std::same_as<bool>;
    // The descriptor with which another process can share the channel, or -1 for threads.
    { seen.fd() } -> std::same_as<int>;
    { seen.socket() } -> std::same_as<int>;
    // Under the lock:
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
