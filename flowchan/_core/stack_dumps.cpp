// Dumps the Python stacks of this process when a signal arrives.
//
// Algorithm. Python's faulthandler installs a signal handler that writes the stacks of all threads to a file,
// even while C code has the GIL. But a reader of that file cannot tell when a dump is complete. Our handler
// therefore replaces Python's handler, and calls it between two marks. The option `chain` of faulthandler
// does not help: it clears SA_RESTART, so signals would interrupt more system calls in C code.
//
// Invariants. Each signal causes one dump, which begins after the signal has arrived. Dumps never overlap,
// because only one thread writes, even if several threads get signals at once. The handlers use only atomics
// and async-signal-safe functions.
#include "stack_dumps.hpp"

#include <errno.h>
#include <signal.h>
#include <unistd.h>
#include <atomic>

namespace flowchan {
namespace {

using Handler = void (*)(int);

// Bytes that never occur in a dump, because faulthandler escapes them.
constexpr char DEATH = 1, BEGIN = 2, END = 3;
constexpr unsigned DUMP_WITHIN_S = 1;  // time limit for the dump of a dying process

std::atomic<Handler> faulthandler{nullptr};
std::atomic<int> signal_number{0}, file{-1};
std::atomic<int> requests{0};  // signals whose dumps are not complete yet

void write_mark(char mark) {
    while (write(file, &mark, 1) < 0 && errno == EINTR) {}
}

void write_dump(char begin) {
    write_mark(begin);
    faulthandler.load()(signal_number);
    write_mark(END);
}

void dump(int) {
    const int error = errno;
    if (requests.fetch_add(1) == 0) {
        do {
            write_dump(BEGIN);
        } while (requests.fetch_sub(1) > 1);
    }
    errno = error;
}

// SA_RESETHAND has restored the signal's default action, so the alarm kills the process even if the dump
// hangs.
void dump_and_die(int number) {
    alarm(DUMP_WITHIN_S);
    write_dump(DEATH);
    kill(getpid(), number);
}

void install(int number, Handler handler, int flags) {
    struct sigaction action{};
    action.sa_handler = handler;
    action.sa_flags = flags;
    sigaction(number, &action, nullptr);
}

}  // namespace

bool claim_signal(int number) {
    struct sigaction action{};
    if (sigaction(number, nullptr, &action) != 0) return false;
    if (action.sa_flags & SA_SIGINFO) return false;
    if (action.sa_handler == dump) return true;  // this process is a fork of a worker process
    if (action.sa_handler != SIG_DFL) return false;
    install(number, SIG_IGN, 0);
    return true;
}

void frame_dumps(int number, int fd) {
    struct sigaction action{};
    sigaction(number, nullptr, &action);
    if (action.sa_handler != dump) faulthandler = action.sa_handler;
    signal_number = number, file = fd, requests = 0;
    install(number, dump, SA_RESTART);
}

void dump_before_death(int number) {
    if (file >= 0) install(number, dump_and_die, SA_RESETHAND | SA_NODEFER);
}

}  // namespace flowchan
