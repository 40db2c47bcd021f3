// A group: members that run collective operations over shared memory.
//
// Algorithm. Every operation is a sequence of rounds, the same for all members. In a round each member writes
// its data into its own part of the memory. Then it *publishes* the data: it stores the round's number into
// its cell. Then it waits until the cells of all other members have that number, and reads their data. Cells
// and slots exist twice, for odd and even rounds. Readers need no acknowledgement. A member that publishes
// round r + 2 overwrites its data of round r. It has seen all members publish r + 1 before, and each did so
// after reading round r.
//
// Invariants.
//  - Only its owner writes a seat, a cell or a slot. Published data stays, even if its owner dies.
//  - All members decide alike. A round is complete for all members once all have published it. A member gives
//    up only if a cell that it waits for can never get the number. Then the owner is gone, and the number is
//    not there afterwards. So all survivors complete an operation, or none does. Calls that do not match, and
//    missing memory, follow from the data of the first round, which all members see.
//  - A member that gives up in the middle of an operation publishes nothing more, as if it had died. The same
//    holds for a member that leaves, and leaving waits for the thread that is in an operation. So the visible
//    data of a member that is gone never changes.
//
// Direct reads. A receiver reads large arrays from the sender's memory by process_vm_readv. The first round
// publishes their addresses. A second round confirms the reads, and no member returns before it. So the data
// is read as published, unless its owner has given up; the reader checks that after reading. If one member
// could not read, all members see that in the second round, and use the slots from then on.
//
// Waking. A sleeper counts itself in `sleepers` of the seat whose cell it waits for. A publisher looks at
// that count after its store, without a fence in between. The sleeper fences for both sides (membarrier), and
// looks at the cell again before it sleeps. If membarrier is refused, publishers fence (`fenced`). A lost
// wake-up would cost one slice of sleep, not a hang.
#pragma once

#include "kernels.hpp"
#include "plans.hpp"
#include "tuner.hpp"
#include "waiting.hpp"

#include <algorithm>
#include <bit>
#include <memory>
#include <thread>
#include <vector>

namespace flowchan {

constexpr size_t LINE = 64;
constexpr size_t INLINE = 32;        // bytes that fit into the cell
constexpr size_t SMALL = 16 * 1024;  // bytes of a small slot
constexpr uint32_t MOST_MEMBERS = 1024;

// One value for each member, on the heap only for large groups.
template <class T>
class ByRank {
  public:
    explicit ByRank(size_t size, T value = {}) : size_(size), many_(size > FEW ? new T[size] : nullptr) {
        std::fill_n(data(), size, value);
    }
    T* data() { return many_ ? many_.get() : few_; }
    const T* data() const { return many_ ? many_.get() : few_; }
    T& operator[](size_t i) { return data()[i]; }
    const T& operator[](size_t i) const { return data()[i]; }
    size_t size() const { return size_; }
    const T* begin() const { return data(); }
    const T* end() const { return data() + size_; }

  private:
    static constexpr size_t FEW = 8;
    size_t size_;
    T few_[FEW];
    std::unique_ptr<T[]> many_;
};
using Sizes = ByRank<uint64_t>;

struct alignas(LINE) Cell {
    std::atomic<uint32_t> round{0};  // partner: Member::await
    uint32_t flags = 0;
    uint64_t key = 0;  // key of the call; equal on all members of one operation
    uint64_t bytes = 0;
    uint32_t filled = 0;  // ns for writing the data of this operation, if it is timed
    uint32_t took = 0;    // ns of the last timed operation, from the arrival of the last member
    unsigned char data[INLINE] = {};
};
static_assert(sizeof(Cell) == LINE);

enum Membership : uint32_t { PRESENT, LEFT, GAVE_UP };
// Flags of a cell. IN_PLACE: the data is to be read from its owner's memory. TELLS: rank 0 publishes the plan
// for the next operation of this size class. All members also publish their own plan.
constexpr uint32_t NO_MEMORY = 1, IN_PLACE = 2, COULD_NOT = 4, TELLS = 8;
constexpr uint32_t OWN_PLAN = 8, NEXT_PLAN = 16;  // position of the lowest bit

struct MemberSlot {
    Cell cell[2];
    alignas(LINE) std::atomic<uint32_t> sleepers{0};  // members that sleep until one of the cells changes
    alignas(LINE) std::atomic<uint64_t> owner{0};     // the process that joined as this member
    std::atomic<uint64_t> started{0};
    std::atomic<uint32_t> membership{PRESENT};
    std::atomic<uint32_t> over{0};       // the member has left, even if it gave up before
    std::atomic<uint32_t> held{0};       // a lock shows whether a process can still join: Member::hold
    std::atomic<uint32_t> operation{0};  // number of operations begun, for messages
    std::atomic<uint32_t> doing{0};      // the last operation, for messages; the top bit: still running
    std::atomic<uint64_t> proof{0};      // address of `proof_of` this seat in its owner's memory
};

struct GroupHeader {
    static constexpr uint64_t MAGIC = 0x33707567'776f6c66;  // "flowgrup"3
    uint64_t magic = MAGIC;
    uint32_t size = 0;
    uint32_t crowded = 0;  // more members than cores; the creator decides, so that all agree
    std::atomic<uint32_t> fenced{0};
    std::atomic<uint32_t> disbanded{0};                             // no member begins an operation any more
    std::atomic<uint32_t> took[OPERATIONS][TRIED][ALL_PLANS] = {};  // ns in the last trial; 0: not tried
};

// A descriptor that a member offers to another one: a channel or the memory of another group.
enum Table : uint32_t { CHANNELS, OFFERS, TABLES };
struct ChannelEntry {
    uint64_t pid = 0, fd = 0;
    std::atomic<uint64_t> inode{0};  // 0: none so far; partner: Member::channel_from
};

// How an operation ended. These ends come before it began:
//  - Closed: the member has left.
//  - Taken: another process is the member.
//  - Within: a signal handler called it during another operation.
//  - Busy: another thread was in an operation until the timeout.
enum class End { Done, MemberLost, Mismatch, NoMemory, TimedOut, Interrupted, Closed, Taken, Within, Busy };

// The deadline of a call, and its actions while it waits.
class Patience {
  public:
    explicit Patience(Deadline deadline) : deadline(deadline) {}
    virtual ~Patience() = default;
    // Called before waiting longer than a short spin, or before moving much data; repeated calls are
    // possible.
    virtual void waits() {}
    // Called every 20 ms while waiting; returns whether to give up.
    virtual bool interrupted(int64_t) { return false; }
    const Deadline deadline;
};

// The visible state of a member.
struct MemberState {
    uint64_t pid;
    uint32_t membership, operation, doing;
    bool alive, arrived, over;
};

class Member {
  public:
    // returns the descriptor of a new group's memory; throws std::system_error
    static int make(uint32_t size);

    Member(int fd, uint32_t rank);  // owns `fd`; throws system_error, invalid_argument
    ~Member();
    Member(const Member&) = delete;

    const uint32_t rank, size;
    int fd() const { return fd_; }
    // Locks the open file description of this descriptor. Every process that may still join as this member
    // has the descriptor. Once the last of them has closed it, the lock is gone, and the other members
    // notice.
    void hold();
    End join();  // makes this process the member; Taken: another process is
    bool joined() const { return joined_ == process_number_now(); }
    bool is_taken() const { return joined_ && !joined(); }  // by the process that forked this one
    // May be called repeatedly. An operation of another thread ends first, and publishes nothing more. If the
    // caller itself is in an operation (a signal handler), the member leaves at the end of that.
    void leave();
    void retire();                    // leaves after a failure
    void count_out(uint32_t member);  // that member ended before it joined
    // Any process that has the memory may call it. Members that would begin an operation give up. So
    // operations in progress end as if a member had died between two of them.
    void disband() { header_->disbanded = 1; }
    bool disbanded() const { return header_->disbanded; }
    MemberState see(uint32_t member) const;
    // Offers a descriptor to `member`. Returns false with errno if memory is missing.
    bool publish_channel(Table table, uint32_t member, uint64_t fd, uint64_t inode);
    const ChannelEntry& channel_from(Table table, uint32_t member) const {
        return entries_[place_of(table, member, rank)];
    }
    bool broken() const { return broken_; }

    // Returns the plan for an operation on that number of bytes: the chosen algorithm if it is possible, else
    // the fastest plan.
    const Plan& plan_of(uint32_t doing, uint64_t bytes) const { return PLANS[number_of(doing, bytes)]; }
    // Returns the shortest time in ns in the last trial of a plan for that size class. It is 0 if the plan
    // was never tried or can't run.
    uint32_t took(uint32_t doing, uint64_t bytes, uint32_t plan) const {
        const uint32_t kind = kind_of(bytes);
        if (kind == UNTRIED || !(possible(doing, kind) >> plan & 1)) return 0;
        return header_->took[doing % OPERATIONS][kind][plan].load(std::memory_order_relaxed);
    }
    // All members must choose the same, else their calls do not match.
    void choose(uint32_t doing, Algorithm algorithm) { chosen_[doing % OPERATIONS] = algorithm; }

    // A mutex that allows one operation at a time.
    class Use {
      public:
        void lock() {
            while (!try_lock_for(SLICE_NS)) {}
        }
        bool try_lock() {
            uint32_t free = 0;
            return word_.compare_exchange_strong(free, 1) && own();  // partner: unlock
        }
        bool try_lock_for(int64_t ns) {
            if (word_.exchange(2) == 0) return own();
            futex_wait(word_, 2, ns, false);
            return word_.exchange(2) == 0 && own();
        }
        void unlock() {
            by_ = std::thread::id();
            if (word_.exchange(0) == 2) futex_wake(word_, 1, false);
        }
        bool is_own() const { return by_ == std::this_thread::get_id(); }

      private:
        bool own() { return by_ = std::this_thread::get_id(), true; }

        std::atomic<uint32_t> word_{0};  // 1: held; 2: held, and others may sleep
        std::atomic<std::thread::id> by_{};
    };
    Use& in_use() { return in_use_; }

    // --- operations; `key` says what the call is, for the comparison with those of the others ---
    struct Call {
        uint32_t doing;
        uint64_t key;
    };
    End barrier(Call call, Patience& patience);
    struct Combining {
        const void* in;
        void* out;  // may be `in`
        size_t count;
        Element element;
        Op op;
        int root = -1;  // negative: all members get the result
    };
    End allreduce(Call call, const Combining& what, Patience& patience);
    // `in` has `count` elements for each member; `out` gets those for this member.
    End reduce_scatter(Call call, const Combining& what, Patience& patience);
    End broadcast(Call call, void* data, size_t bytes, uint32_t root, Patience& patience);
    // Memory for the data of each member, of any size. It is called once with the sizes and sets the target
    // of each; null targets are skipped, and false aborts the operation. `shown` is the published data, null
    // if it is large.
    struct Place {
        virtual ~Place() = default;
        virtual bool operator()(const Sizes& sizes, const ByRank<const void*>& shown, ByRank<void*>& to) = 0;
    };
    End allgather(Call call, const void* in, size_t bytes, Place& place, Patience& patience);
    // in[j] with in_sizes[j] bytes goes to member j; out[i] receives out_sizes[i] bytes from member i.
    struct Parts {
        const ByRank<const void*>& in;
        const Sizes& in_sizes;
        const ByRank<void*>& out;
        const Sizes& out_sizes;
    };
    End alltoall(Call call, const Parts& parts, Patience& patience);

  private:
    static uint64_t process_number_now();
    uint64_t key_of(Call call) const {
        return call.key + uint64_t(chosen_[call.doing % OPERATIONS]) * 0x9e3779b97f4a7c15;
    }
    // A number in the memory of that member's process that hardly any other process has. A process id alone
    // may belong to a later process, or mean another process in another namespace.
    uint64_t proof_of(uint32_t member) const {
        return slot_of(member).owner * 0x9e3779b97f4a7c15 ^ identity_ ^ member;
    }
    size_t place_of(Table table, uint32_t from, uint32_t to) const {
        return (size_t(table) * size + from) * size + to;
    }
    MemberSlot& slot_of(uint32_t member) const { return slots_[member]; }
    Cell& cell(uint32_t member) const { return slots_[member].cell[round_ & 1]; }
    unsigned char* small(uint32_t member) const {
        return small_ + (size_t(member) * 2 + (round_ & 1)) * SMALL;
    }
    unsigned char* big(uint32_t member) const {
        return big_ + (size_t(member) * 2 + (round_ & 1)) * (BIG + result_size_);
    }
    unsigned char* result(uint32_t member, uint32_t of_round) const {
        return big_ + (size_t(member) * 2 + (of_round & 1)) * (BIG + result_size_) + BIG;
    }
    // Returns the memory for the data of one round.
    unsigned char* payload(uint32_t member, size_t bytes) const {
        return bytes <= INLINE ? cell(member).data : bytes <= SMALL ? small(member) : big(member);
    }
    // Returns the size class of an operation, or UNTRIED if all plans are equally fast.
    static uint32_t kind_of(uint64_t bytes);
    uint64_t shown_at(uint32_t member) const { return *reinterpret_cast<const uint64_t*>(cell(member).data); }
    End begin(Call call);
    End finish(End end);
    void give_up();
    void depart();
    void wake_all();
    void publish(Call call, uint32_t flags, uint64_t bytes);
    // Runs one more round of an operation whose calls match.
    End next(Call call, Patience& patience);
    // Runs the first round, with `payload` bytes that `fill` writes to its argument.
    template <class Fill>
    End show(Call call, uint64_t bytes, size_t payload, Fill fill, Patience& patience, uint32_t flags = 0);
    // Runs a round that publishes this member's big slot, or that its memory is missing.
    End show_big(Call call, bool fits, Patience& patience);
    bool pull(const Plan& plan, uint32_t member, uint64_t from, void* to, size_t bytes) const;
    bool pull_by_one(uint32_t member, uint64_t from, void* to, size_t bytes) const;
    // Runs the round after direct reads, and publishes whether this member could read.
    End have_read(Call call, bool could, Patience& patience);
    End await_all(Patience& patience);
    End await(uint32_t member, Patience& patience);
    bool arrives_after_yields(uint32_t member);
    End judge(Call call) const;
    bool has_arrived(uint32_t member) const;
    bool may_join(uint32_t member) const;
    bool any_is_lost(uint32_t from) const;
    bool reserve_big();  // allocates this member's big slots
    uint32_t number_of(uint32_t doing, uint64_t bytes) const;
    uint32_t possible(uint32_t doing, uint32_t kind) const;
    uint32_t first_of(uint32_t doing, uint32_t kind) const;
    const Plan& begin_plan(uint32_t doing, uint64_t bytes);
    void have_come(Call call);
    void end_plan(bool done);
    const Plan& plan_of_member(uint32_t member) const { return PLANS[cell(member).flags >> OWN_PLAN & 15]; }
    End alone(Call call, const void* in, void* out, size_t bytes);
    End exchange(const Plan& plan, Call call, const Combining& what, Patience& patience);
    End slices(const Plan& plan, Call call, const Combining& what, Patience& patience);
    struct Gathering;
    End take_shown(Call call, Gathering& all, Patience& patience);
    struct Swapping;
    bool sizes_match() const;
    End take_shown(Call call, Swapping& all, Patience& patience);
    // Moves the rest of the data in rounds. In round t, `write` fills this member's big slot if it `has`
    // data, and `read` reads that of another member.
    template <class Has, class Write, class Read>
    End follow(Call call, uint64_t rounds, Patience& patience, Has has, Write write, Read read);
    uint32_t usable_plans(uint32_t doing, uint32_t kind) const;

    int fd_ = -1;
    uint64_t joined_ = 0;
    GroupHeader* header_ = nullptr;
    Algorithm chosen_[OPERATIONS] = {};
    // Plan of the next operation, if it is possible then. It is equal on all members, because rank 0
    // published it in the last matching call. The set of possible plans is also equal; an algorithm chosen
    // for a call that did not match has no effect on it.
    static constexpr uint8_t UNKNOWN = 0xff;
    uint8_t next_[OPERATIONS][TRIED];
    std::vector<Tuner> tuners_;  // on rank 0
    struct Timed {
        bool is = false;
        uint32_t doing = 0, kind = 0, plan = 0;
        uint32_t filled = 0;  // longest time in ns in which a member wrote its data
        int64_t since = 0;    // arrival of the last member
    };
    Timed timed_;                     // this operation
    Timed before_;                    // the operation before, while the times of the others are unknown
    uint32_t took_ = 0, filled_ = 0;  // values for the cell
    uint32_t round_flags_ = 0;        // flags of all rounds
    MemberSlot* slots_ = nullptr;
    unsigned char* small_ = nullptr;
    unsigned char* big_ = nullptr;
    ChannelEntry* entries_ = nullptr;
    size_t control_ = 0, big_length_ = 0, length_ = 0, result_size_ = 0;
    uint32_t round_ = 0;
    uint32_t pauses_ = 0;
    uint32_t left_out_ = 0, leave_out_ = 0;  // waits without yields: still to come, and last time
    std::atomic<bool> leaving_ = false;      // waits give up
    uint64_t proof_ = 0, identity_ = 0;
    std::atomic<bool> broken_ = false;  // waits give up, and no operation begins
    bool fenced_ = false, reserved_ = false;
    bool direct_ = true;  // false once a member could not read the memory of another
    Use in_use_;
};

}  // namespace flowchan
