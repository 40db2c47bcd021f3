// The memory of a ring: slots, their blocks, views of blocks, and the checks against damage.
//
// If no block of the needed class is free, a block is cut from the uncut memory in the middle of the file.
// When its slot becomes free, the block joins the free list of its class. A put may then reuse it while it is
// still in the CPU caches. When the uncut memory is used up, `rebuild_lists` divides all memory outside of
// used blocks again.
//
// Views. The receiver of an item with large buffers may read them in place. The slot then records that
// session as its `viewer`. A call that would free the slot leaves it HELD for the viewer, which frees it
// after its last view. If the slot is in another state when the last view ends, the viewer only removes its
// own entry. (If the item was given back, its next worker may be reading it while the first worker still
// views it.)
//
// A slot has at most one viewer, so a second reader makes a private copy. A reader also makes a copy if views
// already cover max_bytes, or if the block is at the end of the memory. Otherwise, readers that keep their
// items could block a writer. After a port is closed, its session remains as a HOLDER until the process has
// dropped its last view or has died.
#include <algorithm>

#include "ring.hpp"

namespace flowchan {

namespace {

// True if this thread's last put got no slot because memory could not be mapped into the process.
thread_local bool unmapped = false;

uint64_t block_start(uint64_t top, uint32_t cls) {
    return cls >= VIEWABLE ? (top + PAGE - 1) / PAGE * PAGE : top;
}

}  // namespace

// --- allocating and mapping memory ---

// Allocate and map the memory below `upto`. On failure, return false and change nothing.
bool Ring::reserve_low(uint64_t upto) {
    if (!windows_.show_blocks(upto)) return !(unmapped = true);
    h_->map_blocks_to = std::max(h_->map_blocks_to, windows_.blocks_to());
    if (upto <= h_->reserved_low) return true;
    const uint64_t end = std::min(blocks_end_, h_->reserved_high);
    if (upto > end) return false;
    const uint64_t step = std::clamp(h_->reserved_low - blocks_at_, PAGE, GROW);
    const uint64_t want = std::min({std::max(upto, h_->reserved_low + step), end, windows_.blocks_to()});
    if (!reserve(h_->reserved_low, want)) return false;
    h_->reserved_low = want;
    return true;
}

bool Ring::reserve_high(uint64_t from) {
    if (!windows_.show_slots(from)) return !(unmapped = true);
    h_->map_slots_from = std::min(h_->map_slots_from, windows_.slots_from());
    if (from >= h_->reserved_high) return true;
    if (from < h_->reserved_low) return false;
    const uint64_t want = std::max(from / PAGE * PAGE, h_->reserved_low);
    if (!reserve(want, h_->reserved_high)) return false;
    h_->reserved_high = want;
    return true;
}

// Allocate the first `n` session records.
bool Ring::reserve_sessions(uint32_t n) {
    if (n <= h_->reserved_sessions) return true;
    if (n > SESSIONS) return false;
    const uint64_t want = std::min<uint64_t>(std::max<uint64_t>(n, 2 * h_->reserved_sessions), SESSIONS);
    if (!reserve(sizeof(Header), sizeof(Header) + want * sizeof(Session))) return false;
    h_->reserved_sessions = want;
    return true;
}

// Map the blocks and slots that another process has added. If that fails, this process can neither put nor
// get.
void Ring::map_growth() {
    const uint64_t upto = h_->map_blocks_to, from = h_->map_slots_from;
    if (upto > length_ || from < blocks_at_) return void(found_damage());
    map_incomplete_ = !windows_.show_blocks(upto) || !windows_.show_slots(from);
}

// --- slots ---

// Return the first class in [cls, upto) with a free slot, or CLASSES if there is none.
[[gnu::always_inline]] inline uint32_t Ring::free_class(uint32_t cls, uint32_t upto) const {
    while (cls < upto && !h_->free_slots[cls]) ++cls;
    return cls < upto ? cls : CLASSES;
}

// Return a slot with room for `size` bytes of payload. If memory is exhausted, return null and change
// nothing.
Slot* Ring::take_slot(uint64_t size, Change& change) {
    unmapped = false;
    const uint32_t cls = class_of(size);
    if (h_->slots_used == 0 && h_->free_slots[cls] == 0 && h_->blocks_top - blocks_at_ > max_bytes_)
        rebuild_lists(cls);
    if (!h_->free_slots[cls]) {
        if (!memory_is_valid()) return found_damage(), nullptr;
        if (Slot* slot = new_slot(cls, change)) return slot;
        if (h_->damaged) return nullptr;
    }
    // Also accept a block from any of the next five classes. Above 256 bytes, such a block is at most 2.5
    // times as large as a block of class `cls`.
    uint32_t found = free_class(cls, std::min(cls + 6, CLASSES));
    if (found == CLASSES) {
        rebuild_lists(cls);
        if (Slot* slot = h_->free_slots[cls] || h_->damaged ? nullptr : new_slot(cls, change)) return slot;
        found = free_class(cls, CLASSES);
        if (found == CLASSES || h_->damaged) return nullptr;
    }
    Slot* slot = at<Slot>(h_->free_slots[found]);
    if (!slot_exists(h_->free_slots[found]) || slot->place() != SlotState::Free || slot->cls != found ||
        !payload_exists(slot))
        return found_damage(), nullptr;
    prefetch(at<Slot>(slot->next));  // for the next put
    change.set(h_->free_slots[found], slot->next);
    change.set(h_->slots_used, h_->slots_used + 1);
    return slot;
}

// Return whether a put should wait for recycled memory. The kernel must find and clear new memory, which
// takes longer than copying the item, and new memory is in no CPU cache. After one put has waited in vain,
// later puts do not wait. Puts wait again once readers have finished more items.
bool Ring::lacks_warm_memory(uint64_t size, bool late) {
    const uint32_t cls = class_of(size);
    if (free_class(cls, std::min(cls + 5, CLASSES)) != CLASSES) return false;
    if (h_->state != OPEN || !h_->slots_used || finished_before_wait_ == finished()) return false;
    (late ? finished_before_wait_ : h_->short_of_memory) = late ? finished() : 1;
    return !late;
}

// Return a slot with a new block, cut from the start of the uncut memory.
Slot* Ring::new_slot(uint32_t cls, Change& change) {
    const uint64_t block = block_start(h_->blocks_top, cls), upto = block + class_size(cls);
    const uint64_t bare = cls ? h_->free_slots[0] : 0;  // a slot without a block
    const uint64_t from = bare ? bare : h_->slots_at - sizeof(Slot);
    if (bare && (!slot_exists(bare) || at<Slot>(bare)->place() != SlotState::Free))
        return found_damage(), nullptr;
    if (!reserve_high(from) || (cls && !reserve_low(upto))) return nullptr;
    Slot* slot = at<Slot>(from);
    if (bare) {
        change.set(h_->free_slots[0], slot->next);
        // From here until it is used, the slot is in no list. If this process dies before that,
        // `rebuild_lists` finds it.
        change.commit();
    } else {
        change.set(h_->slots_at, from);
    }
    slot->state = slot->number = slot->size = 0;
    slot->cls = cls;
    slot->block = cls ? block : 0;
    if (cls) change.set(h_->blocks_top, upto);
    change.set(h_->slots_used, h_->slots_used + 1);
    return slot;
}

void Ring::free_slot(Slot* slot, Change& change) {
    if (slot->cls >= CLASSES) return void(found_damage());
    if (slot->viewer()) {
        change.set(slot->state, slot->with_place(SlotState::Held, slot->viewer()));
        return;
    }
    push_free(slot, change);
}

void Ring::push_free(Slot* slot, Change& change) {
    change.set(slot->next, h_->free_slots[slot->cls]);
    change.set(slot->state, 0);
    change.set(h_->free_slots[slot->cls], offset(slot));
    change.set(h_->slots_used, h_->slots_used - 1);
}

// Find the used blocks, sorted by address, and the free slots. Return false if the memory is damaged.
bool Ring::find_used(std::vector<Span>& used, std::vector<Slot*>& free) {
    for (uint64_t p = first_slot(); p < length_; p += sizeof(Slot)) {
        Slot* slot = at<Slot>(p);
        if (slot->place() == SlotState::Free)
            free.push_back(slot);
        else if (!payload_exists(slot))
            return false;
        else if (slot->cls)
            used.emplace_back(slot->block, slot->block + class_size(uint32_t(slot->cls)));
    }
    std::sort(used.begin(), used.end());
    return true;
}

// Return one more slot without a block, or null if memory is exhausted.
Slot* Ring::new_bare_slot(Change& change) {
    const uint64_t from = h_->slots_at - sizeof(Slot);
    if (!reserve_high(from)) return nullptr;
    at<Slot>(from)->state = 0;
    change.set(h_->slots_at, from);
    change.commit();
    return at<Slot>(from);
}

// Fill the free lists, which must be empty.
void Ring::fill_free_lists(const std::vector<uint64_t>& heads, Change& change) {
    for (uint32_t c = 0; c < CLASSES; ++c) {
        if (!heads[c]) continue;
        change.set(h_->free_slots[c], heads[c]);
        change.commit();
    }
}

namespace {

// Return the gaps between used blocks, which must be sorted. `top` is the start of the memory, and this
// function sets it to the end of the last used block.
std::vector<std::pair<uint64_t, uint64_t>> gaps_between(
    const std::vector<std::pair<uint64_t, uint64_t>>& used, uint64_t& top) {
    std::vector<std::pair<uint64_t, uint64_t>> gaps;
    for (auto [begin, end] : used) {
        if (top < begin) gaps.emplace_back(top, begin);
        top = std::max(top, end);
    }
    return gaps;
}

}  // namespace

// Divide all memory outside of used blocks again. Memory behind the last used block becomes uncut. Each gap
// between used blocks is cut into blocks of class `cls`, and the rest of the gap into the largest blocks that
// fit. First, all free lists are emptied, because memory in a list must not be cut; at the end, they are
// filled again. If the process dies in between, the lists are too short until the next `rebuild_lists`, which
// looks only at used blocks.
void Ring::rebuild_lists(uint32_t cls) {
    if (!memory_is_valid()) return void(found_damage());
    std::vector<Span> used;
    std::vector<Slot*> free;
    if (!find_used(used, free)) return void(found_damage());
    Change change(record(Side::Writer), windows_);
    if (free.empty()) {  // cutting the gaps uses up at least one slot
        Slot* slot = new_bare_slot(change);
        if (!slot) return;
        free.push_back(slot);
    }
    for (uint64_t& list : h_->free_slots) {
        if (!list) continue;
        change.set(list, 0);
        change.commit();
    }
    std::vector<uint64_t> heads(CLASSES, 0);
    auto give = [&](uint32_t of_class, uint64_t block) {
        Slot* slot = free.back();
        free.pop_back();
        slot->cls = of_class;
        slot->block = of_class ? block : 0;
        slot->state = slot->number = slot->size = 0;
        slot->next = heads[of_class];
        heads[of_class] = offset(slot);
    };
    uint64_t top = blocks_at_;
    std::vector<Span> gaps = gaps_between(used, top);
    // First cut blocks of class `cls` from all gaps, then other blocks. Keep one free slot for the memory
    // behind the gaps, because there may be no memory for a new slot. Never cut blocks of class 1: a slot
    // without a block has more room.
    static_assert(UNIT < Slot::INLINE && Slot::INLINE <= 2 * UNIT);
    auto cut = [&](uint32_t piece, uint64_t& begin, uint64_t end) {
        const uint64_t start = block_start(begin, piece);
        if (start + class_size(piece) > end) return false;
        give(piece, start);
        begin = start + class_size(piece);
        return true;
    };
    for (auto& [begin, end] : gaps)
        while (cls && !free.empty() && cut(cls, begin, end)) {}
    for (auto& [begin, end] : gaps)
        for (uint32_t piece = cls; piece > 1 && free.size() > 1;)
            if (!cut(piece, begin, end)) piece -= 1;
    while (!free.empty()) give(0, 0);
    fill_free_lists(heads, change);
    change.set(h_->blocks_top, top);
    change.commit();
}

// --- views ---

// Return whether a reader may read this slot's payload in place. The slot is about to be taken. A small
// payload is copied even from a large block, so that its slot is freed at once. No reader may view the end of
// the memory, because the largest item might need it. A few views scattered over the end would block the
// writer of such an item.
bool Ring::may_view(const Slot* slot) const {
    if (slot->viewer()) return false;
    if (slot->kind == PINNED) return true;  // small, and viewed only while the reader uses the object
    if (slot->kind != BUFFERS || slot->cls < VIEWABLE || slot->size <= Taken::LOCAL) return false;
    const uint64_t end = blocks_end_ - class_size(class_of(max_bytes_)) - PAGE;
    return h_->viewed_bytes + slot->size <= max_bytes_ &&
           slot->block + class_size(uint32_t(slot->cls)) <= end;
}

// Make the session the viewer of a slot. Return `state`, the slot's next state, with the viewer added.
uint64_t Ring::view(uint64_t state, const Slot* slot, uint32_t session, Change& change) {
    change.set(this->session(session).views, this->session(session).views + 1);
    change.set(h_->viewed_bytes, h_->viewed_bytes + slot->size);
    return state | Slot::viewed_by(session);
}

// Subtract one view from a session. A HOLDER session ends when its last view is gone.
void Ring::forget_view(Session& s, Change& change) {
    if (s.views == 1 && s.role == Session::HOLDER) change.set(s.role, Session::NONE);
    change.set(s.views, s.views - 1);
}

// Remove the slot's viewer after its last view has ended.
void Ring::unview(Slot* slot, Wakes& wakes) {
    if (h_->damaged || !slot->viewer()) return;
    if (slot->cls >= CLASSES) return void(found_damage());
    Change change(record(Side::Reader), windows_);
    if (!slot->loaned())
        change.set(h_->viewed_bytes, h_->viewed_bytes - std::min(h_->viewed_bytes, slot->size));
    forget_view(session(slot->viewer()), change);
    // A session that has the slot HELD without being its viewer is copying it, and frees it afterwards.
    const bool held = slot->place() == SlotState::Held && slot->owner() == slot->viewer();
    if (held)
        push_free(slot, change);
    else
        change.set(slot->state, slot->state & ~Slot::VIEW_BITS);
    change.commit();
    if (held) memory_freed(wakes);
}

// Lend memory for a writer to fill in place. The slot is HELD and LOANED, and outside of the FIFO.
Step Ring::loan(uint64_t size, uint32_t session, Slot*& slot) {
    if (h_->state == BROKEN) return Step::Broken;
    if (h_->state == CLOSED) return broken() ? Step::Broken : Step::Closed;
    if (size > max_bytes_) return Step::TooLarge;
    if (map_incomplete_) return Step::NoMemory;
    Change change(record(Side::Writer), windows_);
    slot = take_slot(std::max(size, class_size(VIEWABLE)), change);
    if (!slot) return no_slot();
    slot->size = size;
    slot->kind = BUFFERS;
    Session& s = this->session(session);
    change.set(s.views, s.views + 1);
    change.set(slot->state, Slot::placed(Slot::viewed_by(session) | Slot::LOANED, SlotState::Held, session));
    change.commit();
    return Step::Done;
}

// Put a loan that the writer has filled. Only the size of `frame` is used.
Step Ring::put_loan(Slot* slot, const Frame& frame, WriterState* writer, Wakes& wakes) {
    Step step = room(frame, writer);
    if (step != Step::Done) return step;
    Change change(record(Side::Writer), windows_);
    slot->size = frame.size;
    forget_view(session(slot->viewer()), change);
    const bool parked = is_parked(writer);
    change.set(slot->state, uint64_t(parked ? SlotState::Parked : SlotState::Inside));
    change.set(h_->bytes_in, h_->bytes_in + frame.size);
    link(slot, writer, change);
    change.commit();
    finish_put(writer, wakes, parked);
    return Step::Done;
}

// Return the ids of all existing PINNED items: in the channel, held by a process, or viewed. While an item is
// being written, its slot may still show the id of the previous item.
std::vector<uint64_t> Ring::pinned() const {
    std::vector<uint64_t> ids;
    if (!memory_is_valid()) return ids;
    for (uint64_t p = first_slot(); p < length_; p += sizeof(Slot)) {
        const Slot* slot = at<Slot>(p);
        const bool inside = slot->place() == SlotState::Inside || slot->place() == SlotState::Parked;
        if (slot->place() == SlotState::Free || (inside && h_->state == BROKEN && !slot->viewer())) continue;
        if (slot->kind != PINNED || slot->size < PIN || !payload_exists(slot)) continue;
        ids.emplace_back();
        memcpy(&ids.back(), payload(const_cast<Slot*>(slot)), 8);
    }
    return ids;
}

std::vector<Held> Ring::held() const {
    std::vector<Held> all;
    const bool any = std::ranges::any_of(h_->sessions(), [](const Session& s) { return s.views > 0; });
    if (!any || !memory_is_valid()) return all;
    for (uint64_t p = first_slot(); p < length_; p += sizeof(Slot)) {
        const Slot* slot = at<Slot>(p);
        if (!slot->viewer()) continue;
        const uint64_t pid = session(slot->viewer()).pid;
        auto found = std::find_if(all.begin(), all.end(), [&](const Held& h) { return h.pid == pid; });
        if (found == all.end()) found = all.insert(all.end(), Held{pid, 0, 0});
        found->blocks += 1;
        found->bytes += slot->size;
    }
    return all;
}

// --- damage ---
//
// Other processes write to this memory, and one of them may have a stray pointer. Every offset is therefore
// checked before it is followed. Damage breaks the channel, but never crashes its users or makes them read
// outside of the memory. No list is followed beyond its length, and a slot is taken from a list only if its
// state matches the list. After damage has been found, no offset is followed any more.

// Check the order of the memory ranges: | blocks .. reserved_low | hole | reserved_high .. slots |
bool Ring::memory_is_valid() const {
    return blocks_at_ <= h_->blocks_top && h_->blocks_top <= h_->reserved_low &&
           h_->reserved_low <= h_->reserved_high && h_->reserved_high <= h_->slots_at &&
           h_->slots_at <= length_ && (length_ - h_->slots_at) % sizeof(Slot) == 0;
}

bool Ring::slot_exists(uint64_t offset) const {
    return offset >= first_slot() && offset <= length_ - sizeof(Slot) &&
           (length_ - offset) % sizeof(Slot) == 0;
}

bool Ring::payload_exists(const Slot* slot) const {
    if (slot->cls >= CLASSES) return false;
    if (slot->cls == 0) return slot->block == 0 && slot->size <= Slot::INLINE;
    const uint64_t room = class_size(uint32_t(slot->cls));
    // `write` calls this without the lock, while Redo::apply may store this word. Relaxed order is enough,
    // because an existing slot is always above `slots_at`.
    const uint64_t end =
        std::min(std::atomic_ref(h_->slots_at).load(std::memory_order_relaxed), windows_.blocks_to());
    return slot->size <= room && slot->block >= blocks_at_ && slot->block % UNIT == 0 && room <= end &&
           slot->block <= end - room;
}

Step Ring::found_damage() {
    h_->damaged = 1;
    h_->state = BROKEN;
    return Step::Broken;
}

// Return the result of a put that finds no memory. The put waits until memory is freed, unless none is in
// use. If this process lacks address space, the put waits only while some reader has a port. Otherwise, a
// caller that is itself the only reader would wait forever.
Step Ring::no_slot() {
    if (h_->damaged) return Step::Broken;
    const bool waits = h_->slots_used && (h_->readers || !unmapped);
    unmapped = false;
    if (!waits) return Step::NoMemory;
    h_->short_of_memory = 1;
    return Step::Wait;
}

void Ring::memory_freed(Wakes& wakes) {
    if (!h_->short_of_memory) return;
    h_->short_of_memory = 0;
    wake_all_writers(wakes);
}

}  // namespace flowchan
