// A member of a group: joining, rounds, waiting, and the loss of others.
#include "group.hpp"

#include "faults.hpp"
#include "memory.hpp"
#include "process.hpp"
#include "system.hpp"

#include <fcntl.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cstring>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>

namespace flowchan {

namespace {

constexpr size_t PAGE = 4096;
constexpr int64_t LOOK_NS = 20'000'000;  // interval in which a death is noticed
constexpr uint32_t LOOKED_AT = 8;        // members checked each time
constexpr uint32_t GLANCES = 200;        // checks without a pause, for members that are about to arrive
constexpr int YIELDS = 8;
constexpr int64_t LONG_YIELD_NS = 300'000;
constexpr uint32_t MOST_LEFT_OUT = 4096;
// longer spins only while they pay, because a busy machine needs the core
constexpr uint32_t LEAST_PAUSES = 20;

// A pause takes 11 ns, so the limit is 90 µs, the cost of a sleep and a wake-up. If there are more members
// than cores, spinning would keep the awaited member from running.
uint32_t most_pauses(uint32_t members) {
    static const uint32_t cores = std::thread::hardware_concurrency();
    return members <= cores ? 8000 : LEAST_PAUSES;
}
constexpr uint32_t INSIDE = 1u << 31;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
const size_t HEADER = rounded(sizeof(GroupHeader), PAGE);
size_t seats_length(uint32_t size) { return rounded(sizeof(Seat) * size, PAGE); }
size_t control_length(uint32_t size) { return HEADER + seats_length(size) + SMALL * 2 * size; }
size_t result_length(uint32_t size) { return rounded(BIG / size + LINE, PAGE); }
size_t big_length(uint32_t size) { return (BIG + result_length(size)) * 2 * size; }
size_t lanes_length(uint32_t size) { return rounded(sizeof(Lane) * TABLES * size * size, PAGE); }

// Fences all threads of processes that share the group. After it, the caller sees what others stored before
// they looked at the caller's store. Returns false if the kernel refuses.
bool fence_everybody() { return syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0) == 0; }

}  // namespace

uint64_t Member::process_number_now() { return process_number(); }

int Member::make(uint32_t size) {
    need_proc();
    const int fd = make_memory(control_length(size) + big_length(size) + lanes_length(size));
    const size_t length = control_length(size);
    void* at = reserve_memory(fd, 0, length)
                   ? mmap(nullptr, HEADER, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                   : MAP_FAILED;
    if (at == MAP_FAILED) {
        const int error = errno;
        ::close(fd);
        fail(error, "memory for a group");
    }
    auto* header = new (at) GroupHeader;
    header->size = size;
    header->crowded = size > std::thread::hardware_concurrency();
    munmap(at, HEADER);
    return fd;
}

namespace {

uint64_t number_of_memory(int fd) {
    struct stat st{};
    fstat(fd, &st);
    return uint64_t(st.st_ino) << 20;
}

uint32_t size_of_group(int fd) {
    GroupHeader header;
    if (pread(fd, static_cast<void*>(&header), sizeof header, 0) != ssize_t(sizeof header) ||
        header.magic != GroupHeader::MAGIC || header.size < 1 || header.size > MOST_MEMBERS)
        throw std::invalid_argument("the descriptor must be of the memory of a group");
    return header.size;
}

}  // namespace

Member::Member(int fd, uint32_t rank) : rank(rank), size(size_of_group(fd)), fd_(fd) {
    if (rank >= size)
        ::close(fd), throw std::invalid_argument("rank must be less than the size of the group");
    control_ = control_length(size);
    big_length_ = big_length(size);
    result_size_ = result_length(size);
    length_ = control_ + big_length_ + lanes_length(size);
    void* at = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        const int error = errno;
        ::close(fd);
        fail(error, "memory for a group");
    }
    header_ = static_cast<GroupHeader*>(at);
    seats_ = reinterpret_cast<Seat*>(static_cast<unsigned char*>(at) + HEADER);
    small_ = reinterpret_cast<unsigned char*>(seats_) + seats_length(size);
    big_ = static_cast<unsigned char*>(at) + control_;
    lanes_ = reinterpret_cast<Lane*>(big_ + big_length_);
    pauses_ = most_pauses(size);
    memset(next_, UNKNOWN, sizeof next_);
    identity_ = number_of_memory(fd);
}

Member::~Member() {
    leave();
    munmap(header_, length_);
    ::close(fd_);
}

namespace {

struct flock lock_on(uint32_t member) {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_start = member;
    lock.l_len = 1;
    return lock;
}

}  // namespace

void Member::hold() {
    struct flock lock = lock_on(rank);
    if (fcntl(fd_, F_OFD_SETLK, &lock) == 0) seat(rank).held = 1;
}

bool Member::may_join(uint32_t member) const {
    struct flock lock = lock_on(member);
    return !seat(member).held || fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

End Member::join() {
    if (joined()) return End::Done;
    if (is_taken()) return End::Taken;
    uint64_t nobody = 0;
    if (!seat(rank).owner.compare_exchange_strong(nobody, process_number())) return End::Taken;
    joined_ = process_number();
    proof_ = proof_of(rank);
    seat(rank).proof.store(reinterpret_cast<uint64_t>(&proof_), std::memory_order_relaxed);
    seat(rank).started.store(own_start(), std::memory_order_release);
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0) != 0 || !fence_everybody())
        header_->fenced.store(1);
    return End::Done;
}

void Member::leave() {
    if (!joined()) return;
    leaving_ = true;
    if (in_use_.is_mine()) return;
    const std::lock_guard lock(in_use_);
    depart();
}

void Member::retire() {
    broken_ = true;
    if (is_taken() || in_use_.is_mine()) return;
    const std::lock_guard lock(in_use_);
    give_up();
}

void Member::depart() {
    uint32_t here = HERE;
    seat(rank).gone.compare_exchange_strong(here, LEFT);
    seat(rank).over = 1;
    std::atomic_thread_fence(std::memory_order_release);  // as in give_up
    wake_all();
}

void Member::give_up() {
    uint32_t here = HERE;
    seat(rank).gone.compare_exchange_strong(here, GAVE_UP);
    // The next owner of this memory may overwrite data that others still read. They must see `gone` before
    // that.
    std::atomic_thread_fence(std::memory_order_release);  // partner: the fence in pull
    broken_ = true;
    wake_all();
}

void Member::wake_all() {
    for (Cell& one : seat(rank).cell) futex_wake(one.round, UINT32_MAX, true);
}

void Member::count_out(uint32_t member) {
    uint64_t nobody = 0;
    if (seat(member).owner.compare_exchange_strong(nobody, process_number()))
        seat(member).gone.store(GAVE_UP), seat(member).over = 1;
}

Sight Member::see(uint32_t member) const {
    const Seat& s = seat(member);
    uint64_t pid = s.owner.load();
    const bool coming = pid || may_join(member);
    if (!coming) pid = s.owner.load();  // the process may just have joined and ended
    return {pid,
            s.gone.load(),
            s.operation.load(std::memory_order_relaxed),
            s.doing.load(std::memory_order_relaxed),
            pid ? process_alive(pid, s.started.load()) : coming,
            member == rank || is_here(member),
            s.over.load() != 0};
}

End Member::begin(Call call) {
    if (leaving_) return End::Closed;
    if (broken_) return End::Gone;
    if (const End end = join(); end != End::Done) return end;
    if (header_->disbanded.load(std::memory_order_relaxed)) return End::Gone;
    Seat& mine = seat(rank);
    mine.operation.store(mine.operation.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    mine.doing.store(call.doing | INSIDE, std::memory_order_relaxed);
    fenced_ = header_->fenced.load(std::memory_order_relaxed);
    round_ += 1;
    fault_point();
    return End::Done;
}

// After a mismatch or missing memory the group can be used further; other failures are permanent.
End Member::finish(End end) {
    Seat& mine = seat(rank);
    prefetch(&mine.cell[(round_ + 1) & 1]);  // the others' caches hold it for the next operation
    const bool goes_on = end == End::Done || end == End::Mismatch || end == End::NoMemory;
    end_trial(end == End::Done);
    if (goes_on)
        mine.doing.store(mine.doing.load(std::memory_order_relaxed) & ~INSIDE, std::memory_order_relaxed);
    if (!joined()) return end;
    if (leaving_)
        depart();
    else if (!goes_on || broken_)
        give_up();
    return end;
}

void Member::publish(Call call, uint32_t flags, uint64_t bytes) {
    Cell& mine = cell(rank);
    mine.flags = flags | says_;
    mine.key = key_of(call);
    mine.bytes = bytes;
    mine.filled = filled_;
    mine.took = took_;
    fault_point();
    mine.round.store(round_, std::memory_order_release);  // partner: is_here
    fault_point();
    if (fenced_)
        std::atomic_thread_fence(std::memory_order_seq_cst);
    else
        std::atomic_signal_fence(std::memory_order_seq_cst);  // partner: fence_everybody in await
    if (seat(rank).sleepers.load(std::memory_order_relaxed)) futex_wake(mine.round, UINT32_MAX, true);
}

bool Member::is_here(uint32_t member) const {
    return cell(member).round.load(std::memory_order_acquire) == round_;
}

End Member::await_all(Patience& patience) {
    for (uint32_t i = 1; i < size; ++i) {
        fault_point();
        const uint32_t member = (rank + i) % size;
        if (is_here(member)) continue;
        if (const End end = await(member, patience); end != End::Done) return end;
    }
    fault_point();
    return End::Done;
}

End Member::await(uint32_t member, Patience& patience) {
    for (uint32_t i = 0; i < GLANCES; ++i)
        if (is_here(member)) return End::Done;
    patience.waits();
    for (uint32_t i = 0; i < pauses_; ++i) {
        cpu_relax();
        if (!is_here(member)) continue;
        pauses_ = std::min(pauses_ * 2, most_pauses(size));
        return End::Done;
    }
    pauses_ = std::max(pauses_ / 2, LEAST_PAUSES);
    if (is_here_after_yields(member)) return End::Done;
    std::atomic<uint32_t>& word = cell(member).round;
    std::atomic<uint32_t>& sleepers = seat(member).sleepers;
    const int64_t since = now_ns();
    for (uint32_t looked = member;; looked += LOOKED_AT) {
        const uint32_t seen = word.load(std::memory_order_acquire);
        if (seen == round_) return End::Done;
        sleepers.fetch_add(1);
        fence_everybody();
        fault_point();
        futex_wait(word, seen, std::min(LOOK_NS, patience.deadline.left()), true);
        sleepers.fetch_sub(1);
        if (is_here(member)) return End::Done;
        if (leaving_) return End::Closed;
        if (broken_) return End::Gone;
        if (patience.interrupted(now_ns() - since)) return End::Interrupted;
        if (any_is_lost(member) || any_is_lost(looked % size)) return End::Gone;
        if (patience.deadline.passed()) return End::TimedOut;
    }
}

// If only members want the cores, yielding lets them run. If other programs do, a yield lasts for their whole
// time slices, while a woken sleeper runs first. So after a long yield, yields are skipped for a while.
bool Member::is_here_after_yields(uint32_t member) {
    if (left_out_) return --left_out_, false;
    for (int i = 0; i < YIELDS; ++i) {
        const int64_t since = now_ns();
        sched_yield();
        const bool took_long = now_ns() - since > LONG_YIELD_NS;
        if (took_long)
            left_out_ = leave_out_ = std::min(2 * leave_out_ + 16, MOST_LEFT_OUT);
        else if (i == 0)
            leave_out_ /= 2;
        if (is_here(member)) return true;
        if (took_long) break;
    }
    return false;
}

// Returns whether one of the members from `from` on is lost and will never publish the round. A member that
// is gone published before it was marked as gone.
bool Member::any_is_lost(uint32_t from) const {
    for (uint32_t i = 0; i < std::min(size, LOOKED_AT); ++i) {
        const uint32_t member = (from + i) % size;
        if (member == rank || is_here(member)) continue;
        const Sight sight = see(member);
        if ((sight.gone != HERE || !sight.alive) && !is_here(member)) return true;
    }
    return false;
}

// Judges the calls after the first round; the result is equal on all members.
End Member::judge(Call call) const {
    End end = End::Done;
    for (uint32_t member = 0; member < size; ++member) {
        if (cell(member).flags & NO_MEMORY) end = End::NoMemory;
        if (cell(member).key != key_of(call)) return End::Mismatch;
    }
    return end;
}

bool Member::show_lane(Table table, uint32_t member, uint64_t fd, uint64_t inode) {
    const size_t place = place_of(table, rank, member);
    const uint64_t from = control_ + big_length_ + place * sizeof(Lane);
    if (!reserve_memory(fd_, from, from + sizeof(Lane))) return false;
    Lane& lane = lanes_[place];
    lane.pid = process_number();
    lane.fd = fd;
    lane.inode.store(inode, std::memory_order_release);
    return true;
}

bool Member::reserve_big() {
    const size_t mine = (BIG + result_size_) * 2;
    if (!reserved_) reserved_ = reserve_memory(fd_, control_ + rank * mine, control_ + (rank + 1) * mine);
    return reserved_;
}

}  // namespace flowchan
