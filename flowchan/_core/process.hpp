// Tells whether a process is alive and when it started. Also starts threads with all signals blocked.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <cstdint>
#include <memory>
#include <vector>

namespace flowchan {

struct Pidfd;

// Return the start time of a process in kernel ticks since boot, or 0 if the process does not exist. The
// start time and the pid together identify a process.
uint64_t process_start(uint64_t pid);

// Return whether the process with this pid and start time is still running; a zombie is not. started = 0
// matches any start time.
bool process_alive(uint64_t pid, uint64_t started);

// Processes whose state is queried repeatedly. The second query opens a pidfd and keeps it, so later queries
// cost one system call instead of a lookup in /proc. All users of the same process share one pidfd. Queries
// use /proc if the system refuses pidfds, or if they would exceed a quarter of the descriptor limit. A forked
// child closes the pidfds of its parent. Only one thread at a time may use this object.
class Peers {
  public:
    Peers() = default;
    ~Peers();
    Peers(const Peers&) = delete;
    bool alive(uint64_t pid, uint64_t started);
    // Forget all processes that were not queried since the last call.
    void begin_round();

  private:
    struct Peer {
        uint64_t pid, started, round;
        std::shared_ptr<const Pidfd> pidfd;
    };
    struct Table {
        const uint32_t of;  // pid of the process that created it
        uint64_t round = 0;
        std::vector<Peer> peers;
    };
    static std::shared_ptr<const Pidfd> open(uint64_t pid, uint64_t started);
    Table& table();
    Table* table_ = nullptr;
};

// The pid of this process, without a system call. A forked child updates it.
extern uint32_t own_number;
inline uint32_t process_number() { return own_number; }
// Return the start time of this process.
uint64_t own_start();

// Blocks all signals in this thread, and in the threads that it starts, while this object exists. Only
// Python's main thread should get signals.
class NoSignals {
  public:
    NoSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

}  // namespace flowchan
