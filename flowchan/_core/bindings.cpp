// The extension module flowchan._core: the Python bindings of the core. Its type stub is flowchan/_core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "channel.hpp"
#include "group_bindings.hpp"
#include "link_bindings.hpp"
#include "process_bindings.hpp"
#include "raising.hpp"
#include "sizes.hpp"

namespace nb = nanobind;
using namespace flowchan;
using namespace nb::literals;

namespace {

PyType_Slot channel_slots[] = {
    {Py_tp_methods, channel_methods},      {Py_tp_iter, (void*)PyObject_SelfIter},
    {Py_tp_iternext, (void*)channel_next}, {Py_tp_traverse, (void*)channel_traverse},
    {Py_tp_clear, (void*)channel_clear},   {0, nullptr}};
PyType_Slot in_slots[] = {{Py_tp_methods, in_methods},
                          {Py_tp_iter, (void*)PyObject_SelfIter},
                          {Py_tp_iternext, (void*)in_next},
                          {Py_tp_traverse, (void*)in_traverse},
                          {Py_tp_clear, (void*)in_clear},
                          {Py_tp_finalize, (void*)in_finalize},
                          {0, nullptr}};
PyType_Slot out_slots[] = {{Py_tp_methods, out_methods},
                           {Py_tp_traverse, (void*)out_traverse},
                           {Py_tp_clear, (void*)out_clear},
                           {0, nullptr}};

// Return the channel's state. Check for dead processes first, because a caller that only polls must also
// learn of deaths.
uint64_t state_of(Channel& ch) {
    if (!ch.usable()) throw nb::python_error();
    return ch.with([](auto& transport) {
        check_for_dead(transport);
        return transport.seen_state();
    });
}

uint64_t length(Channel& ch) {
    if (state_of(ch) == BROKEN) return 0;
    return locked(ch, [](auto& transport, Wakes&) { return transport.inside(); });
}

bool is_drained(Channel& ch) {
    return state_of(ch) == CLOSED && locked(ch, [](auto& transport, Wakes&) { return transport.drained(); });
}

bool is_broken(Channel& ch) {
    return state_of(ch) != OPEN && locked(ch, [](auto& transport, Wakes&) { return transport.broken(); });
}

void close_channel(Channel& ch) {
    locked(ch, [](auto& m, Wakes& wakes) {
        m.close(wakes);
        return 0;
    });
}

// Open a session that counts neither as a reader nor as a writer.
uint32_t uncounted_session(Channel& ch) {
    if (!ch.usable()) throw nb::python_error();
    uint32_t session = 0;
    std::string failure;
    locked_ring(ch, [&](Ring& ring, Wakes& wakes) {
        try {
            session = ring.open_session(Session::PLAIN, wakes);
        } catch (const std::exception& e) {
            failure = e.what();
        }
    });
    if (failure.empty()) return session;
    raise("ChannelError", ch.describe() + ": " + failure);
    throw nb::python_error();
}

// From now on, only the supervisor may end this session. Any other process that notices the worker's death
// must leave the session alone.
template <class Port>
void supervise(Port& port) {
    locked_ring(*port.ch, [&](Ring& ring, Wakes&) { ring.session(port.state.session).supervised = 1; });
}

// Return two times in seconds: how long calls of this port have waited in total, and how long they have
// waited for a turn. Both times are 0 after the session has ended.
template <class Port>
nb::tuple waited(Port& port) {
    const auto seconds = [](const PortClock& clock) {
        const int64_t now = now_ns();
        return std::pair(double(clock.all.total(now)) / 1e9, double(clock.turn.total(now)) / 1e9);
    };
    const auto [all, turn] = locked(*port.ch, [&]<class M>(M& m, Wakes&) {
        if constexpr (Traits<M>::processes) {
            const Session& s = m.session(port.state.session);
            return seconds(s.generation == port.generation ? s.clock : PortClock());
        } else {
            return seconds(port.state.clock);
        }
    });
    return nb::make_tuple(all, turn);
}

template <class Port>
nb::tuple port_state(Port& port) {
    if (!port.ch->reaches_processes()) {
        PyErr_SetString(PyExc_TypeError,
                        (port.ch->describe() + " and its ports can't be sent to another process; "
                                               "create it with across='processes'")
                            .c_str());
        throw nb::python_error();
    }
    return nb::make_tuple(port.channel, port.state.session);
}

// Record that process `pid` on another host ended without closing this port (C5).
void end_remote_writer(Out& out, uint64_t pid) {
    if (!out.open.exchange(false)) return;
    locked_ring(*out.ch, [&](Ring& ring, Wakes& wakes) {
        ring.session(out.state.session).pid = pid;
        ring.end_session(out.state.session, true, wakes, true);
    });
}

// --- Recovery after a worker's death. `port` is the supervisor's handle for the dead worker's port. ---

// Return how many workers died holding this worker's leased items, including the worker itself. Only deaths
// in user code or while unpickling count. Return 0 if this worker died in other code.
uint64_t deaths_over(const std::vector<In*>& inputs) {
    bool working = false;
    uint64_t most = 0;
    for (In* in : inputs)
        locked_ring(*in->ch, [&](Ring& ring, Wakes&) {
            const Session& s = ring.session(in->state.session);
            working = working || (s.lease_head && s.at != Session::OURS);
            const std::vector<Slot*> slots = ring.leased_slots(in->state.session);
            for (size_t n = 0; n < std::min<size_t>(slots.size(), s.suspects()); ++n)
                most = std::max(most, slots[n]->deaths());
        });
    return working ? 1 + most : 0;
}

void retire(Out& out, const std::vector<uint64_t>& items) {
    locked_ring(*out.ch, [&](Ring& ring, Wakes& wakes) {
        out.open = false;
        ring.retire_writer(out.state.session, items, wakes);
    });
}

void order(LocalQueue& queue, In& in, Orders what, Wakes& wakes) { queue.order(in.state, &in, what, wakes); }
void order(Ring& ring, In& in, Orders what, Wakes& wakes) {
    const Session& s = ring.session(in.state.session);  // the worker may have ended the session itself
    if (s.role == Session::READER && s.generation == in.generation) ring.order(in.state.session, what, wakes);
}

// Send an order to a reader. Its worker may run on any host.
void order(In& in, Orders what) {
    in.ch->with([&](auto& transport) {
        Wakes wakes;
        Locked locked(transport);
        if (in.open) order(transport, in, what, wakes);
        locked.unlock(wakes);
    });
}

bool is_retired(In& in) {
    return in.ch->with(
        Each{[&](LocalQueue&) { return (in.state.orders & RETIRE) != 0; },
             [&](Ring& ring) { return in.open && (ring.session(in.state.session).orders & RETIRE) != 0; }});
}

// Make a live worker process its leased items again. The worker takes each item again, and skips outputs
// that have already been put.
void begin_again(In& in) {
    locked_ring(*in.ch, [&](Ring& ring, Wakes&) { ring.begin_again(in.state); });
    for (Out* out : in.feeds) out->state.keyed = false;
}

// Release the state of a dead worker. For each item in progress, the channel records which outputs were put.
// The next worker that processes the item skips these outputs. The replacement gets the leased items if they
// may have caused the death, or if `all` is set. Otherwise, any worker may take them. A source has no input,
// so all of its outputs count as outputs for item 0.
void take_up(const std::vector<In*>& inputs, const std::vector<Out*>& outputs,
             const std::vector<In*>& successors, bool all, bool blame) {
    if (inputs.size() != successors.size())
        throw nb::value_error("take_up: successors must have one port for each input");
    uint64_t committed = 0;
    for (Out* out : outputs)
        locked_ring(*out->ch, [&](Ring& ring, Wakes&) {
            const Session& s = ring.session(out->state.session);
            const bool own = s.role == Session::WRITER && s.generation == out->generation;
            committed = std::max(committed, own ? s.committed_item : 0);
        });
    std::vector<uint64_t> items;
    for (In* in : inputs)
        locked_ring(*in->ch, [&](Ring& ring, Wakes& wakes) {
            ring.finish_in_run(in->state.session, committed, wakes);
            for (const Slot* slot : ring.leased_slots(in->state.session)) items.push_back(slot->number);
            for (const uint64_t number : ring.reserved_numbers(in->state.session)) items.push_back(number);
        });
    if (inputs.empty()) items.push_back(0);
    for (Out* out : outputs) retire(*out, items);
    for (size_t i = 0; i < inputs.size(); ++i) {
        In& in = *inputs[i];
        locked_ring(*in.ch, [&](Ring& ring, Wakes&) {
            ring.reserve_for(in.state.session, successors[i]->state.session, all, blame);
        });
        in.close(false);
    }
}

// Construct a Channel. Raise OSError instead of RuntimeError for errors of the operating system.
template <class... Args>
void construct(Channel* self, Args... args) {
    try {
        new (self) Channel(std::move(args)...);
    } catch (const std::system_error& e) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(e.code().value(), e.what()).ptr());
        throw nb::python_error();
    }
}

template <class Port>
void construct_port(Port* self, nb::handle channel, int session) {
    if (!nb::isinstance<Channel>(channel)) throw nb::type_error("port: channel must be a flowchan.Channel");
    new (self) Port(nb::borrow(channel), session);
}

}  // namespace

NB_MODULE(_core, m) {
    nb::set_leak_warnings(false);  // threads still waiting when the interpreter exits are not a leak
    m.doc() = "The native core of flowchan: channels and their ports.";

    nb::class_<View>(m, "View", nb::type_slots(view_slots),
                     "A buffer over memory of a channel or of this process.")
        .def_static("of", View::of, "address"_a, "size"_a, "owner"_a,
                    "Return a read-only view of memory that ``owner`` keeps alive.")
        .def("private", private_view,
             "Return a writable view of the same bytes, which copies each page on the first write.")
        .def(
            "lent", [](View& view, nb::handle array) { view.block->array = nb::weakref(array); }, "array"_a,
            "Remember ``array``, which uses this loan, and make it read-only when the loan is put.");

    nb::class_<Channel>(
        m, "Channel", nb::type_slots(channel_slots), nb::is_weak_referenceable(),
        "A bounded FIFO that can be closed. Use flowchan.Channel instead, which checks its arguments.")
        .def("__init__", construct<uint64_t, bool, uint64_t, std::string>, "capacity"_a, "processes"_a,
             "max_bytes"_a, "name"_a)
        .def("__init__", construct<int, int, std::string>, "fd"_a, "socket"_a, "name"_a)
        .def("close", close_channel,
             "Close the channel, so that later puts raise ``Closed``.\n\n"
             "Readers can still take the remaining items. Any user may close the channel, even "
             "repeatedly.\n\n"
             "Example:\n"
             "    >>> from flowchan import Channel\n"
             "    >>> channel = Channel()\n"
             "    >>> channel.put(\"a\")\n"
             "    >>> channel.close()\n"
             "    >>> channel.closed, list(channel), channel.drained\n"
             "    (True, ['a'], True)")
        .def(
            "abort", [](Channel& ch, nb::handle cause) { abort_channel(ch, cause.ptr()); },
            "cause"_a = nb::none(),
            "Break the channel and discard its items.\n\n"
            "All waiting and later calls raise ``Broken`` from ``cause``.")
        .def("__len__", length)
        .def_prop_ro(
            "capacity", [](Channel& ch) { return ch.capacity; },
            "Return how many items fit into the channel before a put must wait.")
        .def_prop_ro(
            "max_bytes",
            [](Channel& ch) -> std::optional<uint64_t> {
                return ch.max_bytes == UINT64_MAX ? std::nullopt : std::optional(ch.max_bytes);
            },
            "Return the maximum number of bytes in the channel, or None if there is no limit.")
        .def_prop_ro(
            "across", [](Channel& ch) { return ch.across(); },
            "Return the transport: ``\"threads\"``, ``\"processes\"`` or ``\"hosts\"``.")
        .def_rw("_hosts", &Channel::hosts)
        .def_rw("_elsewhere", &Channel::elsewhere)
        .def("_uncounted_session", uncounted_session)
        .def(
            "_allow",
            [](Channel& ch, uint64_t puts) {
                locked_ring(ch, [&](Ring& ring, Wakes& wakes) { ring.allow(puts, wakes); });
            },
            "puts"_a)
        .def_prop_ro(
            "closed", [](Channel& ch) { return state_of(ch) != OPEN; },
            "Return whether the channel accepts no more puts.")
        .def_prop_ro("drained", is_drained,
                     "Return whether the channel is closed and empty, and no item is on lease.")
        .def_prop_ro("broken", is_broken, "Return whether the channel was aborted or ended with a failure.")
        .def_rw("_name", &Channel::name)
        .def_prop_ro("_fd",
                     [](Channel& ch) { return ch.with([](auto& transport) { return transport.fd(); }); })
        .def_prop_rw(
            "_share", [](Channel& ch) { return ch.with([](auto& transport) { return transport.share(); }); },
            [](Channel& ch, uint64_t bytes) { ch.with([&](auto& transport) { transport.share() = bytes; }); })
        .def("_leaves_host",
             [](Channel& ch) { locked_ring(ch, [](Ring& ring, Wakes&) { ring.header().leaves = 1; }); })
        .def("_keep_numbers", [](Channel& ch) { ch.with([](auto& transport) { transport.keep_numbers(); }); })
        .def("_number_from",
             [](Channel& ch, uint64_t first) {
                 locked_ring(ch, [=](Ring& ring, Wakes&) { ring.header().numbered = first; });
             })
        .def("_undo_abort", [](Channel& ch) { locked_ring(ch, [](Ring& ring, Wakes&) { ring.unbreak(); }); })
        .def_prop_ro("_socket",
                     [](Channel& ch) { return ch.with([](auto& transport) { return transport.socket(); }); })
        .def("_stats", channel_stats)
        .def("_peek", peek, "first"_a, "most"_a, "most_bytes"_a)
        .def("_pinned",
             [](Channel& ch) {
                 std::vector<uint64_t> ids;
                 locked_ring(ch, [&](Ring& ring, Wakes& wakes) {
                     ids = ring.pinned();
                     if (ids.empty()) return;
                     ring.sweep(wakes);  // so that dead processes do not count as viewers
                     ids = ring.pinned();
                 });
                 return ids;
             })
        .def(
            "_loan",
            [](Channel& ch, uint64_t size, nb::handle timeout) { return loan(ch, nullptr, size, timeout); },
            "size"_a, "timeout"_a.none());

    nb::class_<In>(m, "In", nb::type_slots(in_slots),
                   "A port that reads a channel. Use flowchan.In, which channel.reader() returns.")
        .def("__init__", construct_port<In>, "channel"_a, "session"_a = 0)
        .def(
            "close", [](In& in) { in.close(true); }, nb::lock_self(),
            "Close the port. Its leased items count as finished.")
        .def(
            "_give_up", [](In& in) { in.close(false); }, nb::lock_self())
        .def("_supervise", supervise<In>)
        .def("_waited", waited<In>)
        .def("_wake_lazily",
             [](In& in) {
                 in.state.lazy = true;
                 locked_ring(*in.ch, [](Ring& ring, Wakes&) { ring.header().lazy = 1; });
             })
        .def("_remain",  // no process owns the session from now on; it ends with the channel
             [](In& in) {
                 locked_ring(*in.ch, [&](Ring& ring, Wakes&) {
                     Session& s = ring.session(in.state.session);
                     s.supervised = 1;
                     s.pid = 0;
                 });
                 in.open = false;
             })
        // If this process dies from now on, none of its leased items is blamed for the death (R10).
        .def("_leave_alone",
             [](In& in) {
                 locked_ring(*in.ch,
                             [&](Ring& ring, Wakes&) { ring.session(in.state.session).at = Session::OURS; });
             })
        .def("_begin_again", begin_again)
        .def("_retire", [](In& in) { order(in, RETIRE); })
        .def("_keep_turns", [](In& in) { order(in, KEEP_TURNS); })
        .def_prop_ro("_retired", is_retired)
        .def_prop_ro("_number", [](In& in) { return in.state.number; })
        .def("_read_alone", [](In& in) { in.state.alone = true; })
        .def("_begin_once", [](In& in) { in.state.once = true; })
        .def(
            "_on_poison",
            [](In& in, uint64_t deaths, nb::object handler) {
                in.max_deaths = deaths;
                in.on_poison = std::move(handler);
            },
            "deaths"_a, "handler"_a.none())
        .def("_trace", trace<In>, "tracing"_a.none())
        .def("_map", map_items, nb::lock_self(), "out"_a, "function"_a)
        .def("_nap", nap, nb::lock_self())
        .def("_hand_over", port_state<In>)
        // The session is shared with another process, which will end it.
        .def("_leave_open", [](In& in) { in.open = false; })
        .def("__enter__", [](nb::handle self) { return self; })
        .def(
            "__exit__", [](In& in, nb::handle type, nb::handle, nb::handle) { in.close(type.is_none()); },
            nb::lock_self(), "type"_a.none(), "error"_a.none(), "traceback"_a.none())
        .def_prop_ro(
            "channel", [](In& in) { return in.channel; }, "Return the channel that the port reads.")
        .def_prop_ro(
            "closed", [](In& in) { return !in.open || is_broken(*in.ch) || is_drained(*in.ch); },
            "Return whether the port can get no more items.\n\n"
            "This is true if the port was closed, or if the channel is drained or broken.");

    nb::class_<Out>(m, "Out", nb::type_slots(out_slots),
                    "A port that writes to a channel. Use flowchan.Out, which channel.writer() returns.")
        .def("__init__", construct_port<Out>, "channel"_a, "session"_a = 0)
        .def("close", &Out::close, nb::lock_self(),
             "Close the port. If it is the last writer, the channel closes.")
        .def(
            "_follow",
            [](nb::handle self, nb::handle reader, bool ordered, bool single, bool later) {
                Out& out = *nb::inst_ptr<Out>(self);
                out.reader = nb::borrow(reader);
                out.state.ordered = ordered;
                out.may_have_turns = later;
                out.state.single = single;
                out.follows()->feeds.push_back(&out);
            },
            "reader"_a, "ordered"_a, "single"_a, "later"_a = false)
        .def("_waited", waited<Out>)
        .def("_trace", trace<Out>, "tracing"_a.none())
        .def("_replay", [](Out& out) { out.replays = true; })
        .def("_fall", end_remote_writer, "pid"_a)
        .def(
            "_loan",
            [](Out& out, uint64_t size, nb::handle timeout) {
                if (!ready(out)) throw nb::python_error();
                return loan(*out.ch, &out, size, timeout);
            },
            "size"_a, "timeout"_a.none())
        .def("_supervise", supervise<Out>)
        .def("_hand_over", port_state<Out>)
        .def("_leave_open", [](Out& out) { out.open = false; })
        .def("__enter__", [](nb::handle self) { return self; })
        .def(
            "__exit__", [](Out& out, nb::handle, nb::handle, nb::handle) { out.close(); }, nb::lock_self(),
            "type"_a.none(), "error"_a.none(), "traceback"_a.none())
        .def_prop_ro(
            "channel", [](Out& out) { return out.channel; }, "Return the channel to which the port writes.")
        .def_prop_ro(
            "closed", [](Out& out) { return !out.open || state_of(*out.ch) != OPEN; },
            "Return whether the port accepts no more puts.\n\n"
            "This is true if the port or the channel was closed, the channel broke, or its readers left.");

    nb::class_<ItemTracing>(m, "ItemTracing",
                            "Follows sampled items through one worker; see items/sampled_item.py.")
        .def(nb::init<nb::object, uint64_t>(), "recorder"_a, "countdown"_a = 0);
    nb::class_<Await>(m, "Await",
                      "A coroutine that waits in the queue of a channel or port; see awaiting.py.")
        .def(nb::init<nb::object, bool, bool>(), "target"_a, "reading"_a, "again"_a)
        .def("leave", &Await::leave, "unused"_a)
        .def_prop_ro("channel", &Await::channel);
    nb::class_<Watch>(m, "Watch", "Lets one thread sleep on behalf of many coroutines.")
        .def(nb::init<>())
        .def_prop_ro("heard", &Watch::heard)
        .def("ring", &Watch::ring)
        .def("sleep", &Watch::sleep, "heard"_a, "waits"_a, "seconds"_a);

    for (const char* name : {"In", "Out"}) m.attr(name).attr("__module__") = "flowchan";
    m.def(
        "_set_codec",
        [](nb::handle dumps, nb::handle loads, nb::handle unreadable, nb::handle is_of_a_handler,
           nb::handle not_put) {
            set_codec(dumps.ptr(), loads.ptr());
            set_not_put(not_put.ptr());
            set_unreadable(unreadable.ptr(), is_of_a_handler.ptr());
        },
        "dumps"_a, "loads"_a, "unreadable"_a, "is_of_a_handler"_a, "not_put"_a);
    m.def("_set_traced", [](nb::handle traced) { set_traced(traced.ptr()); }, "traced"_a);
    m.def("_when_finished", Receiving::when_finished, "call"_a,
          "Call ``call`` when this thread has finished unpickling its item, or now if it is unpickling "
          "none.");
    m.def("_observe", observe, "channels"_a);
    bind_link(m);
    bind_group(m);
    bind_process(m);
    m.def("_deaths_over", deaths_over, "inputs"_a);
    m.def("_take_up", take_up, "inputs"_a, "outputs"_a, "successors"_a, "whole"_a = false, "blame"_a = true);
    m.def("_size_of", [](nb::handle item) { return size_of(item.ptr()); }, "item"_a);
    m.def("_select", select_one, "gets"_a, "puts"_a, "timeout"_a.none(), "ready"_a = nb::list());
}
