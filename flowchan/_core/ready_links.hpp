// Collects the links that need attention, so that one thread can serve many links.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>

namespace flowchan {

class ReadyLinks {
  public:
    void add(uint64_t link);
    // Waits until `until` for ready links. Returns the links added since the last call, or an empty set if
    // the deadline has passed or `close` was called.
    std::set<uint64_t> wait(int64_t until);
    void close();

  private:
    void wake();
    std::mutex mutex_;
    std::set<uint64_t> links_;
    bool closed_ = false;
    // A futex word, because a condition variable must not be destroyed in a forked child.
    std::atomic<uint32_t> changes_{0};
};

}  // namespace flowchan
