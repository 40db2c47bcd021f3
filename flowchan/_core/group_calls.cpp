// The fast calls of a group, for contiguous arrays. For other values, a call falls back to the method in
// flowchan/collective/group_steps.py that has the same name with a leading underscore.
#include "group_calls.hpp"

namespace flowchan {

// Combines arrays and writes this member's part to `out`. Returns NotImplemented unless `x` and `out` are
// contiguous arrays of matching sizes.
PyObject* reduce_scatter_array(PyObject* self, PyObject* x, PyObject* out, PyObject* op_name,
                               PyObject* timeout) {
    PyGroup& group = group_of(self);
    Op op;
    Deadline deadline;
    Array in, to;
    if (!parse_op("reduce_scatter", op_name, op) || !parse_deadline(timeout, deadline)) return nullptr;
    if (!in.read(x) || !to.read(out)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
    if (!has_kernel(in, op, x)) return nullptr;
    if (in.count % group.size || !fits(in, to, in.count / group.size)) return Py_NewRef(Py_NotImplemented);
    const uint64_t key = mixed(mixed(in.what, REDUCE_SCATTER), uint64_t(op));
    Calling calling(self, REDUCE_SCATTER, deadline);
    const End end = calling.run([&](Patience& patience) {
        return group.reduce_scatter({REDUCE_SCATTER, key}, {in.data, to.data, to.count, in.element, op},
                                    patience);
    });
    return end == End::Done ? Py_NewRef(out) : raise_end(self, end, REDUCE_SCATTER, x, op_name);
}

// Combines the arrays of all members. The result goes only to the member `root`, or to all members if `root`
// is negative. Returns NotImplemented unless `x` and `out` are contiguous arrays of matching sizes.
// `part_of`: the key of the whole call, if this is one step of a call across several hosts.
PyObject* reduce_arrays(PyObject* self, uint32_t doing, PyObject* x, PyObject* out, PyObject* op_name,
                        int root, PyObject* timeout, uint64_t part_of) {
    PyGroup& group = group_of(self);
    Op op;
    Deadline deadline;
    if (!parse_op(doing == REDUCE ? "reduce" : "allreduce", op_name, op) ||
        !parse_deadline(timeout, deadline))
        return nullptr;
    Array in, to;
    if (!in.read(x) || (!is_default(out) && !to.read(out)))
        return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
    const Array& result = is_default(out) ? in : to;
    const bool gets = root < 0 || uint32_t(root) == group.rank;
    if (!has_kernel(in, op, x)) return nullptr;
    if (gets && !fits(in, result, in.count)) return Py_NewRef(Py_NotImplemented);
    const uint64_t key =
        mixed(mixed(mixed(mixed(in.what, doing), uint64_t(op)), uint64_t(root + 1)), part_of);
    Calling calling(self, doing, deadline);
    const End end = calling.run([&](Patience& patience) {
        return group.allreduce({doing, key}, {in.data, result.data, in.count, in.element, op, root},
                               patience);
    });
    if (end != End::Done) return raise_end(self, end, doing, x, op_name, doing == REDUCE ? root : -1);
    return Py_NewRef(is_default(out) ? x : out);
}

PyObject* broadcast_array(PyObject* self, PyObject* x, uint32_t root, PyObject* timeout) {
    PyGroup& group = group_of(self);
    Deadline deadline;
    Array array;
    if (!parse_deadline(timeout, deadline)) return nullptr;
    if (!array.read(x)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
    if (group.rank != root && !array.writable) return Py_NewRef(Py_NotImplemented);
    const uint64_t key = mixed(mixed(array.what, BROADCAST), root);
    Calling calling(self, BROADCAST, deadline);
    const End end = calling.run([&](Patience& patience) {
        return group.broadcast({BROADCAST, key}, array.data, array.bytes, root, patience);
    });
    return end == End::Done ? Py_NewRef(x) : raise_end(self, end, BROADCAST, x, nullptr, int(root));
}

End swap_arrays(PyObject* self, Member::Call call, const Arrays& in, const Arrays& out, Deadline deadline) {
    PyGroup& group = group_of(self);
    auto from = in.places<const void*>();
    std::vector<std::vector<char>> copies(in.size());
    for (size_t i = 0; i < in.size(); ++i)
        from[i] = out.kept(in[i], i == group.rank ? i : in.size(), copies[i]);
    const Member::Parts parts{from, in.sizes(), out.places<void*>(), out.sizes()};
    Calling calling(self, call.doing, deadline);
    return calling.run([&](Patience& patience) { return group.alltoall(call, parts, patience); });
}

namespace {

constexpr const char* ALLGATHER_NAMES[] = {"x", "out", "timeout", "wait"};
constexpr const char* ALLTOALL_NAMES[] = {"xs", "out", "timeout", "wait"};
constexpr const char* REDUCE_SCATTER_NAMES[] = {"x", "op", "out", "timeout", "wait"};
constexpr const char* ALLREDUCE_NAMES[] = {"x", "op", "out", "timeout", "wait"};
constexpr const char* BROADCAST_NAMES[] = {"x", "root", "timeout", "wait"};
constexpr const char* BARRIER_NAMES[] = {"timeout", "wait"};

bool goes_later(PyObject* self, PyObject* wait) {
    return (wait && wait != Py_True) || group_of(self).queued.load(std::memory_order_relaxed);
}

PyObject* allreduce(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        PyObject* v[5];
        if (!parse("allreduce", ALLREDUCE_NAMES, 1, args, n, keywords, v)) return nullptr;
        const bool is_function = v[1] && !PyUnicode_Check(v[1]);
        if (!is_function && !goes_later(self, v[4])) {
            PyObject* result = reduce_arrays(self, ALLREDUCE, v[0], v[2], v[1], -1, v[3]);
            if (result != Py_NotImplemented) return result;
            Py_DECREF(result);
        }
        return call_general(self, "_allreduce", v, 5);
    });
}

PyObject* broadcast(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        PyObject* v[4];
        uint32_t root;
        if (!parse("broadcast", BROADCAST_NAMES, 1, args, n, keywords, v) ||
            !parse_root("broadcast", v[1], group_of(self), root))
            return nullptr;
        if (!goes_later(self, v[3])) {
            PyObject* result = broadcast_array(self, v[0], root, v[2]);
            if (result != Py_NotImplemented) return result;
            Py_DECREF(result);
        }
        return call_general(self, "_broadcast", v, 4);
    });
}

PyObject* barrier(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        PyObject* v[2];
        Deadline deadline;
        if (!parse("barrier", BARRIER_NAMES, 0, args, n, keywords, v)) return nullptr;
        if (goes_later(self, v[1])) return call_general(self, "_barrier", v, 2);
        if (!parse_deadline(v[0], deadline)) return nullptr;
        Calling calling(self, BARRIER, deadline);
        const End end = calling.run(
            [&](Patience& patience) { return group_of(self).barrier({BARRIER, BARRIER}, patience); });
        return end == End::Done ? Py_NewRef(Py_None) : raise_end(self, end, BARRIER, nullptr, nullptr);
    });
}

// Gathers into the list of arrays `out`. Returns NotImplemented unless all arrays are contiguous.
PyObject* allgather_arrays(PyObject* self, PyObject* x, PyObject* out, PyObject* timeout) {
    PyGroup& group = group_of(self);
    Deadline deadline;
    Array in;
    Arrays room;
    if (!parse_deadline(timeout, deadline)) return nullptr;
    if (!in.read(x) || !room.read(out) || room.size() != group.size)
        return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
    if (!room.are_writable() || !room.are_of_kind(in.kind)) return Py_NewRef(Py_NotImplemented);
    std::vector<char> copy;
    const void* from = room.kept(in, group.rank, copy);
    Calling calling(self, ALLGATHER, deadline);
    const End end = calling.run([&](Patience& patience) {
        return group.allgather({ALLGATHER, key_of(ALLGATHER, TYPED, &in)}, from, in.bytes, room, patience);
    });
    if (end != End::Done) return raise_end(self, end, ALLGATHER, x, nullptr);
    return room.check() ? Py_NewRef(out) : nullptr;
}

PyObject* allgather(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        PyObject* v[4];
        if (!parse("allgather", ALLGATHER_NAMES, 1, args, n, keywords, v)) return nullptr;
        if (!goes_later(self, v[3])) {
            PyObject* result = is_default(v[1]) ? allgather_values(self, v[0], v[2])
                                                : allgather_arrays(self, v[0], v[1], v[2]);
            if (result != Py_NotImplemented) return result;
            Py_DECREF(result);
        }
        return call_general(self, "_allgather", v, 4);
    });
}

// Exchanges two lists of arrays. Returns NotImplemented unless all arrays are contiguous.
PyObject* alltoall_arrays(PyObject* self, PyObject* xs, PyObject* out, PyObject* timeout) {
    PyGroup& group = group_of(self);
    Deadline deadline;
    Arrays in, room;
    if (!parse_deadline(timeout, deadline)) return nullptr;
    if (!in.read(xs) || !room.read(out) || in.size() != group.size || room.size() != group.size)
        return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
    if (!room.are_writable() || !in.are_of_kind(in[0].kind) || !room.are_of_kind(in[0].kind))
        return Py_NewRef(Py_NotImplemented);
    const uint64_t key = key_of(ALLTOALL, TYPED, &in[0]);
    const End end = swap_arrays(self, {ALLTOALL, key}, in, room, deadline);
    if (end != End::Done) return raise_end(self, end, ALLTOALL, xs, nullptr);
    return PySequence_List(out);
}

PyObject* alltoall(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        PyObject* v[4];
        if (!parse("alltoall", ALLTOALL_NAMES, 1, args, n, keywords, v)) return nullptr;
        if (!is_default(v[1]) && !goes_later(self, v[3])) {
            PyObject* result = alltoall_arrays(self, v[0], v[1], v[2]);
            if (result != Py_NotImplemented) return result;
            Py_DECREF(result);
        }
        return call_general(self, "_alltoall_any", v, 4);
    });
}

PyObject* reduce_scatter(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        PyObject* v[5];
        if (!parse("reduce_scatter", REDUCE_SCATTER_NAMES, 1, args, n, keywords, v)) return nullptr;
        if (!is_default(v[2]) && !goes_later(self, v[4])) {
            PyObject* result = reduce_scatter_array(self, v[0], v[2], v[1], v[3]);
            if (result != Py_NotImplemented) return result;
            Py_DECREF(result);
        }
        return call_general(self, "_reduce_scatter_any", v, 5);
    });
}

// flowchan/collective/collectives.py has the full documentation.
PyMethodDef group_methods[] = {
    {"allreduce", fast(allreduce), FASTCALL,
     "allreduce($self, /, x, op='sum', out=None, timeout=None, wait=True)\n--\n\n"
     "Combine the values of all members element by element, in the order of the ranks.\n\n"
     "See flowchan.collective.Group.allreduce."},
    {"broadcast", fast(broadcast), FASTCALL,
     "broadcast($self, /, x=None, root=0, timeout=None, wait=True)\n--\n\n"
     "Copy the value of ``root`` to all members.\n\n"
     "See flowchan.collective.Group.broadcast."},
    {"barrier", fast(barrier), FASTCALL,
     "barrier($self, /, timeout=None, wait=True)\n--\n\n"
     "Wait until all members have called ``barrier``.\n\n"
     "See flowchan.collective.Group.barrier."},
    {"allgather", fast(allgather), FASTCALL,
     "allgather($self, /, x, out=None, timeout=None, wait=True)\n--\n\n"
     "Gather one value from each member on all members.\n\n"
     "See flowchan.collective.Group.allgather."},
    {"alltoall", fast(alltoall), FASTCALL,
     "alltoall($self, /, xs, out=None, timeout=None, wait=True)\n--\n\n"
     "Send one value to each member, and receive one from each.\n\n"
     "See flowchan.collective.Group.alltoall."},
    {"reduce_scatter", fast(reduce_scatter), FASTCALL,
     "reduce_scatter($self, /, x, op='sum', out=None, timeout=None, wait=True)\n--\n\n"
     "Combine the arrays of all members, and return this member's part of the result.\n\n"
     "See flowchan.collective.Group.reduce_scatter."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyType_Slot group_slots[] = {{Py_tp_methods, group_methods}, {0, nullptr}};

}  // namespace flowchan
