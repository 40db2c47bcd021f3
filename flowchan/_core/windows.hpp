// Windows: the mappings through which one process accesses the file of a ring.
//
// Algorithm. The part before the blocks, including the mutex, is mapped once and permanently, because a
// process must use a robust mutex at only one address. Blocks grow up, and slots grow down from the end of
// the file. One window covers all blocks that existed when it was mapped, and another all slots. When more
// are added, a new window, at least twice as large, replaces the old one. The old window stays mapped until
// the ring ends in this process. Views, loans, and threads that copy outside of the lock point into it. So
// the mapped address space is a small multiple of the memory in use, however large the file could become. A
// word may have several addresses.
//
// Windows are opened under the ring's lock. `block` and `offset_in_window` may be called without it.
// `blocks_` is written before `blocks_to_`: the release store to `blocks_to_` pairs with an acquire load. A
// reader that sees a newer window sees one that covers more, not less.
#pragma once

#include <atomic>
#include <cstdint>

namespace flowchan {

// The largest page size; mappings begin at its multiples. Pages have 4 KB on x86_64, and 4, 16 or 64 KB on
// aarch64, depending on the kernel's configuration.
constexpr uint64_t LARGEST_PAGE = 1 << 16;

class Windows {
  public:
    // number of bytes of the blocks that are mapped together with the part before the blocks
    static constexpr uint64_t FIRST = 1 << 16;

    Windows() = default;
    Windows(const Windows&) = delete;
    ~Windows();

    void open(int fd, uint64_t blocks_at, uint64_t length);  // throws std::system_error
    // sets the offset of the first word that a redo record may refer to
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

    // Convert between the offset and the address of a word in the header, a session, a group or a slot. `has`
    // returns whether an offset refers to such a word.
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
    char* slots_ = nullptr;                // address that offset 0 would have, relative to this window
    std::atomic<char*> blocks_ = nullptr;  // address that offset 0 would have, relative to this window
    std::atomic<uint64_t> blocks_to_ = 0;
    // head of the list of all windows; release when one is added, acquire by lookups
    std::atomic<const Window*> newest_ = nullptr;
};

}  // namespace flowchan
