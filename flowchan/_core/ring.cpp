// The mapping, the lock and the sessions of a ring. Slots and blocks are in ring_memory.cpp, items in
// ring_items.cpp.
#include "ring.hpp"
#include "system.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace flowchan {

namespace {

constexpr uint32_t FIRST_SESSIONS = 64;

// Which of the redo records are this process's: a number that others are unlikely to have.
uint32_t process_number = uint32_t(getpid());
[[maybe_unused]] const int renumbered =
    pthread_atfork(nullptr, nullptr, [] { process_number = uint32_t(getpid()); });

uint64_t align(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// Where everything lies in the memory of a channel.
struct Layout : Constants {
    uint64_t blocks_end;

    Layout(uint64_t capacity_, uint64_t max_bytes_) {
        magic = MAGIC;
        version = VERSION;
        capacity = capacity_;
        max_bytes = max_bytes_;
        groups = std::clamp<uint64_t>(capacity, 64, 4096);
        groups_at = align(sizeof(Header) + SESSIONS * sizeof(Session), UNIT);
        blocks_at = align(groups_at + groups * sizeof(Group), PAGE);
        // Four times max_bytes: items on lease, and what is viewed, are not "inside", classes waste up to a
        // fifth, and what is viewed for long lies in the way.
        const uint64_t slots = (2 * capacity + SESSIONS) * sizeof(Slot);
        length = align(blocks_at + 4 * max_bytes + GROW + slots, GROW);
        blocks_end = (length - slots) / PAGE *
                     PAGE;  // blocks of all sizes must not take the room of slots for `capacity`
    }
};

// Reads /proc/<pid>/stat: the state letter and the start time; false, with errno, if that can't be done.
bool read_stat(uint64_t pid, char& state, uint64_t& started) {
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%lu/stat", static_cast<unsigned long>(pid));
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    const int error = n < 0 ? errno : 0;
    close(fd);
    errno = error;
    if (n <= 0) return false;
    text[n] = 0;
    const char* p = strrchr(text, ')');  // the command may itself contain ")" and spaces
    if (!p) return false;
    unsigned long long start = 0;
    // after ")": state is field 3, start time is field 22
    if (sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &state, &start) != 2)
        return false;
    started = start;
    return true;
}

}  // namespace

uint64_t process_start(uint64_t pid) {
    char state;
    uint64_t started = 0;
    return read_stat(pid, state, started) ? started : 0;
}

bool process_alive(uint64_t pid, uint64_t started) {
    char state;
    uint64_t now = 0;
    if (read_stat(pid, state, now)) return state != 'Z' && state != 'X' && (started == 0 || started == now);
    if (errno == ENOENT) return kill(pid_t(pid), 0) == 0 || errno == EPERM;  // hidden from this user, perhaps
    return errno != ESRCH;  // without a free descriptor it can't be told
}

Ring::Ring(uint64_t capacity, uint64_t max_bytes) {
    const Layout layout(capacity, max_bytes);
    fd_ = memfd_create("flowchan", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) fail(errno, "memfd_create");
    try {
        if (ftruncate(fd_, off_t(layout.length)) != 0) fail(errno, "ftruncate");
        // Nobody can shrink it under us, which would be a SIGBUS.
        if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail(errno, "seal");
        if (!reserve(0, sizeof(Header) + FIRST_SESSIONS * sizeof(Session)) ||
            !reserve(layout.groups_at, layout.blocks_at))
            fail(errno, "fallocate");
        map(layout, layout.blocks_end);
        new (h_) Header{};
        static_cast<Constants&>(*h_) = layout;
        h_->reserved_sessions = FIRST_SESSIONS;
        h_->blocks_top = h_->reserved_low = blocks_at_;
        h_->map_blocks_to = base_.blocks_to();
        h_->slots_at = h_->reserved_high = h_->map_slots_from = length_;
        if (!reserve_low(blocks_at_ + PAGE) ||
            !reserve_high(length_ - std::min<uint64_t>(capacity + 16, 64) * sizeof(Slot)))
            fail(errno, "fallocate");
        pthread_mutexattr_t attr;
        pthread_mutexattr_init(&attr);
        pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&h_->mutex, &attr);
        pthread_mutexattr_destroy(&attr);
        kind_ = kind_of(h_->mutex);
        socket_ = socket_to_itself();
    } catch (...) {
        ::close(fd_);
        throw;
    }
}

Ring::Ring(RingHandle handle) {
    const int fd = handle.fd;
    struct stat st;
    Constants there;
    if (fstat(fd, &st) != 0) fail(errno, "fstat");
    if (pread(fd, &there, sizeof there, 0) != sizeof there || there.magic != MAGIC)
        fail(EINVAL, "not the memory of a channel");
    const uint64_t length = uint64_t(st.st_size);
    const Layout layout(std::min(there.capacity, length), std::min(there.max_bytes, length));
    if (memcmp(&there, static_cast<const Constants*>(&layout), sizeof there) != 0 || there.length != length)
        fail(EINVAL, "not the memory of a channel of this version");
    fd_ = fd;
    try {
        map(layout, layout.blocks_end);
    } catch (...) {
        fd_ = -1;  // it still belongs to the caller
        throw;
    }
    kind_ = kind_of(h_->mutex);
    socket_ = handle.socket;
}

Ring::~Ring() {
    if (fd_ >= 0) ::close(fd_);
    if (socket_ >= 0) ::close(socket_);
}

Redo& Ring::record(Side side) const {
    return h_->redo[(2 * process_number + (side == Side::Writer)) % RECORDS];
}

void Ring::map(const Constants& constants, uint64_t blocks_end) {
    length_ = constants.length;
    capacity_ = constants.capacity;
    max_bytes_ = constants.max_bytes;
    groups_ = constants.groups;
    groups_at_ = constants.groups_at;
    blocks_at_ = constants.blocks_at;
    blocks_end_ = blocks_end;
    base_.open(fd_, blocks_at_, length_);
    h_ = reinterpret_cast<Header*>(base_.header());
    base_.begin_words(uint64_t(reinterpret_cast<char*>(&h_->head) - base_.header()));
}

bool Ring::lock(bool patient) {
    if (kind_of(h_->mutex) != kind_.load(std::memory_order_relaxed)) return lock_without_mutex();
    std::atomic_ref had_by(h_->had_by);
    const bool had = had_by.load(std::memory_order_relaxed) == process_number;
    const int64_t wanted = had ? 0 : ticks();
    if (!had && !patient && pace.should_rest(wanted)) rest(wanted);  // who is patient has just done so
    int rc;
    // Each try takes the lock's line from its owner, so there are ever fewer of them.
    for (int i = 0; (rc = pthread_mutex_trylock(&h_->mutex)) == EBUSY; ++i) {
        if (i < 40) {
            for (int pauses = 1 << std::min(i, 4); pauses; --pauses) cpu_relax();
        } else if (!patient) {
            return false;
        } else {
            rc = lock_slowly();
            break;
        }
    }
    fault_point();
    if (rc == EOWNERDEAD) {
        look_for_growth();
        recover();
        fault_point();
        pthread_mutex_consistent(&h_->mutex);
    } else if (rc != 0) {
        return lock_without_mutex();
    } else {
        look_for_growth();
    }
    if (!had) {
        had_by.store(process_number, std::memory_order_relaxed);
        pace.took_over(wanted, h_->puts + h_->takes);
    }
    pace.count();
    return true;
}

// Whether a thread lives that has this memory mapped; true when that can't be told.
bool Ring::is_used_by(uint64_t thread) const {
    struct stat st;
    char path[32];
    snprintf(path, sizeof path, "/proc/%lu/maps", static_cast<unsigned long>(thread));
    FILE* maps = fstat(fd_, &st) == 0 ? fopen(path, "re") : nullptr;
    if (!maps) return errno != ENOENT && errno != EACCES;  // who has a channel can look at its other users
    char* line = nullptr;
    size_t room = 0;
    bool found = false;
    while (!found && getline(&line, &room, maps) > 0) {
        unsigned long inode = 0;
        found = sscanf(line, "%*s %*s %*s %*s %lu", &inode) == 1 && inode == st.st_ino &&
                strstr(line, "memfd:flowchan");
    }
    free(line);
    fclose(maps);
    return found;
}

// Waits for the lock, unless nobody can ever unlock it: its word names a thread that is not there, or this
// one. (When a thread dies with the lock, the kernel marks the word before the thread is gone.)
int Ring::lock_slowly() {
    uint32_t before = 0;
    for (;;) {
        const int64_t at = now_ns() + 2 * SLICE_NS;
        timespec until{time_t(at / 1'000'000'000), long(at % 1'000'000'000)};
        const int rc = pthread_mutex_clocklock(&h_->mutex, CLOCK_MONOTONIC, &until);
        if (rc != ETIMEDOUT) return rc;
        if (std::atomic_ref(h_->damaged).load(std::memory_order_relaxed))
            return EINVAL;  // its owner may have given it up
#ifdef __GLIBC__
        const uint32_t word = uint32_t(__atomic_load_n(&h_->mutex.__data.__lock, __ATOMIC_RELAXED));
        const uint32_t owner = word & FUTEX_TID_MASK;
        const bool lost = !(word & FUTEX_OWNER_DIED) && (owner == uint32_t(gettid()) || !is_used_by(owner));
        if (word && lost && word == before) return EINVAL;
        before = word;
#endif
    }
}

// The mutex itself is damaged. The channel breaks, and what does not look at the state finds `damaged`.
bool Ring::lock_without_mutex() {
    kind_.store(-1, std::memory_order_relaxed);
    std::atomic_ref(h_->damaged)
        .store(1, std::memory_order_relaxed);  // hints to others without the lock: no partner
    std::atomic_ref(h_->state).store(BROKEN, std::memory_order_relaxed);
    return true;
}

// Makes the last Change whole. False if the records can't be right.
bool Ring::redo() {
    const auto is_valid = [](const Redo& redo) { return redo.valid != 0; };
    bool right = std::ranges::count_if(h_->redo, is_valid) <= 1;
    for (Redo& redo : h_->redo) right = right ? redo.recover(base_) : (redo.valid = 0, false);
    return right;
}

// The owner of the lock died in its critical section. Everything but the last Change is whole; that one is
// made whole. `advance` is the one operation of several Changes that nobody else would take up again.
void Ring::recover() {
    if (!redo()) found_damage();
    Wakes wakes;
    advance(wakes);
    h_->reader_gate.woken = h_->writer_gate.woken =
        0;  // it may have counted sleepers that it did not get to wake
    wakes.readers += h_->reader_gate.call_all();
    call_all_writers(wakes);
    wake(wakes);
}

// --- the channel ---

void Ring::close(Wakes& wakes) {
    if (h_->state != OPEN) return;
    sweep_now(wakes);  // a writer that was killed before this is remembered
    if (h_->state != OPEN) return;
    Change change(record(Side::Writer), base_);
    close_with(change, wakes);
    change.commit();
}

// Closes as a part of `change`: when the last port leaves, a death must not come between its leaving and the
// close.
void Ring::close_with(Change& change, Wakes& wakes) {
    if (h_->state != OPEN) return;
    change.set(h_->state, CLOSED);
    wakes.readers += h_->reader_gate.call_all();
    call_all_writers(wakes);
}

void Ring::break_(const std::string& cause, Wakes& wakes) {
    if (h_->state == BROKEN || at_end()) return;  // the end is final
    Change change(record(Side::Writer), base_);
    if (Slot* slot = cause.empty() || blind_ ? nullptr : take_slot(cause.size(), change)) {
        memcpy(payload(slot), cause.data(), cause.size());
        change.set(h_->cause, offset(payload(slot)));
        change.set(h_->cause_size, cause.size());
    }
    change.set(h_->state, BROKEN);
    change.commit();
    wakes.readers += h_->reader_gate.call_all();
    call_all_writers(wakes);
}

std::string Ring::cause() const {
    const uint64_t begin = h_->cause, size = h_->cause_size;
    const bool in_block = begin >= blocks_at_ && begin < h_->blocks_top;
    const uint64_t end = in_block ? std::min({h_->blocks_top, h_->reserved_low, base_.blocks_to()}) : length_;
    if (!begin || begin < (in_block ? blocks_at_ : base_.slots_from()) || begin >= end || size > end - begin)
        return "";
    if (!in_block && size > Slot::INLINE) return "";
    return std::string(in_block ? base_.block(begin) : at<char>(begin), size);
}

// --- sessions ---

// A record that nobody uses, cleared for this process; 0 if there is none.
uint32_t Ring::free_session(Wakes& wakes) {
    for (int attempt = 0; attempt < 2; ++attempt) {
        for (uint32_t i = 1; i < SESSIONS; ++i) {  // 0 means "no session"
            Session& s = session(i);
            if (!reserve_sessions(i + 1)) break;
            if (s.role != Session::NONE) continue;
            s.pid = uint64_t(getpid());
            s.started = process_start(s.pid);
            s.generation += 1;
            s.supervised = s.lease_head = s.lease_tail = s.leased = s.committed_item = s.committed_count =
                s.views = s.forked = 0;
            s.at_reader_gate = s.at_writer_gate = s.called = 0;
            s.awaits = s.at = s.again_head = s.again_tail = s.again = s.again_at = 0;
            fault_point();
            return i;
        }
        sweep_now(wakes);
    }
    return 0;
}

uint32_t Ring::open_session(Session::Role role, Wakes& wakes) {
    const uint32_t i = free_session(wakes);
    if (!i)
        throw std::length_error(
            h_->reserved_sessions < SESSIONS
                ? "there is no memory for another port"
                : "all " + std::to_string(SESSIONS - 1) +
                      " places for ports and processes of this channel are taken; close some");
    Change change(record(Side::Writer), base_);
    change.set(session(i).role, role);
    if (role == Session::READER) change.set(h_->readers, h_->readers + 1);
    if (role == Session::WRITER) change.set(h_->writers, h_->writers + 1);
    change.commit();
    return i;
}

void Ring::adopt(uint32_t index) {
    if (index == 0 || index >= SESSIONS)
        throw std::length_error("there is no port number " + std::to_string(index));
    Session& s = session(index);
    if (s.views && s.pid != uint64_t(getpid())) part(index);
    s.pid = uint64_t(getpid());
    s.started = process_start(s.pid);
}

// A port moves to another process. What the former one looks at it goes on looking at, so that passes to a
// HOLDER of its own: else the views would end with the new process. One Change for each slot; a death may
// come between any two. (When all records are taken the views stay where they are.)
void Ring::part(uint32_t index) {
    Wakes wakes;
    if (!memory_is_right()) return void(found_damage());
    const uint32_t to = free_session(wakes);
    Session &s = session(index), &holder = session(to);
    if (to) {
        holder.pid = s.pid;
        holder.started = s.started;
        holder.forked = s.forked;
    }
    for (uint64_t p = first_slot(); to && p < length_; p += sizeof(Slot)) {
        Slot* slot = at<Slot>(p);
        if (slot->viewer() != index) continue;
        const uint64_t owner = slot->owner() == index ? to : slot->owner();
        Change change(record(Side::Writer), base_);
        const uint64_t unseen = slot->state & ~Slot::viewed_by(0xffff);
        change.set(slot->state, Slot::placed(unseen | Slot::viewed_by(to), slot->place(), uint32_t(owner)));
        change.set(s.views, s.views - 1);
        change.set(holder.views, holder.views + 1);
        change.set(holder.role, Session::HOLDER);
        change.commit();
    }
    wake(wakes);
}

// What a session that ends, perhaps because its process was killed, was copying, and the waits it was counted
// in. `views`: it looks at nothing any more.
void Ring::drop_copies(uint32_t index, bool views, Wakes& wakes) {
    Session& s = session(index);
    if (!memory_is_right()) found_damage();
    for (uint64_t p = first_slot(); !h_->damaged && p < length_; p += sizeof(Slot)) {
        Slot* slot = at<Slot>(p);
        if (slot->viewer() == index) {
            if (views) unview(slot, wakes);
            continue;
        }
        if (slot->owner() != index) continue;
        if (slot->place() == SlotState::Held) release(slot, wakes);
        if (slot->place() == SlotState::Filling) unclaim(slot, wakes);
    }
    int64_t now = now_ns();
    auto leave = [now](Gate& gate, uint32_t& at_gate) {
        const uint32_t n = at_gate;
        at_gate =
            // first: a death in between leaves `waiting` too high, which costs a needless wake-up, never too
            // low
            0;
        keep_order();
        fault_point();
        gate.waiting -= std::min(gate.waiting, n);
        gate.woken = std::min(gate.woken, gate.waiting);
        gate.selecting = std::min(gate.selecting, gate.waiting);
        gate.waited_ns += int64_t(n) * now;
        return n ? gate.call_all()
                 : 0;  // a thread that waits in the port that is being closed must hear of it
    };
    wakes.readers += leave(h_->reader_gate, s.at_reader_gate);
    wakes.writers += leave(h_->writer_gate, s.at_writer_gate);
    if (s.awaits) {
        s.word.store(s.word.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        wakes.add(s.word, true);  // a thread that waits in the port that is being closed must hear of it
        have_turn(s);
        const auto waits = [](const Session& one) { return one.awaits != 0; };
        h_->writer_gate.ordered = uint32_t(std::ranges::count_if(h_->sessions(), waits));
        call_turns(wakes);
    }
    if (s.pid == uint64_t(getpid())) return;
    // It died, perhaps woken and on its way back, or about to wake somebody: let those who sleep look again.
    h_->reader_gate.woken = h_->writer_gate.woken = 0;
    wakes.readers += h_->reader_gate.call_all();
    call_all_writers(wakes);
}

// Whether the process of this session lives, or may have children that do, and so may still use what it looks
// at, whoever ends the session.
bool Ring::still_looks(uint32_t index) const {
    const Session& s = session(index);
    return s.views && (s.forked || s.pid == uint64_t(getpid()) || process_alive(s.pid, s.started));
}

// `finished`: the items in hand are done with, else they go back. `died`: its process has ended without
// closing it; of a writer that is no clean end (C5), unless the channel was closed before.
void Ring::end_session(uint32_t index, bool finished, Wakes& wakes, bool died) {
    Session& s = session(index);
    if (s.role == Session::NONE) return;
    if (s.lease_head) finished ? free_leased(s, wakes) : give_back(s, wakes);
    if (s.again_head) give_back_again(s, wakes);
    const bool looks = still_looks(index);
    drop_copies(index, !looks, wakes);
    Change change(record(Side::Writer), base_);
    if (s.role == Session::READER) {
        if (h_->readers == 1) close_with(change, wakes);
        change.set(h_->readers, h_->readers - 1);
    } else if (s.role == Session::WRITER) {
        if (h_->writers == 1) close_with(change, wakes);
        if (died && h_->state == OPEN && !h_->cut_off) change.set(h_->cut_off, s.pid);
        change.set(h_->writers, h_->writers - 1);
    } else if (s.role == Session::RESUME) {
        change.set(h_->resumes, h_->resumes - 1);
    }
    if (looks) change.set(s.supervised, 0);  // when its process dies, whoever notices ends it
    change.set(s.role, looks ? Session::HOLDER : Session::NONE);
    change.commit();
}

std::vector<Slot*> Ring::in_hand(uint32_t index) const {
    std::vector<Slot*> slots;
    const Session& s = session(index);
    for (uint64_t p = s.lease_head; slot_exists(p) && slots.size() < s.leased; p = at<Slot>(p)->next)
        slots.push_back(at<Slot>(p));
    return slots;
}

void Ring::retire_writer(uint32_t index, const std::vector<uint64_t>& items, Wakes& wakes) {
    Session& s = session(index);
    bool again =
        s.committed_item && std::find(items.begin(), items.end(), s.committed_item - 1) != items.end();
    if (!again || s.role != Session::WRITER) {
        end_session(index, true, wakes);
        return;
    }
    drop_copies(index, true, wakes);
    Change change(record(Side::Writer), base_);
    if (h_->writers == 1) close_with(change, wakes);
    change.set(h_->writers, h_->writers - 1);
    change.set(h_->resumes, h_->resumes + 1);
    change.set(s.role, Session::RESUME);
    change.commit();
}

void Ring::sweep(Wakes& wakes) {
    if (is_sweep_due()) sweep_now(wakes);
}

void Ring::sweep_now(Wakes& wakes) {
    h_->swept_ns.store(uint64_t(coarse_now_ns()), std::memory_order_relaxed);
    uint64_t me = uint64_t(getpid());
    const Session* alive = nullptr;
    for (uint32_t i = 1; i < h_->sessions().size(); ++i) {
        Session& s = session(i);
        if (s.role == Session::NONE || s.role == Session::RESUME || s.supervised || s.pid == me) continue;
        if (s.role == Session::HOLDER && s.forked) continue;  // until the channel's end
        if (alive && s.pid == alive->pid && s.started == alive->started)
            continue;  // many ports of one process
        if (process_alive(s.pid, s.started))
            alive = &s;
        else
            end_session(i, false, wakes, true);
    }
    for (Gate* gate : {&h_->reader_gate, &h_->writer_gate})
        if (gate->starving && !process_alive(gate->starving, 0)) gate->starving = 0;
}

}  // namespace flowchan
