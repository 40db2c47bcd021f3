// Issues commands for remote tensors without running Python code, provided that the command's template is
// known.
//
// Algorithm. For tensors with the dispatch key Python, torch calls one kernel per operator. start() registers
// the kernels of this file for that key. A kernel builds the key of the call as call_key() in
// remote_tensor.py does, and looks it up in the operator's dictionary of templates. If the dictionary has a
// template, the kernel does the same as issue() in remote_tensor.py. Otherwise, the kernel leaves the call to
// torch's own function for this dispatch key, which calls __torch_dispatch__.
//
// Invariants. A kernel changes nothing before it leaves a call to Python. C++ and Python share one
// dictionary. If C++ and Python ever built different keys for a call, the lookup would fail. A failed lookup
// costs time, but never yields a wrong template. All code here holds the GIL, and appends a command to the
// buffer in one step.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <unordered_map>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using Kind = c10::TypeKind;

struct HoldGil {
    PyGILState_STATE before = PyGILState_Ensure();
    ~HoldGil() { PyGILState_Release(before); }
};

// Owns a reference to a Python object.
struct Object {
    PyObject* it = nullptr;
    Object() = default;
    explicit Object(PyObject* owned) : it(owned) {}
    Object(Object&& other) noexcept : it(std::exchange(other.it, nullptr)) {}
    Object& operator=(Object&& other) noexcept {
        std::swap(it, other.it);
        return *this;
    }
    ~Object() { Py_XDECREF(it); }
    explicit operator bool() const { return it; }
    PyObject* release() { return std::exchange(it, nullptr); }
};

Object checked(PyObject* owned) {
    if (!owned) throw python_error();
    return Object(owned);
}

void check(int result) {
    if (result < 0) throw python_error();
}

PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

// The names of all attributes that this file uses, and some other Python objects. They are never freed.
struct Names {
    PyObject *meta = name("_m"), *handle = name("_h"), *id = name("id"), *client = name("client"),
             *single = name("single"), *outputs = name("outputs"), *results = name("results"),
             *changed = name("changed"), *native = name("native"), *numbers = name("numbers"),
             *sites = name("sites"), *codes = name("codes"), *offsets = name("offsets"),
             *buffer = name("buffer"), *idle = name("idle"), *wake = name("wake"), *flush = name("flush"),
             *refs = name("refs"), *freed = name("freed"), *shape = name("shape"), *stride = name("stride"),
             *offset = name("offset"), *dtype = name("dtype"), *device = name("device"), *conj = name("conj"),
             *neg = name("neg"), *viewed = name("viewed"), *detaches = name("detaches");
};
Names* names = nullptr;
PyTypeObject* tensor_type = nullptr;
PyObject *handle_type = nullptr, *ref_type = nullptr, *is_library_code = nullptr;
Py_ssize_t limit = 0;
size_t site_mask = 0;

Object attribute(PyObject* object, PyObject* key) { return checked(PyObject_GetAttr(object, key)); }

// Records, for each code object, whether it is part of torch or flowchan. The code objects are never freed.
std::unordered_map<PyCodeObject*, bool>* known_codes = nullptr;

bool belongs_to_library(PyCodeObject* code) {
    auto found = known_codes->find(code);
    if (found != known_codes->end()) return found->second;
    Object answer = checked(PyObject_CallOneArg(is_library_code, reinterpret_cast<PyObject*>(code)));
    Py_INCREF(code);
    return (*known_codes)[code] = answer.it == Py_True;
}

void set_item(PyObject* list, size_t place, PyObject* owned) {
    if (!owned) throw python_error();
    check(PyList_SetItem(list, static_cast<Py_ssize_t>(place), owned));
}

// The parts of a NodeClient that are needed to issue commands. The client keeps them for its whole life.
struct Client {
    Object object, numbers, buffer, refs, freed, site_numbers, site_codes, site_offsets;

    explicit Client(Object client) : object(std::move(client)) {
        auto get = [&](PyObject* key) { return attribute(object.it, key); };
        numbers = get(names->numbers);
        buffer = get(names->buffer);
        refs = get(names->refs);
        freed = get(names->freed);
        Object sites = get(names->sites);
        site_numbers = attribute(sites.it, names->numbers);
        site_codes = attribute(sites.it, names->codes);
        site_offsets = attribute(sites.it, names->offsets);
    }
};

// Does the same as CallSites.note() in remote_failures.py.
void note_site(const Client& client, PyObject* number) {
    size_t place = PyLong_AsSize_t(number) & site_mask;
    PyFrameObject* innermost = PyEval_GetFrame();
    Py_XINCREF(innermost);
    Object frame(reinterpret_cast<PyObject*>(innermost)), code;
    while (frame) {
        auto* one = reinterpret_cast<PyFrameObject*>(frame.it);
        code = Object(reinterpret_cast<PyObject*>(PyFrame_GetCode(one)));
        if (!belongs_to_library(reinterpret_cast<PyCodeObject*>(code.it))) break;
        frame = Object(reinterpret_cast<PyObject*>(PyFrame_GetBack(one)));
    }
    set_item(client.site_numbers.it, place, Py_NewRef(number));
    if (frame) {
        int offset = PyFrame_GetLasti(reinterpret_cast<PyFrameObject*>(frame.it));
        set_item(client.site_offsets.it, place, PyLong_FromLong(offset));
        set_item(client.site_codes.it, place, code.release());
    } else {
        set_item(client.site_codes.it, place, Py_NewRef(Py_None));
    }
}

// The metadata of a TensorMeta, in the form that a new tensor needs.
struct Layout {
    Object meta;
    c10::SmallVector<int64_t, 5> sizes, strides;
    int64_t offset = 0;
    size_t bytes = 0;
    caffe2::TypeMeta dtype;
    std::optional<c10::Device> device;
    bool conj = false, neg = false;

    explicit Layout(Object given) : meta(std::move(given)) {
        auto numbers = [&](PyObject* key, auto& into) {
            Object tuple = attribute(meta.it, key);
            for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(tuple.it); ++place)
                into.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.it, place)));
        };
        numbers(names->shape, sizes);
        numbers(names->stride, strides);
        offset = PyLong_AsLongLong(attribute(meta.it, names->offset).it);
        dtype = c10::scalarTypeToTypeMeta(
            reinterpret_cast<THPDtype*>(attribute(meta.it, names->dtype).it)->scalar_type);
        device = reinterpret_cast<THPDevice*>(attribute(meta.it, names->device).it)->device;
        conj = attribute(meta.it, names->conj).it == Py_True;
        neg = attribute(meta.it, names->neg).it == Py_True;
        bytes =
            at::detail::computeStorageNbytes(sizes, strides, dtype.itemsize(), static_cast<size_t>(offset));
    }

    // Return a tensor without memory, as torch.Tensor._make_wrapper_subclass does.
    Object tensor() const {
        c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, *device),
                             c10::GetAllocator(c10::kMeta), true);
        auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                             DispatchKeySet(DispatchKey::PrivateUse1), dtype);
        auto* impl = made.unsafeGetTensorImpl();
        impl->set_sizes_and_strides(sizes, strides, offset);
        impl->set_python_dispatch(true);
        if (conj) impl->_set_conj(true);
        if (neg) impl->_set_neg(true);
        return checked(THPVariable_Wrap(made, tensor_type));
    }
};

// A copy of a Template, in the form that this file needs. The template keeps the copy in its attribute
// ``native``.
struct Known {
    Object id;
    Client client;
    std::optional<Layout> output;         // set if the only result is a new tensor
    std::optional<size_t> changed_input;  // index of the input that is the result
    std::optional<size_t> viewed;         // index of the input that is the view's base
    bool detaches = false;

    explicit Known(PyObject* found)
        : id(attribute(found, names->id)), client(attribute(found, names->client)) {
        Object single = attribute(found, names->single), places = attribute(found, names->results);
        Object base = attribute(found, names->viewed);
        if (base.it != Py_None) viewed = PyLong_AsSize_t(base.it);
        detaches = attribute(found, names->detaches).it == Py_True;
        if (single.it != Py_None)
            output.emplace(std::move(single));
        else if (PyLong_Check(places.it))
            changed_input = PyLong_AsSize_t(places.it);
    }

    // Return the copy of a template, or null if Python must issue its commands. The template owns the copy.
    static const Known* of(PyObject* found, size_t results) {
        Object native = attribute(found, names->native);
        if (native.it == Py_None) {
            bool simple = results <= 1 && !PyTuple_GET_SIZE(attribute(found, names->changed).it);
            if (attribute(found, names->single).it == Py_None) {
                Object places = attribute(found, names->results);
                simple = simple && (results ? PyLong_Check(places.it) : places.it == Py_None) &&
                         !PyTuple_GET_SIZE(attribute(found, names->outputs).it);
            }
            if (simple)
                native = checked(PyCapsule_New(new Known(found), nullptr, [](PyObject* capsule) {
                    delete static_cast<Known*>(PyCapsule_GetPointer(capsule, nullptr));
                }));
            else
                native = Object(Py_NewRef(Py_False));
            check(PyObject_SetAttr(found, names->native, native.it));
        }
        return native.it == Py_False ? nullptr
                                     : static_cast<Known*>(PyCapsule_GetPointer(native.it, nullptr));
    }
};

// The tensors and scalars of a call, in the order of the command.
struct Call {
    c10::SmallVector<PyObject*, 4> inputs;  // kept alive by the arguments
    c10::SmallVector<Object, 4> scalars;
    bool known = true;  // false: leave the call to Python
};

struct Argument {
    bool scalar = false;  // see OpPlan.scalars
    bool dtype = false;
    bool plain = false;  // torch passes the value to Python without conversion
    std::optional<IValue> standard;
    PyObject* name = nullptr;
};

bool is_plain(c10::TypePtr type) {
    for (;;) {
        if (type->kind() == Kind::OptionalType)
            type = type->expectRef<c10::OptionalType>().getElementType();
        else if (type->kind() == Kind::ListType)
            type = type->expectRef<c10::ListType>().getElementType();
        else
            break;
    }
    switch (type->kind()) {
        case Kind::TensorType:
        case Kind::NumberType:
        case Kind::IntType:
        case Kind::FloatType:
        case Kind::BoolType:
        case Kind::SymIntType:
        case Kind::StringType:
            return true;
        default:
            return false;
    }
}

Object number_of(double value) { return Object(PyFloat_FromDouble(value)); }

// Does the same as exact() in remote_tensor.py. In the key, 0.0 differs from -0.0, and NaN equals itself.
Object exact(double value) {
    Object number = number_of(value);
    return value == 0 || value != value ? checked(PyObject_Str(number.it)) : std::move(number);
}

Object scalar(Object value, Call& call) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value.it));
    call.scalars.push_back(std::move(value));
    return Object(Py_NewRef(type));
}

Object not_known(Call& call) {
    call.known = false;
    return Object(Py_NewRef(Py_None));
}

// Return the number in a tensor that torch has made from a Python number. In the same call,
// __torch_dispatch__ would get the number and not the tensor.
Object wrapped_number(const at::Tensor& tensor, Call& call) {
    switch (tensor.scalar_type()) {
        case at::kDouble:
            return scalar(number_of(*tensor.const_data_ptr<double>()), call);
        case at::kLong:
            return scalar(Object(PyLong_FromLongLong(*tensor.const_data_ptr<int64_t>())), call);
        case at::kBool:
            return scalar(Object(PyBool_FromLong(*tensor.const_data_ptr<bool>())), call);
        default:
            return not_known(call);
    }
}

Object element_of_tensor(const at::Tensor& tensor, bool scalar, Call& call) {
    if (!tensor.defined()) return not_known(call);
    auto* impl = tensor.unsafeGetTensorImpl();
    if (impl->is_wrapped_number()) return scalar ? wrapped_number(tensor, call) : not_known(call);
    PyObject* object = impl->pyobj_slot()->load_pyobj();
    if (!object || Py_TYPE(object) != tensor_type) return not_known(call);
    call.inputs.push_back(object);
    return attribute(object, names->meta);
}

template <class List, class Element>
Object tuple_of(List&& list, Element element) {
    Object tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(list.size())));
    Py_ssize_t place = 0;
    for (auto&& one : list) PyTuple_SET_ITEM(tuple.it, place++, element(one).release());
    return tuple;
}

// Return the part of a key for one value, as key_of() in remote_tensor.py does.
Object element(const IValue& value, const Argument& argument, Call& call) {
    if (value.isNone()) return Object(Py_NewRef(Py_None));
    if (argument.dtype && value.isInt())
        return Object(Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(value.toScalarType()))));
    if (!argument.plain) return not_known(call);
    auto of_int = [](int64_t one) { return checked(PyLong_FromLongLong(one)); };
    auto given = [&](Object one) { return argument.scalar ? scalar(std::move(one), call) : std::move(one); };
    if (value.isTensor()) return element_of_tensor(value.toTensor(), argument.scalar, call);
    if (value.isInt()) return given(of_int(value.toInt()));
    if (value.isBool()) return given(Object(PyBool_FromLong(value.toBool())));
    if (value.isDouble())
        return argument.scalar ? scalar(number_of(value.toDouble()), call) : exact(value.toDouble());
    if (value.isString()) return checked(PyUnicode_FromString(value.toStringRef().c_str()));
    if (value.isList())
        return tuple_of(value.toListRef(), [&](const IValue& one) { return element(one, argument, call); });
    return not_known(call);
}

Object new_tensor(const Layout& layout, const Client& client, PyObject* number) {
    Object tensor = layout.tensor();
    Object handle = checked(PyObject_CallNoArgs(handle_type));
    check(PyObject_SetAttr(handle.it, names->id, number));
    PyObject* arguments[] = {handle.it, client.freed.it};
    Object ref = checked(PyObject_Vectorcall(ref_type, arguments, 2, nullptr));
    check(PyObject_SetAttr(ref.it, names->id, number));
    check(PyDict_SetItem(client.refs.it, number, ref.it));
    check(PyObject_SetAttr(tensor.it, names->meta, layout.meta.it));
    check(PyObject_SetAttr(tensor.it, names->handle, handle.it));
    return tensor;
}

// The kernel of one operator.
struct Kernel final : c10::OperatorKernel {
    PyObject* templates = nullptr;  // see OpPlan.templates; null: leave all calls to Python
    size_t positional = 0, results = 0;
    std::vector<Argument> arguments;

    void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
        if (templates && !c10::impl::TorchDispatchModeTLS::stack_len()) {
            HoldGil gil;
            if (issue(*stack)) return;
        }
        leave_to_python(op, keys, stack);
    }

    // Do the same as torch's fallback for the dispatch key Python.
    static void leave_to_python(const c10::OperatorHandle& op, DispatchKeySet keys,
                                torch::jit::Stack* stack) {
        static const DispatchKeySet above_python =
            DispatchKeySet(DispatchKeySet::FULL) ^
            (DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Python) |
             DispatchKeySet(DispatchKey::Python));
        c10::impl::ExcludeDispatchKeyGuard guard(above_python);
        bool mode = c10::impl::TorchDispatchModeTLS::stack_len() > 0;
        if (mode || any_python(torch::jit::last(*stack, op.schema().arguments().size())))
            (*c10::impl::getGlobalPyInterpreter())->dispatch(op, stack);
        else
            op.redispatchBoxed(keys.remove(DispatchKey::Python), stack);
    }

    static bool any_python(at::ArrayRef<IValue> values) {
        for (const IValue& value : values) {
            if (value.isTensor() && value.unsafeToTensorImpl()->key_set().has(DispatchKey::Python))
                return true;
            if (value.isList() && any_python(value.toListRef())) return true;
        }
        return false;
    }

    Object key(at::ArrayRef<IValue> values, Call& call) const {
        c10::SmallVector<Object, 8> parts;
        auto standard = c10::typeMetaToScalarType(c10::get_default_dtype());
        parts.emplace_back(Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(standard))));
        auto is_standard = [&](size_t place) {
            const auto& one = arguments[place].standard;
            return one && *one == values[place];
        };
        size_t given = positional;
        while (given && is_standard(given - 1)) --given;
        for (size_t place = 0; place < given && call.known; ++place)
            parts.push_back(element(values[place], arguments[place], call));
        c10::SmallVector<Object, 4> named;
        for (size_t place = positional; place < values.size() && call.known; ++place)
            if (!is_standard(place)) named.emplace_back(Py_NewRef(arguments[place].name));
        if (!named.empty()) {
            parts.push_back(tuple_of(named, [](Object& one) { return std::move(one); }));
            for (size_t place = positional; place < values.size() && call.known; ++place)
                if (!is_standard(place)) parts.push_back(element(values[place], arguments[place], call));
        }
        return tuple_of(parts, [](Object& one) { return std::move(one); });
    }

    // Issue the command of a call with a known template. If no template is known, return false and change
    // nothing.
    bool issue(torch::jit::Stack& stack) const {
        Call call;
        Object found;
        {
            Object built = key(torch::jit::last(stack, arguments.size()), call);
            if (!call.known) return false;
            PyObject* borrowed = PyDict_GetItemWithError(templates, built.it);
            if (!borrowed) {
                if (PyErr_Occurred()) throw python_error();
                return false;
            }
            found = Object(Py_NewRef(borrowed));
        }
        const Known* known = Known::of(found.it, results);
        if (!known) return false;
        // Outside inference mode, detach() of an inference tensor returns a tensor with a version counter.
        // Only the Python code adds that counter.
        if (known->detaches && !c10::InferenceMode::is_enabled() &&
            THPVariable_Unpack(call.inputs[0]).is_inference())
            return false;
        const Client& client = known->client;
        Object number = checked(PyIter_Next(client.numbers.it));
        note_site(client, number.it);
        append(*known, number.it, call);
        at::Tensor result;
        if (known->output) {
            // In any mode, a view is an inference tensor if and only if its base is one.
            std::optional<c10::InferenceMode> mode;
            if (known->viewed) {
                bool inference = THPVariable_Unpack(call.inputs[*known->viewed]).is_inference();
                if (inference != c10::InferenceMode::is_enabled()) mode.emplace(inference);
            }
            result = THPVariable_Unpack(new_tensor(*known->output, client, number.it).it);
        } else if (known->changed_input)
            result = THPVariable_Unpack(call.inputs[*known->changed_input]);
        send(client);
        torch::jit::drop(stack, arguments.size());
        if (results) torch::jit::push(stack, std::move(result));
        return true;
    }

    static void append(const Known& known, PyObject* number, Call& call) {
        size_t size = 2 + known.output.has_value() + call.inputs.size() + call.scalars.size();
        Object command = checked(PyTuple_New(static_cast<Py_ssize_t>(size)));
        Py_ssize_t place = 0;
        auto put = [&](PyObject* owned) { PyTuple_SET_ITEM(command.it, place++, owned); };
        put(Py_NewRef(known.id.it));
        put(Py_NewRef(number));
        if (known.output) put(Py_NewRef(number));
        for (PyObject* input : call.inputs)
            put(attribute(attribute(input, names->handle).it, names->id).release());
        for (Object& one : call.scalars) put(one.release());
        checked(PySequence_InPlaceConcat(known.client.buffer.it, command.it));
    }

    static void send(const Client& client) {
        if (PyList_GET_SIZE(client.buffer.it) >= limit)
            checked(PyObject_CallMethodNoArgs(client.object.it, names->flush));
        else if (attribute(client.object.it, names->idle).it == Py_True)
            checked(PyObject_CallMethodNoArgs(client.object.it, names->wake));
    }
};

std::unordered_map<std::string, Kernel*>* kernels = nullptr;

// Register a kernel for each torch operator that has none for the dispatch key Python.
void register_kernels() {
    kernels = new std::unordered_map<std::string, Kernel*>;
    auto* library = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::Python, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& full : dispatcher.getAllOpNames()) {
        auto op = dispatcher.findSchema(full);
        if (full.name.rfind("aten::", 0) != 0 || !op || op->hasKernelForDispatchKey(DispatchKey::Python))
            continue;
        auto kernel = std::make_unique<Kernel>();
        const auto& schema = op->schema();
        kernel->results = schema.returns().size();
        for (const auto& argument : schema.arguments()) {
            if (!argument.kwarg_only()) ++kernel->positional;
            Argument one;
            const auto& type = argument.real_type();
            const auto& inner = type->kind() == Kind::OptionalType
                                    ? type->expectRef<c10::OptionalType>().getElementType()
                                    : type;
            one.dtype = inner->kind() == Kind::ScalarTypeType;
            one.plain = is_plain(type);
            one.standard = argument.default_value();
            one.name = name(argument.name().c_str());
            kernel->arguments.push_back(std::move(one));
        }
        (*kernels)[c10::toString(full)] = kernel.get();
        library->impl(c10::toString(full).c_str() + 6,
                      torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
    }
}

PyObject* start(PyObject*, PyObject* given) {
    PyObject* type = nullptr;
    if (!PyArg_ParseTuple(given, "O!OOOnn", &PyType_Type, &type, &handle_type, &ref_type, &is_library_code,
                          &limit, &site_mask))
        return nullptr;
    for (PyObject* one : {type, handle_type, ref_type, is_library_code}) Py_INCREF(one);
    tensor_type = reinterpret_cast<PyTypeObject*>(type);
    names = new Names;
    known_codes = new std::unordered_map<PyCodeObject*, bool>;
    site_mask -= 1;
    register_kernels();
    Py_RETURN_NONE;
}

PyObject* accelerate(PyObject*, PyObject* given) {
    const char* op = nullptr;
    PyObject *templates = nullptr, *scalars = nullptr;
    if (!PyArg_ParseTuple(given, "sO!O!", &op, &PyDict_Type, &templates, &PyTuple_Type, &scalars))
        return nullptr;
    auto found = kernels->find(op);
    if (found == kernels->end()) Py_RETURN_NONE;
    auto& arguments = found->second->arguments;
    for (size_t place = 0; place < arguments.size(); ++place)
        arguments[place].scalar = PyTuple_GetItem(scalars, static_cast<Py_ssize_t>(place)) == Py_True;
    found->second->templates = Py_NewRef(templates);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"start", start, METH_VARARGS,
     "Register the kernels: RemoteTensor, TensorHandle, HandleRef, is_library_code, LIMIT, SITES."},
    {"accelerate", accelerate, METH_VARARGS,
     "Issue commands of an operator here: its name, its templates, and whether each argument is a scalar."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "command_path", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_command_path() { return PyModule_Create(&module); }
