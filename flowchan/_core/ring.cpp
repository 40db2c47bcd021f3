// Mapping, locking and ending a ring. ring.hpp lists the ring's other files.
#include "ring.hpp"

#include "memory.hpp"
#include "process.hpp"
#include "system.hpp"

#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>

namespace flowchan {

namespace {

constexpr uint32_t FIRST_SESSIONS = 64;

uint64_t align(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// Where the parts of a channel's memory begin.
struct Layout : Constants {
    uint64_t blocks_end;

    uint64_t groups_end() const { return groups_at + groups * sizeof(Group); }

    Layout(uint64_t capacity_, uint64_t max_bytes_) {
        magic = MAGIC;
        version = VERSION;
        capacity = capacity_;
        max_bytes = std::min(max_bytes_, class_size(CLASSES - 1));  // the largest block has 1.9 TB
        groups = std::clamp<uint64_t>(capacity, 64, 4096);
        groups_at = align(sizeof(Header) + SESSIONS * sizeof(Session), UNIT);
        blocks_at = align(groups_end(), LARGEST_PAGE);
        // The blocks get four times max_bytes, for three reasons. Leased and viewed items need memory but do
        // not count as inside. Size classes waste up to a fifth. Long-lived views leave gaps that are too
        // small to use.
        const uint64_t slots = (2 * capacity + SESSIONS) * sizeof(Slot);
        length = align(blocks_at + 4 * max_bytes + GROW + slots, LARGEST_PAGE);
        // The blocks must leave room for the slots of `capacity` items.
        blocks_end = (length - slots) / PAGE * PAGE;
    }
};

}  // namespace

Ring::Ring(uint64_t capacity, uint64_t max_bytes) {
    const Layout layout(capacity, max_bytes);
    fd_ = make_memory(layout.length);
    try {
        if (!reserve(0, sizeof(Header) + FIRST_SESSIONS * sizeof(Session)) ||
            !reserve(layout.groups_at, layout.groups_end()))
            fail(errno, "fallocate");
        map(layout, layout.blocks_end);
        new (h_) Header{};
        static_cast<Constants&>(*h_) = layout;
        h_->reserved_sessions = FIRST_SESSIONS;
        h_->blocks_top = h_->reserved_low = blocks_at_;
        h_->map_blocks_to = windows_.blocks_to();
        h_->slots_at = h_->reserved_high = h_->map_slots_from = length_;
        if (!reserve_low(blocks_at_ + PAGE) ||
            !reserve_high(length_ - std::min<uint64_t>(capacity + 16, 64) * sizeof(Slot)))
            fail(errno, "fallocate");
        SharedLock::make(h_->mutex);
        lock_.attach(h_->mutex, fd_, h_->damaged);
        socket_ = socket_to_itself();
    } catch (...) {
        ::close(fd_);
        throw;
    }
}

Ring::Ring(RingHandle handle) {
    const int fd = handle.fd;
    struct stat st;
    Constants found;
    if (fstat(fd, &st) != 0) fail(errno, "fstat");
    if (pread(fd, &found, sizeof found, 0) != sizeof found || found.magic != MAGIC)
        fail(EINVAL, "not the memory of a channel");
    const uint64_t length = uint64_t(st.st_size);
    const Layout layout(std::min(found.capacity, length), std::min(found.max_bytes, length));
    if (memcmp(&found, static_cast<const Constants*>(&layout), sizeof found) != 0 || found.length != length)
        fail(EINVAL, "not the memory of a channel of this version");
    fd_ = fd;
    try {
        map(layout, layout.blocks_end);
    } catch (...) {
        fd_ = -1;  // after a failure, the caller still owns the descriptor
        throw;
    }
    lock_.attach(h_->mutex, fd_, h_->damaged);
    socket_ = handle.socket;
}

Ring::~Ring() {
    if (fd_ >= 0) ::close(fd_);
    if (socket_ >= 0) ::close(socket_);
}

Redo& Ring::record(Side side) const {
    return h_->redo[(2 * process_number() + (side == Side::Writer)) % RECORDS];
}

void Ring::map(const Constants& constants, uint64_t blocks_end) {
    length_ = constants.length;
    capacity_ = constants.capacity;
    max_bytes_ = constants.max_bytes;
    groups_ = constants.groups;
    groups_at_ = constants.groups_at;
    blocks_at_ = constants.blocks_at;
    blocks_end_ = blocks_end;
    windows_.open(fd_, blocks_at_, length_);
    h_ = reinterpret_cast<Header*>(windows_.header());
    windows_.begin_words(uint64_t(reinterpret_cast<char*>(&h_->head) - windows_.header()));
}

bool Ring::lock(bool patient) {
    std::atomic_ref had_by(h_->had_by);
    const bool had = had_by.load(std::memory_order_relaxed) == process_number();
    const int64_t wanted = had ? 0 : ticks();
    if (!had && !patient && turn_taking.should_rest(wanted))
        rest(wanted);  // a patient call follows an impatient call, which has already rested
    const SharedLock::Got got = lock_.lock(patient);
    if (got == SharedLock::Got::Busy) return false;
    fault_point();
    if (got == SharedLock::Got::Lost) return lock_without_mutex();
    check_growth();
    if (got == SharedLock::Got::FromDead) {
        recover();
        fault_point();
        lock_.mark_consistent();
    }
    if (!had) {
        had_by.store(process_number(), std::memory_order_relaxed);
        turn_taking.took_over(wanted, h_->puts + h_->takes);
    }
    turn_taking.count();
    return true;
}

// Break the channel, because the mutex itself is damaged. Also set `damaged`, for operations that do not read
// the state.
bool Ring::lock_without_mutex() {
    lock_.give_up();
    // Both words are only hints for readers without the lock, so the stores order no other memory access.
    std::atomic_ref(h_->damaged).store(1, std::memory_order_relaxed);
    std::atomic_ref(h_->state).store(BROKEN, std::memory_order_relaxed);
    return true;
}

// Complete the last Change. Return false if the redo records are damaged.
bool Ring::redo() {
    const auto is_valid = [](const Redo& redo) { return redo.valid != 0; };
    bool right = std::ranges::count_if(h_->redo, is_valid) <= 1;
    for (Redo& redo : h_->redo) right = right ? redo.recover(windows_) : (redo.valid = 0, false);
    return right;
}

// Repair the ring after the owner of its lock died. At most one Change is incomplete, and this function
// completes it. If an operation consists of several Changes, the next call continues it. Only `advance`
// needs to be continued here.
void Ring::recover() {
    if (!redo()) found_damage();
    Wakes wakes;
    advance(wakes);
    // The dead process may have counted sleepers as woken without waking them.
    h_->reader_queue.woken = h_->writer_queue.woken = 0;
    wakes.readers += h_->reader_queue.call_all();
    wake_all_writers(wakes);
    wake(wakes);
}

// --- the channel ---

void Ring::close(Wakes& wakes) {
    if (h_->state != OPEN) return;
    sweep_now(wakes);  // to notice a writer that was killed before this close
    if (h_->state != OPEN) return;
    Change change(record(Side::Writer), windows_);
    close_with(change, wakes);
    change.commit();
    advance(wakes);
}

// Close the channel as part of `change`, because the end of the last port and the close must be a single
// step. The caller calls `advance` afterwards.
void Ring::close_with(Change& change, Wakes& wakes) {
    if (h_->state != OPEN) return;
    change.set(h_->state, CLOSED);
    wakes.readers += h_->reader_queue.call_all();
    wake_all_writers(wakes);
    end_nap(wakes);
}

void Ring::break_(const std::string& cause, Wakes& wakes, const std::string& in_short) {
    if (h_->state == BROKEN || at_end()) return;  // BROKEN and drained are final states
    Change change(record(Side::Writer), windows_);
    for (const std::string* text : {&cause, &in_short}) {
        Slot* slot = text->empty() || map_incomplete_ ? nullptr : take_slot(text->size(), change);
        if (!slot) continue;
        memcpy(payload(slot), text->data(), text->size());
        change.set(h_->cause, offset(payload(slot)));
        change.set(h_->cause_size, text->size());
        break;
    }
    change.set(h_->state, BROKEN);
    change.commit();
    wakes.readers += h_->reader_queue.call_all();
    wake_all_writers(wakes);
    end_nap(wakes);
}

void Ring::unbreak() {
    if (h_->state != BROKEN || h_->damaged) return;
    Change change(record(Side::Reader), windows_);
    change.set(h_->state, CLOSED);
    change.commit();
    Wakes unused;
    advance(unused);
}

Counts Ring::counts() const {
    const Header& h = *h_;
    const WaitQueue &readers = h.reader_queue, &writers = h.writer_queue;
    uint64_t unstarted = 0;
    const uint64_t finished = all_started(unstarted);
    return {.items_in = h.puts + h.parked,
            .items_out = h.takes - unstarted,
            .bytes_in = h.bytes_in,
            .bytes_inside = h.bytes_in - h.bytes_out,
            .inside = h.state == BROKEN ? 0 : inside() + unstarted,
            .leased = h.leased - finished - unstarted,
            .readers = h.readers,
            .writers = h.writers,
            .waiting_readers = readers.all_waiting(),
            .waiting_writers = writers.all_waiting(),
            .read_wait_ns = readers.total_wait_ns(),
            .write_wait_ns = writers.total_wait_ns(),
            .turn_wait_ns = writers.turns.total(now_ns()),
            .readers_waiting_for_ns = readers.waiting_for_ns(),
            .writers_waiting_for_ns = writers.waiting_for_ns(),
            .selecting = readers.selecting + writers.selecting,
            .woken = readers.woken + writers.woken,
            .short_of_bytes = h.short_of_memory && writers.waiting > 0};
}

std::string Ring::cause() const {
    const uint64_t begin = h_->cause, size = h_->cause_size;
    const bool in_block = begin >= blocks_at_ && begin < h_->blocks_top;
    const uint64_t end =
        in_block ? std::min({h_->blocks_top, h_->reserved_low, windows_.blocks_to()}) : length_;
    if (!begin || begin < (in_block ? blocks_at_ : windows_.slots_from()) || begin >= end ||
        size > end - begin)
        return "";
    if (!in_block && size > Slot::INLINE) return "";
    return std::string(in_block ? windows_.block(begin) : at<char>(begin), size);
}

}  // namespace flowchan
