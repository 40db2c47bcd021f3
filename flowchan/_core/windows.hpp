// The windows through which one process sees the file of a ring.
//
// Algorithm. What lies before the blocks, the mutex included, is mapped once and for good: a process must
// know a robust mutex at one address only. Blocks, which grow up, and slots, which grow down from the end of
// the file, are each seen through a window of what there is of them. When there is more, a window at least
// twice as large takes the place of the old one, which stays mapped until the ring's end in this process,
// because views, loans, and threads that copy outside of the lock point into it. So the address space taken
// is a small multiple of the memory used, however large the file could become, and a word may be known by
// several addresses.
//
// Windows are opened under the ring's lock. `block` and `offset_in_window` may be called without it:
// `blocks_` is written before `blocks_to_`, whose acquire is the partner of its release, and what is read too
// new covers more, not less.
#pragma once

#include <atomic>
#include <cstdint>

namespace flowchan {

// Memory is mapped from multiples of it: 4 KB on x86_64, but 4, 16 or 64 KB on aarch64, as the kernel was built.
constexpr uint64_t LARGEST_PAGE = 1 << 16;

class Windows {
  public:
    static constexpr uint64_t FIRST = 1 << 16;  // so much of the blocks is mapped with what lies before them

    Windows() = default;
    Windows(const Windows&) = delete;
    ~Windows();

    void open(int fd, uint64_t blocks_at, uint64_t length);  // throws std::system_error
    void begin_words(uint64_t at) { words_from_ = at; }      // from here on a redo record may name them

    char* header() const { return header_; }
    char* slots() const { return slots_; }
    char* block(uint64_t offset) const { return blocks_.load(std::memory_order_relaxed) + offset; }
    uint64_t slots_from() const { return slots_from_; }
    uint64_t blocks_to() const { return blocks_to_.load(std::memory_order_acquire); }

    // Whether blocks up to, or slots from, here are mapped now. False when there is no address space for
    // that.
    bool show_blocks(uint64_t upto);
    bool show_slots(uint64_t from);

    // Of a word of the header, a session, a group or a slot: where it is, and whether it is one.
    uint64_t* at(uint64_t offset) const {
        return reinterpret_cast<uint64_t*>((offset < blocks_at_ ? header_ : slots_) + offset);
    }
    bool has(uint64_t offset) const {
        return (offset >= words_from_ && offset < blocks_at_) ||
               (offset >= slots_from_ && offset <= length_ - sizeof(uint64_t));
    }
    uint64_t offset(const void* p) const {
        const uint64_t in_header = address(p) - address(header_), in_slots = address(p) - address(slots_);
        if (in_header < blocks_at_) return in_header;
        if (in_slots >= slots_from_ && in_slots < length_) return in_slots;
        return offset_in_window(p);
    }
    // Of anything, through whatever window it was seen.
    uint64_t offset_in_window(const void* p) const;

  private:
    struct Window {
        char* begin;
        uint64_t from, size;
        const Window* older;
    };
    static uint64_t address(const void* p) { return uint64_t(reinterpret_cast<uintptr_t>(p)); }
    char* open_window(uint64_t from, uint64_t upto);

    int fd_ = -1;
    uint64_t words_from_ = 0, blocks_at_ = 0, length_ = 0, slots_from_ = 0;
    char* header_ = nullptr;
    char* slots_ = nullptr;                // where offset 0 would be, seen through this window
    std::atomic<char*> blocks_ = nullptr;  // likewise
    std::atomic<uint64_t> blocks_to_ = 0;
    std::atomic<const Window*> newest_ =
        nullptr;  // of all windows; release when one is added, acquire by who looks through them
};

}  // namespace flowchan
