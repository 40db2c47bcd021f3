// Looking at the items of a ring without taking them.
//
// Algorithm. The caller holds the lock. The leased items of all readers and the first items of the FIFO are
// sorted by number. Their payloads are copied, except for the contents of arrays. An item without a number is
// shown with the number that it will get, so a later peek shows the same number.
//
// Invariants. Peeking writes nothing to shared memory, so a process may safely die at any point while
// peeking. A peek follows at most MOST_WALKED slots and copies only what fits into `room`, so users of the
// channel wait only briefly. It copies neither a larger item nor an item with parts that only its reader can
// open, such as descriptors.
#include <algorithm>

#include "ring.hpp"

namespace flowchan {

namespace {

// Return the number of bytes to copy: the whole payload, or the part before the contents of arrays.
uint64_t shown_size(const Slot* slot, const char* at) {
    uint64_t from = 0, length = slot->size;
    if (slot->kind == BUFFERS && slot->size >= 24) {
        memcpy(&from, at + 8, 8);
        memcpy(&length, at + 16, 8);
    }
    return from <= slot->size && length <= slot->size - from ? from + length : slot->size;
}

}  // namespace

std::vector<Seen> Ring::peek(uint64_t first, uint64_t most, std::span<char> room) const {
    std::vector<Seen> seen;
    if (h_->damaged || map_incomplete_) return seen;
    std::vector<std::pair<uint64_t, const Slot*>> found;
    for (uint32_t i = 0; i < h_->sessions().size(); ++i)
        for (const Slot* slot : leased_slots(i))
            if (slot->number >= first) found.emplace_back(slot->number, slot);
    uint64_t next = h_->numbered, p = h_->head, in_fifo = 0;
    for (uint64_t n = std::min(inside(), MOST_WALKED); n && slot_exists(p) && in_fifo < most; --n) {
        const Slot* slot = at<Slot>(p);
        const bool keeps = slot->numbered() || (h_->keeps_numbers && slot->number != Slot::KEYLESS);
        const uint64_t number = keeps ? slot->number : next;
        if (!slot->numbered()) next = number + 1;
        if (number >= first) found.emplace_back(number, slot), in_fifo += 1;
        p = slot->next;
    }
    std::ranges::sort(found, {}, &std::pair<uint64_t, const Slot*>::first);
    found.resize(std::min<uint64_t>(found.size(), most));
    std::span<char> left = room;
    for (const auto& [number, slot] : found) {
        if (!payload_exists(slot)) break;
        const char* from = payload(const_cast<Slot*>(slot));
        const uint64_t size = shown_size(slot, from);
        const bool copied = !is_taken_singly(slot->kind) && size <= room.size();
        if (copied && size > left.size()) break;
        seen.push_back({number, slot->kind, slot->size, is_leased(slot), {}});
        if (!copied) continue;
        memcpy(left.data(), from, size);
        seen.back().copy = left.first(size);
        left = left.subspan(size);
    }
    return seen;
}

}  // namespace flowchan
