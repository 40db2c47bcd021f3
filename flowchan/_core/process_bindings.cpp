// Python bindings for processes: their descriptors, their deaths and the dumps of their stacks.
#include "process_bindings.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

#include "process.hpp"
#include "stack_dumps.hpp"
#include "system.hpp"

namespace flowchan {

namespace {

// Duplicate another process's descriptor. Return -1 if the system forbids it.
int descriptor_of(int pid, int fd) {
    const long process = syscall(SYS_pidfd_open, pid, 0);
    if (process < 0) return -1;
    const long opened = syscall(438 /* pidfd_getfd, Linux 5.6 */, process, fd, 0);
    close(int(process));
    return int(opened);
}

// End this process as soon as process `pid` ends, even while C code has the GIL. A thread waits for the end
// of that process in poll(). If the kernel or a seccomp filter refuses pidfd_open, the thread checks ten
// times a second.
void die_with(int pid) {
    const uint64_t started = process_start(pid);
    const int fd = open_pidfd(pid);
    // Process `pid` may already have ended.
    if (fd < 0 && (errno == ESRCH || !process_alive(pid, started))) _exit(1);
    std::thread([=] {
        pollfd p{fd, POLLIN, 0};
        if (fd >= 0)
            while (poll(&p, 1, -1) < 0 && errno == EINTR) {}
        else
            while (process_alive(pid, started))
                std::this_thread::sleep_for(std::chrono::nanoseconds(SLICE_NS));
        _exit(1);
    }).detach();
}

// Make this process die of signal `number` after the interpreter has shut down. Python itself does this after
// an uncaught KeyboardInterrupt, but not after an uncaught exception of a subclass. A shell that runs the
// program in a loop stops the loop only if the program died of the signal.
void die_of(int number) {
    static int of = 0;
    if (of || Py_AtExit([] { signal(of, SIG_DFL), kill(getpid(), of); })) return;
    of = number;
}

}  // namespace

void bind_process(nanobind::module_& m) {
    using namespace nanobind::literals;
    m.def("_descriptor_of", descriptor_of, "pid"_a, "fd"_a);
    m.def("_die_with", die_with, "pid"_a);
    m.def("_die_of", die_of, "number"_a);
    m.def("_claim_signal", claim_signal, "number"_a);
    m.def("_frame_dumps", frame_dumps, "number"_a, "fd"_a);
    m.def("_dump_before_death", dump_before_death, "number"_a);
}

}  // namespace flowchan
