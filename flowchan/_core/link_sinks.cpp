// Sinks put received items into local rings; see link_ports.hpp.
#include "link_ports.hpp"

#include <algorithm>

namespace flowchan {

Frame frame_of(const Received& item) {
    Frame frame;
    frame.kind = item.kind;
    frame.size = item.size;
    frame.deaths = item.deaths;
    frame.one = {item.at, item.size, 0};
    return frame;
}

Sink::Sink(std::shared_ptr<Ring> ring_, const WriterState& writer_, bool follows_, bool replays_)
    : ring(std::move(ring_)),
      writer(writer_),
      follows(follows_),
      replays(replays_),
      queue_place(*ring, Side::Writer, writer_.session) {}

Sink::~Sink() {
    if (!queue_place.entered()) return;
    RingLock holding(*ring);
    queue_place.leave();
}

bool Sink::stage(const Received& item, std::vector<char> payload) {
    if (staged.size() >= MOST_AHEAD || staged_bytes > ByteWindow::MOST) return false;
    staged_bytes += item.size;
    staged.push_back({item.key, item.kind, item.deaths, got, std::move(payload)});
    return true;
}

void Sink::unstage() {
    staged_bytes -= staged.front().payload.size();
    staged.pop_front();
}

void Sink::forget_staged() {
    for (const Staged& one : staged) drop(one.output, one.key);
    staged.clear();
    staged_bytes = 0;
}

Step Sink::begin(uint64_t number) {
    if (number != Slot::KEYLESS && !writer.keyed) {
        ring->begin_item(writer, number);
        writer.keyed = true;
    }
    return number != Slot::KEYLESS && writer.skips() ? Step::Done : Step::Wait;
}

Step Sink::put(const Received& item, uint64_t number, Wakes& wakes) {
    skipped = begin(number) == Step::Done;
    index = writer.count - skipped;
    if (skipped) return Step::Done;
    WriterState plain;
    plain.session = writer.session;
    return ring->try_put(frame_of(item), number == Slot::KEYLESS ? &plain : &writer, wakes);
}

void Sink::begin_lending() {
    if (std::exchange(is_lent, true)) return;
    released = used;
    lent.resize(staged.size());
}

void Sink::count_used(uint64_t output, uint64_t reference, uint64_t key) {
    used += 1;
    if (!is_lent) return;
    if (output - released >= lent.size()) lent.resize(output - released + 1);
    lent[output - released] = {reference, key};
    forget_reference(0);
}

// A dropped item does not count as used, because `flush` promises that the owner has put the used items (C3).
// After an output was lent, all later outputs must be counted, because the worker's host frees them in order.
void Sink::drop(uint64_t output, uint64_t key) {
    if (is_lent) count_used(output, 0, key);
}

// Forget a reference whose output the worker's host may now free. Outputs are freed in order.
void Sink::forget_reference(uint64_t reference) {
    const auto is_it = [reference](const Lent& one) { return one.reference == reference; };
    const auto found = reference ? std::ranges::find_if(lent, is_it) : lent.end();
    if (found != lent.end()) found->reference = 0;
    for (; !lent.empty() && !lent.front().reference; lent.pop_front()) released += 1;
}

Step Sink::done_with(uint64_t number, Wakes& wakes) {
    const Step step = finish_item(*ring, writer, number, wakes);
    if (step == Step::Done) writer.count = 0;
    return step;
}

void Sink::recall() {
    got -= staged.size();
    forget_staged();  // counts nothing: only a worker's inputs are recalled, and they are never lent
    part = {};
    if (!over) {
        RingLock holding(*ring);
        got -= ring->take_back(holding.wakes);
    }
    recalled = dirty = true;
}

void Sink::end(Ending ending, const std::string& why) {
    if (std::exchange(over, true)) return;
    RingLock holding(*ring);
    queue_place.leave();
    if (ending == Ending::Broke) ring->break_(why, holding.wakes);
    ring->end_session(writer.session, true, holding.wakes);
    dirty = true;
}

bool Sink::check_ended() {
    if (over || ring->seen_state() == OPEN) return false;
    over = dirty = true;
    forget_staged();
    return true;
}

bool Sink::has_room(uint64_t prefetched) {
    RingLock holding(*ring);
    const bool has = ring->free_places() > prefetched;
    if (has || queue_place.changed()) queue_place.leave();
    return has;
}

void Sink::enter_queue() {
    RingLock holding(*ring);
    queue_place.enter(writer.ordered && writer.keyed, writer.number);
}

// Call this under the ring's lock.
static Sink::Progress progress_in(Ring& ring, bool on_demand) {
    Sink::Progress now;
    const Header& h = ring.header();
    now.done = std::min(h.takes - std::min(h.leased, h.takes), ring.first_undecoded());
    now.started = h.takes - now.done;
    const bool waits = (h.leased == 0 && !on_demand) || h.reader_queue.waiting > 0;
    if (ring.inside() == 0 && waits && h.state == OPEN) now.flags |= STARVED;
    if (h.readers == 0) now.flags |= NO_MORE;
    if (h.state == BROKEN) now.flags |= BREAK;
    for (const Session& s : ring.sessions()) {
        if (!now.started || s.role != Session::READER) continue;
        if (s.at == Session::USERS) now.flags |= USERS;
        if (s.at == Session::UNPICKLING) now.flags |= UNPICKLED;
    }
    return now;
}

Sink::Progress Sink::read_progress() {
    RingLock holding(*ring);
    queue_place.leave();
    inside_ = ring->inside();
    return seen = progress_in(*ring, on_demand);
}

void Sink::mark_progress_sent() {
    const int64_t now = now_ns();
    const bool quick = now - std::exchange(progress_sent_at_, now) < 3 * UNWATCHED_NS;
    unwatched_until = quick && inside_ >= ENOUGH ? now + UNWATCHED_NS : 0;
}

bool Sink::enter_queue_for_worker() {
    if (queue_place.entered()) return !queue_place.changed();
    RingLock holding(*ring);
    if (progress_in(*ring, on_demand) != seen) return false;
    queue_place.enter(false, 0);
    return true;
}

}  // namespace flowchan
