// Sources take items out of local rings for the link to send; see link_ports.hpp.
#include "link_ports.hpp"

#include <algorithm>

namespace flowchan {

// --- how much may be in transit ---

void Window::update(bool starved, bool waits, bool gathers, uint64_t ahead, uint64_t done,
                    int64_t round_trip) {
    const int64_t now = now_ns();
    const int64_t passed = now - at_, worth = slow(round_trip);
    const uint64_t finished = done - done_;
    // A remote worker that never starves may still need more items in advance. Either the worker has to wait
    // for items in transit (`waits`), or it finishes a full window within two round trips (`hurries`). The
    // window grows at most once per round trip, because more items cannot arrive earlier.
    const bool hurries = double(finished) * double(2 * round_trip) > size_ * double(passed);
    starved = starved || ((waits || hurries) && ahead >= size() && passed >= round_trip);
    // How many items the worker finishes in four round trips. The extra 1 ms allows for waking threads along
    // the way.
    const double few = passed ? double(finished) / double(passed) * double(4 * round_trip + 1'000'000) : 0;
    if (starved) {
        const bool quick = finished && passed / int64_t(finished) < worth;
        if (quick) size_ = std::max(size_, std::min(4 * size_, 1 + 2 * few));
        if (gathers || quick) size_ = std::max(size_, double(ahead + 1));
        size_ = std::min(size_, double(MOST_AHEAD));
        starved_ = true;
    }
    if (at_ && !starved && passed < worth) return;
    if (at_ && finished && !starved_ && !gathers) size_ = std::min(size_, std::max(1 + few, size_ / 2));
    at_ = now;
    done_ = done;
    if (!starved) starved_ = false;
}

void Allowance::update(uint64_t used, int64_t round_trip) {
    const int64_t now = now_ns(), passed = now - at_;
    if (passed < round_trip + 1'000'000) return;
    const double rate = double(used - used_) / double(passed);
    most_ = std::clamp(uint64_t(rate * double(4 * round_trip)), LEAST, MOST_AHEAD);
    at_ = now;
    used_ = used;
}

void ByteWindow::update(uint64_t most, int64_t round_trip) {
    const int64_t now = now_ns(), passed = now - at_;
    const int64_t trip = round_trip + 1'000'000;  // plus 1 ms, as for `few`
    if (passed < trip) return;
    const double two_trips = double(freed_) / double(passed) * double(2 * trip), before = double(size_);
    // Grow only if this raises the throughput. A window that was never full does not limit the throughput. A
    // slow reader does not empty its window within a round trip, so a larger window would not help.
    const double next = std::clamp(two_trips, before / 2, full_ ? 2 * before : before);
    size_ = std::clamp(uint64_t(next), LEAST, std::clamp(most, LEAST, MOST));
    at_ = now;
    freed_ = 0;
    full_ = false;
}

// --- Source ---

void Source::Entries::grow() {
    std::vector<Entry> more(std::max<uint64_t>(64, 2 * all_.size()));
    const uint64_t n = size();
    for (uint64_t i = 0; i < n; ++i) more[i] = (*this)[i];
    all_.swap(more);
    begin_ = 0;
    end_ = n;
}

Source::Source(std::shared_ptr<Ring> ring_, uint32_t session, bool alone)
    : ring(std::move(ring_)), queue_place(*ring, Side::Reader, session) {
    reader.session = session;
    reader.alone = alone;
}

Source::~Source() {
    if (link) references().remove_reader(&demand);
    if (!queue_place.entered()) return;
    RingLock holding(*ring);
    queue_place.leave();
}

bool Source::take(uint64_t most) {
    const bool broke = ring->seen_state() == BROKEN && ending == Ending::Open;
    if (!wants(most, has_references) && !broke) return false;
    const size_t before = entries.size();
    RingLock holding(*ring);
    queue_place.leave();
    if (broke) {
        ending = Ending::Broke;
        cause = ring->cause();
    }
    while (wants_head(most)) {
        if (take_run(most - std::min(active(), most), holding.wakes)) continue;
        const bool took = take_one(holding.wakes);
        if (refused) return true;
        if (!took) break;
    }
    replay_waits = false;  // so that `serve_as_owner` checks again
    // The wake-up may have been for items that this reader does not take, so wake another reader.
    if (entries.size() == before && ring->header().head && !leaves_head)
        holding.wakes.readers += ring->header().reader_queue.call(1);
    return entries.size() != before || ending != Ending::Open;
}

void Source::join(Link* link_) {
    link = link_;
    references().add_reader(ring.get(), link, &demand);
}

void Source::update_demand(uint64_t most) {
    const bool any = known && wants(most), local = known && wants(most, true);
    demand.store(any ? Demand::Any : local ? Demand::Local : Demand::None, std::memory_order_release);
}

bool Source::wants_head(uint64_t most) {
    leaves_head = false;
    if (is_held_back()) return false;
    const bool remote = wants(most);
    if (!link || !ring->header().head || ring->session(reader.session).reserved_head) return remote;
    const uint64_t id = ring->reference_next();
    has_references = has_references || id;
    if (id && references().is_on(id, link)) return wants(most, true);
    if (!has_references || (remote && !id)) return remote;
    if (std::exchange(left_reference, id) != id) left_at = now_ns();
    const bool late = remote && now_ns() - left_at >= LEAVE_NS;
    leaves_head = references().call_reader(id, ring.get(), remote, late) || !remote;
    return !leaves_head;
}

void Source::update_fetches(bool starved) {
    if (entries.empty() || entries.back().kind != REFERENCE) return;
    if (starved && active() + 1 >= fetches)  // the last finished item may not have a successor yet
        fetches = std::min(2 * fetches, MOST_FETCHES);
    else if (!starved)
        fetches = std::max(fetches - 1, FETCHES);
}

// Take one item under the ring's lock. Return false if there is none now, if the channel has ended, or if the
// item was refused and put back.
bool Source::take_one(Wakes& wakes) {
    Taken taken;
    const Step step = ring->try_take(taken, &reader, reader.session, wakes);
    if (step != Step::Done) {
        handle_take(step);
        return false;
    }
    if (taken.viewed) ring->unview(taken.slot, wakes);
    refused = needs_its_slot(taken.kind);
    if (refused) {
        ring->put_back(taken, &reader, wakes);
        return false;
    }
    if (active() == 0) progress_at = now_ns();
    Entry& entry = add(taken.at, taken.size, taken.number, taken.made_for, uint8_t(taken.kind), taken.deaths,
                       taken.is_replay);
    entry.route = Ring::route_of(taken.slot);
    // The windows count the bytes that the other side will fetch.
    if (entry.kind == REFERENCE) {
        const uint64_t fetched = references().size_of(entry.reference());
        bytes += fetched - entry.size;
        entry.size = fetched;
        has_references = true;
    }
    return true;
}

// Append an entry for an item that was just taken. Its fields are written in place, because the processor
// stalls when an entry is copied right after its fields were written one by one.
Source::Entry& Source::add(const char* at, uint64_t size, uint64_t number, uint64_t key, uint8_t kind,
                           uint64_t deaths, bool is_replay) {
    Entry& entry = entries.append();
    entry.at = at;
    entry.size = size;
    entry.number = number;
    entry.key = key;
    entry.kind = kind;
    entry.deaths = uint8_t(std::min(deaths, Head::MOST_DEATHS));
    entry.is_replay = is_replay;
    entry.is_urgent = is_replay || number < highest;
    if (number != Slot::KEYLESS) highest = std::max(highest, number);
    bytes += size;
    urgent += entry.is_urgent;
    return entry;
}

void Source::handle_take(Step step) {
    if (step == Step::Broken) {
        ending = Ending::Broke;
        cause = ring->cause();
    } else if (step == Step::Drained && (active() == 0 || (starved && started == active()))) {
        // A worker that gathers items and has all remaining items is now sent the end. If other readers give
        // back items later, this worker does not get them.
        ending = Ending::Drained;
    }
}

// Take several small items at once, if possible. Call this under the ring's lock.
bool Source::take_run(uint64_t most, Wakes& wakes) {
    Ring::InRun run[Redo::MOST];
    // This limit includes items on the other side, as in `wants`.
    const uint64_t room = most_bytes() - std::min(bytes, most_bytes());
    const uint64_t n = ring->take_run(reader, run, most, room, wakes);
    if (n && active() == 0) progress_at = now_ns();
    for (uint64_t i = 0; i < n; ++i) {
        const Slot* slot = run[i].slot;
        add(ring->payload_of(run[i].slot), slot->size, slot->number, run[i].made_for, uint8_t(slot->kind),
            slot->deaths(), false);
    }
    return n > 0;
}

void Source::free_oldest(uint64_t n) {
    n = std::min<uint64_t>(n, entries.size());
    if (!n) return;
    uint64_t freed = 0;
    for (uint64_t i = 0; i < n; ++i) {
        if (base + i >= settled) freed += entries[i].size;
        if (entries[i].kind == REFERENCE) references().release(entries[i].reference());
    }
    byte_window.free(freed, bytes);
    bytes -= freed;
    entries.drop_oldest(n);
    base += n;
    settled = std::max(settled, base);
    sent = std::max(sent, base);
    if (left) return;
    RingLock holding(*ring);
    ring->acknowledge_oldest(reader.session, n, holding.wakes);
}

void Source::settle(uint64_t upto) {
    uint64_t freed = 0;
    for (uint64_t i = std::max(settled, base); i < upto; ++i) {
        freed += entries[i - base].size;
        urgent -= entries[i - base].is_urgent;
    }
    if (freed) byte_window.free(freed, bytes);
    bytes -= freed;
    settled = std::max(settled, upto);
}

bool Source::free_settled() {
    uint64_t n = 0;
    while (n < held() && !entries[n].references) n += 1;
    free_oldest(n);
    return n > 0;
}

void Source::release(uint64_t key) {
    if (key >= base && key - base < entries.size() && entries[key - base].references)
        entries[key - base].references -= 1;
}

void Source::look_for_replay() {
    RingLock holding(*ring);
    replay_waits = ring->is_replay_next();
}

void Source::give_back_replays() {
    const uint64_t n = held();
    if (!n || left) return;
    {
        RingLock holding(*ring);
        ring->give_back_replays(reader.session, n, holding.wakes);
    }
    entries.drop_oldest(n);
    base += n;
}

void Source::leave() {
    if (std::exchange(left, true)) return;
    RingLock holding(*ring);
    queue_place.leave();
    demand = Demand::None;
    ring->end_session(reader.session, false, holding.wakes);
    references().release_unread(*ring);
    entries = {};
    urgent = 0;
    sent = base;
}

// Return whether this worker has been busy with one item for a long time while other readers wait.
bool Source::should_recall(int64_t round_trip) const {
    if (!may_recall() || now_ns() - progress_at < Window::slow(round_trip)) return false;
    // This worker wants no more items now, so leave them to other readers.
    if (on_demand && !started && !starved) return true;
    const Header& h = ring->header();
    const auto seen = [](const auto& word) {
        return std::atomic_ref(const_cast<std::remove_cvref_t<decltype(word)>&>(word))
            .load(std::memory_order_relaxed);
    };
    if (seen(h.head) != 0 || seen(h.reader_queue.waiting) <= uint32_t(queue_place.entered())) return false;
    return !has_references || references().is_wanted_by_another(ring.get(), &demand);
}

void Source::handle_recalled(uint64_t got) {
    if (!std::exchange(recalling, false)) return;
    recall_sent = false;
    const uint64_t kept = std::clamp(got, base, base + entries.size()) - base, n = entries.size() - kept;
    for (uint64_t i = kept; i < entries.size(); ++i) {
        bytes -= entries[i].size;
        urgent -= entries[i].is_urgent;
    }
    entries.drop_newest(n);
    sent = base + kept;
    part = {};
    acknowledged = std::min(acknowledged, sent);
    window.shrink();
    fetches = FETCHES;
    RingLock holding(*ring);
    ring->give_back_newest(reader.session, n, holding.wakes);
}

void Source::resume_after(uint64_t got) {
    if (std::exchange(known, true)) return;
    sent = std::clamp(got, base, base + entries.size());
}

bool Source::set_part(uint64_t item, uint64_t size) {
    if (left) return true;
    if (known || item < base || item - base >= entries.size() || size >= entries[item - base].size)
        return false;
    part = {item, size};
    return true;
}

uint64_t Source::first_key() {
    if (sent < base + entries.size()) return entries[sent - base].key == Slot::KEYLESS ? 0 : unsent().key;
    if (left || !has_more()) return Slot::KEYLESS;
    RingLock holding(*ring);
    const uint64_t head = ring->header().head;
    if (!head || ring->header().state == BROKEN) return Slot::KEYLESS;
    const Slot* slot = ring->slot_at(head);
    return slot->numbered() || slot->number == Slot::KEYLESS ? 0 : slot->number;
}

bool Source::enter_queue(uint64_t most) {
    if (queue_place.entered() && !queue_place.changed()) return true;
    RingLock holding(*ring);
    queue_place.leave();
    const Header& h = ring->header();
    // At the end of a channel, leases that other readers give back would wake all waiters.
    const bool ended = h.state == BROKEN || (ring->at_end_for(&reader) && active() == 0);
    const bool any = (h.head && wants_head(most)) || (ring->is_limited() && ring->wants_more() != want_sent);
    if (any || ring->session(reader.session).reserved_head || ended) return false;
    queue_place.enter(false, 0);
    return true;
}

}  // namespace flowchan
