// A member of a group: how it joins, runs rounds, waits, and notices that other members have died or left.
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
constexpr int64_t DEATH_CHECK_INTERVAL_NS = 20'000'000;  // how often to check for dead members
constexpr uint32_t CHECKED_AT_ONCE = 8;                  // how many members one check covers
// A wait makes this many checks before its first pause, because the other members often arrive at once.
constexpr uint32_t CHECKS_WITHOUT_PAUSE = 200;
constexpr int YIELDS = 8;
constexpr int64_t LONG_YIELD_NS = 300'000;
constexpr uint32_t MOST_LEFT_OUT = 4096;
// Spins get longer only while they succeed, because other programs may need the core.
constexpr uint32_t LEAST_PAUSES = 20;

// A pause takes 11 ns, so 8000 pauses take about 90 µs, which is the cost of a sleep and a wake-up. If
// members outnumber cores, a spin would keep the core from the very member that it waits for.
uint32_t most_pauses(uint32_t members) {
    static const uint32_t cores = std::thread::hardware_concurrency();
    return members <= cores ? 8000 : LEAST_PAUSES;
}
constexpr uint32_t INSIDE = 1u << 31;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
const size_t HEADER = rounded(sizeof(GroupHeader), PAGE);
size_t slots_length(uint32_t size) { return rounded(sizeof(MemberSlot) * size, PAGE); }
size_t control_length(uint32_t size) { return HEADER + slots_length(size) + SMALL * 2 * size; }
size_t result_length(uint32_t size) { return rounded(BIG / size + LINE, PAGE); }
size_t big_length(uint32_t size) { return (BIG + result_length(size)) * 2 * size; }
size_t entries_length(uint32_t size) { return rounded(sizeof(ChannelEntry) * TABLES * size * size, PAGE); }

// Execute a fence in all threads of all processes that share the group. If another thread stored a value and
// then missed the caller's last store, the caller sees that value after this call. Return false if the kernel
// refuses the call.
bool fence_all_threads() { return syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0) == 0; }

}  // namespace

uint64_t Member::process_number_now() { return process_number(); }

int Member::make(uint32_t size) {
    need_proc();
    const int fd = make_memory(control_length(size) + big_length(size) + entries_length(size));
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
        throw std::invalid_argument("the descriptor must refer to the memory of a group");
    return header.size;
}

}  // namespace

Member::Member(int fd, uint32_t rank) : rank(rank), size(size_of_group(fd)), fd_(fd) {
    if (rank >= size)
        ::close(fd), throw std::invalid_argument("rank must be less than the size of the group");
    control_ = control_length(size);
    big_length_ = big_length(size);
    result_size_ = result_length(size);
    length_ = control_ + big_length_ + entries_length(size);
    void* at = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        const int error = errno;
        ::close(fd);
        fail(error, "memory for a group");
    }
    header_ = static_cast<GroupHeader*>(at);
    slots_ = reinterpret_cast<MemberSlot*>(static_cast<unsigned char*>(at) + HEADER);
    small_ = reinterpret_cast<unsigned char*>(slots_) + slots_length(size);
    big_ = static_cast<unsigned char*>(at) + control_;
    entries_ = reinterpret_cast<ChannelEntry*>(big_ + big_length_);
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
    if (fcntl(fd_, F_OFD_SETLK, &lock) == 0) slot_of(rank).held = 1;
}

bool Member::may_join(uint32_t member) const {
    struct flock lock = lock_on(member);
    return !slot_of(member).held || fcntl(fd_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

End Member::join() {
    if (joined()) return End::Done;
    if (is_taken()) return End::Taken;
    uint64_t unowned = 0;
    if (!slot_of(rank).owner.compare_exchange_strong(unowned, process_number())) return End::Taken;
    joined_ = process_number();
    proof_ = proof_of(rank);
    slot_of(rank).proof.store(reinterpret_cast<uint64_t>(&proof_), std::memory_order_relaxed);
    slot_of(rank).started.store(own_start(), std::memory_order_release);
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0) != 0 || !fence_all_threads())
        header_->fenced.store(1);
    return End::Done;
}

void Member::leave() {
    if (!joined()) return;
    leaving_ = true;
    if (in_use_.is_own()) return;
    const std::lock_guard lock(in_use_);
    depart();
}

void Member::retire() {
    broken_ = true;
    if (is_taken() || in_use_.is_own()) return;
    const std::lock_guard lock(in_use_);
    give_up();
}

void Member::depart() {
    uint32_t present = PRESENT;
    slot_of(rank).membership.compare_exchange_strong(present, LEFT);
    slot_of(rank).over = 1;
    std::atomic_thread_fence(std::memory_order_release);  // pairs with the fence in pull, as in give_up
    wake_all();
}

void Member::give_up() {
    uint32_t present = PRESENT;
    slot_of(rank).membership.compare_exchange_strong(present, GAVE_UP);
    // From now on, this member's arrays may change while other members read them. Those members must see the
    // new `membership` before any new data.
    std::atomic_thread_fence(std::memory_order_release);  // pairs with the fence in pull
    broken_ = true;
    wake_all();
}

void Member::wake_all() {
    for (Cell& one : slot_of(rank).cell) futex_wake(one.round, UINT32_MAX, true);
}

void Member::count_out(uint32_t member) {
    uint64_t unowned = 0;
    if (slot_of(member).owner.compare_exchange_strong(unowned, process_number()))
        slot_of(member).membership.store(GAVE_UP), slot_of(member).over = 1;
}

MemberState Member::see(uint32_t member) const {
    const MemberSlot& s = slot_of(member);
    uint64_t pid = s.owner.load();
    const bool coming = pid || may_join(member);
    if (!coming) pid = s.owner.load();  // the process may have joined and ended in the meantime
    return {pid,
            s.membership.load(),
            s.operation.load(std::memory_order_relaxed),
            s.doing.load(std::memory_order_relaxed),
            pid ? process_alive(pid, s.started.load()) : coming,
            member == rank || has_arrived(member),
            s.over.load() != 0};
}

End Member::begin(Call call) {
    if (leaving_) return End::Closed;
    if (broken_) return End::MemberLost;
    if (const End end = join(); end != End::Done) return end;
    if (header_->disbanded.load(std::memory_order_relaxed)) return End::MemberLost;
    MemberSlot& own = slot_of(rank);
    own.operation.store(own.operation.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    own.doing.store(call.doing | INSIDE, std::memory_order_relaxed);
    fenced_ = header_->fenced.load(std::memory_order_relaxed);
    round_ += 1;
    fault_point();
    return End::Done;
}

// The group survives a mismatch or a lack of memory. Any other failure is permanent.
End Member::finish(End end) {
    MemberSlot& own = slot_of(rank);
    // Fetch this line now: it is in other members' caches, and the next operation writes it.
    prefetch(&own.cell[(round_ + 1) & 1]);
    const bool goes_on = end == End::Done || end == End::Mismatch || end == End::NoMemory;
    end_plan(end == End::Done);
    if (goes_on)
        own.doing.store(own.doing.load(std::memory_order_relaxed) & ~INSIDE, std::memory_order_relaxed);
    if (!joined()) return end;
    if (leaving_)
        depart();
    else if (!goes_on || broken_)
        give_up();
    return end;
}

void Member::publish(Call call, uint32_t flags, uint64_t bytes) {
    Cell& own = cell(rank);
    own.flags = flags | round_flags_;
    own.key = key_of(call);
    own.bytes = bytes;
    own.filled = filled_;
    own.took = took_;
    fault_point();
    own.round.store(round_, std::memory_order_release);  // pairs with has_arrived
    fault_point();
    if (fenced_)
        std::atomic_thread_fence(std::memory_order_seq_cst);
    else
        std::atomic_signal_fence(std::memory_order_seq_cst);  // pairs with fence_all_threads in await
    if (slot_of(rank).sleepers.load(std::memory_order_relaxed)) futex_wake(own.round, UINT32_MAX, true);
}

bool Member::has_arrived(uint32_t member) const {
    return cell(member).round.load(std::memory_order_acquire) == round_;
}

End Member::await_all(Patience& patience) {
    for (uint32_t i = 1; i < size; ++i) {
        fault_point();
        const uint32_t member = (rank + i) % size;
        if (has_arrived(member)) continue;
        if (const End end = await(member, patience); end != End::Done) return end;
    }
    fault_point();
    return End::Done;
}

End Member::await(uint32_t member, Patience& patience) {
    for (uint32_t i = 0; i < CHECKS_WITHOUT_PAUSE; ++i)
        if (has_arrived(member)) return End::Done;
    patience.waits();
    for (uint32_t i = 0; i < pauses_; ++i) {
        cpu_relax();
        if (!has_arrived(member)) continue;
        pauses_ = std::min(pauses_ * 2, most_pauses(size));
        return End::Done;
    }
    pauses_ = std::max(pauses_ / 2, LEAST_PAUSES);
    if (arrives_after_yields(member)) return End::Done;
    std::atomic<uint32_t>& word = cell(member).round;
    std::atomic<uint32_t>& sleepers = slot_of(member).sleepers;
    const int64_t since = now_ns();
    for (uint32_t checked = member;; checked += CHECKED_AT_ONCE) {
        const uint32_t seen = word.load(std::memory_order_acquire);
        if (seen == round_) return End::Done;
        sleepers.fetch_add(1);
        fence_all_threads();
        fault_point();
        futex_wait(word, seen, std::min(DEATH_CHECK_INTERVAL_NS, patience.deadline.left()), true);
        sleepers.fetch_sub(1);
        if (has_arrived(member)) return End::Done;
        if (leaving_) return End::Closed;
        if (broken_) return End::MemberLost;
        if (patience.interrupted(now_ns() - since)) return End::Interrupted;
        if (any_is_lost(member) || any_is_lost(checked % size)) return End::MemberLost;
        if (patience.deadline.passed()) return End::TimedOut;
    }
}

// If the members themselves keep all cores busy, a yield lets another member run. If other programs keep the
// cores busy, a yield takes as long as their time slices. A thread that wakes from a sleep runs before these
// programs. After a yield longer than LONG_YIELD_NS, the next waits therefore sleep without yielding first.
bool Member::arrives_after_yields(uint32_t member) {
    if (left_out_) return --left_out_, false;
    for (int i = 0; i < YIELDS; ++i) {
        const int64_t since = now_ns();
        sched_yield();
        const bool took_long = now_ns() - since > LONG_YIELD_NS;
        if (took_long)
            left_out_ = leave_out_ = std::min(2 * leave_out_ + 16, MOST_LEFT_OUT);
        else if (i == 0)
            leave_out_ /= 2;
        if (has_arrived(member)) return true;
        if (took_long) break;
    }
    return false;
}

// Check a few members, starting with `from`. Return whether any of them has died or left without publishing
// this round. A member is marked as gone only after it has published all its rounds.
bool Member::any_is_lost(uint32_t from) const {
    for (uint32_t i = 0; i < std::min(size, CHECKED_AT_ONCE); ++i) {
        const uint32_t member = (from + i) % size;
        if (member == rank || has_arrived(member)) continue;
        const MemberState member_state = see(member);
        if ((member_state.membership != PRESENT || !member_state.alive) && !has_arrived(member)) return true;
    }
    return false;
}

// Compare the calls of all members after the first round. Each member gets the same result.
End Member::judge(Call call) const {
    End end = End::Done;
    for (uint32_t member = 0; member < size; ++member) {
        if (cell(member).flags & NO_MEMORY) end = End::NoMemory;
        if (cell(member).key != key_of(call)) return End::Mismatch;
    }
    return end;
}

bool Member::publish_channel(Table table, uint32_t member, uint64_t fd, uint64_t inode) {
    const size_t place = place_of(table, rank, member);
    const uint64_t from = control_ + big_length_ + place * sizeof(ChannelEntry);
    if (!reserve_memory(fd_, from, from + sizeof(ChannelEntry))) return false;
    ChannelEntry& entry = entries_[place];
    entry.pid = process_number();
    entry.fd = fd;
    entry.inode.store(inode, std::memory_order_release);
    return true;
}

bool Member::reserve_big() {
    const size_t own = (BIG + result_size_) * 2;
    if (!reserved_) reserved_ = reserve_memory(fd_, control_ + rank * own, control_ + (rank + 1) * own);
    return reserved_;
}

}  // namespace flowchan
