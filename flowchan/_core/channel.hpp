// The Python objects: a Channel on its transport, and its ports In and Out.
//
// The transport's lock guards only part of a port's data; the GIL guards the rest. Free-threaded Python has
// no GIL, so there the critical section of the port object takes its place. A thread enters that section
// while it uses the port, and leaves it wherever it would release the GIL.
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

// Combines one function per transport into a visitor: `ch.with(Each{[](LocalQueue&) {}, [](Ring&) {}})`.
template <class... F>
struct Each : F... {
    using F::operator()...;
};

class Channel {
    std::unique_ptr<LocalQueue> queue_;  // null if the channel uses `ring_`
    std::shared_ptr<Ring> ring_;

  public:
    std::atomic<bool> lends = false;  // set by the first loan, never cleared
    // shared memory that writers in this process are filling or have put
    std::vector<std::weak_ptr<Block>> loans;
    std::string name;
    uint64_t capacity = 0;
    uint64_t max_bytes = 0;  // UINT64_MAX: no limit (threads)
    std::atomic<uint64_t> forks = fork_count;
    bool hosts = false;  // ring: some readers run on other hosts, to which descriptors cannot be sent
    // another process owns the channel, and this process reaches it through two local rings
    bool elsewhere = false;
    nb::object reading, writing;  // if `elsewhere`: the two local rings, once they are open
    // if `elsewhere`: `fork_count` at the time when the rings were opened
    std::atomic<uint64_t> opened_in = fork_count;
    uint64_t moved_there = 0;  // if `elsewhere`: number of puts and gets in the owner's last report
    // if `elsewhere`: when the owner last reported to a select that the channel is empty
    int64_t last_found_nothing = 0;
    // ring: the session that plain calls of this process share, opened by the first of them
    std::atomic<uint32_t> plain = 0;
    // number of coroutines of this process that wait for this channel; only statistics use it, so relaxed
    // order is enough
    std::atomic<uint32_t> awaiting = 0;

    Channel(uint64_t capacity, bool processes, uint64_t max_bytes, std::string name);
    Channel(int fd, int socket, std::string name);
    ~Channel();

    // Call `f` with the channel's transport. Only this function checks which transport the channel has.
    template <class F>
    [[gnu::always_inline]] auto with(F&& f) const {
        return queue_ ? f(*queue_) : f(*ring_);
    }
    const char* across() const;
    bool reaches_processes() const;
    std::string describe() const;  // "channel 'name'" or "Channel(64, across='threads')"
    uint32_t plain_session();      // returns 0 for threads; throws nb::python_error
    // the channel whose ring serves calls of this process; throws nb::python_error
    Channel& through(Side side);
    void fetch(Py_ssize_t most);  // if `elsewhere`: asks for up to `most` items; throws nb::python_error
    // if `elsewhere`: asks the owner whether a retry makes sense; throws nb::python_error
    bool asks_again(Side side);
    bool usable();  // returns false and sets an error in a forked child, which cannot use a `threads` channel
};

// true if the current error is an Empty or Full that was raised by the channel, not by a signal handler
bool is_out_of_time();

// How long to wait for items that the owner has announced. Every ASK_AGAIN_NS, the caller checks whether
// another thread has taken them.
constexpr int64_t ON_ITS_WAY_NS = 1'000'000'000, ASK_AGAIN_NS = 20'000'000;

// Perform `call` on the channel's ring in this process. When it times out, ask the owner what is on its way,
// and retry. No Python code runs between `call` and the return of its result.
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

// Call `f` under the lock if the transport is a ring. Do nothing for a LocalQueue, because its users die only
// together with the queue.
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

// Clean up after dead processes if the next check is due.
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
// Algorithm. A sampled item travels in a box (items/sampled_item.py) whose marks identify the sample. A get
// unpacks the box. Until the port's next get, the worker is processing that item, so each put boxes its
// output with the same marks. The recorder is a Python object; unsampled items never call it.
struct ItemTracing {
    nb::object recorder;  // has the methods took(), finished(), boxed() and sent()
    // Several threads may use the ports. The counters only select the items to sample, so relaxed memory
    // order is enough.
    std::atomic<uint64_t> countdown = 0;  // puts until the next sample; 0: never
    std::atomic<uint32_t> held = 0;       // number of ports whose leased item is sampled

    ItemTracing(nb::object recorder, uint64_t countdown)
        : recorder(std::move(recorder)), countdown(countdown) {}
    bool boxes_next_put() {
        const uint64_t left = countdown.load(std::memory_order_relaxed);
        if (left > 1) countdown.store(left - 1, std::memory_order_relaxed);
        return left == 1 || held.load(std::memory_order_relaxed) > 0;
    }
    // Return how many of the next `most` puts need no box. After these puts, the caller must pass their
    // number to pass().
    uint64_t puts_without_box(uint64_t most) const {
        const uint64_t left = countdown.load(std::memory_order_relaxed);
        if (held.load(std::memory_order_relaxed)) return 0;
        return left ? std::min(most, left - 1) : most;
    }
    void pass(uint64_t puts) {
        const uint64_t left = countdown.load(std::memory_order_relaxed);
        if (left > puts) countdown.store(left - puts, std::memory_order_relaxed);
    }
};

// Release the items. An item's destructor may run any code, so the caller must first release the lock. The
// caller must also have removed the items from every container that the garbage collector visits.
inline void drop_items(const std::vector<LocalQueue::Item>& items) {
    for (const LocalQueue::Item& item : items) Py_DECREF(item.object);
}

// Lets one thread at a time get items from a port that several threads share, because each get finishes the
// previous item. The lock is recursive: signal handlers and unpickling code may get from the same port.
class Turn {
  public:
    // Wait for the caller's turn and return Done. Return NotNow at the deadline. Return Interrupted, with a
    // Python error set, after a signal.
    Step enter(Deadline deadline);
    void leave();
    bool is_own() const { return owner_.load(std::memory_order_relaxed) == me(); }
    void forget() { owner_ = depth_ = 0; }  // call in a forked child: the other threads do not exist there

  private:
    static uint32_t me() {  // cheaper than the system call gettid()
        static std::atomic<uint32_t> last = 0;
        static thread_local const uint32_t number = ++last;
        return number;
    }
    // the thread whose turn it is (0: none); the other threads sleep on this word as a futex
    std::atomic<uint32_t> owner_ = 0;
    std::atomic<uint32_t> waiting_ = 0;
    uint32_t depth_ = 0;
};

struct In {
    nb::object channel;
    Channel* ch;
    ReaderState state;
    // used only by `threads` channels; when the port closes, unfinished items go back to the queue
    std::vector<LocalQueue::Item> leased_items;
    std::vector<Out*> feeds;  // the writers of the outputs for the leased item
    std::atomic<uint64_t> forks = fork_count;
    uint64_t generation = 0;
    std::atomic<bool> open = true;
    Turn turn;
    std::atomic<bool> copying = false;  // an item is being decoded in place, so closing the port must wait
    // A get calls this with (stand-in, deaths, error or None) instead of returning a poisonous item. An item
    // is poisonous if it cannot be unpickled, or if `max_deaths` workers died processing it (0: no limit).
    uint64_t max_deaths = 0;
    nb::object on_poison;
    std::vector<nb::object> due;     // functions to call once the leased items are finished
    ItemTracing* tracing = nullptr;  // kept alive by `tracing_owner`
    nb::object tracing_owner;
    bool holds_traced = false;  // true while a leased item is sampled

    In(nb::object channel, int session);
    ~In();
    void close(bool finished);
    void drop();  // gives back the leased items once the port has no user left
    void call_due();

  private:
    void leave(LocalQueue& queue, bool finished);
    void leave(Ring& ring, bool finished);
};

// The item that this thread is receiving. While the item is decoded, its contents may register a function.
// The function is called only after the item is finished, because until then another reader may still get the
// item.
class Receiving {
  public:
    Receiving() : outer_(std::exchange(current_, this)) {}
    ~Receiving() { current_ = outer_; }
    Receiving(const Receiving&) = delete;
    void received(In* in);
    // Run `call` at once, unless this thread is receiving an item.
    static void when_finished(nb::object call);

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
    // threads that are writing large items into slots; until they finish, the port cannot close
    std::atomic<uint32_t> copying = 0;
    // outputs must keep their order, so they take turns once the stage has more than one worker
    bool may_have_turns = false;
    // Source only: all outputs count as outputs for item 0, so a replacement can skip those that were put.
    bool replays = false;
    ItemTracing* tracing = nullptr;  // kept alive by `tracing_owner`
    nb::object tracing_owner;
    nb::object route;  // chooses the worker that a large output is for (Frame::route); may be null

    Out(nb::object channel, int session);
    ~Out();
    In* follows() const { return reader.is_valid() ? nb::inst_ptr<In>(reader) : nullptr; }
    void close();

  private:
    void leave(LocalQueue& queue);
    void leave(Ring& ring);
};

// The next functions return a new reference, or null with a Python error set. The port is null for a plain
// call.
PyObject* put_item(Channel& ch, Out* out, PyObject* item, Deadline deadline);
Caller writing(Channel& ch, const Out* out, uint64_t size, bool waits);  // the identity of a put
PyObject* get_item(Channel& ch, In* in, Deadline deadline, bool keep, bool iterating);
// Set the class of stand-ins for items that cannot be unpickled, and the function `is_of_a_handler`. The
// function tells whether an error came from a signal handler.
void set_unreadable(PyObject* unreadable, PyObject* is_of_a_handler);
// Set the class that boxes sampled items.
void set_traced(PyObject* traced);
bool is_traced(PyObject* item);
// Take a sampled item out of its box. This steals the reference to `box`. `in` may be null.
PyObject* unboxed(In* in, PyObject* box);
// Call a method of the recorder with the port's identity and, unless it is null, the item. Return the result.
// If the method raises, report the error as unraisable and return an invalid object.
nb::object call_recorder(ItemTracing& tracing, const char* method, const void* port,
                         PyObject* item = nullptr);
// Return whether a signal handler raised the current Python error. If not, the item caused it.
bool is_interrupt();
// Set the function to call when an item was encoded for another host but the put failed.
void set_not_put(PyObject* not_put);
nb::object loan(Channel& ch, Out* out, uint64_t size, nb::handle timeout);
PyObject* put_all(Channel& ch, Out* out, PyObject* items, Deadline deadline);
PyObject* get_all(Channel& ch, In* in, Py_ssize_t most, Deadline deadline);
nb::object map_items(In& in, nb::handle out, nb::handle function);  // throws nb::python_error
void nap(In& in);                                                   // throws nb::python_error
// Tell the recorder that the worker is about to finish the leased items of this port.
void finish_traced(In& in);

// Record which kind of code processes the leased items of `in` (R10). A null `in` is allowed and has no
// effect.
void runs(In* in, Session::At at);

// Finish the leased items. This ends their turns, so later outputs of the stage can be put. On failure,
// return false with a Python error set.
bool pass_turns(In& in);
// Return whether a dead worker has already put the leased item's only output.
bool has_its_output(In& in);

// Try once without waiting. Return Done, NotNow or Drained; any other step sets a Python error.
Step try_put(Channel& ch, Out* out, PyObject* item);
Step try_get(Channel& ch, In* in, PyObject*& item);

bool parse_deadline(PyObject* timeout, Deadline& deadline);

// Return whether this process can use the port, and set a Python error if not. A forked child takes over a
// port by using it.
template <class Port>
bool ready(Port& port);

nb::object select_one(nb::list gets, nb::list puts, nb::handle timeout, nb::list ready);

// One caller's entry in the queue of waiting calls: the wait list of a LocalQueue, or the wait queue of a
// Ring. A caller that waits for several channels has one entry in each.
class Place {
  public:
    Place(Channel* ch, const Caller& caller) : ch(ch), caller(caller) {}
    Place(const Place&) = delete;

    void enter(bool again);
    void leave(bool unused);  // `unused`: if this caller was woken but took nothing, wake another waiter
    void pass_on();           // passes this caller's wake-up to another waiter
    bool changed() const { return word_->load(std::memory_order_relaxed) != seen_; }
    WaitedWord waited() const {
        return {seen_, reinterpret_cast<uint64_t>(word_),
                FUTEX_WORD_32 | (ch->reaches_processes() ? 0 : FUTEX_PRIVATE_FLAG), 0};
    }

    Channel* const ch;
    const Caller caller;

  private:
    // One element per transport; only the element for the channel's transport is used.
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

// Lets one thread sleep on behalf of all coroutines of an event loop, until its doorbell rings.
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
nb::list peek(Channel& ch, uint64_t first, uint64_t most, uint64_t most_bytes);
nb::tuple observe(nb::list channels);

// Follow sampled items through this port from now on, or stop if `tracing` is None.
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
