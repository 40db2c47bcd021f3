// Extra sleepers: additional threads that sleep on futex words, for more words than a single thread can
// watch.
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

// Futex words, and the objects that keep their memory mapped.
struct Watched {
    std::vector<WaitedWord> words;
    std::vector<std::shared_ptr<void>> kept;

    void add(const WaitedWord& word, std::shared_ptr<void> keeps);
};

// A thread that sleeps on words on behalf of another thread. It calls `ring` once when a word has changed.
class ExtraSleeper {
  public:
    explicit ExtraSleeper(std::function<void()> ring);
    ~ExtraSleeper();
    ExtraSleeper(const ExtraSleeper&) = delete;
    void watch(Watched watched);
    // For a forked child, which does not have the thread. The child must not even detach the thread. The
    // thread's state is on its stack, and another thread of the child may have reused this memory.
    void abandon() { thread_ = nullptr; }

  private:
    void run();
    void notify();  // called with the mutex held, after new words or `over_` were set
    const std::function<void()> ring_;
    std::mutex mutex_;
    Watched watched_;
    bool has_signalled_ = false, over_ = false;
    std::atomic<uint32_t> changes_{0};
    std::thread* thread_;
};

// A growing set of extra sleepers. Only one thread may use it.
class ExtraSleepers {
  public:
    explicit ExtraSleepers(std::function<void()> ring) : ring_(std::move(ring)) {}
    // Assign each part to a sleeper. Return false if more threads are needed than exist.
    bool watch(std::vector<Watched> parts);
    void end() { all_.clear(); }
    void abandon() {
        for (ExtraSleeper& one : all_) one.abandon();
    }

  private:
    const std::function<void()> ring_;
    std::deque<ExtraSleeper> all_;
};

}  // namespace flowchan
