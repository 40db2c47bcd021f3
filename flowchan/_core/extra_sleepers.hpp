// Extra sleepers: threads that sleep on futex words when there are more words than one thread can watch.
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

// Futex words, together with the objects that keep their memory mapped.
struct Watched {
    std::vector<WaitedWord> words;
    std::vector<std::shared_ptr<void>> kept;

    void add(const WaitedWord& word, std::shared_ptr<void> keeps);
};

// A thread that sleeps on words on behalf of another thread. When one of the words changes, it calls `ring`
// once.
class ExtraSleeper {
  public:
    explicit ExtraSleeper(std::function<void()> ring);
    ~ExtraSleeper();
    ExtraSleeper(const ExtraSleeper&) = delete;
    void watch(Watched watched);
    // Forget the thread in a forked child, where it does not exist. Detaching it would access the thread's
    // state, which is on the thread's stack. The child may have reused that memory.
    void abandon() { thread_ = nullptr; }

  private:
    void run();
    void notify();  // call under the mutex, after storing new words or `over_`
    const std::function<void()> ring_;
    std::mutex mutex_;
    Watched watched_;
    bool has_signalled_ = false, over_ = false;
    std::atomic<uint32_t> changes_{0};
    std::thread* thread_;
};

// Extra sleepers, started as needed. Only one thread may use this object.
class ExtraSleepers {
  public:
    explicit ExtraSleepers(std::function<void()> ring) : ring_(std::move(ring)) {}
    // Give each sleeper one part. Return false if the system refused to start a thread for one of them.
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
