#include "views.hpp"

#include "blocking.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <algorithm>
#include <mutex>
#include <unordered_set>

namespace flowchan {

namespace {

// Views of fewer bytes are copied instead of mapped. A copy is just as fast, and a process can have only
// about 65,000 mappings.
constexpr uint64_t MAPPED = 1 << 16;

// This mutex is held across a fork, so the child finds `live` consistent and can unlock the mutex.
std::mutex live_mutex;
std::unordered_set<Block*> live;

void before_fork() {
    live_mutex.lock();
    for (const Block* block : live)
        if (!block->put && !block->slot->loaned()) block->ring->session(block->slot->viewer()).forked = 1;
}
void after_fork() { live_mutex.unlock(); }

[[maybe_unused]] const int fork_hook = pthread_atfork(before_fork, after_fork, after_fork);

int get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
    const View& view = *nb::inst_ptr<View>(self);
    return PyBuffer_FillInfo(buffer, self, view.at, Py_ssize_t(view.size), !view.writable, flags);
}

nb::object wrap(View view) { return nb::cast(std::move(view)); }

}  // namespace

PyType_Slot view_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

// If the process forks while a block has views, the child may use them, and nothing records when the child
// stops using them. The slot then keeps its viewer until the channel ends, even if the parent dies
// (Session::forked). In the child, the block still belongs to the parent. A loan has no content yet, so it
// belongs only to the process that took it.
Block::Block(std::shared_ptr<Ring> ring_, Slot* slot)
    : ring(std::move(ring_)), slot(slot), begin(ring->payload_of(slot)), size(slot->size) {
    std::lock_guard guard(live_mutex);
    live.insert(this);
}

Block::~Block() {
    {
        std::lock_guard guard(live_mutex);
        live.erase(this);
    }
    if (put || forks != fork_count || (children != children_forked && !slot->loaned())) return;
    Wakes wakes;
    Locked<Ring> locked(*ring);
    ring->unview(slot, wakes);
    locked.unlock(wakes);
}

nb::object View::over(std::shared_ptr<Block> block, const char* at, uint64_t size) {
    return wrap({std::move(block), nullptr, const_cast<char*>(at), size});
}

nb::object View::of(uint64_t address, uint64_t size, nb::object owner) {
    char* at = reinterpret_cast<char*>(address);
    return wrap({nullptr, std::shared_ptr<char>(at, [owner = std::move(owner)](char*) {}), at, size});
}

nb::object View::copy_of(const char* at, uint64_t size) {
    std::shared_ptr<char> memory(static_cast<char*>(malloc(size)), free);
    if (!memory) throw std::bad_alloc();
    {
        WithoutGil without;
        memcpy(memory.get(), at, size);
    }
    char* begin = memory.get();
    return wrap({nullptr, std::move(memory), begin, size});
}

nb::object private_view(nb::handle self) {
    const View& view = *nb::inst_ptr<View>(self);
    View result = view;
    result.writable = true;
    if (!view.block || view.writable) return wrap(std::move(result));
    Ring& ring = *view.block->ring;
    const uint64_t from = ring.offset_of_payload(view.at), begin = from / LARGEST_PAGE * LARGEST_PAGE,
                   length = from + view.size - begin;
    void* p = MAP_FAILED;
    if (view.size >= MAPPED)
        p = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, ring.fd(),
                 off_t(begin));
    if (p == MAP_FAILED) {  // the view is too small, or no mapping is left: make a plain copy
        nb::object copy = View::copy_of(view.at, view.size);
        nb::inst_ptr<View>(copy)->writable = true;
        return copy;
    }
    result.memory = std::shared_ptr<char>(static_cast<char*>(p), [length](char* q) { munmap(q, length); });
    result.at = result.memory.get() + (from - begin);
    return wrap(std::move(result));
}

bool is_in_view(const Ring& ring, const void* at) {
    std::lock_guard guard(live_mutex);
    return std::any_of(live.begin(), live.end(), [&](const Block* block) {
        return !block->put && block->ring.get() == &ring && at >= block->begin &&
               at < block->begin + block->size;
    });
}

std::shared_ptr<Block> loan_with(std::vector<std::weak_ptr<Block>>& loans, const void* at) {
    std::erase_if(loans, [](const std::weak_ptr<Block>& loan) { return loan.expired(); });
    std::shared_ptr<Block> found;
    for (const std::weak_ptr<Block>& loan : loans) {
        std::shared_ptr<Block> block = loan.lock();
        if (!block || at < block->begin || at >= block->begin + block->size) continue;
        found = std::move(block);
        if (!found->put) break;
    }
    return found;
}

}  // namespace flowchan
