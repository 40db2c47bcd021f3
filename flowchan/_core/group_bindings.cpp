// Group as Python sees it. What needs no speed, and the words of errors, are in flowchan/collective/group.py.
#include "group_bindings.hpp"
#include "arguments.hpp"
#include "channel.hpp"
#include "group.hpp"
#include "group_arrays.hpp"

#include <cstring>
#include <system_error>

namespace flowchan {

using namespace nb::literals;

namespace {

// The numbers of the operations; flowchan/collective/group.py has their names.
enum Doing : uint32_t { BARRIER = 1, BROADCAST, REDUCE, ALLREDUCE, REDUCE_SCATTER };

constexpr const char* OPS[] = {"sum", "mean", "prod", "min", "max", "and", "or", "xor"};
constexpr int64_t STALLED_NS = 10'000'000'000;

class PyGroup : public Member {
  public:
    using Member::Member;
    std::atomic<uint32_t> queued{0};  // operations that a thread of this process still has to do first
};

PyGroup& group_of(PyObject* self) { return *nb::inst_ptr<PyGroup>(self); }

// A call: without the GIL, but for a look at signals and a word about stalls while it waits.
class Calling : public Patience {
  public:
    Calling(PyObject* self, uint32_t doing, Deadline deadline)
        : Patience(deadline), self_(self), doing_(doing) {}

    template <class F>
    End run(F operation) {
        state_ = PyEval_SaveThread();
        End end;
        {
            std::lock_guard lock(group_of(self_).in_use());
            end = operation(*this);
        }
        take_gil(state_);
        return end;
    }
    // In the middle of it, with the GIL.
    template <class F>
    bool with_gil(F f) {
        take_gil(state_);
        const bool done = f();
        state_ = PyEval_SaveThread();
        return done;
    }
    bool interrupted(int64_t waited) override {
        return with_gil([&] {
            if (PyErr_CheckSignals()) return true;
            if (waited < STALLED_NS || told_) return false;
            told_ = true;
            PyObject* done = PyObject_CallMethod(self_, "_stalled", "Id", doing_, double(waited) / 1e9);
            Py_XDECREF(done);
            return !done;
        });
    }

  private:
    PyObject* self_;
    const uint32_t doing_;
    PyThreadState* state_ = nullptr;
    bool told_ = false;
};

// Raises what an operation has ended by; null.
PyObject* raise_end(PyObject* self, End end, uint32_t doing, PyObject* x, PyObject* more) {
    if (end == End::Interrupted) return nullptr;
    PyObject* none =
        PyObject_CallMethod(self, "_failed", "iIOO", int(end), doing, x ? x : Py_None, more ? more : Py_None);
    Py_XDECREF(none);
    if (none) PyErr_SetString(PyExc_SystemError, "an operation failed, and nothing said so");
    return nullptr;
}

bool parse_op(PyObject* name, Op& op) {
    op = Op::Sum;
    if (!name) return true;
    for (size_t i = 0; PyUnicode_Check(name) && i < std::size(OPS); ++i)
        if (PyUnicode_CompareWithASCIIString(name, OPS[i]) == 0) return op = Op(i), true;
    PyErr_Format(PyExc_ValueError,
                 "op must be 'sum', 'mean', 'prod', 'min', 'max', 'and', 'or' or 'xor', not %R", name);
    return false;
}

bool parse_root(PyObject* value, const Member& group, uint32_t& root) {
    const long long number = value ? PyLong_AsLongLong(value) : 0;
    if (number == -1 && PyErr_Occurred()) return false;
    if (number < 0 || number >= group.size) {
        PyErr_Format(PyExc_ValueError, "root must be a rank of the group, from 0 to %u, not %R",
                     group.size - 1, value);
        return false;
    }
    root = uint32_t(number);
    return true;
}

bool is_default(PyObject* value) { return !value || value == Py_None; }

// Where a result goes; false with an error.
bool check_out(const Array& in, const Array& out, PyObject* given, size_t count) {
    if (out.element != in.element || out.count != count) {
        PyErr_Format(PyExc_ValueError, "out must have the type of the input, and %zu elements, not %zu",
                     count, out.count);
        return false;
    }
    if (!out.writable)
        PyErr_Format(PyExc_ValueError, "the result can't be written into a read-only array: %R", given);
    return out.writable;
}

bool has_kernel(const Array& array, Op op, PyObject* x) {
    if (find_kernel(array.element, op)) return true;
    PyObject* type = PyObject_GetAttrString(x, "dtype");
    PyErr_Format(PyExc_TypeError, "there is no %s of elements of type %S%s", OPS[size_t(op)],
                 type ? type : Py_None,
                 op == Op::Mean ? "; take the sum, or convert them to a floating-point type" : "");
    Py_XDECREF(type);
    return false;
}

PyObject* call_general(PyObject* self, const char* method, PyObject* const* values, size_t n) {
    PyObject* arguments[8] = {self};
    for (size_t i = 0; i < n; ++i) arguments[i + 1] = values[i] ? values[i] : Py_None;
    PyObject* name = PyUnicode_InternFromString(method);
    PyObject* result = PyObject_VectorcallMethod(name, arguments, n + 1, nullptr);
    Py_DECREF(name);
    return result;
}

// Combines arrays of all members. root < 0: for everybody. NotImplemented: `x` is no such array.
PyObject* reduce_arrays(PyObject* self, uint32_t doing, PyObject* x, PyObject* out, PyObject* op_name,
                        int root, PyObject* timeout) {
    PyGroup& group = group_of(self);
    Op op;
    Deadline deadline;
    if (!parse_op(op_name, op) || !parse_deadline(timeout, deadline)) return nullptr;
    Array in, to;
    if (!in.read(x) || (!is_default(out) && !to.read(out)))
        return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
    const Array& result = is_default(out) ? in : to;
    const bool gets = root < 0 || uint32_t(root) == group.rank;
    if (!has_kernel(in, op, x) || (gets && !check_out(in, result, is_default(out) ? x : out, in.count)))
        return nullptr;
    const uint64_t key = mixed(mixed(mixed(in.what, doing), uint64_t(op)), uint64_t(root + 1));
    Calling calling(self, doing, deadline);
    const End end = calling.run([&](Patience& patience) {
        return group.allreduce({doing, key}, in.data, result.data, in.count, in.element, op, root, patience);
    });
    if (end != End::Done) return raise_end(self, end, doing, x, op_name);
    return Py_NewRef(is_default(out) ? x : out);
}

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

PyObject* broadcast_array(PyObject* self, PyObject* x, uint32_t root, PyObject* timeout) {
    PyGroup& group = group_of(self);
    Deadline deadline;
    Array array;
    if (!parse_deadline(timeout, deadline)) return nullptr;
    if (!array.read(x)) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_NotImplemented);
    if (group.rank != root && !check_out(array, array, x, array.count)) return nullptr;
    const uint64_t key = mixed(mixed(array.what, BROADCAST), root);
    Calling calling(self, BROADCAST, deadline);
    const End end = calling.run([&](Patience& patience) {
        return group.broadcast({BROADCAST, key}, array.data, array.bytes, root, patience);
    });
    return end == End::Done ? Py_NewRef(x) : raise_end(self, end, BROADCAST, x, nullptr);
}

PyObject* broadcast(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* keywords) {
    return guarded([&]() -> PyObject* {
        PyObject* v[4];
        uint32_t root;
        if (!parse("broadcast", BROADCAST_NAMES, 1, args, n, keywords, v) ||
            !parse_root(v[1], group_of(self), root))
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

PyMethodDef group_methods[] = {
    {"allreduce", fast(allreduce), FASTCALL,
     "allreduce($self, /, x, op='sum', out=None, timeout=None, wait=True)\n--\n\n"
     "Combine what all members give, element by element, in the order of their ranks: all get the same "
     "bits.\n\n"
     "An array or tensor is overwritten with the result and returned; with ``out`` it stays, and that one is "
     "returned. Any other value is combined by Python's operators, and the result returned. ``op``: 'sum', "
     "'mean', 'prod', 'min', 'max', 'and', 'or', 'xor', for values also a function of two. ``wait=False`` "
     "gives "
     "a handle."},
    {"broadcast", fast(broadcast), FASTCALL,
     "broadcast($self, /, x=None, root=0, timeout=None, wait=True)\n--\n\n"
     "Give all members what ``root`` has: an array or tensor of the same shape and type is overwritten and "
     "returned; any other value is returned."},
    {"barrier", fast(barrier), FASTCALL,
     "barrier($self, /, timeout=None, wait=True)\n--\n\nReturn when all members have called it."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot group_slots[] = {{Py_tp_methods, group_methods}, {0, nullptr}};

// A value as bytes that lie in one piece.
struct Bytes {
    Py_buffer view{};
    explicit Bytes(PyObject* object) {
        if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~Bytes() { PyBuffer_Release(&view); }
    Bytes(const Bytes&) = delete;
};

Deadline deadline_of(nb::handle timeout) {
    Deadline deadline;
    if (!parse_deadline(timeout.ptr(), deadline)) throw nb::python_error();
    return deadline;
}

void raise_unless_done(nb::handle self, End end, uint32_t doing, nb::handle x, nb::handle more) {
    if (end != End::Done) raise_end(self.ptr(), end, doing, x.ptr(), more.ptr()), throw nb::python_error();
}

// New bytes of Python for what each member shows, or for that of one.
class PlaceBytes : public Member::Place {
  public:
    PlaceBytes(Calling& calling, int only) : calling_(calling), only_(only) {}
    nb::list found;
    bool operator()(const std::vector<uint64_t>& sizes, std::vector<void*>& to) override {
        return calling_.with_gil([&] {
            for (size_t r = 0; r < sizes.size(); ++r) {
                if (only_ >= 0 && size_t(only_) != r) continue;
                PyObject* bytes = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(sizes[r]));
                if (!bytes) return false;
                to[r] = PyBytes_AS_STRING(bytes);
                const bool kept = PyList_Append(found.ptr(), bytes) == 0;
                Py_DECREF(bytes);
                if (!kept) return false;
            }
            return true;
        });
    }

  private:
    Calling& calling_;
    const int only_;
};

// Each member's bytes, or those of the member `only`. `key`: what has to be the same for all.
nb::list exchange(nb::handle self, uint32_t doing, uint64_t key, nb::handle data, int only,
                  nb::handle timeout, nb::handle x, nb::handle more) {
    Bytes bytes(data.ptr());
    Calling calling(self.ptr(), doing, deadline_of(timeout));
    PlaceBytes place(calling, only);
    const End end = calling.run([&](Patience& patience) {
        return group_of(self.ptr())
            .allgather({doing, mixed(key, doing)}, bytes.view.buf, size_t(bytes.view.len), place, patience);
    });
    raise_unless_done(self, end, doing, x, more);
    return place.found;
}

// Memory that is there already: of arrays or bytes, one for each member; None: it is not wanted.
class Arrays : public Member::Place {
  public:
    explicit Arrays(nb::list objects) : many_(objects.size()) {
        for (size_t i = 0; i < many_.size(); ++i) {
            PyObject* one = nb::handle(objects[i]).ptr();
            if (one == Py_None || many_[i].read_bytes(one) || many_[i].read(one)) continue;
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_TypeError, "%R does not lie in one piece in this machine's memory", one);
            throw nb::python_error();
        }
    }
    bool operator()(const std::vector<uint64_t>&, std::vector<void*>& to) override {
        for (size_t r = 0; r < to.size(); ++r) to[r] = many_[r].data;
        return true;
    }
    template <class P>
    void tell(std::vector<P>& at, Member::Sizes& sizes) const {
        for (const Array& one : many_) at.push_back(one.data), sizes.push_back(one.bytes);
    }
    const Array& operator[](size_t i) const { return many_[i]; }
    size_t size() const { return many_.size(); }

  private:
    std::vector<Array> many_;
};

void need_each(const Arrays& arrays, const Member& group, const char* what) {
    if (arrays.size() != group.size)
        throw nb::value_error((std::string(what) + " takes one array for each of the " +
                               std::to_string(group.size) + " members, not " + std::to_string(arrays.size()))
                                  .c_str());
}

// Into arrays whose sizes everybody knows; `key` says so.
void allgather_into(nb::handle self, uint32_t doing, uint64_t key, nb::list mine, nb::list outs,
                    nb::handle timeout) {
    PyGroup& group = group_of(self.ptr());
    Arrays in(mine), out(outs);
    need_each(out, group, "allgather");
    Calling calling(self.ptr(), doing, deadline_of(timeout));
    const End end = calling.run([&](Patience& patience) {
        return group.allgather({doing, mixed(key, doing)}, in[0].data, in[0].bytes, out, patience);
    });
    raise_unless_done(self, end, doing, mine[0], nb::none());
}

void alltoall(nb::handle self, uint32_t doing, uint64_t key, nb::list ins, nb::list outs,
              nb::handle timeout) {
    PyGroup& group = group_of(self.ptr());
    Arrays in(ins), out(outs);
    need_each(in, group, "alltoall");
    need_each(out, group, "alltoall");
    std::vector<const void*> from;
    std::vector<void*> to;
    Member::Sizes in_sizes, out_sizes;
    in.tell(from, in_sizes);
    out.tell(to, out_sizes);
    Calling calling(self.ptr(), doing, deadline_of(timeout));
    const End end = calling.run([&](Patience& patience) {
        return group.alltoall({doing, mixed(key, doing)}, from, in_sizes, to, out_sizes, patience);
    });
    raise_unless_done(self, end, doing, ins, nb::none());
}

nb::object reduce_scatter(nb::handle self, nb::handle x, nb::handle out, nb::handle op_name,
                          nb::handle timeout) {
    PyGroup& group = group_of(self.ptr());
    Op op;
    Array in, to;
    if (!parse_op(op_name.ptr(), op)) throw nb::python_error();
    if (!in.read(x.ptr()) || !to.read(out.ptr())) {
        if (PyErr_Occurred()) throw nb::python_error();
        return nb::borrow(Py_NotImplemented);
    }
    if (!has_kernel(in, op, x.ptr()) || !check_out(in, to, out.ptr(), in.count / group.size))
        throw nb::python_error();
    if (in.count % group.size) throw nb::value_error("reduce_scatter takes as many elements for each member");
    const uint64_t key = mixed(mixed(in.what, REDUCE_SCATTER), uint64_t(op));
    Calling calling(self.ptr(), REDUCE_SCATTER, deadline_of(timeout));
    const End end = calling.run([&](Patience& patience) {
        return group.reduce_scatter({REDUCE_SCATTER, key}, in.data, to.data, to.count, in.element, op,
                                    patience);
    });
    raise_unless_done(self, end, REDUCE_SCATTER, x, op_name);
    return nb::borrow(out);
}

// Combines arrays that are all here, in their order. Without any it only says whether it could.
void combine(nb::handle out, nb::list ins, nb::handle op_name) {
    Op op;
    Array to;
    if (!parse_op(op_name.ptr(), op) || (!to.read(out.ptr()) && PyErr_Occurred())) throw nb::python_error();
    if (!has_kernel(to, op, out.ptr())) throw nb::python_error();
    const Arrays from(ins);
    std::vector<const void*> in;
    for (size_t i = 0; i < from.size(); ++i) {
        if (!check_out(from[i], to, out.ptr(), from[i].count)) throw nb::python_error();
        in.push_back(from[i].data);
    }
    if (in.empty()) return;
    nb::gil_scoped_release release;
    find_kernel(to.element, op)(to.data, in.data(), in.size(), to.count);
}

template <class F>
auto with_os_errors(F f) {
    try {
        return f();
    } catch (const std::system_error& e) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(e.code().value(), e.what()).ptr());
        throw nb::python_error();
    }
}

void construct(PyGroup* self, int fd, uint32_t rank) {
    with_os_errors([&] { return new (self) PyGroup(fd, rank); });
}

int make(uint32_t size) {
    return with_os_errors([&] { return Member::make(size); });
}

nb::tuple see(PyGroup& group, uint32_t member) {
    const Sight s = group.see(member);
    return nb::make_tuple(s.pid, s.gone, s.operation, s.doing & ~(1u << 31), bool(s.doing >> 31), s.alive,
                          s.arrived);
}

void show_lane(PyGroup& group, uint32_t member, uint64_t fd, uint64_t inode) {
    if (group.show_lane(member, fd, inode)) return;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

nb::object lane_from(PyGroup& group, uint32_t member) {
    const Lane& lane = group.lane_from(member);
    const uint64_t inode = lane.inode.load(std::memory_order_acquire);
    return inode ? nb::object(nb::make_tuple(lane.pid, lane.fd, inode)) : nb::none();
}

}  // namespace

void bind_group(nb::module_& m) {
    m.def("_combine", combine, "out"_a, "ins"_a, "op"_a);
    nb::class_<PyGroup>(m, "Group", nb::type_slots(group_slots), nb::is_weak_referenceable(),
                        "A member of a group. Use flowchan.collective.")
        .def("__init__", construct, "fd"_a, "rank"_a)
        .def_static("_make", make, "size"_a)
        .def_ro("rank", &PyGroup::rank, "Which member this is, from 0.")
        .def_ro("size", &PyGroup::size, "How many members there are.")
        .def_prop_ro("_fd", &PyGroup::fd)
        .def_prop_ro("_joined", &PyGroup::joined)
        .def_prop_ro("_broken", &PyGroup::broken)
        .def("_join", [](PyGroup& group) { return int(group.join()); })
        .def("_leave", &PyGroup::leave)
        .def("_give_up", &PyGroup::give_up)
        .def(
            "_queue", [](PyGroup& group, int change) { group.queued += uint32_t(change); }, "change"_a)
        .def("_count_out", &PyGroup::count_out, "member"_a)
        .def("_show_lane", show_lane, "member"_a, "fd"_a, "inode"_a)
        .def("_lane_from", lane_from, "member"_a)
        .def("_see", see, "member"_a)
        .def("_exchange", exchange, "doing"_a, "key"_a, "data"_a, "only"_a, "timeout"_a.none(), "x"_a.none(),
             "more"_a.none())
        .def("_allgather_into", allgather_into, "doing"_a, "key"_a, "mine"_a, "outs"_a, "timeout"_a.none())
        .def("_alltoall", alltoall, "doing"_a, "key"_a, "ins"_a, "outs"_a, "timeout"_a.none())
        .def(
            "_reduce",
            [](nb::handle self, uint32_t doing, nb::handle x, nb::handle out, nb::handle op, int root,
               nb::handle timeout) {
                PyObject* done =
                    reduce_arrays(self.ptr(), doing, x.ptr(), out.ptr(), op.ptr(), root, timeout.ptr());
                if (!done) throw nb::python_error();
                return nb::steal(done);
            },
            "doing"_a, "x"_a, "out"_a.none(), "op"_a, "root"_a, "timeout"_a.none())
        .def(
            "_spread",
            [](nb::handle self, nb::handle x, uint32_t root, nb::handle timeout) {
                PyObject* done = broadcast_array(self.ptr(), x.ptr(), root, timeout.ptr());
                if (!done) throw nb::python_error();
                return nb::steal(done);
            },
            "x"_a, "root"_a, "timeout"_a.none())
        .def(
            "_wait_for_all",
            [](nb::handle self, nb::handle timeout) {
                Calling calling(self.ptr(), BARRIER, deadline_of(timeout));
                const End end = calling.run([&](Patience& patience) {
                    return group_of(self.ptr()).barrier({BARRIER, BARRIER}, patience);
                });
                raise_unless_done(self, end, BARRIER, nb::none(), nb::none());
            },
            "timeout"_a.none())
        .def("_reduce_scatter", reduce_scatter, "x"_a, "out"_a, "op"_a, "timeout"_a.none());
}

}  // namespace flowchan
