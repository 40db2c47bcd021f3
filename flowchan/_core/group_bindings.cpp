// The Python class Group. flowchan/collective/collectives.py has the slower operations and the error
// messages.
#include "group_bindings.hpp"
#include "group_calls.hpp"

#include <cstring>
#include <system_error>

namespace flowchan {

namespace {

// A contiguous view of the bytes of a Python object.
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

// Takes ownership of a new reference, or throws if it is null.
nb::object checked(PyObject* made) {
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

// Allocates Python bytes objects for the data of all members, or of one member.
class PlaceBytes : public Member::Place {
  public:
    PlaceBytes(Calling& calling, int only) : calling_(calling), only_(only) {}
    nb::list found;
    bool operator()(const Sizes& sizes, const ByRank<const void*>&, ByRank<void*>& to) override {
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

// Returns the bytes of all members, or only those of member `only`. `key` must be the same on all members.
nb::list exchange(nb::handle self, uint32_t doing, uint64_t key, nb::handle data, int only,
                  nb::handle timeout, nb::handle x, nb::handle more) {
    Bytes bytes(data.ptr());
    Calling calling(self.ptr(), doing, deadline_of(timeout));
    PlaceBytes place(calling, only);
    const End end = calling.run([&](Patience& patience) {
        return group_of(self.ptr())
            .allgather({doing, key_of(doing, key)}, bytes.view.buf, size_t(bytes.view.len), place, patience);
    });
    raise_unless_done(self, end, doing, x, more);
    return place.found;
}

void need_each(const Arrays& arrays, const Member& group, const char* what) {
    if (arrays.size() != group.size)
        throw nb::value_error((std::string(what) + " must have one array for each of the " +
                               std::to_string(group.size) + " members, got " + std::to_string(arrays.size()))
                                  .c_str());
}

// Gathers into arrays. All members know the sizes, because `key` depends on them.
void allgather_into(nb::handle self, uint32_t doing, uint64_t key, nb::list own, nb::list outs,
                    nb::handle timeout) {
    PyGroup& group = group_of(self.ptr());
    Arrays in(own.ptr()), out(outs.ptr());
    need_each(out, group, "allgather");
    std::vector<char> copy;
    const void* from = out.kept(in[0], group.rank, copy);
    Calling calling(self.ptr(), doing, deadline_of(timeout));
    const End end = calling.run([&](Patience& patience) {
        return group.allgather({doing, key_of(doing, key, &in[0])}, from, in[0].bytes, out, patience);
    });
    raise_unless_done(self, end, doing, own[0], nb::none());
    if (!out.check()) throw nb::python_error();
}

void alltoall(nb::handle self, uint32_t doing, uint64_t key, nb::list ins, nb::list outs, nb::handle timeout,
              nb::handle more) {
    PyGroup& group = group_of(self.ptr());
    Arrays in(ins.ptr()), out(outs.ptr());
    need_each(in, group, "alltoall");
    need_each(out, group, "alltoall");
    const Member::Call call{doing, key_of(doing, key, &in[0])};
    const End end = swap_arrays(self.ptr(), call, in, out, deadline_of(timeout));
    raise_unless_done(self, end, doing, ins, more);
}

// Combines local arrays in the given order. An empty list only checks that the operation exists.
void combine(nb::handle out, nb::list ins, nb::handle op_name) {
    Op op;
    Array to;
    if (!parse_op("reduce", op_name.ptr(), op) || (!to.read(out.ptr()) && PyErr_Occurred()))
        throw nb::python_error();
    if (!has_kernel(to, op, out.ptr())) throw nb::python_error();
    const Arrays from(ins.ptr());
    std::vector<const void*> in;
    for (size_t i = 0; i < from.size(); ++i) {
        if (!fits(from[i], to, from[i].count))
            throw nb::value_error("out must have the type and size of the arrays");
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
    const MemberState s = group.see(member);
    return nb::make_tuple(s.pid, s.membership, s.operation, s.doing & ~(1u << 31), bool(s.doing >> 31),
                          s.alive, s.arrived, s.over);
}

nb::tuple as_tuple(const Plan& plan) {
    return nb::make_tuple(int(plan.algorithm), plan.piece, plan.shows_past, plan.keeps_past, plan.by_two);
}

// Returns all plans that were measured for this many bytes, each with its shortest time in ns.
nb::list times(PyGroup& group, uint32_t doing, uint64_t bytes) {
    nb::list found;
    for (uint32_t i = 0; i < ALL_PLANS; ++i)
        if (const uint32_t ns = group.took(doing, bytes, i))
            found.append(nb::make_tuple(as_tuple(PLANS[i]), ns));
    return found;
}

void publish_channel(PyGroup& group, uint32_t member, uint64_t fd, uint64_t inode, bool offer) {
    if (group.publish_channel(offer ? OFFERS : CHANNELS, member, fd, inode)) return;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

nb::object channel_from(PyGroup& group, uint32_t member, bool offer) {
    const ChannelEntry& entry = group.channel_from(offer ? OFFERS : CHANNELS, member);
    const uint64_t inode = entry.inode.load(std::memory_order_acquire);
    return inode ? nb::object(nb::make_tuple(entry.pid, entry.fd, inode)) : nb::none();
}

}  // namespace

void bind_group(nb::module_& m) {
    m.def("_combine", combine, "out"_a, "ins"_a, "op"_a);
    m.def(
        "_plain_bytes", [](nb::handle value) { return checked(plain_bytes(value.ptr())); }, "value"_a.none());
    m.def(
        "_from_plain_bytes", [](nb::handle data) { return checked(from_plain_bytes(data.ptr())); }, "data"_a);
    nb::class_<PyGroup>(m, "Group", nb::type_slots(group_slots), nb::is_weak_referenceable(),
                        "A member of a group. Use flowchan.collective instead.")
        .def("__init__", construct, "fd"_a, "rank"_a)
        .def_static("_make", make, "size"_a)
        .def_ro("rank", &PyGroup::rank, "Return the rank of this member, from 0.")
        .def_ro("size", &PyGroup::size, "Return the number of members.")
        .def_prop_ro("_fd", &PyGroup::fd)
        .def_prop_ro("_joined", &PyGroup::joined)
        .def_prop_ro("_broken", &PyGroup::broken)
        .def("_join", [](PyGroup& group) { return int(group.join()); })
        .def("_leave", &PyGroup::leave, nb::call_guard<nb::gil_scoped_release>())
        .def("_hold", &PyGroup::hold)
        .def("_give_up", &PyGroup::retire, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "_queue", [](PyGroup& group, int change) { group.queued += uint32_t(change); }, "change"_a)
        .def(
            "_choose",
            [](PyGroup& group, uint32_t doing, int algorithm) { group.choose(doing, Algorithm(algorithm)); },
            "doing"_a, "algorithm"_a)
        .def(
            "_plan",
            [](PyGroup& group, uint32_t doing, uint64_t bytes) {
                return as_tuple(group.plan_of(doing, bytes));
            },
            "doing"_a, "size"_a)
        .def("_took", times, "doing"_a, "size"_a)
        .def("_disband", &PyGroup::disband)
        .def_prop_ro("_disbanded", &PyGroup::disbanded)
        .def("_count_out", &PyGroup::count_out, "member"_a)
        .def("_publish_channel", publish_channel, "member"_a, "fd"_a, "inode"_a, "offer"_a = false)
        .def("_channel_from", channel_from, "member"_a, "offer"_a = false)
        .def("_see", see, "member"_a)
        .def("_exchange", exchange, "doing"_a, "key"_a, "data"_a, "only"_a, "timeout"_a.none(), "x"_a.none(),
             "more"_a.none())
        .def("_allgather_into", allgather_into, "doing"_a, "key"_a, "mine"_a, "outs"_a, "timeout"_a.none())
        .def("_alltoall", alltoall, "doing"_a, "key"_a, "ins"_a, "outs"_a, "timeout"_a.none(),
             "more"_a.none())
        .def(
            "_reduce",
            [](nb::handle self, uint32_t doing, nb::handle x, nb::handle out, nb::handle op, int root,
               nb::handle timeout, uint64_t part_of) {
                return checked(reduce_arrays(self.ptr(), doing, x.ptr(), out.ptr(), op.ptr(), root,
                                             timeout.ptr(), part_of));
            },
            "doing"_a, "x"_a, "out"_a.none(), "op"_a, "root"_a, "timeout"_a.none(), "part_of"_a = 0)
        .def(
            "_spread",
            [](nb::handle self, nb::handle x, uint32_t root, nb::handle timeout) {
                return checked(broadcast_array(self.ptr(), x.ptr(), root, timeout.ptr()));
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
        .def(
            "_reduce_scatter",
            [](nb::handle self, nb::handle x, nb::handle out, nb::handle op, nb::handle timeout) {
                return checked(reduce_scatter_array(self.ptr(), x.ptr(), out.ptr(), op.ptr(), timeout.ptr()));
            },
            "x"_a, "out"_a, "op"_a, "timeout"_a.none());
}

}  // namespace flowchan
