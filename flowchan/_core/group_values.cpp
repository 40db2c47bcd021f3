// Converts Python values to bytes and back. Plain values use the encoding of direct_values.hpp instead of
// pickle. The last byte identifies the format; flowchan/collective/value_bytes.py handles all other formats.
#include "codec.hpp"
#include "group_calls.hpp"

#include <memory>

namespace flowchan {

namespace {

constexpr char PLAIN = 2;
constexpr size_t MOST_PLAIN = 64 * 1024;  // in bytes; pickle is as fast for larger values

// An encoded value. This thread reuses the buffer for its next value. A value that a signal handler encodes
// during a call gets its own buffer.
class Written {
  public:
    explicit Written(PyObject* value) : buffer_(std::move(spare_)) {
        if (!buffer_) buffer_ = std::make_unique<char[]>(MOST_PLAIN);
        char* end = write_plain(value, buffer_.get(), buffer_.get() + MOST_PLAIN - 1);
        if (!end) return;
        *end++ = PLAIN;
        bytes = size_t(end - buffer_.get());
    }
    ~Written() { spare_ = std::move(buffer_); }
    Written(const Written&) = delete;
    const char* from() const { return buffer_.get(); }

    size_t bytes = 0;  // 0: the value is not plain

  private:
    static thread_local std::unique_ptr<char[]> spare_;
    std::unique_ptr<char[]> buffer_;
};
thread_local std::unique_ptr<char[]> Written::spare_;

bool is_plain(const void* at, size_t bytes) {
    return bytes && static_cast<const char*>(at)[bytes - 1] == PLAIN;
}

PyObject* read_value(const void* at, size_t bytes) {
    const char* from = static_cast<const char*>(at);
    return read_plain(from, from + bytes - 1);
}

// Decodes small plain values directly from the slots, and copies all others as bytes.
class PlaceValues : public Member::Place {
  public:
    PlaceValues(Calling& calling, PyObject* found, uint32_t size)
        : are_bytes(size), calling_(calling), found_(found) {}
    ByRank<bool> are_bytes;
    bool operator()(const Sizes& sizes, const ByRank<const void*>& shown, ByRank<void*>& to) override {
        return calling_.with_gil([&] {
            for (size_t r = 0; r < sizes.size(); ++r) {
                const bool shows_plain = shown[r] && is_plain(shown[r], sizes[r]);
                PyObject* one = shows_plain ? read_value(shown[r], sizes[r])
                                            : PyBytes_FromStringAndSize(nullptr, Py_ssize_t(sizes[r]));
                if (!one) return false;
                if (!shows_plain) to[r] = PyBytes_AS_STRING(one);
                are_bytes[r] = !shows_plain;
                PyList_SET_ITEM(found_, Py_ssize_t(r), one);
            }
            return true;
        });
    }

  private:
    Calling& calling_;
    PyObject* found_;
};

}  // namespace

PyObject* allgather_values(PyObject* self, PyObject* x, PyObject* timeout) {
    PyGroup& group = group_of(self);
    Deadline deadline;
    if (!parse_deadline(timeout, deadline)) return nullptr;
    const Written own(x);
    if (!own.bytes) return Py_NewRef(Py_NotImplemented);
    nb::object found = nb::steal(PyList_New(group.size));
    if (!found.is_valid()) return nullptr;
    Calling calling(self, ALLGATHER, deadline);
    PlaceValues place(calling, found.ptr(), group.size);
    const End end = calling.run([&](Patience& patience) {
        return group.allgather({ALLGATHER, key_of(ALLGATHER, VALUES)}, own.from(), own.bytes, place,
                               patience);
    });
    if (end != End::Done) return raise_end(self, end, ALLGATHER, x, nullptr);
    for (uint32_t r = 0; r < group.size; ++r) {
        if (!place.are_bytes[r]) continue;
        PyObject* one = PyObject_CallMethod(self, "_loads", "O", PyList_GET_ITEM(found.ptr(), r));
        if (!one || PyList_SetItem(found.ptr(), r, one) != 0) return nullptr;
    }
    return found.release().ptr();
}

PyObject* plain_bytes(PyObject* value) {
    const Written written(value);
    return written.bytes ? PyBytes_FromStringAndSize(written.from(), Py_ssize_t(written.bytes))
                         : Py_NewRef(Py_None);
}

PyObject* from_plain_bytes(PyObject* bytes) {
    Py_buffer view;
    if (PyObject_GetBuffer(bytes, &view, PyBUF_SIMPLE) != 0) return nullptr;
    PyObject* value = read_value(view.buf, size_t(view.len));
    PyBuffer_Release(&view);
    return value;
}

}  // namespace flowchan
