// Describes the device type of remote tensors to torch's C++ code: which devices exist, which one is current,
// and which stream each device has. Python reads and sets these values through the module at the end of this
// file.
//
// Torch's own guard for Python devices does not suffice. Autograd runs each node of a backward pass under a
// stream guard, whose destructor calls exchangeStream(). In torch's Python guard, that function is noexcept
// and calls the Python method type_(). If an operation of the node has raised, its exception is still
// pending, so no Python code may run. If the call to type_() then fails, the process aborts with "terminate
// called without an active exception". If type_() clears the exception, the user gets "SystemError:
// run_backward returned NULL without setting an exception".
//
// In this guard, the functions that the engine calls run no Python code. Torch's Python guard has a second
// defect: it knows only one device, so an assertion in the engine fails for remote:1.
//
// Invariant: a backward pass runs in the thread that calls backward(). On a process's first pass, the engine
// starts one thread per device that it finds. From then on, it asserts that no device has been added. A
// forked child of a process with such threads cannot run a pass. Therefore, load_file() starts the engine
// before it registers this guard, so the engine finds no device. Before the engine picks a thread for a
// remote autograd node, it calls some functions of this guard. Each of these functions makes the engine stay
// in the current thread.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <Python.h>

#include <atomic>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto REMOTE = c10::DeviceType::PrivateUse1;

std::atomic<DeviceIndex> device_count{0};
thread_local DeviceIndex current = 0;

// A function that waits for all commands of a device. It is never freed, because other threads may use it
// until the process ends.
PyObject* synchronize = nullptr;

void run_backward_in_this_thread() noexcept {
    auto& state = c10::AutogradState::get_tls_state();
    if (state.get_multithreading_enabled()) state.set_multithreading_enabled(false);
}

Device with_index(Device device) { return device.has_index() ? device : Device(REMOTE, current); }

Stream only_stream(Device device) {
    run_backward_in_this_thread();
    return Stream(Stream::DEFAULT, with_index(device));
}

void wait_for(DeviceIndex index) {
    if (!synchronize) return;
    auto gil = PyGILState_Ensure();
    PyObject* result = PyObject_CallFunction(synchronize, "i", static_cast<int>(index));
    std::string failure;
    if (!result) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyObject* text = value ? PyObject_Str(value) : nullptr;
        const char* characters = text ? PyUnicode_AsUTF8(text) : nullptr;
        failure = characters ? characters : "unknown error";
        PyErr_Clear();
        Py_XDECREF(text);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    }
    Py_XDECREF(result);
    PyGILState_Release(gil);
    TORCH_CHECK(failure.empty(), failure);
}

// One byte per device. Torch uses the address of a device's byte as the handle of all events of that device.
char places[128];

// A remote device runs its commands in order. It therefore has one stream, and an event is a position in that
// stream.
struct RemoteGuard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return REMOTE; }
    DeviceIndex deviceCount() const noexcept override { return device_count; }

    Device getDevice() const override { return Device(REMOTE, current); }
    Device exchangeDevice(Device device) const override {
        Device before = getDevice();
        current = with_index(device).index();
        return before;
    }
    void setDevice(Device device) const override { current = with_index(device).index(); }
    void uncheckedSetDevice(Device device) const noexcept override {
        current = device.has_index() ? device.index() : current;
    }

    Stream getStream(Device device) const override { return only_stream(device); }
    Stream getDefaultStream(Device device) const override { return only_stream(device); }
    Stream getNewStream(Device device, int) const override { return only_stream(device); }
    Stream getStreamFromGlobalPool(Device device, bool) const override { return only_stream(device); }
    Stream exchangeStream(Stream stream) const override { return only_stream(stream.device()); }
    void synchronizeStream(const Stream& stream) const override { wait_for(stream.device_index()); }
    void synchronizeDevice(const DeviceIndex index) const override { wait_for(index); }

    void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
        run_backward_in_this_thread();
        *event = &places[stream.device_index()];
    }
    void block(void*, const Stream&) const override {}
    void synchronizeEvent(void* event) const override {
        if (event) wait_for(static_cast<DeviceIndex>(static_cast<char*>(event) - places));
    }
};

struct RemoteHooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count > 0; }
    bool hasPrimaryContext(DeviceIndex index) const override { return index < device_count; }
    DeviceIndex deviceCount() const override { return device_count; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex index) const override { current = index; }
    DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
    at::Generator getNewGenerator(DeviceIndex) const override { return no_generator(); }
    const at::Generator& getDefaultGenerator(DeviceIndex) const override { return no_generator(); }

    static const at::Generator& no_generator() {
        TORCH_CHECK_NOT_IMPLEMENTED(
            false, "remote: a node has one random generator; seed it with torch.remote.manual_seed()");
    }
};

PyObject* get_current(PyObject*, PyObject*) { return PyLong_FromLong(current); }

PyObject* set_current(PyObject*, PyObject* index) {
    long value = PyLong_AsLong(index);
    if (value == -1 && PyErr_Occurred()) return nullptr;
    current = static_cast<DeviceIndex>(value);
    Py_RETURN_NONE;
}

PyObject* set_count(PyObject*, PyObject* count) {
    long value = PyLong_AsLong(count);
    if (value == -1 && PyErr_Occurred()) return nullptr;
    device_count = static_cast<DeviceIndex>(value);
    Py_RETURN_NONE;
}

PyObject* start(PyObject*, PyObject* function) {
    // Neither object is ever freed, because torch may use both until the process ends.
    static const RemoteGuard* guard = nullptr;
    if (guard || at::isPrivateUse1HooksRegistered() || c10::impl::hasDeviceGuardImpl(REMOTE)) {
        PyErr_SetString(PyExc_RuntimeError, "remote: torch already has a device type of another package");
        return nullptr;
    }
    guard = new RemoteGuard;
    Py_INCREF(function);
    synchronize = function;
    at::RegisterPrivateUse1HooksInterface(new RemoteHooks);
    c10::impl::DeviceGuardImplRegistrar(REMOTE, guard);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"start", start, METH_O,
     "Register the device type with torch, with the function that waits for a device."},
    {"current_device", get_current, METH_NOARGS, "Return the index of this thread's current device."},
    {"set_device", set_current, METH_O, "Set the index of this thread's current device."},
    {"set_device_count", set_count, METH_O, "Set the number of devices, which may only grow."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "device_guard", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_device_guard() { return PyModule_Create(&module); }
