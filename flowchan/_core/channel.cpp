// The Channel object itself: making, attaching and ending it, its statistics, and what a fork means for it.
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
    if (processes) need_proc();
    if (processes)
        ring = std::make_shared<Ring>(capacity, max_bytes);
    else
        queue = std::make_unique<LocalQueue>(capacity, max_bytes);
}

Channel::Channel(int fd, int socket, std::string name) : name(std::move(name)) {
    need_proc();
    ring = std::make_shared<Ring>(RingHandle{fd, socket});
    capacity = ring->header().capacity;
    max_bytes = ring->header().max_bytes;
}

Channel::~Channel() {
    if (!ring || !plain || forks != fork_count) return;
    Wakes wakes;
    Locked<Ring> locked(*ring);
    ring->end_session(plain, false, wakes);
    locked.unlock(wakes);
}

std::string Channel::describe() const {
    if (!name.empty()) return "channel '" + name + "'";
    return "Channel(" + std::to_string(capacity) + ", across='" + (queue ? "threads" : "processes") + "')";
}

bool Channel::usable() {
    if (forks == fork_count) return true;
    if (ring) {  // the child is another user of the same ring
        plain = 0;
        awaiting = 0;
        forks = fork_count;
        return true;
    }
    raise("ChannelError",
          describe() + " was made in another process (pid of this one: " + std::to_string(getpid()) +
              ") and across='threads' does not reach a forked child; make it with across='processes'");
    return false;
}

uint32_t Channel::plain_session() {
    if (plain) return plain;
    Wakes wakes;
    std::string failure;
    {
        Locked<Ring> locked(*ring);
        if (!plain) try {  // another thread may have been quicker
                plain = ring->open_session(Session::PLAIN, wakes);
            } catch (const std::exception& e) {
                failure = e.what();
            }
        locked.unlock(wakes);
    }
    if (!failure.empty()) {
        raise("ChannelError", describe() + ": " + failure);
        throw nb::python_error();
    }
    return plain;
}

void abort_channel(Channel& ch, PyObject* cause) {
    if (!ch.usable()) throw nb::python_error();
    Wakes wakes;
    if (ch.queue) {
        std::vector<PyObject*> dropped;
        Locked<LocalQueue> locked(*ch.queue);
        if (ch.queue->state != BROKEN && cause != Py_None) ch.queue->cause = Py_NewRef(cause);
        ch.queue->break_(dropped, wakes);
        locked.unlock(wakes);
        for (PyObject* o : dropped) Py_DECREF(o);
        return;
    }
    std::string pickled;
    if (cause != Py_None) {
        pickled = pickle_cause(cause);
    }
    Locked<Ring> locked(*ch.ring);
    ch.ring->break_(pickled, wakes);
    locked.unlock(wakes);
}

// (pid, blocks, bytes) of each process that looks at blocks of the channel.
static nb::list as_list(const std::vector<Held>& held) {
    nb::list list;
    for (const Held& h : held) list.append(nb::make_tuple(h.pid, h.blocks, h.bytes));
    return list;
}

nb::tuple channel_stats(Channel& ch) {
    if (!ch.usable()) throw nb::python_error();
    auto total = [](auto& g) { return double(g.total_wait_ns()) / 1e9; };
    auto now = [](auto& g) { return double(g.waiting_for_ns()) / 1e9; };
    if (ch.queue) {
        LocalQueue& q = *ch.queue;
        Locked<LocalQueue> locked(q);
        auto values =
            std::make_tuple(q.puts + q.parked, q.takes, q.bytes_in, q.state == BROKEN ? 0 : q.inside(),
                            q.leased, q.reader_line.waiting, q.writer_line.waiting, q.readers, q.writers,
                            total(q.reader_line), total(q.writer_line), now(q.reader_line),
                            now(q.writer_line), q.reader_line.selecting() + q.writer_line.selecting(),
                            q.reader_line.woken() + q.writer_line.woken(), ch.awaiting.load(),
                            q.bytes_in - q.bytes_out, q.short_of_bytes && q.writer_line.waiting > 0);
        locked.unlock({});
        return std::apply([](auto... v) { return nb::make_tuple(v..., nb::list()); }, values);
    }
    Header& h = ch.ring->header();
    Wakes wakes;
    Locked<Ring> locked(*ch.ring);
    std::vector<Held> held = ch.ring->held();
    if (!held.empty()) {
        ch.ring->sweep(wakes);  // the dead hold nothing
        held = ch.ring->held();
    }
    auto values = std::make_tuple(
        h.puts + h.parked, h.takes, h.bytes_in, h.state == BROKEN ? 0 : uint64_t(h.inside()), h.leased,
        h.reader_gate.everybody(), h.writer_gate.everybody(), h.readers, h.writers, total(h.reader_gate),
        total(h.writer_gate), now(h.reader_gate), now(h.writer_gate),
        h.reader_gate.selecting + h.writer_gate.selecting, h.reader_gate.woken + h.writer_gate.woken,
        ch.awaiting.load(), h.bytes_in - h.bytes_out, h.short_of_memory && h.writer_gate.waiting > 0);
    locked.unlock(wakes);
    return std::apply([&](auto... v) { return nb::make_tuple(v..., as_list(held)); }, values);
}

// All channels of a run at once: how many items have been put and taken in all, how many readers and how many
// writers wait. Cheap enough to be asked for as often as one likes.
nb::tuple look_at(nb::list channels) {
    uint64_t moved = 0, reading = 0, writing = 0;
    for (nb::handle one : channels) {
        Channel& ch = *nb::inst_ptr<Channel>(one);
        if (!ch.usable()) throw nb::python_error();
        auto add = [&](auto& medium, auto& counts, auto& readers, auto& writers) {
            Locked lock(medium);
            moved += counts.puts + counts.takes + counts.parked;
            reading += readers.waiting;
            writing += writers.waiting;
            lock.unlock({});
        };
        if (ch.queue) {
            add(*ch.queue, *ch.queue, ch.queue->reader_line, ch.queue->writer_line);
        } else {
            Header& h = ch.ring->header();
            add(*ch.ring, h, h.reader_gate, h.writer_gate);
        }
    }
    return nb::make_tuple(moved, reading, writing);
}

}  // namespace flowchan
