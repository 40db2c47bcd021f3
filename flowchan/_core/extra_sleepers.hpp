// More futex words than one thread can sleep on: further threads sleep on the rest.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "sleeping.hpp"

namespace flowchan {

// Words, and what keeps each of them mapped.
struct Watched {
    std::vector<WaitedWord> words;
    std::vector<std::shared_ptr<void>> kept;

    void add(const WaitedWord& word, std::shared_ptr<void> keeps);
};

// A thread that sleeps on words for another one, and rings once when one of them has changed.
class Lookout {
  public:
    explicit Lookout(std::function<void()> ring);
    ~Lookout();
    Lookout(const Lookout&) = delete;
    void watch(Watched watched);
    void leave_alone() { thread_.detach(); }  // in a forked child, which does not have the thread

  private:
    void run();
    void tell();  // with the mutex held: there is something new
    const std::function<void()> ring_;
    std::mutex mutex_;
    Watched watched_;
    bool has_rung_ = false, over_ = false;
    std::atomic<uint32_t> told_{0};
    std::thread thread_;
};

// As many of them as are needed. One thread uses it.
class Lookouts {
  public:
    explicit Lookouts(std::function<void()> ring) : ring_(std::move(ring)) {}
    // One watches each of these. False: there are not so many threads to be had.
    bool watch(std::vector<Watched> parts);
    void end() { all_.clear(); }
    void leave_alone() {
        for (Lookout& one : all_) one.leave_alone();
    }

  private:
    const std::function<void()> ring_;
    std::deque<Lookout> all_;
};

}  // namespace flowchan
