// The Channel object: construction, attachment, end, statistics, and the effects of a fork.
#include "channel.hpp"
#include "raising.hpp"
#include "system.hpp"

#include <pthread.h>

namespace flowchan {

uint64_t fork_count = 0, children_forked = 0;

namespace {

[[maybe_unused]] const int fork_hook =
    pthread_atfork(nullptr, [] { children_forked += 1; }, [] { fork_count += 1; });

}  // namespace

Channel::Channel(uint64_t capacity, bool processes, uint64_t max_bytes, std::string name)
    : name(std::move(name)), capacity(capacity), max_bytes(max_bytes) {
    if (!processes) {
        queue_ = std::make_unique<LocalQueue>(capacity, max_bytes);
        return;
    }
    need_proc();
    ring_ = std::make_shared<Ring>(capacity, max_bytes);
    this->max_bytes = ring_->header().max_bytes;  // a ring limits it to the size of the largest block
}

Channel::Channel(int fd, int socket, std::string name) : name(std::move(name)) {
    need_proc();
    ring_ = std::make_shared<Ring>(RingHandle{fd, socket});
    capacity = ring_->header().capacity;
    max_bytes = ring_->header().max_bytes;
}

Channel::~Channel() {
    if (!plain || forks != fork_count) return;
    locked_ring(*this, [&](Ring& ring, Wakes& wakes) { ring.end_session(plain, false, wakes); });
}

std::string Channel::describe() const {
    if (!name.empty()) return "channel '" + name + "'";
    return "Channel(" + std::to_string(capacity) + ", across='" + across() + "')";
}

const char* Channel::across() const {
    if (hosts) return "hosts";
    return with([]<class M>(M&) { return Traits<M>::across; });
}

bool Channel::reaches_processes() const {
    return with([]<class M>(M&) { return Traits<M>::processes; });
}

bool Channel::usable() {
    if (forks == fork_count) return true;
    if (reaches_processes()) {  // a forked child is an additional user of the same memory
        nb::object self = nb::find(*this);
        nb::ft_object_guard guard(self);
        if (forks == fork_count) return true;  // another thread has already done this
        plain = 0;
        awaiting = 0;
        forks = fork_count;
        return true;
    }
    raise("ChannelError",
          describe() + " was created in another process (this is process " + std::to_string(getpid()) +
              "), and across='threads' does not reach a forked child; create it with across='processes'");
    return false;
}

uint32_t Channel::plain_session() {
    if (plain) return plain;
    std::string failure;
    locked_ring(*this, [&](Ring& ring, Wakes& wakes) {
        if (!plain) try {  // another thread may have opened it in the meantime
                plain = ring.open_session(Session::PLAIN, wakes);
            } catch (const std::exception& e) {
                failure = e.what();
            }
    });
    if (!failure.empty()) {
        raise("ChannelError", describe() + ": " + failure);
        throw nb::python_error();
    }
    return plain;
}

Channel& Channel::through(Side side) {
    if (!elsewhere) return *this;
    nb::object& port = side == Side::Reader ? reading : writing;
    if (!port.is_valid() || opened_in != fork_count) {
        nb::object opened = nb::find(*this).attr("_open_port")(side == Side::Reader);
        if (opened_in != fork_count) (side == Side::Reader ? writing : reading).reset();
        opened_in = fork_count;
        port = std::move(opened);
    }
    return *nb::inst_ptr<Channel>(port);
}

void Channel::fetch(Py_ssize_t most) {
    if (!elsewhere) return;
    const uint64_t here =
        locked(through(Side::Reader), [](auto& transport, Wakes&) { return transport.inside(); });
    if (here < uint64_t(most)) nb::find(*this).attr("_fetch")(uint64_t(most) - here);
}

// Ask the owner whether a retry makes sense, because this process may not know the channel's latest state. An
// item that the owner then sends may arrive shortly after this function returns.
bool Channel::asks_again(Side side) {
    if (!elsewhere) return false;
    nb::object answer = nb::find(*this).attr("_ask_again")(side == Side::Reader);
    moved_there = nb::cast<uint64_t>(answer[1]);
    return nb::cast<bool>(answer[0]);
}

static void abort_transport(LocalQueue& queue, PyObject* cause) {
    Wakes wakes;
    std::vector<PyObject*> dropped;
    Locked locked(queue);
    queue.break_(cause == Py_None ? nullptr : cause, dropped, wakes);
    locked.unlock(wakes);
    for (PyObject* o : dropped) Py_DECREF(o);
}

static void abort_transport(Ring& ring, PyObject* cause) {
    Wakes wakes;
    const Cause pickled = cause == Py_None ? Cause{} : pickle_cause(cause);
    Locked locked(ring);
    ring.break_(pickled.whole, wakes, pickled.text);
    locked.unlock(wakes);
}

void abort_channel(Channel& ch, PyObject* cause) {
    if (!ch.usable()) throw nb::python_error();
    ch.with([&](auto& transport) { abort_transport(transport, cause); });
}

// Return (pid, blocks, bytes) for each process that keeps blocks of the channel in use.
static nb::list as_list(const std::vector<Held>& held) {
    nb::list list;
    for (const Held& h : held) list.append(nb::make_tuple(h.pid, h.blocks, h.bytes));
    return list;
}

nb::dict channel_stats(Channel& ch) {
    std::vector<Held> held;
    const Counts c = locked(ch, [&](auto& transport, Wakes& wakes) {
        held = transport.held();
        if (!held.empty()) {
            transport.sweep(wakes);  // so that dead processes do not count
            held = transport.held();
        }
        return transport.counts();
    });
    const auto seconds = [](int64_t ns) { return double(ns) / 1e9; };
    nb::dict stats;
    stats["items_in"] = c.items_in;
    stats["items_out"] = c.items_out;
    stats["bytes_in"] = c.bytes_in;
    stats["inside"] = c.inside;
    stats["leased"] = c.leased;
    stats["waiting_readers"] = c.waiting_readers;
    stats["waiting_writers"] = c.waiting_writers;
    stats["readers"] = c.readers;
    stats["writers"] = c.writers;
    stats["read_wait"] = seconds(c.read_wait_ns);
    stats["write_wait"] = seconds(c.write_wait_ns);
    stats["turn_wait"] = seconds(c.turn_wait_ns);
    stats["readers_waiting_for"] = seconds(c.readers_waiting_for_ns);
    stats["writers_waiting_for"] = seconds(c.writers_waiting_for_ns);
    stats["selecting"] = c.selecting;
    stats["woken"] = c.woken;
    stats["awaiting"] = ch.awaiting.load();
    stats["bytes_inside"] = c.bytes_inside;
    stats["short_of_bytes"] = c.short_of_bytes;
    stats["holders"] = as_list(held);
    return stats;
}

static nb::list as_list(const std::vector<LocalQueue::Item>& seen) {
    nb::list list;
    for (const LocalQueue::Item& item : seen)
        list.append(nb::make_tuple(item.number, false, item.size, 0, nb::steal(item.object)));
    return list;
}

static nb::list as_list(const std::vector<Seen>& seen) {
    nb::list list;
    for (const Seen& one : seen) {
        nb::object payload = nb::none();
        if (one.copy.data() && one.kind == DIRECT)
            payload = nb::steal(decode(one.kind, one.copy.data(), one.copy.size()));
        else if (one.copy.data())
            payload = nb::bytes(one.copy.data(), one.copy.size());
        if (!payload.is_valid()) throw nb::python_error();
        const uint64_t kind = one.kind == DIRECT ? 0 : one.kind;
        list.append(nb::make_tuple(one.number, one.leased, one.size, kind, payload));
    }
    return list;
}

// Look at a channel under its lock. If memory is exhausted, release the lock and then raise MemoryError.
template <class M, class F>
static nb::list look_at(M& transport, F&& look) {
    decltype(look()) seen;
    bool exhausted = false;
    Locked lock(transport);
    try {
        seen = look();
    } catch (const std::bad_alloc&) {
        exhausted = true;
    }
    lock.unlock({});
    if (exhausted) throw std::bad_alloc();
    return as_list(seen);
}

// Return (number, leased, size, kind, payload) for items that the channel contains. If the kind is 0, the
// payload is the object. Otherwise, it is bytes without the contents of arrays, or None if it was not copied.
nb::list peek(Channel& ch, uint64_t first, uint64_t most, uint64_t most_bytes) {
    if (!ch.usable()) throw nb::python_error();
    return ch.with(
        Each{[&](LocalQueue& queue) { return look_at(queue, [&] { return queue.peek(first, most); }); },
             [&](Ring& ring) {
                 std::vector<char> room(most_bytes);  // its pages are touched before the lock is taken
                 return look_at(ring, [&] { return ring.peek(first, most, room); });
             }});
}

// Return sums over the channels of a run: items put plus items taken, waiting readers, and waiting writers.
// This function is cheap enough to be called often.
nb::tuple observe(nb::list channels) {
    uint64_t moved = 0, reading = 0, writing = 0;
    for (nb::handle one : channels) {
        const Counts c =
            locked(*nb::inst_ptr<Channel>(one), [](auto& transport, Wakes&) { return transport.counts(); });
        moved += c.items_in + c.items_out;
        reading += c.waiting_readers;
        writing += c.waiting_writers;
    }
    return nb::make_tuple(moved, reading, writing);
}

}  // namespace flowchan
