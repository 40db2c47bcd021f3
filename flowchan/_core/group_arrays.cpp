#include "group_arrays.hpp"

#include <cstring>
#include <iterator>

namespace flowchan {

namespace {

// Returns a class (borrowed), or null if its module is not imported. The core keeps the class forever.
PyObject* class_of(const char* module, const char* name, PyObject*& known) {
    if (known) return known;
    PyObject* imported = PyDict_GetItemString(PyImport_GetModuleDict(), module);
    if (!imported) return nullptr;
    known = PyObject_GetAttrString(imported, name);
    if (!known) PyErr_Clear();  // the module is still being imported
    return known;
}

PyObject *ndarray = nullptr, *masked_array = nullptr, *tensor_class = nullptr;

bool is_instance(PyObject* object, PyObject* cls) {
    return cls && PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(cls));
}

bool is_exactly(PyObject* object, PyObject* cls) {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == cls;
}

constexpr Element integer(bool is_signed, size_t width) {
    switch (width) {
        case 1:
            return is_signed ? Element::I8 : Element::U8;
        case 2:
            return is_signed ? Element::I16 : Element::U16;
        case 4:
            return is_signed ? Element::I32 : Element::U32;
        default:
            return is_signed ? Element::I64 : Element::U64;
    }
}

// Returns the element type for a buffer format in the notation of Python's struct module.
Element element_of(const char* format, size_t width) {
    if (!format) return Element::U8;
    if (*format == 'Z')
        return strcmp(format, "Zf") == 0   ? Element::C64
               : strcmp(format, "Zd") == 0 ? Element::C128
                                           : Element::Raw;
    if (format[1]) return Element::Raw;
    if (strchr("bhilq", *format)) return integer(true, width);
    if (strchr("BHILQ", *format)) return integer(false, width);
    switch (*format) {
        case '?':
            return Element::Bool;
        case 'e':
            return Element::F16;
        case 'f':
            return Element::F32;
        case 'd':
            return Element::F64;
        default:
            return Element::Raw;
    }
}

// The first fields of NumPy's PyArray_Descr and PyArrayObject, which have been binary compatible since NumPy
// 1.0.
struct NumpyType {
    PyObject_HEAD PyTypeObject* scalars;
    char kind, letter, byte_order, flags;
    int number;
};
struct NumpyArray {
    static constexpr int IN_ONE_PIECE = 1, WRITABLE = 0x400;
    PyObject_HEAD void* data;
    int dimensions;
    Py_ssize_t* shape;
    Py_ssize_t* strides;
    PyObject* base;
    const NumpyType* type;
    int flags;
};

constexpr int DATE = 21, SPAN = 22, HALF = 23;

bool is_time(const NumpyType& type) { return type.number == DATE || type.number == SPAN; }

// Returns the element type for a NumPy type. Returns Raw for a type that is not listed here, and for foreign
// byte order.
Element element_of(const NumpyType& type) {
    constexpr Element BY_NUMBER[] = {Element::Bool,
                                     Element::I8,
                                     Element::U8,
                                     Element::I16,
                                     Element::U16,
                                     Element::I32,
                                     Element::U32,
                                     integer(true, sizeof(long)),
                                     integer(false, sizeof(long)),
                                     Element::I64,
                                     Element::U64,
                                     Element::F32,
                                     Element::F64,
                                     Element::Raw,
                                     Element::C64,
                                     Element::C128};
    if (type.byte_order != '=' && type.byte_order != '|') return Element::Raw;
    if (type.number == HALF) return Element::F16;
    if (is_time(type)) return type.number == DATE ? Element::Date : Element::Span;
    return type.number >= 0 && type.number < int(std::size(BY_NUMBER)) ? BY_NUMBER[type.number]
                                                                       : Element::Raw;
}

// torch's dtypes and their element types. Tensors of any other dtype can only be moved, not combined.
struct Named {
    const char* name;
    Element element;
};
constexpr Named DTYPES[] = {
    {"float32", Element::F32},   {"float64", Element::F64},   {"float16", Element::F16},
    {"bfloat16", Element::BF16}, {"int64", Element::I64},     {"int32", Element::I32},
    {"int16", Element::I16},     {"int8", Element::I8},       {"uint8", Element::U8},
    {"uint16", Element::U16},    {"uint32", Element::U32},    {"uint64", Element::U64},
    {"bool", Element::Bool},     {"complex64", Element::C64}, {"complex128", Element::C128}};

PyObject* dtypes() {
    static PyObject* known = nullptr;
    if (known) return known;
    PyObject* torch = PyImport_ImportModule("torch");
    known = torch ? PyDict_New() : nullptr;
    for (const Named& one : DTYPES) {
        PyObject* dtype = known ? PyObject_GetAttrString(torch, one.name) : nullptr;
        PyObject* number = dtype ? PyLong_FromLong(long(one.element)) : nullptr;
        if (number) PyDict_SetItem(known, dtype, number);
        Py_XDECREF(number);
        Py_XDECREF(dtype);
        PyErr_Clear();  // older versions of torch lack some dtypes
    }
    Py_XDECREF(torch);
    return known;
}

// An interned Python string, for an attribute that is looked up often.
struct Word {
    PyObject* text;
    explicit Word(const char* word) : text(PyUnicode_InternFromString(word)) {}
};

uint64_t hash_of(const char* text) {
    uint64_t hash = 1;
    for (; text && *text; ++text) hash = mixed(hash, uint64_t(*text));
    return hash;
}

uint64_t hash_of(PyObject* object) {
    PyObject* text = PyObject_Str(object);
    const uint64_t hash = hash_of(text ? PyUnicode_AsUTF8(text) : nullptr);
    Py_XDECREF(text);
    return hash;
}

// Converts an object to an integer and drops the reference. Returns -1 with an error set on failure.
long long number(PyObject* object) {
    if (!object) return -1;
    const long long value = PyLong_AsLongLong(object);
    Py_DECREF(object);
    return value;
}

bool is_true(PyObject* object) {
    const bool is = object == Py_True;
    Py_XDECREF(object);
    return is;
}

}  // namespace

bool Array::read(PyObject* object) {
    const bool is_numpy = is_instance(object, class_of("numpy", "ndarray", ndarray));
    if (is_numpy && !is_exactly(object, ndarray) &&
        is_instance(object, class_of("numpy.ma", "MaskedArray", masked_array)))
        return false;  // a masked array has its mask in separate memory; array_access.py raises the error
    if (!is_numpy && !is_instance(object, class_of("torch", "Tensor", tensor_class))) return false;
    if (!(is_numpy ? read_numpy(object) : read_tensor(object))) return false;
    if (!view_.obj) kept_ = Py_NewRef(object);
    return true;
}

// Starts both hashes. `named` identifies the type if the core does not know it.
void Array::begin(uint64_t named, size_t width) {
    what = kind = mixed(mixed(named, uint64_t(element)), width);
    count = 1;
}

void Array::add_shape(uint64_t extent) {
    what = mixed(what, extent);
    count *= extent;
}

// Reads NumPy's own structure for built-in types, because asking for a buffer would take longer than a small
// operation.
bool Array::read_numpy(PyObject* object) {
    const auto* array = reinterpret_cast<const NumpyArray*>(object);
    const Element its = element_of(*array->type);
    const bool time = is_time(*array->type);  // NumPy does not export these types as buffers
    if ((its == Element::Raw && !time) || !(array->flags & NumpyArray::IN_ONE_PIECE))
        return read_buffer(object);
    data = array->data;
    element = its;
    writable = array->flags & NumpyArray::WRITABLE;
    const size_t width = time ? sizeof(int64_t) : size_of_element(element);
    begin(time ? hash_of(reinterpret_cast<PyObject*>(const_cast<NumpyType*>(array->type))) : 0, width);
    for (int i = 0; i < array->dimensions; ++i) add_shape(uint64_t(array->shape[i]));
    bytes = count * width;
    return true;
}

bool Array::read_buffer(PyObject* array) {
    if (PyObject_GetBuffer(array, &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
        PyErr_Clear();
        return false;
    }
    // References to objects mean nothing in other processes.
    if (view_.format && strchr(view_.format, 'O')) return false;
    data = view_.buf;
    bytes = size_t(view_.len);
    writable = !view_.readonly;
    element = element_of(view_.format, size_t(view_.itemsize));
    begin(element == Element::Raw ? hash_of(view_.format) : 0, size_t(view_.itemsize));
    for (int i = 0; i < view_.ndim; ++i) add_shape(uint64_t(view_.shape[i]));
    return true;
}

bool Array::read_bytes(PyObject* object) {
    if (!PyBytes_Check(object) && !PyByteArray_Check(object)) return false;
    if (PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) != 0) return false;
    data = view_.buf;
    count = bytes = size_t(view_.len);
    writable = !view_.readonly;
    return true;
}

bool Array::read_tensor(PyObject* tensor) {
    static const Word contiguous("is_contiguous"), cpu("is_cpu"), pointer("data_ptr"), dtype("dtype"),
        shape("shape"), width("itemsize"), conjugate("is_conj"), negative("is_neg"),
        quantized("is_quantized");
    if (!is_true(PyObject_GetAttr(tensor, cpu.text))) return false;
    if (!is_true(PyObject_CallMethodNoArgs(tensor, contiguous.text))) {
        PyErr_Clear();  // for example, a sparse tensor; array_access.py raises the error
        return false;
    }
    PyObject* type = PyObject_GetAttr(tensor, dtype.text);
    if (!type) return false;
    PyObject* known = PyDict_GetItemWithError(dtypes(), type);
    element = known ? Element(PyLong_AsLong(known)) : Element::Raw;
    if (!known && is_true(PyObject_GetAttr(tensor, quantized.text))) return Py_DECREF(type), false;
    const size_t size = known ? size_of_element(element) : size_t(number(PyObject_GetAttr(type, width.text)));
    begin(known ? 0 : hash_of(type), size);
    Py_DECREF(type);
    if (element >= Element::C64 && is_true(PyObject_CallMethodNoArgs(tensor, conjugate.text))) return false;
    if (is_true(PyObject_CallMethodNoArgs(tensor, negative.text))) return false;
    PyObject* extents = PyObject_GetAttr(tensor, shape.text);
    if (!extents) return PyErr_Clear(), false;  // a nested tensor
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(extents); ++i)
        add_shape(uint64_t(PyLong_AsLongLong(PyTuple_GET_ITEM(extents, i))));
    Py_DECREF(extents);
    bytes = count * size;
    data = reinterpret_cast<void*>(number(PyObject_CallMethodNoArgs(tensor, pointer.text)));
    if (!PyErr_Occurred()) return data || !bytes;
    PyErr_Clear();  // a tensor without memory; array_access.py raises the error
    return false;
}

const char* convert_first(PyObject* array) {
    if (!is_instance(array, ndarray)) {
        PyObject* type = PyObject_GetAttrString(array, "dtype");
        PyObject* name = type ? PyObject_Str(type) : nullptr;
        const bool is_complex = name && PyUnicode_CompareWithASCIIString(name, "torch.complex32") == 0;
        Py_XDECREF(name);
        Py_XDECREF(type);
        PyErr_Clear();
        return is_complex ? "; convert them first, for example to complex64"
                          : "; convert them first, for example to float32";
    }
    const NumpyType& type = *reinterpret_cast<const NumpyArray*>(array)->type;
    const bool turned = type.byte_order != '=' && type.byte_order != '|';
    if (strchr("biufcmM", type.kind))
        return turned ? "; convert them first, for example with .astype(x.dtype.newbyteorder('='))"
               : type.kind == 'c' ? "; convert them first, for example to complex128"
                                  : "; convert them first, for example to float64";
    return "; only numbers, booleans, dates and time spans can be combined";
}

}  // namespace flowchan
