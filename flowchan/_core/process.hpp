// Queries about processes: whether one is alive, and when it started. Also a guard that starts threads with
// signals blocked.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <cstdint>
#include <memory>
#include <vector>

namespace flowchan {

struct Pidfd;

// Return the start time of a process, in the kernel's ticks since boot, or 0 if the process does not exist.
// The pid and the start time together identify a process uniquely.
uint64_t process_start(uint64_t pid);

// Return whether the process with this pid and start time is still running (a zombie is not). started = 0
// matches any start time.
bool process_alive(uint64_t pid, uint64_t started);

// Other processes whose state is queried repeatedly. From the second query on, each process has an open
// pidfd, so that a query needs one system call and not /proc. All users that query the same process share its
// pidfd. If the system refuses pidfds, or if they would exceed a quarter of this process's descriptor limit,
// queries use /proc. A forked child closes its parent's pidfds. Only one thread at a time may use this.
class Peers {
  public:
    Peers() = default;
    ~Peers();
    Peers(const Peers&) = delete;
    bool alive(uint64_t pid, uint64_t started);
    // Forget the processes that were not queried since the last call.
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

// This process's pid, available without a system call. A fork updates it in the child.
extern uint32_t own_number;
inline uint32_t process_number() { return own_number; }
// Return the start time of this process.
uint64_t own_start();

// Blocks all signals in this thread, and in the threads that it starts while this object exists. Python's
// main thread must handle the signals.
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
