// Windows: the mappings through which a process uses a ring's file.
//
// Algorithm. The part before the blocks is mapped only once, because it includes a robust mutex, which a
// process must use at a single address. Blocks grow up, and slots grow down from the end of the file. One
// window covers all blocks that existed when it was mapped, and another covers all slots. When blocks or
// slots are added, a new window of at least twice the size replaces the old window. The old window stays
// mapped until the ring ends in this process, because views, loans and copying threads still point into it. A
// word may therefore have several addresses. The mapped address space is a small multiple of the memory in
// use, even in a large file.
//
// Opening a window needs the ring's lock; `block` and `offset_in_window` do not. `blocks_` is written before
// `blocks_to_`, whose release store pairs with an acquire load. A reader that already sees a newer `blocks_`
// gets a window that covers more, not less.
#pragma once

#include <atomic>
#include <cstdint>

namespace flowchan {

// The largest page size; mappings start at multiples of it. A page is 4 KB on x86_64. On aarch64, it is 4,
// 16 or 64 KB, depending on the kernel's configuration.
constexpr uint64_t LARGEST_PAGE = 1 << 16;

class Windows {
  public:
    // How many bytes of blocks are mapped in one mapping with the part that precedes the blocks.
    static constexpr uint64_t FIRST = 1 << 16;

    Windows() = default;
    Windows(const Windows&) = delete;
    ~Windows();

    void open(int fd, uint64_t blocks_at, uint64_t length);  // throws std::system_error
    // sets the offset of the first word that a redo record may change
    void begin_words(uint64_t at) { words_from_ = at; }

    char* header() const { return header_; }
    char* slots() const { return slots_; }
    char* block(uint64_t offset) const { return blocks_.load(std::memory_order_relaxed) + offset; }
    uint64_t slots_from() const { return slots_from_; }
    uint64_t blocks_to() const { return blocks_to_.load(std::memory_order_acquire); }

    // Map the blocks up to an offset, or the slots from an offset on. Return false if the address space is
    // exhausted.
    bool show_blocks(uint64_t upto);
    bool show_slots(uint64_t from);

    // Convert an offset to the address of a word in the header, a session, a group or a slot, and back. `has`
    // returns whether the offset belongs to one of them.
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
    // Return the offset of an address in any window.
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
    char* slots_ = nullptr;                // where offset 0 would be, if the window reached that far
    std::atomic<char*> blocks_ = nullptr;  // where offset 0 would be, if the window reached that far
    std::atomic<uint64_t> blocks_to_ = 0;
    // Head of the list of all windows. Additions are release stores, and lookups are acquire loads.
    std::atomic<const Window*> newest_ = nullptr;
};

}  // namespace flowchan
