#include "process.hpp"

#include "system.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace flowchan {

uint32_t own_number = uint32_t(getpid());

struct Pidfd {
    const uint64_t pid, started;
    const int fd;

    Pidfd(uint64_t pid, uint64_t started) : pid(pid), started(started), fd(open_pidfd(int(pid))) {}
    ~Pidfd() {
        if (fd >= 0) close(fd);
    }
    bool may_have_ended() const {
        pollfd p{fd, POLLIN, 0};
        return poll(&p, 1, 0) != 0;
    }
};

namespace {

std::atomic<uint64_t> own_start_{0};  // 0: not read yet

// This mutex is held across a fork, so the child finds consistent data and can unlock the mutex.
std::mutex open_mutex;
// Never destroyed, because threads use it while the program exits.
auto& all_open = *new std::vector<std::weak_ptr<const Pidfd>>;

void before_fork() { open_mutex.lock(); }
void in_parent() { open_mutex.unlock(); }
void in_child() {
    // The child needs none of these descriptors. The threads that used the descriptors do not exist in the
    // child, and its Peers start with empty tables (see Peers::table).
    for (const auto& one : all_open)
        if (auto open = one.lock()) close(open->fd);
    all_open.clear();
    open_mutex.unlock();
    own_number = uint32_t(getpid());
    own_start_.store(0, std::memory_order_relaxed);
}

[[maybe_unused]] const int fork_hook = pthread_atfork(before_fork, in_parent, in_child);

// Read the state letter and the start time from the stat file of the process's main thread, which has the
// values of the whole process. In an emulator (qemu-user), a process and its peers see different times in its
// /proc/<pid>/stat. On failure, return false with errno set.
bool read_stat(uint64_t pid, char& state, uint64_t& started) {
    char path[64], text[512];
    const auto number = static_cast<unsigned long>(pid);
    snprintf(path, sizeof path, "/proc/%lu/task/%lu/stat", number, number);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    const int error = n < 0 ? errno : 0;
    close(fd);
    errno = error;
    if (n <= 0) return false;
    text[n] = 0;
    const char* p = strrchr(text, ')');  // the command name may contain ")" and spaces
    if (!p) return false;
    unsigned long long start = 0;
    // The rest of the line, after the ")", begins with field 3, the state. The start time is field 22.
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
    // /proc may hide the processes of other users, so ask kill().
    if (errno == ENOENT) return kill(pid_t(pid), 0) == 0 || errno == EPERM;
    return errno != ESRCH;  // no answer, perhaps because no descriptor is free; assume that it is alive
}

uint64_t own_start() {
    uint64_t start = own_start_.load(std::memory_order_relaxed);
    if (!start) own_start_.store(start = process_start(process_number()), std::memory_order_relaxed);
    return start;
}

// Return whether this many descriptors are at most a quarter of the number that the process may open.
static bool is_room_for(size_t descriptors) {
    rlimit most;
    return getrlimit(RLIMIT_NOFILE, &most) != 0 || descriptors <= most.rlim_cur / 4;
}

// Return null if no pidfd can be opened, or if another thread has the mutex. Waiting for the mutex could
// deadlock with a fork, because a fork also takes the mutex. The start time is compared after opening, because
// the pid may have been reused.
std::shared_ptr<const Pidfd> Peers::open(uint64_t pid, uint64_t started) {
    std::unique_lock guard(open_mutex, std::try_to_lock);
    if (!guard) return nullptr;
    std::erase_if(all_open, [](const auto& one) { return one.expired(); });
    for (const auto& one : all_open)
        if (auto open = one.lock(); open && open->pid == pid && open->started == started) return open;
    if (!is_room_for(all_open.size() + 1)) return nullptr;
    auto opened = std::make_shared<const Pidfd>(pid, started);
    if (opened->fd < 0 || process_start(pid) != started) return nullptr;
    all_open.push_back(opened);
    return opened;
}

bool Peers::alive(uint64_t pid, uint64_t started) {
    auto& [of, round, peers] = table();
    const auto peer = std::ranges::find_if(
        peers, [&](const Peer& one) { return one.pid == pid && one.started == started; });
    if (peer == peers.end()) {
        peers.push_back({pid, started, round, nullptr});
        return process_alive(pid, started);
    }
    if (!peer->pidfd && peer->round != round) peer->pidfd = open(pid, started);
    peer->round = round;
    if (peer->pidfd && !peer->pidfd->may_have_ended()) return true;
    peer->pidfd = nullptr;
    // Do not rely on the pidfd alone, because a program that closes all of its descriptors also closes the
    // pidfd.
    return process_alive(pid, started);
}

void Peers::begin_round() {
    Table& now = table();
    std::erase_if(now.peers, [&](const Peer& one) { return one.round != now.round; });
    now.round += 1;
}

// Return the table of this process. A forked child abandons its parent's table, which may be inconsistent.
Peers::Table& Peers::table() {
    if (!table_ || table_->of != process_number()) table_ = new Table{process_number()};
    return *table_;
}

Peers::~Peers() {
    if (table_ && table_->of == process_number()) delete table_;
}

}  // namespace flowchan
