// A group of members, one per process, that run collective operations through shared memory.
//
// Algorithm. All members run an operation as the same sequence of rounds. In each round, a member first
// writes its data into its own part of the memory. It *publishes* the data by storing the round number in its
// cell. It then waits until every other cell contains that number, and reads the data.
//
// Cells and slots exist twice, for odd and even rounds, so readers need not acknowledge what they have read.
// A member overwrites the data of round r only in round r + 2. Before that, it has seen all members publish
// round r + 1, and each member publishes round r + 1 only after it has read round r.
//
// Invariants.
// - Member slots, cells and data slots each have an owner, and only the owner writes to them. Published data
//   stays valid even if its owner dies.
// - All members reach the same result. A round is complete for everyone once every member has published it. A
//   member gives up only if the owner of a cell is gone and the cell can therefore no longer get the number.
//   The member checks that cell once more before it gives up. Either all survivors complete an operation, or
//   none does. Mismatched calls and missing memory show in the data of the first round, which all members
//   see.
// - A member that gives up during an operation publishes nothing more, as if it had died. A member that
//   leaves the group also publishes nothing more; leave() waits until no thread runs an operation. The
//   visible data of a lost member therefore never changes.
//
// Direct reads. A receiver reads large arrays with process_vm_readv from the sender's memory. The first round
// publishes the addresses. A second round confirms the reads, and no member returns before it is complete.
// The reader therefore gets the published data unless the sender gave up, which the reader checks afterwards.
// If any read fails, all members learn this in the second round, and use the slots from then on.
//
// Waking. A member that is about to sleep increments `sleepers` in the member slot whose cell it waits for. A
// publisher stores the round and then reads that count, without a fence in between. Instead, the sleeper
// executes the fence for both with membarrier, and checks the cell again before it sleeps. If the system
// refuses membarrier, publishers execute their own fence (`fenced`). A lost wake-up costs one slice of sleep,
// but never hangs a member.
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
constexpr size_t SMALL = 16 * 1024;  // size of a small slot in bytes
constexpr uint32_t MOST_MEMBERS = 1024;

// One value per member, stored on the heap only in large groups.
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
    std::atomic<uint32_t> round{0};  // pairs with Member::has_arrived
    uint32_t flags = 0;
    uint64_t key = 0;  // identifies the call; all members of one operation must have the same key
    uint64_t bytes = 0;
    uint32_t filled = 0;  // ns that this member needed to write its data, if measured
    uint32_t took = 0;    // ns from the last member's arrival to the end of the last timed operation
    unsigned char data[INLINE] = {};
};
static_assert(sizeof(Cell) == LINE);

enum Membership : uint32_t { PRESENT, LEFT, GAVE_UP };
// Flags of a cell. NO_MEMORY: the owner has no memory for its big slot. IN_PLACE: read the data from the
// owner's memory. COULD_NOT: a direct read by the owner failed. TELLS: every member publishes the plan that
// it uses now, and rank 0 also publishes the plan for the next operation of this size class.
constexpr uint32_t NO_MEMORY = 1, IN_PLACE = 2, COULD_NOT = 4, TELLS = 8;
constexpr uint32_t OWN_PLAN = 8, NEXT_PLAN = 16;  // shifts of the two plan numbers within the flags

struct MemberSlot {
    Cell cell[2];
    // number of members that sleep until one of this member's cells changes
    alignas(LINE) std::atomic<uint32_t> sleepers{0};
    alignas(LINE) std::atomic<uint64_t> owner{0};  // process that joined as this member
    std::atomic<uint64_t> started{0};
    std::atomic<uint32_t> membership{PRESENT};
    std::atomic<uint32_t> over{0};  // nonzero: the member has left or given up
    // nonzero: a file lock exists while any process can still join as this member; see Member::hold
    std::atomic<uint32_t> held{0};
    std::atomic<uint32_t> operation{0};  // how many operations the member has started, for error messages
    // the last operation, for error messages; the top bit is set during the operation
    std::atomic<uint32_t> doing{0};
    std::atomic<uint64_t> proof{0};  // address of `proof_` in the member's process
};

struct GroupHeader {
    static constexpr uint64_t MAGIC = 0x33707567'776f6c66;  // "flowgrup"3
    uint64_t magic = MAGIC;
    uint32_t size = 0;
    // nonzero: there are more members than cores; set only by the creator, so all members agree
    uint32_t crowded = 0;
    std::atomic<uint32_t> fenced{0};
    std::atomic<uint32_t> disbanded{0};  // nonzero: no member may start another operation
    // Shortest time in ns from the latest trial, or 0 if the plan was not tried.
    std::atomic<uint32_t> took[OPERATIONS][TRIED][ALL_PLANS] = {};
};

// Tables of the descriptors that one member offers to another. CHANNELS are for channels, and OFFERS for the
// memory of new groups.
enum Table : uint32_t { CHANNELS, OFFERS, TABLES };
struct ChannelEntry {
    uint64_t pid = 0, fd = 0;
    std::atomic<uint64_t> inode{0};  // 0: no descriptor yet; pairs with Member::channel_from
};

// Result of an operation. These results mean that the operation did not start:
// - Closed: this member has left the group.
// - Taken: another process has joined with this rank.
// - Within: this call comes from a signal handler that interrupted an operation of the same thread.
// - Busy: another thread ran an operation for the whole timeout.
enum class End { Done, MemberLost, Mismatch, NoMemory, TimedOut, Interrupted, Closed, Taken, Within, Busy };

// The deadline of a call, and hooks that the call invokes while it waits.
class Patience {
  public:
    explicit Patience(Deadline deadline) : deadline(deadline) {}
    virtual ~Patience() = default;
    // Called before any wait that is longer than a short spin, and before a large transfer. May be called
    // repeatedly.
    virtual void waits() {}
    // Called every 20 ms during a wait. Returns true if the call must give up.
    virtual bool interrupted(int64_t) { return false; }
    const Deadline deadline;
};

// The state of a member, as the other members see it.
struct MemberState {
    uint64_t pid;
    uint32_t membership, operation, doing;
    bool alive, arrived, over;
};

class Member {
  public:
    // Creates the memory of a new group and returns its descriptor; throws std::system_error.
    static int make(uint32_t size);

    Member(int fd, uint32_t rank);  // takes ownership of `fd`; throws system_error, invalid_argument
    ~Member();
    Member(const Member&) = delete;

    const uint32_t rank, size;
    int fd() const { return fd_; }
    // Locks the open file description behind this descriptor. Every process that may still join with this
    // rank has a copy of the descriptor. When the last copy is closed, the lock disappears, and the other
    // members notice that the member cannot join any more.
    void hold();
    End join();  // makes this process the member; returns Taken if another process already joined
    bool joined() const { return joined_ == process_number_now(); }
    bool is_taken() const { return joined_ && !joined(); }  // true in a forked child of the member's process
    // Leaves the group; may be called repeatedly. If another thread is running an operation, the operation
    // publishes nothing more, and this call waits until it ends. If a signal handler interrupts this thread's
    // own operation, the member leaves when that operation ends.
    void leave();
    void retire();                    // leaves after a failure
    void count_out(uint32_t member);  // records that `member` ended without joining
    // Ends the group for all members. Any process that maps the memory may call this. The next operation of
    // each member then fails. A running operation completes only if every member has already started it.
    void disband() { header_->disbanded = 1; }
    bool disbanded() const { return header_->disbanded; }
    MemberState see(uint32_t member) const;
    // Offers a descriptor to `member`. Returns false with errno set if memory is exhausted.
    bool publish_channel(Table table, uint32_t member, uint64_t fd, uint64_t inode);
    const ChannelEntry& channel_from(Table table, uint32_t member) const {
        return entries_[place_of(table, member, rank)];
    }
    bool broken() const { return broken_; }

    // Returns the plan for an operation on `bytes` bytes. This is a plan of the chosen algorithm if that
    // algorithm can run, and otherwise the fastest plan.
    const Plan& plan_of(uint32_t doing, uint64_t bytes) const { return PLANS[number_of(doing, bytes)]; }
    // Returns the shortest time in ns from the latest trial of a plan in this size class. Returns 0 if the
    // plan was never tried or cannot run.
    uint32_t took(uint32_t doing, uint64_t bytes, uint32_t plan) const {
        const uint32_t kind = kind_of(bytes);
        if (kind == UNTRIED || !(possible(doing, kind) >> plan & 1)) return 0;
        return header_->took[doing % OPERATIONS][kind][plan].load(std::memory_order_relaxed);
    }
    // Sets the algorithm of an operation. All members must choose the same algorithm, or their calls will not
    // match.
    void choose(uint32_t doing, Algorithm algorithm) { chosen_[doing % OPERATIONS] = algorithm; }

    // A mutex that admits one operation at a time.
    class Use {
      public:
        void lock() {
            while (!try_lock_for(SLICE_NS)) {}
        }
        bool try_lock() {
            uint32_t free = 0;
            return word_.compare_exchange_strong(free, 1) && own();  // pairs with unlock
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

        std::atomic<uint32_t> word_{0};  // 1: locked; 2: locked, with threads that may be asleep
        std::atomic<std::thread::id> by_{};
    };
    Use& in_use() { return in_use_; }

    // --- operations; members compare `key` to check that they all made the same call ---
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
    // `in` has `count` elements per member. `out` gets this member's elements, combined over all members.
    End reduce_scatter(Call call, const Combining& what, Patience& patience);
    End broadcast(Call call, void* data, size_t bytes, uint32_t root, Patience& patience);
    // Chooses the target memory for the data of each member. An operation calls this object once, with the
    // sizes of all members' data. The call stores the targets in `to`; a null target skips that member's
    // data. If the call returns false, the operation is aborted. `shown` points to the published data, and is
    // null for large data.
    struct Place {
        virtual ~Place() = default;
        virtual bool operator()(const Sizes& sizes, const ByRank<const void*>& shown, ByRank<void*>& to) = 0;
    };
    End allgather(Call call, const void* in, size_t bytes, Place& place, Patience& patience);
    // in[j] has in_sizes[j] bytes for member j; out[i] receives out_sizes[i] bytes from member i.
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
    // Returns a number that a member has stored in its own memory. From this number, a reader can verify
    // which member's memory it has read. A process id proves nothing: a later process may reuse it, and each
    // pid namespace has its own numbers.
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
    // Returns the memory that contains a member's data for one round.
    unsigned char* payload(uint32_t member, size_t bytes) const {
        return bytes <= INLINE ? cell(member).data : bytes <= SMALL ? small(member) : big(member);
    }
    // Returns the size class of an operation, or UNTRIED if all plans take equally long.
    static uint32_t kind_of(uint64_t bytes);
    uint64_t shown_at(uint32_t member) const { return *reinterpret_cast<const uint64_t*>(cell(member).data); }
    End begin(Call call);
    End finish(End end);
    void give_up();
    void depart();
    void wake_all();
    void publish(Call call, uint32_t flags, uint64_t bytes);
    // Runs another round of an operation after the calls were found to match.
    End next(Call call, Patience& patience);
    // Runs the first round. `fill` must write `payload` bytes to the address that it receives.
    template <class Fill>
    End show(Call call, uint64_t bytes, size_t payload, Fill fill, Patience& patience, uint32_t flags = 0);
    // Runs a round that publishes either this member's big slot or its lack of memory for one.
    End show_big(Call call, bool fits, Patience& patience);
    bool pull(const Plan& plan, uint32_t member, uint64_t from, void* to, size_t bytes) const;
    bool pull_by_one(uint32_t member, uint64_t from, void* to, size_t bytes) const;
    // Runs the round after direct reads. The round publishes whether this member's reads succeeded.
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
    // Moves the remaining data in rounds. In round t, if `has` returns true, this member calls `write`
    // to fill its big slot. It calls `read` to read another member's big slot.
    template <class Has, class Write, class Read>
    End follow(Call call, uint64_t rounds, Patience& patience, Has has, Write write, Read read);
    uint32_t usable_plans(uint32_t doing, uint32_t kind) const;

    int fd_ = -1;
    uint64_t joined_ = 0;
    GroupHeader* header_ = nullptr;
    Algorithm chosen_[OPERATIONS] = {};
    // The plan of the next operation, if that operation can run it. Rank 0 published the plan in the last
    // matching call, so all members have the same plan. They also agree on which plans can run. Plans chosen
    // in a mismatched call are ignored.
    static constexpr uint8_t UNKNOWN = 0xff;
    uint8_t next_[OPERATIONS][TRIED];
    std::vector<Tuner> tuners_;  // only on rank 0
    struct Timed {
        bool is = false;
        uint32_t doing = 0, kind = 0, plan = 0;
        uint32_t filled = 0;  // ns that the slowest member took to write its data
        int64_t since = 0;    // time at which the last member arrived
    };
    Timed timed_;                     // the current operation
    Timed before_;                    // the previous operation, until all members have published its times
    uint32_t took_ = 0, filled_ = 0;  // published with the next cell
    uint32_t round_flags_ = 0;        // published with every round of the operation
    MemberSlot* slots_ = nullptr;
    unsigned char* small_ = nullptr;
    unsigned char* big_ = nullptr;
    ChannelEntry* entries_ = nullptr;
    size_t control_ = 0, big_length_ = 0, length_ = 0, result_size_ = 0;
    uint32_t round_ = 0;
    uint32_t pauses_ = 0;
    // left_out_: how many of the next waits skip the yield; leave_out_: how many waits had to skip it after
    // the last long yield
    uint32_t left_out_ = 0, leave_out_ = 0;
    std::atomic<bool> leaving_ = false;  // true: all waits must give up
    uint64_t proof_ = 0, identity_ = 0;
    std::atomic<bool> broken_ = false;  // true: all waits must give up, and no operation may start
    bool fenced_ = false, reserved_ = false;
    bool direct_ = true;  // false after any member failed to read another member's memory
    Use in_use_;
};

}  // namespace flowchan
