// The Python objects: a Channel on its transport, and its ports In and Out.
//
// The transport's lock guards only part of a port's data. The GIL guards the rest. In a free-threaded Python,
// the critical section of the port object guards it. A thread holds that section while it uses the port, and
// releases it wherever it would release the GIL.
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

// One function for each transport: `ch.with(Each{[](LocalQueue&) {}, [](Ring&) {}})`.
template <class... F>
struct Each : F... {
    using F::operator()...;
};

class Channel {
    std::unique_ptr<LocalQueue> queue_;  // either this or `ring_`
    std::shared_ptr<Ring> ring_;

  public:
    std::atomic<bool> lends = false;  // true once memory was lent
    // blocks of the ring that writers in this process are filling or have put
    std::vector<std::weak_ptr<Block>> loans;
    std::string name;
    uint64_t capacity = 0;
    uint64_t max_bytes = 0;  // UINT64_MAX: no limit (threads)
    std::atomic<uint64_t> forks = fork_count;
    bool hosts = false;           // ring: descriptors cannot reach some of its readers
    bool elsewhere = false;       // another process owns the channel; items pass through two local rings
    nb::object reading, writing;  // elsewhere: these two rings, once they are open
    // elsewhere: value of `fork_count` when the rings were opened
    std::atomic<uint64_t> opened_in = fork_count;
    uint64_t moved_there = 0;        // elsewhere: number of puts and gets that the owner last reported
    int64_t last_found_nothing = 0;  // elsewhere: when the owner last had nothing for a select
    // ring: the session of this process's plain calls, opened when it is first needed
    std::atomic<uint32_t> plain = 0;
    // coroutines of this process that wait for this channel; read only for stats, so all accesses are relaxed
    std::atomic<uint32_t> awaiting = 0;

    Channel(uint64_t capacity, bool processes, uint64_t max_bytes, std::string name);
    Channel(int fd, int socket, std::string name);
    ~Channel();

    // Call `f` with the channel's transport. No other code checks which transport that is.
    template <class F>
    [[gnu::always_inline]] auto with(F&& f) const {
        return queue_ ? f(*queue_) : f(*ring_);
    }
    const char* across() const;
    bool reaches_processes() const;
    std::string describe() const;  // "channel 'name'" or "Channel(64, across='threads')"
    uint32_t plain_session();      // returns 0 for threads; throws nb::python_error
    Channel& through(Side side);   // the ring that calls in this process use; throws nb::python_error
    void fetch(Py_ssize_t most);   // elsewhere: asks for up to `most` items; throws nb::python_error
    bool asks_again(Side side);    // elsewhere: asks the owner; true: retry; throws nb::python_error
    bool usable();                 // false with a Python error set if a forked child uses a `threads` channel
};

bool is_out_of_time();  // true if the current error is an Empty or Full that did not come from a signal
                        // handler

// How long to wait for items that the owner says it has sent, and how often to check whether another thread
// has taken them.
constexpr int64_t ON_ITS_WAY_NS = 1'000'000'000, ASK_AGAIN_NS = 20'000'000;

// Perform `call` on the channel's ring in this process. A call that is about to fail at its deadline first
// asks the owner once. No Python code runs between `call` and the return of its result.
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

// Call `f` with the channel's transport, under the transport's lock.
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

// Call `f` under the lock if the transport is a ring; do nothing for a queue. Only a ring outlives users that
// die.
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

// Check for dead processes, if the time for the next check has come.
template <class M>
void check_for_dead(M& transport) {
    if (!Traits<M>::is_check_due(transport)) return;
    Wakes wakes;
    Locked lock(transport);
    Traits<M>::check_for_dead(transport, wakes);
    lock.unlock(wakes);
}

struct Out;

// Follows sampled items through one worker. All ports of the worker share this object.
//
// Algorithm. A sampled item travels in a box (items/sampled_item.py), whose marks identify the sample. A get
// takes the item out of its box. The worker then processes that item until the port's next get, so each put
// in between boxes its output with the same marks. The recorder is a Python object, and is called only for
// sampled items.
struct ItemTracing {
    nb::object recorder;  // has the methods took, finished, boxed and sent
    // Several threads may use the ports. The counters only decide which items to sample, so relaxed memory
    // order is enough.
    std::atomic<uint64_t> countdown = 0;  // puts until the next sample; 0: never
    std::atomic<uint32_t> held = 0;       // number of ports that hold sampled items now

    ItemTracing(nb::object recorder, uint64_t countdown)
        : recorder(std::move(recorder)), countdown(countdown) {}
    bool boxes_next_put() {
        const uint64_t left = countdown.load(std::memory_order_relaxed);
        if (left > 1) countdown.store(left - 1, std::memory_order_relaxed);
        return left == 1 || held.load(std::memory_order_relaxed) > 0;
    }
};

// Release the items. The destructor of an item may run any code. So the caller must not hold the lock, and
// must have removed the items from every container that the garbage collector visits.
inline void drop_items(const std::vector<LocalQueue::Item>& items) {
    for (const LocalQueue::Item& item : items) Py_DECREF(item.object);
}

// Makes threads that share a port get one at a time, because each get finishes the items of the previous one.
// A thread may enter again from a signal handler, or from code that unpickles an item.
class Turn {
  public:
    // Wait for the caller's turn and return Done. Return NotNow at the deadline, and Interrupted with a
    // Python error set after a signal.
    Step enter(Deadline deadline);
    void leave();
    bool is_own() const { return owner_.load(std::memory_order_relaxed) == me(); }
    void forget() { owner_ = depth_ = 0; }  // for a forked child, which has no other threads

  private:
    static uint32_t me() {  // cheaper than the system call gettid()
        static std::atomic<uint32_t> last = 0;
        static thread_local const uint32_t number = ++last;
        return number;
    }
    // number of the thread whose turn it is; also the futex word on which the other threads sleep
    std::atomic<uint32_t> owner_ = 0;
    std::atomic<uint32_t> waiting_ = 0;
    uint32_t depth_ = 0;
};

struct In {
    nb::object channel;
    Channel* ch;
    ReaderState state;
    std::vector<LocalQueue::Item> leased_items;  // threads: leased items; the unfinished ones are given back
    std::vector<Out*> feeds;                     // the writers of the outputs for the leased item
    std::atomic<uint64_t> forks = fork_count;
    uint64_t generation = 0;
    std::atomic<bool> open = true;
    Turn turn;
    std::atomic<bool> copying = false;  // an item is being decoded in place, so the port cannot close now
    // Called with (stand-in, deaths, error or None) instead of returning the item to the caller. That happens
    // if the item cannot be unpickled, or if `max_deaths` workers died while processing it (0: no limit).
    uint64_t max_deaths = 0;
    nb::object on_poison;
    std::vector<nb::object> due;     // functions to call once the leased items are finished
    ItemTracing* tracing = nullptr;  // `tracing_owner` keeps this alive
    nb::object tracing_owner;
    bool holds_traced = false;  // whether a leased item is sampled

    In(nb::object channel, int session);
    ~In();
    void close(bool finished);
    void drop();  // for a port that no user has any more: gives back its leased items
    void call_due();

  private:
    void leave(LocalQueue& queue, bool finished);
    void leave(Ring& ring, bool finished);
};

// State of a receive: the item that this thread is receiving. Its contents may register a call, which runs
// once the item is finished and no other reader can get it. A port finishes its leased items when it takes
// the next one.
class Receiving {
  public:
    Receiving() : outer_(std::exchange(current_, this)) {}
    ~Receiving() { current_ = outer_; }
    Receiving(const Receiving&) = delete;
    void received(In* in);
    static void when_finished(nb::object call);  // calls at once if this thread is not receiving an item

  private:
    static thread_local Receiving* current_;
    Receiving* const outer_;
    std::vector<nb::object> calls_;
};

struct Out {
    nb::object channel;
    Channel* ch;
    WriterState state;
    nb::object reader;  // the In that numbers the input items; may be null
    std::atomic<uint64_t> forks = fork_count;
    uint64_t generation = 0;
    std::atomic<bool> open = true;
    // number of large items that threads are writing into slots; the port cannot close before that ends
    std::atomic<uint32_t> copying = 0;
    // true if outputs take turns to keep their order, as soon as the stage has more than one worker
    bool may_have_turns = false;
    // For a source: all outputs belong to item 0, so that a replacement can skip those that were put.
    bool replays = false;
    ItemTracing* tracing = nullptr;  // `tracing_owner` keeps this alive
    nb::object tracing_owner;

    Out(nb::object channel, int session);
    ~Out();
    In* follows() const { return reader.is_valid() ? nb::inst_ptr<In>(reader) : nullptr; }
    void close();

  private:
    void leave(LocalQueue& queue);
    void leave(Ring& ring);
};

// Each of these returns a new reference, or null with a Python error set. `in` or `out` is the port of the
// call, or null for a plain call.
PyObject* put_item(Channel& ch, Out* out, PyObject* item, Deadline deadline);
Caller writing(Channel& ch, const Out* out, uint64_t size, bool waits);  // the identity of a put
PyObject* get_item(Channel& ch, In* in, Deadline deadline, bool keep, bool iterating);
// Set the class of stand-ins for items that cannot be unpickled. `is_of_a_handler` returns whether an error
// came from a signal handler.
void set_unreadable(PyObject* unreadable, PyObject* is_of_a_handler);
// Set the class that boxes sampled items.
void set_traced(PyObject* traced);
bool is_traced(PyObject* item);
// Take a sampled item out of its box. This steals the reference to `box`. `in` may be null.
PyObject* unboxed(In* in, PyObject* box);
// Call a method of the recorder with the identity of the port, and with the item unless it is null. Return
// the result. If the method raises, report the error as unraisable and return an invalid object.
nb::object call_recorder(ItemTracing& tracing, const char* method, const void* port,
                         PyObject* item = nullptr);
// Return whether the current Python error came from a signal handler, and so not from the item.
bool is_interrupt();
// Set the function to call if an item was encoded for another host but could not be put.
void set_not_put(PyObject* not_put);
nb::object loan(Channel& ch, Out* out, uint64_t size, nb::handle timeout);
PyObject* put_all(Channel& ch, Out* out, PyObject* items, Deadline deadline);
PyObject* get_all(Channel& ch, In* in, Py_ssize_t most, Deadline deadline);

// Record which kind of code is processing the leased items of `in` (R10). If `in` is null, do nothing.
void runs(In* in, Session::At at);

// Finish the leased items, so the writers that follow this reader end their turns. Return false with a Python
// error set.
bool pass_turns(In& in);
// Return whether the leased item's only output has already been put, by a worker that died after that.
bool has_its_output(In& in);

// Try once without waiting. Return Done, NotNow or Drained. For any other step, the Python error is set.
Step try_put(Channel& ch, Out* out, PyObject* item);
Step try_get(Channel& ch, In* in, PyObject*& item);

bool parse_deadline(PyObject* timeout, Deadline& deadline);

// Return whether this process can use the port; if not, a Python error is set. A port moves to a forked child
// when the child first uses it.
template <class Port>
bool ready(Port& port);

nb::object select_one(nb::list gets, nb::list puts, nb::handle timeout, nb::list ready);

// An entry in the queue of waiting calls: the wait list of a LocalQueue, or the wait queue of a Ring. A
// caller that waits for several channels has one for each.
class Place {
  public:
    Place(Channel* ch, const Caller& caller) : ch(ch), caller(caller) {}
    Place(const Place&) = delete;

    void enter(bool again);
    void leave(bool unused);  // `unused`: wake another waiter if this caller was woken in vain
    void pass_on();           // wakes another waiter instead
    bool changed() const { return word_->load(std::memory_order_relaxed) != seen_; }
    WaitedWord waited() const {
        return {seen_, reinterpret_cast<uint64_t>(word_),
                FUTEX_WORD_32 | (ch->reaches_processes() ? 0 : FUTEX_PRIVATE_FLAG), 0};
    }

    Channel* const ch;
    const Caller caller;

  private:
    // Only the element for the channel's own transport is used.
    std::tuple<Traits<LocalQueue>::Waiting, Traits<Ring>::Waiting> waiting_;
    std::atomic<uint32_t>* word_ = nullptr;
    uint32_t seen_ = 0;
};

// A coroutine that waits for one channel.
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

// The sleep of the thread that waits on behalf of the coroutines of an event loop. The doorbell ends it.
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

// Follow sampled items through this port from now on. Pass None to stop.
template <class Port>
void trace(Port& port, nb::object tracing) {
    port.tracing = tracing.is_none() ? nullptr : nb::inst_ptr<ItemTracing>(tracing);
    port.tracing_owner = std::move(tracing);
}

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
