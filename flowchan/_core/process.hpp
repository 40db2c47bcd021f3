// Functions that tell whether a process is alive and when it started, and a guard that starts threads with
// all signals blocked.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <cstdint>
#include <memory>
#include <vector>

namespace flowchan {

struct Pidfd;

// Return the start time of a process, in kernel ticks since boot, or 0 if the process does not exist. The pid
// and the start time together identify a process.
uint64_t process_start(uint64_t pid);

// Return whether the process with this pid and start time is still running. A zombie does not count as
// running. started = 0 matches any start time.
bool process_alive(uint64_t pid, uint64_t started);

// Processes whose state is queried again and again. From the second query on, a pidfd for the process stays
// open. A query then costs one system call instead of a look into /proc. All users that query the same
// process share its pidfd. If the system refuses pidfds, or if they would exceed a quarter of the descriptor
// limit, queries use /proc. A forked child closes the pidfds of its parent. Only one thread at a time may use
// this object.
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

// The pid of this process, without a system call. A fork updates it in the child.
extern uint32_t own_number;
inline uint32_t process_number() { return own_number; }
// Return the start time of this process.
uint64_t own_start();

// Blocks all signals in this thread, and in the threads that it starts, while this object exists. They must
// go to Python's main thread.
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
