// Whether a process lives, whoever started it, and which of all that ever had its number it is. Besides, its threads.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <cstdint>
#include <memory>
#include <vector>

namespace flowchan {

struct Pidfd;

// When it started, in the kernel's ticks since boot: with its number it names one process for ever. 0: none.
uint64_t process_start(uint64_t pid);

// Whether the process with this number and start time still runs (a zombie does not). started = 0: any start
// time.
bool process_alive(uint64_t pid, uint64_t started);

// Other processes, of which it is asked again and again whether they still run. From the second time on each has
// a pidfd that stays open, so that an answer is one system call and no look into /proc; it is shared by all who
// ask for the same process. Where the system refuses pidfds, and when they would be more than a quarter of the
// descriptors that this process may have, /proc has the answer. A forked child closes those of its parent. Not for
// several threads at once.
class Peers {
  public:
    Peers() = default;
    ~Peers();
    Peers(const Peers&) = delete;
    bool alive(uint64_t pid, uint64_t started);
    // Forgets those for whom nobody has asked since this was called last.
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
// And when it started.
uint64_t own_start();

// Threads that are begun meanwhile take no signal: those are for Python's main thread.
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
