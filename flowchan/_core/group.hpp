// A group: members that take part in collectives over memory that they share.
//
// Algorithm. Every operation is a sequence of rounds, the same for all members. In a round each member writes
// what it has to show into memory of its own, then *publishes*: it stores the round's number into its cell.
// Then it waits until the cells of all the others have that number, and reads what they show. Cells and slots
// exist twice, for odd and even rounds. Nobody says that he has read: who publishes round r + 2, and so writes
// over what he showed in round r, has seen everybody publish r + 1, which each did after reading round r.
//
// Invariants.
//  - Only its owner writes a seat, a cell, a slot. What was published stays, whatever becomes of its owner.
//  - All decide alike. A round is complete for everybody once everybody has published it. A member gives up
//    only when a cell that it waits for can never have the number: its owner is gone, and the number is not
//    there afterwards. So all survivors complete an operation, or none does. What is decided besides (that
//    calls do not match, that there is no memory) follows from what the first round shows to all.
//  - Who gives up in the middle of an operation publishes nothing any more: it is as good as dead. So is who
//    leaves, and leaving waits for the thread that is inside: what the others see of a member that is gone is
//    all that there will ever be.
//
// Large arrays are read from where they lie, by the system call that debuggers read with. The first round shows
// where that is; a second one says that it has been read, and nobody returns before it: so what is read is as it
// was shown, unless its owner has given up meanwhile, which is looked at after reading. Where somebody could not
// read, all find so in the second round; then the slots are used, now and from then on.
//
// Waking. Who sleeps counts itself in `sleepers` of the seat whose cell it waits for; who publishes looks
// there, after the store and without a fence in between: the sleeper fences for both (membarrier), and looks
// again before it sleeps. Where membarrier is refused, publishers fence (`fenced`). A lost wake-up would cost
// a slice, not a hang.
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
constexpr size_t INLINE = 32;        // bytes that fit beside the round's number
constexpr size_t SMALL = 16 * 1024;  // bytes of a small slot
constexpr uint32_t MOST_MEMBERS = 1024;

// One for each member; hardly ever are there so many that they need the heap.
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
    uint64_t key = 0;  // what the call is; those of one operation are equal
    uint64_t bytes = 0;
    uint32_t filled = 0;  // ns that it took to write what this operation shows, if that is timed
    uint32_t took = 0;    // ns of the last one that was, from when all had come
    unsigned char data[INLINE] = {};
};
static_assert(sizeof(Cell) == LINE);

enum Gone : uint32_t { HERE, LEFT, GAVE_UP };
// What a cell says besides. IN_PLACE: what is to be read lies in its owner's memory.
// TELLS: of rank 0, in which manner the next one of about this size is done. Besides, everybody says its own.
constexpr uint32_t NO_MEMORY = 1, IN_PLACE = 2, COULD_NOT = 4, TELLS = 8;
constexpr uint32_t OWN_MANNER = 8, NEXT_MANNER = 16;  // from which bit on

struct Seat {
    Cell cell[2];
    alignas(LINE) std::atomic<uint32_t> sleepers{0};  // others that sleep until one of the cells changes
    alignas(LINE) std::atomic<uint64_t> owner{0};     // the process that joined as this member
    std::atomic<uint64_t> started{0};
    std::atomic<uint32_t> gone{HERE};
    std::atomic<uint32_t> over{0};       // it has left, whether it had given up before or not
    std::atomic<uint32_t> held{0};       // until somebody has joined: Member::hold
    std::atomic<uint32_t> operation{0};  // how many it has begun; for messages only, as is the next
    std::atomic<uint32_t> doing{0};      // which one was the last; the top bit: it is inside
    std::atomic<uint64_t> proof{0};      // where in its own memory `proof_of` this seat lies
};

struct GroupHeader {
    static constexpr uint64_t MAGIC = 0x33707567'776f6c66;  // "flowgrup"3
    uint64_t magic = MAGIC;
    uint32_t size = 0;
    uint32_t crowded = 0;  // there are more members than cores; the same for all, so it is its maker's word
    std::atomic<uint32_t> fenced{0};
    std::atomic<uint32_t> disbanded{0};                               // nobody begins an operation any more
    std::atomic<uint32_t> took[OPERATIONS][TRIED][ALL_MANNERS] = {};  // ns, when it was last tried; 0: never
};

// Where a member has something for another one, a channel or the memory of another group: a descriptor of its
// process.
enum Table : uint32_t { CHANNELS, OFFERS, TABLES };
struct Lane {
    uint64_t pid = 0, fd = 0;
    std::atomic<uint64_t> inode{0};  // 0: there is none yet; partner: Member::lane_from
};

// How an operation ended.
// Not begun: Closed; Taken, by another process; Within one, as the handler of a signal; Busy, another thread
// was in one till time was up.
enum class End { Done, Gone, Mismatch, NoMemory, TimedOut, Interrupted, Closed, Taken, Within, Busy };

// Until when a call waits, and what it does meanwhile.
class Patience {
  public:
    explicit Patience(Deadline deadline) : deadline(deadline) {}
    virtual ~Patience() = default;
    // Called when what is awaited is not there at a glance, or there is much to move; any number of times.
    virtual void waits() {}
    // Called every 20 ms while it waits: whether it is to be given up.
    virtual bool interrupted(int64_t) { return false; }
    const Deadline deadline;
};

// What of a member the others can see.
struct Sight {
    uint64_t pid;
    uint32_t gone, operation, doing;
    bool alive, arrived, over;
};

class Member {
  public:
    static int make(uint32_t size);  // the descriptor of a new group's memory; throws std::system_error

    Member(int fd, uint32_t rank);  // owns `fd`; throws system_error, invalid_argument
    ~Member();
    Member(const Member&) = delete;

    const uint32_t rank, size;
    int fd() const { return fd_; }
    // Whoever may still join as this member has its descriptor, whose open file description holds a lock from
    // now on: once nobody has it any more, the lock is gone, and the others know.
    void hold();
    End join();  // this process is the member from now on; Taken: another one is
    bool joined() const { return joined_ == process_number_now(); }
    bool is_taken() const { return joined_ && !joined(); }  // by the process that this one was forked from
    // Any number of times. An operation that another thread is inside ends first, and publishes nothing after; in
    // one that the caller is inside, as the handler of a signal, it is done at the end.
    void leave();
    void retire();                    // the same, as who has given up
    void count_out(uint32_t member);  // it ended before it joined
    // By anybody who has the memory. Each that would begin an operation gives up instead, so what others are in
    // ends as it does when one dies between two of them.
    void disband() { header_->disbanded = 1; }
    bool disbanded() const { return header_->disbanded; }
    Sight see(uint32_t member) const;
    // Shows `member` where this one has something for it. False, with errno: there is no memory.
    bool show_lane(Table table, uint32_t member, uint64_t fd, uint64_t inode);
    const Lane& lane_from(Table table, uint32_t member) const {
        return lanes_[place_of(table, member, rank)];
    }
    bool broken() const { return broken_; }

    // How an operation on so many bytes is done: as chosen, where that can be, else as is best.
    const Manner& manner_of(uint32_t doing, uint64_t bytes) const { return MANNERS[number_of(doing, bytes)]; }
    // How many ns one of about that size took at least, when it was last tried in that manner; 0: never yet, or it
    // can't be any more.
    uint32_t took(uint32_t doing, uint64_t bytes, uint32_t manner) const {
        const uint32_t kind = kind_of(bytes);
        if (kind == UNTRIED || !(possible(doing, kind) >> manner & 1)) return 0;
        return header_->took[doing % OPERATIONS][kind][manner].load(std::memory_order_relaxed);
    }
    // All members choose the same, or their calls do not match.
    void choose(uint32_t doing, Way way) { chosen_[doing % OPERATIONS] = way; }

    // One operation at a time, by the thread that has this.
    class Use {
      public:
        void lock() {
            while (!try_lock_for(SLICE_NS)) {}
        }
        bool try_lock() {
            uint32_t free = 0;
            return word_.compare_exchange_strong(free, 1) && mine();  // partner: unlock
        }
        bool try_lock_for(int64_t ns) {
            if (word_.exchange(2) == 0) return mine();
            futex_wait(word_, 2, ns, false);
            return word_.exchange(2) == 0 && mine();
        }
        void unlock() {
            by_ = std::thread::id();
            if (word_.exchange(0) == 2) futex_wake(word_, 1, false);
        }
        bool is_mine() const { return by_ == std::this_thread::get_id(); }

      private:
        bool mine() { return by_ = std::this_thread::get_id(), true; }

        std::atomic<uint32_t> word_{0};  // 1: held; 2: others may sleep until it is free
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
        int root = -1;  // below 0: all members get the result
    };
    End allreduce(Call call, const Combining& what, Patience& patience);
    // `in` has `count` elements for each member; `out` gets those for this one.
    End reduce_scatter(Call call, const Combining& what, Patience& patience);
    End broadcast(Call call, void* data, size_t bytes, uint32_t root, Patience& patience);
    // What each member has, of any size. `place` is called once, with the sizes, and says where each goes;
    // null entries are left out; false: it is given up. `shown`: where it lies meanwhile, null if it is large.
    struct Place {
        virtual ~Place() = default;
        virtual bool operator()(const Sizes& sizes, const ByRank<const void*>& shown, ByRank<void*>& to) = 0;
    };
    End allgather(Call call, const void* in, size_t bytes, Place& place, Patience& patience);
    // in[j] of in_sizes[j] bytes goes to member j; out[i] of out_sizes[i] bytes comes from member i.
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
    // What lies in the memory of that member and hardly of any other process: a process may have the number of
    // one that died, or of one that is called otherwise elsewhere.
    uint64_t proof_of(uint32_t member) const {
        return seat(member).owner * 0x9e3779b97f4a7c15 ^ identity_ ^ member;
    }
    size_t place_of(Table table, uint32_t from, uint32_t to) const {
        return (size_t(table) * size + from) * size + to;
    }
    Seat& seat(uint32_t member) const { return seats_[member]; }
    Cell& cell(uint32_t member) const { return seats_[member].cell[round_ & 1]; }
    unsigned char* small(uint32_t member) const {
        return small_ + (size_t(member) * 2 + (round_ & 1)) * SMALL;
    }
    unsigned char* big(uint32_t member) const {
        return big_ + (size_t(member) * 2 + (round_ & 1)) * (BIG + result_size_);
    }
    unsigned char* result(uint32_t member, uint32_t of_round) const {
        return big_ + (size_t(member) * 2 + (of_round & 1)) * (BIG + result_size_) + BIG;
    }
    // Where a payload of a single round lies.
    unsigned char* payload(uint32_t member, size_t bytes) const {
        return bytes <= INLINE ? cell(member).data : bytes <= SMALL ? small(member) : big(member);
    }
    // Which kind an operation on so many bytes is of those that are tried; UNTRIED: all manners are alike.
    static uint32_t kind_of(uint64_t bytes);
    uint64_t shown_at(uint32_t member) const { return *reinterpret_cast<const uint64_t*>(cell(member).data); }
    End begin(Call call);
    End finish(End end);
    void give_up();
    void depart();
    void wake_all();
    void publish(Call call, uint32_t flags, uint64_t bytes);
    // One more round of an operation that has been judged.
    End next(Call call, Patience& patience);
    // The first round, with `payload` bytes to show, which `fill` writes where it is told to.
    template <class Fill>
    End show(Call call, uint64_t bytes, size_t payload, Fill fill, Patience& patience, uint32_t flags = 0);
    // A round in which this member shows what it has written into its big slot, if there is memory.
    End show_big(Call call, bool fits, Patience& patience);
    bool pull(const Manner& manner, uint32_t member, uint64_t from, void* to, size_t bytes) const;
    bool pull_by_one(uint32_t member, uint64_t from, void* to, size_t bytes) const;
    // The round after members have read each other's memory, this one with success or not.
    End have_read(Call call, bool could, Patience& patience);
    End await_all(Patience& patience);
    End await(uint32_t member, Patience& patience);
    bool is_here_after_yields(uint32_t member);
    End judge(Call call) const;
    bool is_here(uint32_t member) const;
    bool may_join(uint32_t member) const;
    bool any_is_lost(uint32_t from) const;
    bool reserve_big();  // this member's big slots
    uint32_t number_of(uint32_t doing, uint64_t bytes) const;
    uint32_t possible(uint32_t doing, uint32_t kind) const;
    uint32_t first_of(uint32_t doing, uint32_t kind) const;
    const Manner& begin_trial(uint32_t doing, uint64_t bytes);
    void have_come(Call call);
    void end_trial(bool done);
    const Manner& its_manner(uint32_t member) const { return MANNERS[cell(member).flags >> OWN_MANNER & 15]; }
    End alone(Call call, const void* in, void* out, size_t bytes);
    End exchange(const Manner& manner, Call call, const Combining& what, Patience& patience);
    End slices(const Manner& manner, Call call, const Combining& what, Patience& patience);
    struct Gathering;
    End take_shown(Call call, Gathering& all, Patience& patience);
    struct Swapping;
    bool sizes_match() const;
    End take_shown(Call call, Swapping& all, Patience& patience);
    // What has not been shown follows in rounds: in round t `write` puts what this member has into its big slot,
    // if it `has` something, and `read` takes that of another one.
    template <class Has, class Write, class Read>
    End follow(Call call, uint64_t rounds, Patience& patience, Has has, Write write, Read read);
    uint32_t ways_of(uint32_t doing, uint32_t kind) const;

    int fd_ = -1;
    uint64_t joined_ = 0;
    GroupHeader* header_ = nullptr;
    Way chosen_[OPERATIONS] = {};
    // In which manner the next operation is done, if that is possible then: the same for all, as rank 0 has said in
    // the last one that all called alike. So is what is possible; what was chosen for one that was not done is no part
    // of it.
    static constexpr uint8_t UNKNOWN = 0xff;
    uint8_t next_[OPERATIONS][TRIED];
    std::vector<Trial> trials_;  // of rank 0
    struct Timed {
        bool is = false;
        uint32_t doing = 0, kind = 0, manner = 0;
        uint32_t filled = 0;  // ns that it took whoever took longest to write what it shows
        int64_t since = 0;    // when all had come
    };
    Timed timed_;                     // this operation
    Timed before_;                    // the last one, where it isn't known yet how long it took the others
    uint32_t took_ = 0, filled_ = 0;  // for the cell
    uint32_t says_ = 0;               // flags of all rounds
    Seat* seats_ = nullptr;
    unsigned char* small_ = nullptr;
    unsigned char* big_ = nullptr;
    Lane* lanes_ = nullptr;
    size_t control_ = 0, big_length_ = 0, length_ = 0, result_size_ = 0;
    uint32_t round_ = 0;
    uint32_t pauses_ = 0;
    uint32_t left_out_ = 0, leave_out_ = 0;  // waits without yields: from now on, and last time
    std::atomic<bool> leaving_ = false;      // what still waits gives up
    uint64_t proof_ = 0, identity_ = 0;
    std::atomic<bool> broken_ = false;  // likewise, and nothing is begun any more
    bool fenced_ = false, reserved_ = false;
    bool direct_ = true;  // until one member could not read another one's memory
    Use in_use_;
};

}  // namespace flowchan
