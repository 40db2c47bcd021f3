// The Python objects: Channel over its transport, and its ports In and Out.
//
// The GIL guards the port's data that the transport's lock does not guard. Without a GIL, the critical
// section of the port's object does. Every thread holds it while it uses the port, and releases it where it
// would release the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "blocking.hpp"
#include "codec.hpp"
#include "sleeping.hpp"
#include "system.hpp"

namespace flowchan {

// One function for each transport where they differ: `ch.with(Each{[](LocalQueue&) {}, [](Ring&) {}})`.
template <class... F>
struct Each : F... {
    using F::operator()...;
};

class Channel {
    std::unique_ptr<LocalQueue> queue_;  // one of the two
    std::shared_ptr<Ring> ring_;

  public:
    std::atomic<bool> lends = false;          // whether there ever was a loan
    std::vector<std::weak_ptr<Block>> loans;  // memory of the ring that writers here fill, or have put
    std::string name;
    uint64_t capacity = 0;
    uint64_t max_bytes = 0;  // UINT64_MAX: no limit (threads)
    std::atomic<uint64_t> forks = fork_count;
    bool hosts = false;           // ring: it has readers that no descriptor can reach
    bool elsewhere = false;       // another process owns it: items pass through two rings of this process
    nb::object reading, writing;  // elsewhere: those rings, once they are open
    std::atomic<uint64_t> opened_in = fork_count;  // elsewhere: `fork_count` of the process that opened them
    uint64_t moved_there = 0;         // elsewhere: the owner's puts and gets when it was last asked
    int64_t last_found_nothing = 0;   // elsewhere: when the owner last had nothing for a select
    std::atomic<uint32_t> plain = 0;  // ring: this process's own session, opened when first needed
    std::atomic<uint32_t> awaiting =
        0;  // coroutines of this process that wait here: a count for stats, no partner

    Channel(uint64_t capacity, bool processes, uint64_t max_bytes, std::string name);
    Channel(int fd, int socket, std::string name);
    ~Channel();

    // Call `f` with its transport. This is the only place that checks which transport it is.
    template <class F>
    auto with(F&& f) const {
        return queue_ ? f(*queue_) : f(*ring_);
    }
    const char* across() const;
    bool reaches_processes() const;
    std::string describe() const;  // "channel 'name'" or "Channel(64, across='threads')"
    uint32_t plain_session();      // 0 for threads; throws nb::python_error
    Channel& through(Side side);   // the ring for calls of this process; throws nb::python_error
    void fetch(Py_ssize_t most);   // elsewhere: prefetches up to so many items; throws nb::python_error
    bool asks_again(Side side);    // elsewhere: asks the owner; true: try again; throws nb::python_error
    bool usable();                 // false with a Python error set: a `threads` channel in a forked child
};

bool is_out_of_time();  // whether the current error is Empty or Full, and no signal handler raised it

// How long to wait for items that the owner says it has sent, and how often to ask whether another thread has
// taken them.
constexpr int64_t ON_ITS_WAY_NS = 1'000'000'000, ASK_AGAIN_NS = 20'000'000;

// Perform `call` on the channel's ring in this process. Before the call fails at its deadline, ask the owner
// once. No Python code runs between the call and the return of its result.
template <class Call>
PyObject* in_time(Channel& ch, Side side, Deadline deadline, Call&& call) {
    if (!ch.elsewhere) return call(ch, deadline);
    Channel& port = ch.through(side);
    PyObject* done = call(port, deadline);
    if (done || deadline.at == NEVER || !is_out_of_time()) return done;
    nb::python_error late;
    const int64_t give_up = now_ns() + ON_ITS_WAY_NS;
    while (ch.asks_again(side)) {
        done = call(port, Deadline{now_ns() + ASK_AGAIN_NS});
        if (done || !is_out_of_time()) return done;
        PyErr_Clear();
        if (now_ns() > give_up) break;
    }
    late.restore();
    return nullptr;
}

// Call `f` with the transport of a channel, under its lock.
template <class F>
auto locked(Channel& ch, F&& f) {
    if (!ch.usable()) throw nb::python_error();
    return ch.with([&](auto& transport) {
        Wakes wakes;
        Locked lock(transport);
        auto result = f(transport, wakes);
        lock.unlock(wakes);
        return result;
    });
}

// Do the same for rings only, whose processes may die and leave state behind. Threads end with their process.
template <class F>
void locked_ring(Channel& ch, F&& f) {
    ch.with(Each{[](LocalQueue&) {},
                 [&](Ring& ring) {
                     Wakes wakes;
                     Locked lock(ring);
                     f(ring, wakes);
                     lock.unlock(wakes);
                 }});
}

// Look for dead processes when it is time to.
template <class M>
void check_for_dead(M& transport) {
    if (!Traits<M>::is_check_due(transport)) return;
    Wakes wakes;
    Locked lock(transport);
    Traits<M>::check_for_dead(transport, wakes);
    lock.unlock(wakes);
}

struct Out;

// Release the items, unlocked. No container that the garbage collector visits may still have them: the
// destructor of an item may call any code.
inline void drop_items(const std::vector<LocalQueue::Item>& items) {
    for (const LocalQueue::Item& item : items) Py_DECREF(item.object);
}

// Serialises the threads that share a port for gets, since each get finishes the items of the one before. A
// thread may enter again, from a signal handler or from code that unpickles an item.
class Turn {
  public:
    // Return Done once it is the caller's turn; else NotNow, or Interrupted with a Python error set.
    Step enter(Deadline deadline);
    void leave();
    bool is_own() const { return owner_.load(std::memory_order_relaxed) == me(); }
    void forget() { owner_ = depth_ = 0; }  // for a forked child, which has no other threads

  private:
    static uint32_t me() {  // not gettid(), which is a system call
        static std::atomic<uint32_t> last = 0;
        static thread_local const uint32_t number = ++last;
        return number;
    }
    std::atomic<uint32_t> owner_ = 0;  // number of a thread; also the futex word that the others sleep on
    std::atomic<uint32_t> waiting_ = 0;
    uint32_t depth_ = 0;
};

struct In {
    nb::object channel;
    Channel* ch;
    ReaderState state;
    std::vector<LocalQueue::Item>
        leased_items;         // threads: the leased items, to be given back if they are not finished
    std::vector<Out*> feeds;  // the writers whose outputs belong to the leased item
    std::atomic<uint64_t> forks = fork_count;
    uint64_t generation = 0;
    std::atomic<bool> open = true;
    Turn turn;
    std::atomic<bool> copying = false;  // an item is being read in place: the port cannot be closed now
    // Receives, in the caller's place, an item that cannot be used: (its stand-in, deaths, error or None).
    // That is an item that cannot be unpickled, or one with which `max_deaths` workers have died (0: no such
    // limit).
    uint64_t max_deaths = 0;
    nb::object on_poison;
    std::vector<nb::object> due;  // callbacks for when the leased items are finished

    In(nb::object channel, int session);
    ~In();
    void close(bool finished);
    void drop();  // for a port without users: gives its leased items back
    void call_due();

  private:
    void leave(LocalQueue& queue, bool finished);
    void leave(Ring& ring, bool finished);
};

// An item that this thread is receiving now. Its contents may ask for a callback when the item is finished
// and no other reader can get it. A port finishes its leased items when it takes the next one.
class Receiving {
  public:
    Receiving() : outer_(std::exchange(current_, this)) {}
    ~Receiving() { current_ = outer_; }
    Receiving(const Receiving&) = delete;
    void received(In* in);
    static void when_finished(nb::object call);  // at once if no item is being received

  private:
    static thread_local Receiving* current_;
    Receiving* const outer_;
    std::vector<nb::object> calls_;
};

struct Out {
    nb::object channel;
    Channel* ch;
    WriterState state;
    nb::object reader;  // the In that numbers the items, or null
    std::atomic<uint64_t> forks = fork_count;
    uint64_t generation = 0;
    std::atomic<bool> open = true;
    std::atomic<uint32_t> copying =
        0;  // large items that threads are writing into their slots: the port cannot be closed now
    bool may_have_turns = false;  // as soon as its stage has several workers
    bool replays =
        // for a source: all its outputs belong to one item, number 0, so that a replacement can skip them
        false;

    Out(nb::object channel, int session);
    ~Out();
    In* follows() const { return reader.is_valid() ? nb::inst_ptr<In>(reader) : nullptr; }
    void close();

  private:
    void leave(LocalQueue& queue);
    void leave(Ring& ring);
};

// Each returns a new reference, or null with a Python error set. `in`/`out` is the port used, or null for a
// plain call.
PyObject* put_item(Channel& ch, Out* out, PyObject* item, Deadline deadline);
Caller writing(Channel& ch, const Out* out, uint64_t size, bool waits);  // the identity of a put
PyObject* get_item(Channel& ch, In* in, Deadline deadline, bool keep, bool iterating);
// Set the stand-in class for items that cannot be unpickled. `is_of_a_handler` tells whether an error came
// from a signal handler.
void set_unreadable(PyObject* unreadable, PyObject* is_of_a_handler);
void set_not_put(PyObject* not_put);  // is called with an item that was encoded for another host, but not put
nb::object loan(Channel& ch, Out* out, uint64_t size, nb::handle timeout);
PyObject* put_all(Channel& ch, Out* out, PyObject* items, Deadline deadline);
PyObject* get_all(Channel& ch, In* in, Py_ssize_t most, Deadline deadline);

// Record whose code runs now for the items that `in` leases, if there is one (R10).
void runs(In* in, Session::At at);

// Finish the leased items: the writers that follow pass their turn. Return false with a Python error set.
bool pass_turns(In& in);
// Return whether the only output of the leased item is already out: the previous holder died after it put it.
bool has_its_output(In& in);

// Try once without waiting. Return Done, NotNow, Drained, or a step with its Python error set.
Step try_put(Channel& ch, Out* out, PyObject* item);
Step try_get(Channel& ch, In* in, PyObject*& item);

bool parse_deadline(PyObject* timeout, Deadline& deadline);

// Return whether the port can be used here; false with a Python error set. A port that a forked child uses
// for the first time moves to that child.
template <class Port>
bool ready(Port& port);

nb::object select_one(nb::list gets, nb::list puts, nb::handle timeout, nb::list ready);

// One wait of a caller that waits on several channels: in the wait list of a LocalQueue or the wait queue of
// a Ring.
class Place {
  public:
    Place(Channel* ch, const Caller& caller) : ch(ch), caller(caller) {}
    Place(const Place&) = delete;

    void enter(bool again);
    void leave(bool unused);  // `unused`: another waiter may have the opportunity
    void pass_on();           // gives its opportunity to another waiter
    bool changed() const { return word_->load(std::memory_order_relaxed) != seen_; }
    WaitedWord waited() const {
        return {seen_, reinterpret_cast<uint64_t>(word_),
                FUTEX_WORD_32 | (ch->reaches_processes() ? 0 : FUTEX_PRIVATE_FLAG), 0};
    }

    Channel* const ch;
    const Caller caller;

  private:
    // only the one of its transport is used
    std::tuple<Traits<LocalQueue>::Waiting, Traits<Ring>::Waiting> waiting_;
    std::atomic<uint32_t>* word_ = nullptr;
    uint32_t seen_ = 0;
};

// One coroutine that waits for a channel.
struct Await {
    nb::object target;  // a channel or a port
    In* in = nullptr;
    Out* out = nullptr;
    std::optional<Place> place;
    uint64_t forks = fork_count;
    std::atomic<bool> entered = false;

    Await(nb::object target, bool reading, bool again);
    ~Await();
    nb::object channel() const;
    void leave(bool unused);
};

// Sleep of the thread that waits for the coroutines of an event loop, and the doorbell that ends it.
class Watch {
  public:
    uint32_t heard() const { return doorbell_.load(std::memory_order_relaxed); }
    void ring();
    nb::list sleep(uint32_t heard, nb::list waits, double seconds);

  private:
    std::atomic<uint32_t> doorbell_{0};
    std::atomic<bool> asleep_{false};
};

void abort_channel(Channel& ch, PyObject* cause);
nb::dict channel_stats(Channel& ch);
nb::tuple observe(nb::list channels);

extern PyMethodDef channel_methods[], in_methods[], out_methods[];
int channel_traverse(PyObject* self, visitproc visit, void* arg);
int channel_clear(PyObject* self);
int in_traverse(PyObject* self, visitproc visit, void* arg);
int out_traverse(PyObject* self, visitproc visit, void* arg);
int in_clear(PyObject* self);
void in_finalize(PyObject* self);
int out_clear(PyObject* self);
PyObject* channel_next(PyObject* self);
PyObject* in_next(PyObject* self);

}  // namespace flowchan
