#include "process.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace flowchan {

uint32_t own_number = uint32_t(getpid());

namespace {

[[maybe_unused]] const int renumbered =
    pthread_atfork(nullptr, nullptr, [] { own_number = uint32_t(getpid()); });

// Reads /proc/<pid>/stat: the state letter and the start time; false, with errno, if that can't be done.
bool read_stat(uint64_t pid, char& state, uint64_t& started) {
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%lu/stat", static_cast<unsigned long>(pid));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    const int error = n < 0 ? errno : 0;
    close(fd);
    errno = error;
    if (n <= 0) return false;
    text[n] = 0;
    const char* p = strrchr(text, ')');  // the command may itself contain ")" and spaces
    if (!p) return false;
    unsigned long long start = 0;
    // after ")": state is field 3, start time is field 22
    if (sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &state, &start) != 2)
        return false;
    started = start;
    return true;
}

}  // namespace

uint64_t process_start(uint64_t pid) {
    char state;
    uint64_t started = 0;
    return read_stat(pid, state, started) ? started : 0;
}

bool process_alive(uint64_t pid, uint64_t started) {
    char state;
    uint64_t now = 0;
    if (read_stat(pid, state, now)) return state != 'Z' && state != 'X' && (started == 0 || started == now);
    if (errno == ENOENT) return kill(pid_t(pid), 0) == 0 || errno == EPERM;  // hidden from this user, perhaps
    return errno != ESRCH;  // without a free descriptor it can't be told
}

}  // namespace flowchan
