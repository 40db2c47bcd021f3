// Extra sleepers: further threads for futex words that exceed the limit of one thread's sleep.
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

// Words, and the owners that keep their memory mapped.
struct Watched {
    std::vector<WaitedWord> words;
    std::vector<std::shared_ptr<void>> kept;

    void add(const WaitedWord& word, std::shared_ptr<void> keeps);
};

// A thread that sleeps on words for another thread. It calls `ring` once when one of them has changed.
class ExtraSleeper {
  public:
    explicit ExtraSleeper(std::function<void()> ring);
    ~ExtraSleeper();
    ExtraSleeper(const ExtraSleeper&) = delete;
    void watch(Watched watched);
    void detach() { thread_.detach(); }  // in a forked child, which does not have the thread

  private:
    void run();
    void notify();  // the caller holds the mutex: there are new words or an end
    const std::function<void()> ring_;
    std::mutex mutex_;
    Watched watched_;
    bool has_signalled_ = false, over_ = false;
    std::atomic<uint32_t> changes_{0};
    std::thread thread_;
};

// As many extra sleepers as are needed. One thread uses it.
class ExtraSleepers {
  public:
    explicit ExtraSleepers(std::function<void()> ring) : ring_(std::move(ring)) {}
    // Give each part to one sleeper. Return false if there are not enough threads.
    bool watch(std::vector<Watched> parts);
    void end() { all_.clear(); }
    void detach() {
        for (ExtraSleeper& one : all_) one.detach();
    }

  private:
    const std::function<void()> ring_;
    std::deque<ExtraSleeper> all_;
};

}  // namespace flowchan
