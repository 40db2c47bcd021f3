// The Python binding of Link.
#include "link_bindings.hpp"
#include "channel.hpp"
#include "link.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <unistd.h>
#include <algorithm>

namespace flowchan {

using namespace nb::literals;

namespace {

std::shared_ptr<Ring> ring_of(nb::handle port, Channel& ch) {
    return ch.with(Each{[&](LocalQueue&) -> std::shared_ptr<Ring> {
                            PyErr_Format(PyExc_TypeError,
                                         "link: ports must belong to channels between processes, got %R",
                                         port.ptr());
                            throw nb::python_error();
                        },
                        [](Ring& ring) { return ring.shared_from_this(); }});
}

template <class Port>
Port& port_of(nb::handle port, const char* what) {
    if (!nb::isinstance<Port>(port)) {
        PyErr_Format(PyExc_TypeError, "link: %s, got %R", what, port.ptr());
        throw nb::python_error();
    }
    return *nb::inst_ptr<Port>(port);
}

class PyLink : public Link {
  public:
    explicit PyLink(bool owner_side) : Link(owner_side), owner_side(owner_side) {}
    const bool owner_side;
};

void open_stream(PyLink& link, uint32_t number, nb::list inputs, nb::list outputs, bool on_demand,
                 bool limited, bool lends) {
    nb::list reads = link.owner_side ? inputs : outputs, writes = link.owner_side ? outputs : inputs;
    std::vector<Link::Taking> takes;
    std::vector<Link::Putting> puts;
    for (nb::handle port : reads) {
        In& in = port_of<In>(port, link.owner_side ? "inputs must be In ports on the owner side"
                                                   : "outputs must be In ports on the worker side");
        takes.push_back({ring_of(port, *in.ch), in.state.session, in.state.alone});
    }
    for (nb::handle port : writes) {
        Out& out = port_of<Out>(port, link.owner_side ? "outputs must be Out ports on the owner side"
                                                      : "inputs must be Out ports on the worker side");
        puts.push_back(
            {ring_of(port, *out.ch), out.state, out.reader.is_valid() && !out.reader.is_none(), out.replays});
    }
    WithoutGil without;
    link.open_stream(number, takes, puts, on_demand, limited, lends);
}

nb::tuple tuple_of(const LinkEvent& event) {
    switch (event.kind) {
        case LinkEvent::Kind::None:
            return nb::make_tuple();
        case LinkEvent::Kind::Broken:
            return nb::make_tuple("broken", event.why);
        case LinkEvent::Kind::Finished:
            return nb::make_tuple("finished", event.stream);
        case LinkEvent::Kind::Refused:
            return nb::make_tuple("refused", event.stream, event.port);
        case LinkEvent::Kind::TooLarge:
            return nb::make_tuple("too large", event.stream, event.port, event.size);
        case LinkEvent::Kind::ToFetch:
            return nb::make_tuple("to fetch", event.stream, event.port,
                                  nb::bytes(event.why.data(), event.why.size()));
        case LinkEvent::Kind::NotRemade:
            return nb::make_tuple("not remade", event.stream, event.port);
        case LinkEvent::Kind::Closed:
            break;
    }
    return nb::make_tuple("closed");
}

std::string text_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

// Call a function without the GIL, and raise OSError if it throws std::system_error.
template <class Function>
auto with_os_errors(Function function) {
    try {
        WithoutGil without;
        return function();
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
}

// Return how long one sleep may last. Only the main thread handles signals, so only that thread must wake
// after each slice. Any other thread sleeps until an event comes: a driver has one such thread per agent, and
// each wake-up would take the GIL.
int64_t slice_here(Deadline deadline) {
    return thread_number() == uint32_t(getpid()) ? deadline.slice()
                                                 : std::min<int64_t>(deadline.left(), 3600'000'000'000);
}

nb::tuple wait_for_event(PyLink& link, nb::handle timeout) {
    Deadline deadline;
    if (!parse_deadline(timeout.ptr(), deadline)) throw nb::python_error();
    for (;;) {
        LinkEvent event;
        {
            WithoutGil without;
            event = link.next_event(now_ns() + slice_here(deadline));
        }
        if (event.kind != LinkEvent::Kind::None || deadline.now_only() || deadline.passed())
            return tuple_of(event);
        if (PyErr_CheckSignals()) throw nb::python_error();
    }
}

nb::object await_used(PyLink& link, uint32_t number, uint64_t count, nb::handle timeout) {
    Deadline deadline;
    if (!parse_deadline(timeout.ptr(), deadline)) throw nb::python_error();
    for (;;) {
        std::optional<bool> used;
        {
            WithoutGil without;
            used = link.await_used(number, count, now_ns() + slice_here(deadline));
        }
        if (used) return nb::bool_(*used);
        if (deadline.now_only() || deadline.passed()) return nb::none();
        if (PyErr_CheckSignals()) throw nb::python_error();
    }
}

// Signals do not interrupt this wait, so the main thread must not call it.
nb::list wait_for_links(ReadyLinks& ready, nb::handle timeout) {
    Deadline deadline;
    if (!parse_deadline(timeout.ptr(), deadline)) throw nb::python_error();
    std::set<uint64_t> links;
    {
        WithoutGil without;
        links = ready.wait(now_ns() + std::min<int64_t>(deadline.left(), 3600'000'000'000));
    }
    nb::list found;
    for (const uint64_t link : links) found.append(link);
    return found;
}

nb::dict state_of(PyLink& link) {
    std::vector<StreamCounts> counts;
    bool connected;
    {
        WithoutGil without;
        counts = link.counts();
        connected = link.connected();
    }
    nb::dict streams;
    for (const StreamCounts& stream : counts) {
        nb::dict one;
        one["ahead"] = stream.ahead;
        one["in_hand"] = stream.started;
        one["staged"] = stream.staged;
        one["window"] = stream.window;
        one["starved"] = stream.starved;
        one["taken"] = stream.taken;
        one["used"] = stream.used;
        one["standing"] = stream.standing;
        streams[nb::int_(stream.number)] = one;
    }
    nb::dict all;
    all["connected"] = connected;
    all["breaks_in_vain"] = link.breaks_in_vain();
    all["stuck_for"] = double(link.stuck_for()) / 1e9;
    all["heard_ago"] = double(link.silent_for()) / 1e9;
    all["round_trip"] = double(link.round_trip()) / 1e9;
    all["bytes_in"] = link.bytes_in.load();
    all["bytes_out"] = link.bytes_out.load();
    all["breaks"] = link.breaks.load();
    all["streams"] = streams;
    return all;
}

}  // namespace

void bind_link(nb::module_& m) {
    m.def(
        "_references", [] { return references().count(); },
        "Return how many outputs in this process's channels are still stored on other hosts.");
    m.def(
        "_route_outputs", [](Out& out, nb::object route) { out.route = std::move(route); }, "out"_a,
        "route"_a,
        "Let ``route(item)`` choose the worker for each large item, from 0. None lets the program choose.");
    nb::class_<Reference>(m, "Reference",
                          "An output that stays on its host while a stage passes it from channel to channel.")
        .def_ro("worker", &Reference::worker);
    nb::class_<ReadyLinks>(m, "ReadyLinks", "The links that need attention, for one thread that serves many.")
        .def(nb::init<>())
        .def("add", &ReadyLinks::add, "number"_a)
        .def("wait", wait_for_links, "timeout"_a = nb::none(),
             "Wait for links and return their numbers, or [] after the timeout and after ``close``.")
        .def("close", &ReadyLinks::close);
    nb::class_<PyLink>(m, "Link",
                       "A connection between two hosts of a run, which serves the ports of remote workers.")
        .def(nb::init<bool>(), "owner_side"_a)
        .def(
            "attach",
            [](PyLink& link, int fd) {
                WithoutGil without;
                link.attach(fd);
            },
            "fd"_a,
            "Continue over this connected socket and take ownership of it.\n\n"
            "The link resends all frames that did not arrive over the previous socket.")
        .def(
            "open_stream", open_stream, "number"_a, "inputs"_a, "outputs"_a, "on_demand"_a = false,
            "limited"_a = false, "lends"_a = false,
            "Start to serve the ports of one worker. Both sides must use the same ``number``.\n\n"
            "``on_demand``: send items only to workers that wait for an item or process one.\n"
            "``limited``: the worker puts only as many items as the owner has room for.\n"
            "``lends``: large outputs of the first port stay on the worker's side until a host fetches them.")
        .def("set_fetch_address", &PyLink::set_fetch_address, "address"_a,
             "Set the address where other hosts can fetch the outputs that this agent keeps.")
        .def(
            "serve_fetches",
            [](PyLink& link, int fd) {
                WithoutGil without;
                link.serve_fetches(fd);
            },
            "fd"_a, "Send outputs to the host behind this socket until that host closes it.")
        .def(
            "request",
            [](PyLink& link, int fd, nb::bytes location) {
                with_os_errors([&, text = text_of(location)] { return link.request(fd, text); });
            },
            "fd"_a, "location"_a,
            "Request an output over this socket; call ``fetch`` once for each request, in the same order.")
        .def(
            "fetch",
            [](PyLink& link, int fd, nb::bytes location) {
                return with_os_errors([&, text = text_of(location)] { return link.fetch(fd, text); });
            },
            "fd"_a, "location"_a,
            "Receive the oldest requested output. Return False if the other host does not have it.")
        .def(
            "report_unreachable",
            [](PyLink& link, nb::bytes location) {
                const std::string text = text_of(location);
                WithoutGil without;
                link.report_unreachable(text);
            },
            "location"_a, "Report to the owner that an output cannot be fetched, so that the owner sends it.")
        .def(
            "pair",
            [](PyLink& link, uint32_t writes, uint32_t reads) {
                WithoutGil without;
                link.pair_streams(writes, reads);
            },
            "writes"_a, "reads"_a,
            "Reduce the room of stream ``writes`` by the items that stream ``reads`` has prefetched.")
        .def(
            "offer",
            [](PyLink& link, uint32_t number, uint64_t most) {
                WithoutGil without;
                return link.offer(number, most);
            },
            "number"_a, "most"_a,
            "Send up to ``most`` more items of this stream.\n\n"
            "Returns how many items were sent in total, and whether the channel has ended. Returns None "
            "during a recall.")
        .def(
            "room",
            [](PyLink& link, uint32_t number) {
                WithoutGil without;
                return link.room(number);
            },
            "number"_a,
            "Return how many puts this stream was granted in total, and whether its channel has ended.")
        .def("await_used", await_used, "number"_a, "count"_a, "timeout"_a = nb::none(),
             "Wait until the other side has put ``count`` items of this stream.\n\n"
             "Returns True if it has put them, False if it never will, and None after the timeout.")
        .def(
            "drop",
            [](PyLink& link, uint32_t number) {
                WithoutGil without;
                link.drop_stream(number);
            },
            "number"_a, "Stop serving a worker's ports, but keep their sessions. Ignore unknown numbers.")
        .def("wait", wait_for_event, "timeout"_a = nb::none(),
             "Wait for the next event and return its kind and values, or () after the timeout.\n\n"
             "flowchan.transport.link_events converts events to typed objects.")
        .def("announce", &PyLink::announce, "number"_a, "events"_a, "reports"_a,
             "Add ``number`` to ``events`` or ``reports`` when an event or an item of stream 0 arrives.")
        .def(
            "excuse", [](PyLink& link, double seconds) { link.excuse(int64_t(seconds * 1e9)); }, "seconds"_a,
            "Do not count the last ``seconds`` as the peer's silence, because this process was delayed.")
        .def("state", state_of, "Return the state of the connection and the counters of the link.")
        .def(
            "close",
            [](PyLink& link) {
                WithoutGil without;
                link.close();
            },
            "End the connection and the link's threads.");
}

}  // namespace flowchan
