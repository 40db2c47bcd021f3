// Queries about processes: whether one is alive, and which of the processes with a number it is. Also threads
// without signals.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <cstdint>
#include <memory>
#include <vector>

namespace flowchan {

struct Pidfd;

// Return the start time of a process, in the kernel's ticks since boot, 0 if there is none. With the number
// it identifies one process for all time.
uint64_t process_start(uint64_t pid);

// Return whether the process with this number and start time still runs (a zombie does not). started = 0: any
// start time.
bool process_alive(uint64_t pid, uint64_t started);

// Other processes whose state is asked for repeatedly. From the second query on, each has an open pidfd, so
// that an answer is one system call without /proc. All users that ask for the same process share it. If the
// system refuses pidfds, or if they exceed a quarter of this process's descriptor limit, /proc answers. A
// forked child closes those of its parent. Not for several threads at once.
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
        const uint32_t of;  // the process that made it
        uint64_t round = 0;
        std::vector<Peer> peers;
    };
    static std::shared_ptr<const Pidfd> open(uint64_t pid, uint64_t started);
    Table& table();
    Table* table_ = nullptr;
};

// This process's number, without a system call; a forked child has its own.
extern uint32_t own_number;
inline uint32_t process_number() { return own_number; }
// Return the start time of this process.
uint64_t own_start();

// Blocks signals for threads that start while it exists, because Python's main thread handles signals.
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
