// The methods that run once per item. They are plain C functions, because a binding layer would take longer
// than the operation itself.
#include <cmath>

#include "arguments.hpp"
#include "channel.hpp"

namespace flowchan {

// Return whether an object is a real number, such as a Fraction, a Decimal or a NumPy scalar. Neither a bool
// nor an object that merely has a __float__ method counts.
static bool is_real(PyObject* v) {
    if (PyFloat_Check(v) || PyLong_Check(v)) return !PyBool_Check(v);
    nb::object real = nb::module_::import_("numbers").attr("Real"),
               decimal = nb::module_::import_("decimal").attr("Decimal");
    return PyObject_IsInstance(v, real.ptr()) == 1 || PyObject_IsInstance(v, decimal.ptr()) == 1;
}

// Return the timeout in seconds: INFINITY if it is too large for a double, and NAN if it is not a real
// number.
static double seconds_of(PyObject* v) {
    double s = is_real(v) ? PyFloat_AsDouble(v) : NAN;
    if (!PyErr_Occurred()) return s;
    bool huge = PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    if (!huge) return NAN;
    nb::int_ zero(0);
    int more = PyObject_RichCompareBool(v, zero.ptr(), Py_GT);
    PyErr_Clear();
    return more == 1 ? INFINITY : NAN;
}

bool parse_deadline(PyObject* timeout, Deadline& deadline) {
    if (!timeout || timeout == Py_None) return true;
    double s = seconds_of(timeout);
    if (!(s >= 0)) {
        PyErr_Format(PyExc_ValueError, "timeout must be None or at least 0 seconds, got %R", timeout);
        return false;
    }
    deadline.at = s == 0 ? 0 : s > 1e9 ? NEVER : now_ns() + int64_t(s * 1e9);
    return true;
}

namespace {

Channel& channel_of(PyObject* self) { return *nb::inst_ptr<Channel>(self); }
In& in_of(PyObject* self) { return *nb::inst_ptr<In>(self); }
Out& out_of(PyObject* self) { return *nb::inst_ptr<Out>(self); }

constexpr const char* PUT[] = {"item", "timeout"};
constexpr const char* PUT_MANY[] = {"items", "timeout"};
constexpr const char* GET[] = {"timeout"};
constexpr const char* GET_MANY[] = {"max", "timeout"};

[[gnu::noinline]] PyObject* put_with_options(Channel& ch, Out* out, PyObject* const* args, Py_ssize_t n,
                                             PyObject* keywords) {
    PyObject* v[2];
    Deadline deadline;
    if (!parse("put", PUT, 1, args, n, keywords, v) || !parse_deadline(v[1], deadline)) return nullptr;
    return in_time(ch, Side::Writer, deadline,
                   [&](Channel& to, Deadline until) { return put_item(to, out, v[0], until); });
}
PyObject* do_put(Channel& ch, Out* out, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    if (n != 1 || keywords) return put_with_options(ch, out, args, n, keywords);
    return put_item(ch.elsewhere ? ch.through(Side::Writer) : ch, out, args[0], Deadline{});
}
PyObject* do_put_many(Channel& ch, Out* out, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    PyObject* v[2];
    Deadline deadline;
    if (!parse("put_many", PUT_MANY, 1, args, n, keywords, v) || !parse_deadline(v[1], deadline))
        return nullptr;
    return put_all(ch, out, v[0], deadline);
}
PyObject* do_get(Channel& ch, In* in, PyObject* const* args, Py_ssize_t n, PyObject* keywords, bool keep) {
    PyObject* v[1];
    Deadline deadline;
    if (n || keywords)
        if (!parse("get", GET, 0, args, n, keywords, v) || !parse_deadline(v[0], deadline)) return nullptr;
    return in_time(ch, Side::Reader, deadline,
                   [&](Channel& from, Deadline until) { return get_item(from, in, until, keep, false); });
}
PyObject* do_get_many(Channel& ch, In* in, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    PyObject* v[2];
    Deadline deadline;
    if (!parse("get_many", GET_MANY, 1, args, n, keywords, v) || !parse_deadline(v[1], deadline))
        return nullptr;
    Py_ssize_t most = PyLong_Check(v[0]) && !PyBool_Check(v[0]) ? PyLong_AsSsize_t(v[0]) : -1;
    if (most < 1) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "get_many: max must be an int of at least 1, got %R", v[0]);
        return nullptr;
    }
    ch.fetch(most);
    return in_time(ch, Side::Reader, deadline,
                   [&](Channel& from, Deadline until) { return get_all(from, in, most, until); });
}

#define FAST(name, body)                                                                      \
    PyObject* name(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) { \
        (void)args, (void)n, (void)keywords;                                                  \
        return guarded([&]() -> PyObject* { body; });                                         \
    }
#define PORT(kind)                   \
    nb::ft_object_guard guard(self); \
    auto& port = kind##_of(self);    \
    if (!ready(port)) return nullptr

FAST(channel_put, return do_put(channel_of(self), nullptr, args, n, keywords))
FAST(channel_put_many, return do_put_many(channel_of(self), nullptr, args, n, keywords))
FAST(channel_get, return do_get(channel_of(self), nullptr, args, n, keywords, false))
FAST(channel_get_many, return do_get_many(channel_of(self), nullptr, args, n, keywords))
FAST(out_put, PORT(out); return do_put(*port.ch, &port, args, n, keywords))
FAST(out_put_many, PORT(out); return do_put_many(*port.ch, &port, args, n, keywords))
FAST(in_get, PORT(in); return do_get(*port.ch, &port, args, n, keywords, false))
FAST(in_get_more, PORT(in); return do_get(*port.ch, &port, args, n, keywords, true))
FAST(in_get_many, PORT(in); return do_get_many(*port.ch, &port, args, n, keywords))

PyObject* channel_put_nowait(PyObject* self, PyObject* item) {
    return guarded([&] {
        return in_time(channel_of(self), Side::Writer, Deadline{0},
                       [&](Channel& to, Deadline until) { return put_item(to, nullptr, item, until); });
    });
}
PyObject* channel_get_nowait(PyObject* self, PyObject*) {
    return guarded([&] {
        return in_time(channel_of(self), Side::Reader, Deadline{0}, [&](Channel& from, Deadline until) {
            return get_item(from, nullptr, until, false, false);
        });
    });
}
PyObject* out_put_nowait(PyObject* self, PyObject* item) {
    return guarded([&]() -> PyObject* {
        PORT(out);
        return put_item(*port.ch, &port, item, Deadline{0});
    });
}
PyObject* in_get_nowait(PyObject* self, PyObject*) {
    return guarded([&]() -> PyObject* {
        PORT(in);
        return get_item(*port.ch, &port, Deadline{0}, false, false);
    });
}

#undef FAST

#define PUT_DOC                                                             \
    "put($self, /, item, timeout=None)\n--\n\n"                             \
    "Put an item, waiting while the channel is full.\n\n"                   \
    "Args:\n"                                                               \
    "    item: The item. A channel between processes passes a copy.\n"      \
    "    timeout: Seconds to wait (default: no limit).\n\n"                 \
    "Raises:\n"                                                             \
    "    Full: The channel stayed full for ``timeout`` seconds.\n"          \
    "    Closed: The channel was closed, or its last reader left.\n"        \
    "    Broken: The channel is broken.\n"                                  \
    "    TypeError: The item cannot be serialised for another process.\n\n" \
    "Example:\n"                                                            \
    "    >>> from flowchan import Channel\n"                                \
    "    >>> channel = Channel(capacity=2)\n"                               \
    "    >>> channel.put(\"a\")\n"                                          \
    "    >>> channel.put(\"b\", timeout=0.1)\n"                             \
    "    >>> channel.get_many(2)\n"                                         \
    "    ['a', 'b']"

#define PUT_NOWAIT_DOC                                                      \
    "put_nowait($self, item, /)\n--\n\n"                                    \
    "Put an item if there is room now.\n\n"                                 \
    "Args:\n"                                                               \
    "    item: The item. A channel between processes passes a copy.\n\n"    \
    "Raises:\n"                                                             \
    "    Full: The channel is full.\n"                                      \
    "    Closed: The channel was closed, or its last reader left.\n"        \
    "    Broken: The channel is broken.\n"                                  \
    "    TypeError: The item cannot be serialised for another process.\n\n" \
    "Example:\n"                                                            \
    "    >>> from flowchan import Channel, Full\n"                          \
    "    >>> channel = Channel(capacity=1)\n"                               \
    "    >>> channel.put_nowait(\"a\")\n"                                   \
    "    >>> try:\n"                                                        \
    "    ...     channel.put_nowait(\"b\")\n"                               \
    "    ... except Full:\n"                                                \
    "    ...     print(\"full\")\n"                                         \
    "    full"

#define PUT_MANY_DOC                                                                              \
    "put_many($self, /, items, timeout=None)\n--\n\n"                                             \
    "Put all items of an iterable in order, waiting while the channel is full.\n\n"               \
    "Args:\n"                                                                                     \
    "    items: The items. The iterable is read as the channel accepts them.\n"                   \
    "    timeout: Seconds to wait for all items together (default: no limit).\n\n"                \
    "Raises:\n"                                                                                   \
    "    Full: The timeout expired. The error's ``items_put`` counts the items that were put.\n"  \
    "    Closed: The channel was closed, or its last reader left. The error has ``items_put``.\n" \
    "    Broken: The channel is broken. The error has ``items_put``.\n"                           \
    "    TypeError: An item cannot be serialised for another process.\n\n"                        \
    "Example:\n"                                                                                  \
    "    >>> from flowchan import Channel\n"                                                      \
    "    >>> channel = Channel(capacity=3)\n"                                                     \
    "    >>> channel.put_many(range(3))\n"                                                        \
    "    >>> len(channel)\n"                                                                      \
    "    3"

#define GET_DOC                                                                \
    "get($self, /, timeout=None)\n--\n\n"                                      \
    "Take the oldest item, waiting while the channel is empty.\n\n"            \
    "Args:\n"                                                                  \
    "    timeout: Seconds to wait (default: no limit).\n\n"                    \
    "Returns:\n"                                                               \
    "    The item.\n\n"                                                        \
    "Raises:\n"                                                                \
    "    Empty: No item arrived within ``timeout`` seconds.\n"                 \
    "    Drained: The channel is closed, and all its items have been taken.\n" \
    "    Broken: The channel is broken.\n\n"                                   \
    "Example:\n"                                                               \
    "    >>> from flowchan import Channel\n"                                   \
    "    >>> channel = Channel()\n"                                            \
    "    >>> channel.put(\"a\")\n"                                             \
    "    >>> channel.get(timeout=1)\n"                                         \
    "    'a'"

#define GET_NOWAIT_DOC                                                         \
    "get_nowait($self)\n--\n\n"                                                \
    "Take the oldest item if there is one now.\n\n"                            \
    "Returns:\n"                                                               \
    "    The item.\n\n"                                                        \
    "Raises:\n"                                                                \
    "    Empty: The channel is empty.\n"                                       \
    "    Drained: The channel is closed, and all its items have been taken.\n" \
    "    Broken: The channel is broken.\n\n"                                   \
    "Example:\n"                                                               \
    "    >>> from flowchan import Channel, Empty\n"                            \
    "    >>> channel = Channel()\n"                                            \
    "    >>> try:\n"                                                           \
    "    ...     channel.get_nowait()\n"                                       \
    "    ... except Empty:\n"                                                  \
    "    ...     print(\"empty\")\n"                                           \
    "    empty"

#define GET_MANY_DOC                                                                                  \
    "get_many($self, /, max, timeout=None)\n--\n\n"                                                   \
    "Take up to ``max`` items as a list.\n\n"                                                         \
    "The call waits for the first item like ``get``, and then takes what is already available. The\n" \
    "list ends before an item that cannot be unpickled. The next call raises that item's error.\n\n"  \
    "Args:\n"                                                                                         \
    "    max: Largest number of items to take.\n"                                                     \
    "    timeout: Seconds to wait for the first item (default: no limit).\n\n"                        \
    "Returns:\n"                                                                                      \
    "    A list of at least one item.\n\n"                                                            \
    "Raises:\n"                                                                                       \
    "    Empty: No item arrived within ``timeout`` seconds.\n"                                        \
    "    Drained: The channel is closed, and all its items have been taken.\n"                        \
    "    Broken: The channel is broken.\n"                                                            \
    "    KeyboardInterrupt: The error's ``items_got`` contains the items already taken.\n\n"          \
    "Example:\n"                                                                                      \
    "    >>> from flowchan import Channel\n"                                                          \
    "    >>> channel = Channel()\n"                                                                   \
    "    >>> channel.put_many(\"abc\")\n"                                                             \
    "    >>> channel.get_many(2)\n"                                                                   \
    "    ['a', 'b']"

#define GET_MORE_DOC                                                                \
    "get_more($self, /, timeout=None)\n--\n\n"                                      \
    "Take an item like ``get``, but keep the earlier items on lease.\n\n"           \
    "The item and the earlier ones count as unfinished until the next ``get``.\n\n" \
    "Args:\n"                                                                       \
    "    timeout: Seconds to wait (default: no limit).\n\n"                         \
    "Returns:\n"                                                                    \
    "    The item.\n\n"                                                             \
    "Raises:\n"                                                                     \
    "    Empty: No item arrived within ``timeout`` seconds.\n"                      \
    "    Drained: The channel is closed, and all its items have been taken.\n"      \
    "    Broken: The channel is broken.\n\n"                                        \
    "Example:\n"                                                                    \
    "    >>> from flowchan import Channel\n"                                        \
    "    >>> channel = Channel(across=\"processes\")\n"                             \
    "    >>> channel.put_many(\"ab\")\n"                                            \
    "    >>> with channel.reader() as reader:\n"                                    \
    "    ...     pair = [reader.get(), reader.get_more()]\n"                        \
    "    >>> pair\n"                                                                \
    "    ['a', 'b']"

}  // namespace

PyMethodDef channel_methods[] = {{"put", fast(channel_put), FASTCALL, PUT_DOC},
                                 {"put_nowait", channel_put_nowait, METH_O, PUT_NOWAIT_DOC},
                                 {"put_many", fast(channel_put_many), FASTCALL, PUT_MANY_DOC},
                                 {"get", fast(channel_get), FASTCALL, GET_DOC},
                                 {"get_nowait", channel_get_nowait, METH_NOARGS, GET_NOWAIT_DOC},
                                 {"get_many", fast(channel_get_many), FASTCALL, GET_MANY_DOC},
                                 {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS,
                                  "Channel[T]: annotation for a channel with items of type T."},
                                 {nullptr, nullptr, 0, nullptr}};

PyMethodDef in_methods[] = {{"get", fast(in_get), FASTCALL, GET_DOC},
                            {"get_nowait", in_get_nowait, METH_NOARGS, GET_NOWAIT_DOC},
                            {"get_many", fast(in_get_many), FASTCALL, GET_MANY_DOC},
                            {"get_more", fast(in_get_more), FASTCALL, GET_MORE_DOC},
                            {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS,
                             "In[T]: annotation for an input port with items of type T."},
                            {nullptr, nullptr, 0, nullptr}};

PyMethodDef out_methods[] = {{"put", fast(out_put), FASTCALL, PUT_DOC},
                             {"put_nowait", out_put_nowait, METH_O, PUT_NOWAIT_DOC},
                             {"put_many", fast(out_put_many), FASTCALL, PUT_MANY_DOC},
                             {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS,
                              "Out[T]: annotation for an output port with items of type T."},
                             {nullptr, nullptr, 0, nullptr}};

PyObject* channel_next(PyObject* self) {
    return guarded([&] {
        Channel& ch = channel_of(self);
        return get_item(ch.elsewhere ? ch.through(Side::Reader) : ch, nullptr, Deadline{}, false, true);
    });
}
PyObject* in_next(PyObject* self) {
    return guarded([&]() -> PyObject* {
        PORT(in);
        return get_item(*port.ch, &port, Deadline{}, false, true);
    });
}

#undef PORT

// --- garbage collection: a channel owns its items, and a port owns its channel ---

int channel_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    Channel& ch = channel_of(self);
    Py_VISIT(ch.reading.ptr());
    Py_VISIT(ch.writing.ptr());
    return ch.with(
        Each{[&](LocalQueue& queue) { return queue.traverse(visit, arg); }, [](Ring&) { return 0; }});
}
int channel_clear(PyObject* self) {
    if (!nb::inst_ready(self)) return 0;
    std::vector<PyObject*> dropped;
    Wakes wakes;
    channel_of(self).reading.reset();
    channel_of(self).writing.reset();
    channel_of(self).with(
        Each{[&](LocalQueue& queue) { queue.break_(nullptr, dropped, wakes); }, [](Ring&) {}});
    for (PyObject* o : dropped) Py_DECREF(o);
    return 0;
}
int in_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    Py_VISIT(in_of(self).channel.ptr());
    Py_VISIT(in_of(self).on_poison.ptr());
    for (nb::object& call : in_of(self).due) Py_VISIT(call.ptr());
    for (LocalQueue::Item& item : in_of(self).leased_items) Py_VISIT(item.object);
    return 0;
}
int in_clear(PyObject* self) {
    if (!nb::inst_ready(self)) return 0;
    in_of(self).on_poison.reset();
    const auto calls = std::exchange(in_of(self).due, {});
    drop_items(std::exchange(in_of(self).leased_items, {}));
    return 0;
}
// Give back the leased items. The garbage collector calls this before it clears the objects that the port
// refers to, so the items are still intact.
void in_finalize(PyObject* self) {
    if (!nb::inst_ready(self)) return;
    nb::error_scope kept;
    in_of(self).drop();
}
int out_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    Py_VISIT(out_of(self).channel.ptr());
    Py_VISIT(out_of(self).reader.ptr());
    Py_VISIT(out_of(self).route.ptr());
    return 0;
}
int out_clear(PyObject* self) {
    if (!nb::inst_ready(self)) return 0;
    if (In* in = out_of(self).follows()) std::erase(in->feeds, &out_of(self));
    out_of(self).reader.reset();
    out_of(self).route.reset();
    return 0;
}

}  // namespace flowchan
