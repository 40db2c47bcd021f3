#include "windows.hpp"

#include "system.hpp"

#include <sys/mman.h>
#include <algorithm>
#include <utility>

namespace flowchan {

Windows::~Windows() {
    for (const Window* w = newest_.load(std::memory_order_relaxed); w;) {
        munmap(w->begin, w->size);
        delete std::exchange(w, w->older);
    }
}

void Windows::open(int fd, uint64_t blocks_at, uint64_t length) {
    fd_ = fd;
    blocks_at_ = blocks_at;
    length_ = slots_from_ = length;
    const uint64_t upto = std::min(blocks_at + FIRST, length);
    char* begin = open_window(0, upto);
    if (!begin) fail(errno, "mmap");
    header_ = begin;
    blocks_.store(begin, std::memory_order_relaxed);
    blocks_to_.store(upto, std::memory_order_release);
}

// Map a part of the file. Return null with errno set if the address space is exhausted.
char* Windows::open_window(uint64_t from, uint64_t upto) {
    void* p =
        mmap(nullptr, upto - from, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, off_t(from));
    if (p == MAP_FAILED) return nullptr;
    madvise(p, upto - from, MADV_DONTDUMP);
    char* begin = static_cast<char*>(p);
    newest_.store(new Window{begin, from, upto - from, newest_.load(std::memory_order_relaxed)},
                  std::memory_order_release);
    return begin;
}

bool Windows::show_blocks(uint64_t upto) {
    const uint64_t now = blocks_to();
    if (upto <= now) return true;
    if (upto > length_) return false;
    const uint64_t least = std::min((upto + FIRST - 1) / FIRST * FIRST, length_);
    const uint64_t twice = std::min(now + (now - blocks_at_), length_);
    for (uint64_t to : {std::max(least, twice), least}) {
        char* begin = open_window(blocks_at_, to);
        if (!begin) continue;
        blocks_.store(begin - blocks_at_, std::memory_order_relaxed);
        blocks_to_.store(to, std::memory_order_release);
        return true;
    }
    return false;
}

bool Windows::show_slots(uint64_t from) {
    if (from >= slots_from_) return true;
    if (from < blocks_at_) return false;
    const uint64_t least = from / LARGEST_PAGE * LARGEST_PAGE;
    const uint64_t twice = length_ - std::min(2 * (length_ - slots_from_), length_ - blocks_at_);
    for (uint64_t begin_at : {std::min(least, twice), least}) {
        char* begin = open_window(begin_at, length_);
        if (!begin) continue;
        slots_ = begin - begin_at;
        slots_from_ = begin_at;
        return true;
    }
    return false;
}

uint64_t Windows::offset_in_window(const void* p) const {
    for (const Window* w = newest_.load(std::memory_order_acquire); w; w = w->older) {
        const uint64_t within = address(p) - address(w->begin);
        if (within < w->size) return w->from + within;
    }
    return 0;
}

}  // namespace flowchan
