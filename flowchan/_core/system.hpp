// What the kernel may lack or refuse. Old kernels do not know every call (ENOSYS), and the seccomp filters of
// containers and service managers refuse some (EPERM or ENOSYS): each has another way or an error that names
// it. The numbers and structures that the headers of Linux 5.10 lack are our own, so that the core compiles
// with them.
#pragma once

#include "waiting.hpp"

#include <sys/stat.h>
#include <system_error>

#ifndef SYS_futex_waitv
#    define SYS_futex_waitv 449
#endif
#ifndef SYS_pidfd_open
#    define SYS_pidfd_open 434
#endif

namespace flowchan {

constexpr uint32_t FUTEX_WORD_32 = 2;  // FUTEX_32

// The kernel's struct futex_waitv: a word of 32 bits and what it must still hold for a sleep.
struct WaitedWord {
    uint64_t val;
    uint64_t uaddr;
    uint32_t flags;
    uint32_t reserved;
};

// Sleeps until one of the words changes or is woken; an error number, 0 for none.
inline int wait_for_any(WaitedWord* words, size_t count, const timespec& until) {
    return syscall(SYS_futex_waitv, words, count, 0, &until, CLOCK_MONOTONIC) < 0 ? errno : 0;
}

inline int open_pidfd(int pid) { return int(syscall(SYS_pidfd_open, pid, 0)); }

// A system call without which there is no channel between processes has failed.
[[noreturn]] inline void fail(int error, const char* call) {
    std::string text = call;
    if (error == EPERM || error == EACCES || error == ENOSYS)
        text = "channels between processes need " + text +
               ", which is refused here, likely by the seccomp filter of a "
               "container or of a service manager; allow " +
               text + " in it";
    throw std::system_error(error, std::system_category(), text);
}

// Who shares a channel is found under /proc: who lives, and whose descriptor is meant.
inline void need_proc() {
    struct stat st;
    if (stat("/proc/self/stat", &st) != 0)
        throw std::system_error(
            errno, std::system_category(),
            "channels between processes need /proc, which is not mounted here (mount -t proc proc /proc)");
}

}  // namespace flowchan
