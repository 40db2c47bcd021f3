// System calls and files that may be missing or refused. Old kernels lack some calls (ENOSYS). The seccomp
// filters of containers and service managers refuse some (EPERM or ENOSYS). Each case has a fallback, or an
// error that names the call. The headers of Linux 5.10 lack some numbers and structures, which are defined
// here so that the core compiles with these headers.
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

inline int open_pidfd(int pid) { return int(syscall(SYS_pidfd_open, pid, 0)); }

// Raise an error for a system call that channels between processes need.
[[noreturn]] inline void fail(int error, const char* call) {
    std::string text = call;
    if (error == EPERM || error == EACCES || error == ENOSYS)
        text = "channels between processes need " + text +
               ", which is refused here, likely by the seccomp filter of a "
               "container or service manager; allow " +
               text + " in it";
    throw std::system_error(error, std::system_category(), text);
}

// Check that /proc is mounted. From /proc, the core learns which users of a channel are alive, and which
// files their descriptors have open.
inline void need_proc() {
    struct stat st;
    if (stat("/proc/self/stat", &st) != 0)
        throw std::system_error(
            errno, std::system_category(),
            "channels between processes need /proc, which is not mounted here (mount -t proc proc /proc)");
}

}  // namespace flowchan
