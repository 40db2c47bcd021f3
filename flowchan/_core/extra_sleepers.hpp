// Extra sleepers: additional threads that sleep on futex words, for more words than one thread can sleep on.
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

// Futex words, and the objects that keep the memory of these words mapped.
struct Watched {
    std::vector<WaitedWord> words;
    std::vector<std::shared_ptr<void>> kept;

    void add(const WaitedWord& word, std::shared_ptr<void> keeps);
};

// A thread that sleeps on words for another thread. After a word changes, it calls `ring` once.
class ExtraSleeper {
  public:
    explicit ExtraSleeper(std::function<void()> ring);
    ~ExtraSleeper();
    ExtraSleeper(const ExtraSleeper&) = delete;
    void watch(Watched watched);
    // Forget the thread in a forked child, where it does not exist. Even detaching it would be wrong: its
    // state is on its stack, and another thread of the child may already have reused that memory.
    void abandon() { thread_ = nullptr; }

  private:
    void run();
    void notify();  // call with the mutex held, after storing new words or `over_`
    const std::function<void()> ring_;
    std::mutex mutex_;
    Watched watched_;
    bool has_signalled_ = false, over_ = false;
    std::atomic<uint32_t> changes_{0};
    std::thread* thread_;
};

// A growing set of extra sleepers, for use by a single thread.
class ExtraSleepers {
  public:
    explicit ExtraSleepers(std::function<void()> ring) : ring_(std::move(ring)) {}
    // Give each sleeper one part. Return false if the system refuses to start a thread that is needed.
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
