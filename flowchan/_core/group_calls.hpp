// Helpers for all calls of a group: parsing arguments, waiting, and raising errors.
#pragma once

#include "arguments.hpp"
#include "channel.hpp"
#include "group.hpp"
#include "group_arrays.hpp"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace flowchan {

using namespace nb::literals;

// Kinds of input, as in flowchan/collective/operations.py: arrays of one element type, or Python values.
constexpr uint64_t TYPED = 0, VALUES = 1, KINDS = 4;

// Returns the key with which members check that their calls match. `array` is the input, if it is an array.
inline uint64_t key_of(uint32_t doing, uint64_t key, const Array* array = nullptr) {
    const uint64_t found = mixed(mixed(0, doing), key);
    return array && key % KINDS == TYPED ? mixed(found, array->kind) : found;
}

constexpr const char* OPS[] = {"sum", "mean", "prod", "min", "max", "and", "or", "xor"};
constexpr int64_t STALLED_NS = 10'000'000'000;

class PyGroup : public Member {
  public:
    using Member::Member;
    // nonzero: all operations run in Python, because some are queued or use other backends
    std::atomic<uint32_t> queued{0};
};

inline PyGroup& group_of(PyObject* self) { return *nb::inst_ptr<PyGroup>(self); }

// A call in progress. It releases the GIL before it waits or moves much data. While it waits, it checks for
// signals and reports stalls.
class Calling : public Patience {
  public:
    Calling(PyObject* self, uint32_t doing, Deadline deadline)
        : Patience(deadline), self_(self), doing_(doing) {}

    template <class F>
    End run(F operation) {
        End end = await_turn();
        if (end == End::Done) {
            const std::unique_lock lock(group_of(self_).in_use(), std::adopt_lock);
            end = operation(*this);
        }
        take_back();
        return end;
    }
    // Calls `f` during an operation, with the GIL held.
    template <class F>
    bool with_gil(F f) {
        const bool released = take_back();
        const bool done = f();
        if (released) waits();
        return done;
    }
    void waits() override {
        if (!state_) state_ = PyEval_SaveThread();
    }
    bool interrupted(int64_t waited) override {
        return with_gil([&] {
            if (PyErr_CheckSignals()) return true;
            if (waited < STALLED_NS || has_reported_) return false;
            has_reported_ = true;
            PyObject* done = PyObject_CallMethod(self_, "_stalled", "Id", doing_, double(waited) / 1e9);
            Py_XDECREF(done);
            return !done;
        });
    }

  private:
    // Waits until no other thread is running an operation. In a forked child, that thread does not exist, so
    // the wait would never end; the child gets Taken at once.
    End await_turn() {
        PyGroup& group = group_of(self_);
        Member::Use& use = group.in_use();
        if (group.is_taken()) return End::Taken;
        if (use.is_own()) return End::Within;
        if (use.try_lock()) return End::Done;
        waits();
        while (!use.try_lock_for(std::min(SLICE_NS, deadline.left()))) {
            if (interrupted(0)) return End::Interrupted;
            if (deadline.passed()) return End::Busy;
        }
        return End::Done;
    }
    bool take_back() {
        if (!state_) return false;
        take_gil(std::exchange(state_, nullptr));
        return true;
    }

    PyObject* self_;
    const uint32_t doing_;
    PyThreadState* state_ = nullptr;  // set while the GIL is released
    bool has_reported_ = false;
};

// Raises the error for an operation that ended with `end`, and returns null. `x`, `root` and `more` are
// arguments of the call; a negative `root` means that the operation has no root.
inline PyObject* raise_end(PyObject* self, End end, uint32_t doing, PyObject* x, PyObject* more,
                           int root = -1) {
    if (end == End::Interrupted) return nullptr;
    PyObject* given = root < 0 ? Py_NewRef(more ? more : Py_None)
                      : more   ? Py_BuildValue("(iO)", root, more)
                               : PyLong_FromLong(root);
    if (!given) return nullptr;
    PyObject* none = PyObject_CallMethod(self, "_failed", "iIOO", int(end), doing, x ? x : Py_None, given);
    Py_DECREF(given);
    Py_XDECREF(none);
    if (none) PyErr_SetString(PyExc_SystemError, "an operation failed without an error");
    return nullptr;
}

inline bool parse_op(const char* call, PyObject* name, Op& op) {
    op = Op::Sum;
    if (!name) return true;
    for (size_t i = 0; PyUnicode_Check(name) && i < std::size(OPS); ++i)
        if (PyUnicode_CompareWithASCIIString(name, OPS[i]) == 0) return op = Op(i), true;
    PyErr_Format(PyExc_ValueError,
                 "%s: op must be 'sum', 'mean', 'prod', 'min', 'max', 'and', 'or' or 'xor', got %R", call,
                 name);
    return false;
}

inline bool parse_root(const char* call, PyObject* value, const Member& group, uint32_t& root) {
    const bool is_integer = !value || (PyIndex_Check(value) && !PyBool_Check(value));
    const long long number = value && is_integer ? PyLong_AsLongLong(value) : 0;
    // clears the OverflowError of a number that is too large
    if (number == -1 && PyErr_Occurred()) PyErr_Clear();
    if (!is_integer || number < 0 || number >= group.size) {
        PyErr_Format(PyExc_ValueError, "%s: root must be a rank of the group, from 0 to %u, got %R", call,
                     group.size - 1, value);
        return false;
    }
    root = uint32_t(number);
    return true;
}

inline bool is_default(PyObject* value) { return !value || value == Py_None; }

// Returns whether `out` can take the result. If not, array_access.py raises the error. `out` may be `in` or
// a part of it, because each element is read before it is overwritten.
inline bool fits(const Array& in, const Array& out, size_t count) {
    if (out.kind != in.kind || out.count != count || !out.writable) return false;
    const auto from = reinterpret_cast<uintptr_t>(in.data), to = reinterpret_cast<uintptr_t>(out.data);
    const bool overlap = to < from + in.bytes && from < to + out.bytes;
    return !overlap || (std::max(from, to) - std::min(from, to)) % out.bytes == 0;
}

inline bool has_kernel(const Array& array, Op op, PyObject* x) {
    if (find_kernel(array.element, op)) return true;
    std::string supported;
    for (const char* const& name : OPS)
        if (find_kernel(array.element, Op(&name - OPS)))
            supported += (supported.empty() ? "" : ", ") + std::string(name);
    const std::string remedy = supported.empty() ? convert_first(x)
                               : op == Op::Mean && array.element <= Element::U64
                                   ? "; take the sum, or convert them to a floating-point type"
                                   : "; use " + supported;
    PyObject* type = PyObject_GetAttrString(x, "dtype");
    PyErr_Format(PyExc_TypeError, "elements of type %S cannot be combined by %s%s", type ? type : Py_None,
                 OPS[size_t(op)], remedy.c_str());
    Py_XDECREF(type);
    return false;
}

inline PyObject* call_general(PyObject* self, const char* method, PyObject* const* values, size_t n) {
    PyObject* arguments[8] = {self};
    for (size_t i = 0; i < n; ++i) arguments[i + 1] = values[i] ? values[i] : Py_None;
    PyObject* name = PyUnicode_InternFromString(method);
    PyObject* result = PyObject_VectorcallMethod(name, arguments, n + 1, nullptr);
    Py_DECREF(name);
    return result;
}

// Memory that the caller provides for each member's data: arrays, bytes, or None if the data is not needed.
class Arrays : public Member::Place {
  public:
    Arrays() = default;
    explicit Arrays(PyObject* objects) {
        if (!read(objects) && !PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "arrays must be contiguous and in host memory, got %R", objects);
        if (PyErr_Occurred()) throw nb::python_error();
    }
    // Reads a list or tuple of arrays. Returns false, perhaps with an error set, if one of them is not
    // contiguous in host memory.
    bool read(PyObject* objects) {
        if (!PyList_Check(objects) && !PyTuple_Check(objects)) return false;
        many_ = std::vector<One>(size_t(PySequence_Fast_GET_SIZE(objects)));
        for (size_t i = 0; i < many_.size(); ++i) {
            PyObject* one = PySequence_Fast_GET_ITEM(objects, Py_ssize_t(i));
            many_[i].wanted = one != Py_None;
            if (many_[i].wanted && !many_[i].read_bytes(one) && !many_[i].read(one)) return false;
        }
        return true;
    }
    // Skips data of the wrong size, so that the other members can continue. check() reports it later.
    bool operator()(const Sizes& sizes, const ByRank<const void*>&, ByRank<void*>& to) override {
        for (size_t r = 0; r < to.size(); ++r) {
            if (!many_[r].wanted) continue;
            if (many_[r].bytes == sizes[r])
                to[r] = many_[r].data;
            else if (misfit_ < 0)
                misfit_ = int(r), has_ = sizes[r];
        }
        return true;
    }
    // Returns false with an error set if a member's data had the wrong size.
    bool check() const {
        if (misfit_ >= 0)
            PyErr_Format(
                PyExc_ValueError,
                "allgather: out must have room for exactly the %llu bytes from rank %d, got room for %zu",
                static_cast<unsigned long long>(has_), misfit_, many_[size_t(misfit_)].bytes);
        return misfit_ < 0;
    }
    bool are_writable() const {
        return std::all_of(many_.begin(), many_.end(), [](const Array& one) { return one.writable; });
    }
    bool are_of_kind(uint64_t kind) const {
        return std::all_of(many_.begin(), many_.end(), [=](const Array& one) { return one.kind == kind; });
    }
    // Returns the data of `in`, safe from writes to these arrays. If `in` overlaps one of these arrays, its
    // data is copied to `copy` first. The array at index `own` may be `in` itself.
    const void* kept(const Array& in, size_t own, std::vector<char>& copy) const {
        const auto begins = [](const Array& array) { return reinterpret_cast<uintptr_t>(array.data); };
        for (size_t i = 0; i < many_.size(); ++i) {
            const Array& one = many_[i];
            if ((i == own && one.data == in.data) || begins(one) >= begins(in) + in.bytes ||
                begins(in) >= begins(one) + one.bytes)
                continue;
            const char* first = static_cast<const char*>(in.data);
            copy.assign(first, first + in.bytes);
            return copy.data();
        }
        return in.data;
    }
    template <class P>
    ByRank<P> places() const {
        ByRank<P> found(size());
        for (size_t i = 0; i < size(); ++i) found[i] = many_[i].data;
        return found;
    }
    Sizes sizes() const {
        Sizes found(size());
        for (size_t i = 0; i < size(); ++i) found[i] = many_[i].bytes;
        return found;
    }
    const Array& operator[](size_t i) const { return many_[i]; }
    size_t size() const { return many_.size(); }

  private:
    struct One : Array {
        bool wanted = true;
    };
    std::vector<One> many_;
    int misfit_ = -1;
    uint64_t has_ = 0;
};

// These operations handle contiguous arrays, and return NotImplemented for other values.
PyObject* reduce_arrays(PyObject* self, uint32_t doing, PyObject* x, PyObject* out, PyObject* op_name,
                        int root, PyObject* timeout, uint64_t part_of = 0);
PyObject* broadcast_array(PyObject* self, PyObject* x, uint32_t root, PyObject* timeout);
PyObject* reduce_scatter_array(PyObject* self, PyObject* x, PyObject* out, PyObject* op_name,
                               PyObject* timeout);

// Sends each member its array of `in`, and receives each member's array into `out`.
End swap_arrays(PyObject* self, Member::Call call, const Arrays& in, const Arrays& out, Deadline deadline);

// Returns a list of all members' values, or NotImplemented if `x` is not a plain value.
PyObject* allgather_values(PyObject* self, PyObject* x, PyObject* timeout);
// Convert a plain value to bytes and back. `plain_bytes` returns None if the value is not plain.
PyObject* plain_bytes(PyObject* value);
PyObject* from_plain_bytes(PyObject* bytes);

extern PyType_Slot group_slots[];  // methods that group_calls.cpp defines

}  // namespace flowchan
