#include "ready_links.hpp"

#include <utility>

#include "waiting.hpp"

namespace flowchan {

void ReadyLinks::wake() {
    // Relaxed, because the mutex guards the data that has changed.
    changes_.fetch_add(1, std::memory_order_relaxed);
    futex_wake(changes_, 1, false);
}

void ReadyLinks::add(uint64_t link) {
    std::lock_guard lock(mutex_);
    if (links_.insert(link).second) wake();
}

void ReadyLinks::close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    wake();
}

std::set<uint64_t> ReadyLinks::wait(int64_t until) {
    for (;;) {
        uint32_t seen;
        {
            std::lock_guard lock(mutex_);
            if (closed_ || !links_.empty()) return std::exchange(links_, {});
            seen = changes_.load(std::memory_order_relaxed);
        }
        const int64_t left = until - now_ns();
        if (left <= 0) return {};
        futex_wait(changes_, seen, left, false);
    }
}

}  // namespace flowchan
