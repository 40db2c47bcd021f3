// The receiving thread of a link. It reads frames, checks them, and puts their items into rings. Items
// without room are staged, so the thread never waits for room.
#include "link.hpp"

#include <sys/socket.h>
#include <algorithm>
#include <cstddef>

namespace flowchan {

namespace {

constexpr uint32_t HELD_FOR = 64;
constexpr uint64_t SMALL = Taken::LOCAL;  // items up to this size are put in batches
// How many bytes to receive beyond the end of a large item. The next item is probably large as well, so only
// its beginning should be copied.
constexpr uint64_t AFTER_LARGE = 4096;
const char* const WRONG = "the other side sent an invalid frame";

}  // namespace

void Link::receive_loop() {
    uint64_t served = 0;
    for (;;) {
        int fd = -1;
        {
            std::unique_lock lock(mutex_);
            while (!closed_ && (fd_ < 0 || lost_ || connection_ == served)) changed_.wait(lock);
            if (closed_) return;
            served = connection_;
            fd = fd_;
            users_ += 1;
        }
        leave_connection(fd, receive(fd, served));
    }
}

// Receive until the connection ends. Return the reason for its end.
std::string Link::receive(int fd, uint64_t connection) {
    std::vector<char> buffer(GATHER + LARGE);
    uint64_t have = 0;
    for (;;) {
        const ssize_t n = recv(fd, buffer.data() + have, std::min(buffer.size() - have, GATHER), 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return std::string("receiving failed: ") + strerror(errno);
        if (n == 0) return "the other side closed the connection";
        have += uint64_t(n);
        bytes_in.fetch_add(uint64_t(n), std::memory_order_relaxed);
        last_byte_at_.store(now_ns(), std::memory_order_relaxed);
        uint64_t at = 0;
        std::unique_lock lock(mutex_);
        while (have - at >= Head::SHORT) {
            if (const uint64_t handled = handle_run(buffer.data() + at, have - at)) {
                at += handled;
                continue;
            }
            Head head{};
            memcpy(static_cast<void*>(&head), buffer.data() + at, Head::SHORT);
            if (have - at < head.length()) break;
            memcpy(static_cast<void*>(&head), buffer.data() + at, head.length());
            if (!is_valid(head)) return release_ring(), WRONG;
            const char* payload = buffer.data() + at + head.length();
            const uint64_t here = have - at - head.length();
            if (here >= head.size) {
                if (!handle(head, payload)) return release_ring(), WRONG;
                at += head.length() + head.size;
            } else if (head.carries_item() && head.size >= LARGE) {
                release_ring();
                ring_doorbell_if_news();
                lock.unlock();
                Following following{buffer.data(), AFTER_LARGE};
                if (!receive_large(fd, connection, head, payload, here, following))
                    return "the connection ended in the middle of an item";
                lock.lock();
                at = 0;
                have = following.have;
            } else {
                break;
            }
        }
        release_ring();
        announce_items();
        ring_doorbell_if_news();
        lock.unlock();
        memmove(buffer.data(), buffer.data() + at, have - at);
        have -= at;
        // Grow the buffer only as bytes arrive, because the size that the other side claims may be false.
        if (buffer.size() - have < LARGE) buffer.resize(2 * buffer.size());
    }
}

// Release the ring that hold() has locked. A thread that has locked one ring must not lock another.
void Link::release_ring() {
    held_.reset();
    held_ring_ = nullptr;
    held_for_ = 0;
}

// Lock a ring to put `items` items. Keep the lock for later items, up to about HELD_FOR in total.
void Link::hold(Sink& sink, uint64_t items) {
    if (held_ring_ != sink.ring.get() || held_for_ >= HELD_FOR) {
        release_ring();
        held_.emplace(*sink.ring);
        held_ring_ = sink.ring.get();
    }
    held_for_ += uint32_t(items);
}

// Return whether an item may be put in a batch.
static bool is_small_item(const Head& head) {
    return head.type == FrameType::ITEM && head.size <= SMALL && head.kind() != REFERENCE;
}

// Worker side: put consecutive small items of one port into its ring as a batch. Return their size in bytes,
// or 0 if the first frame needs separate handling.
uint64_t Link::handle_run(const char* at, uint64_t size) {
    Head head{};
    memcpy(static_cast<void*>(&head), at, Head::SHORT);
    LinkStream* stream = owner_side_ || !is_small_item(head) ? nullptr : find(head.stream);
    if (!stream || head.port >= stream->sinks.size()) return 0;
    Sink& sink = stream->sinks[head.port];
    if (sink.drops_items() || !sink.staged.empty() || !sink.part.empty()) return 0;
    const Head first = head;
    Ring::Small run[Redo::MOST];
    uint64_t n = 0;
    for (uint64_t from = 0; n < Redo::MOST && size - from >= Head::SHORT; from += Head::SHORT + head.size) {
        memcpy(static_cast<void*>(&head), at + from, Head::SHORT);
        const bool same = head.stream == first.stream && head.port == first.port;
        if (!same || !is_small_item(head) || !is_valid(head) || head.n != sink.got + n) break;
        if (class_of(head.size) != class_of(first.size) || size - from - Head::SHORT < head.size) break;
        run[n++] = {head.kind(), head.deaths(), head.size, at + from + Head::SHORT};
    }
    if (n < 2) return 0;
    hold(sink, n);
    n = sink.ring->put_run(run, n, held_->wakes);
    sink.got += n;
    sink.used += n;
    note_progress();
    uint64_t handled = n * Head::SHORT;
    for (uint64_t i = 0; i < n; ++i) handled += run[i].size;
    return handled;
}

// Return whether only this side of the link sends frames of this type. If so, receiving such a frame is an
// error.
bool Link::is_sent_here_only(FrameType type) const {
    if (owner_side_)
        return type == FrameType::ITEM || type == FrameType::OUTPUT || type == FrameType::RECALL ||
               type == FrameType::MOVED || type == FrameType::PULL;
    return type == FrameType::OPEN || type == FrameType::OUT || type == FrameType::INPUT ||
           type == FrameType::WANT || type == FrameType::UNREACHABLE || type == FrameType::PULLED;
}

// Handle the reply to the ping sent at `pinged_at`.
bool Link::handle_pong(int64_t pinged_at) {
    const int64_t now = now_ns();
    if (pinged_at < 0 || pinged_at > now) return false;
    const int64_t took = now - pinged_at;
    least_trip_ = timed_ ? std::min(least_trip_, took) : took;
    const int64_t before = std::exchange(timed_, true) ? round_trip() : took;
    round_trip_.store(std::max<int64_t>((3 * before + took) / 4, 1000), std::memory_order_relaxed);
    return true;
}

bool Link::handle(const Head& head, const char* payload) {
    if (head.type == FrameType::PONG) return handle_pong(int64_t(head.n));
    if (!head.carries_item()) {
        release_ring();
        has_news_ = true;
    }
    if (head.type == FrameType::PING) {
        pong_ = true;
        pong_n_ = head.n;
        return true;
    }
    if (is_sent_here_only(head.type)) return false;
    LinkStream* stream = find(head.stream);
    if (!stream) return true;  // the stream is not open yet, or no longer
    if (head.type == FrameType::OPEN) {
        for (Sink& sink : stream->sinks) sink.dirty = true, sink.wanted = false;
        return true;
    }
    const bool of_source = is_for_sender(head.type);
    if (head.port >= (of_source ? stream->sources.size() : stream->sinks.size())) return false;
    if (head.type == FrameType::INPUT) return handle_input(*stream, head, payload);
    if (head.type == FrameType::OUTPUT) return handle_output(*stream, head, payload);
    if (head.type == FrameType::PART) return handle_part(stream->sources[head.port], head);
    if (is_about_reference(head.type)) return handle_about_reference(*stream, head, payload);
    Sink& sink = stream->sinks[head.port];
    if (head.type == FrameType::RECALL) return sink.recall(), true;
    if (head.type == FrameType::WANT) return handle_want(sink, head.n != 0);
    if (head.type == FrameType::END) return handle_end(*stream, sink, head, payload);
    const std::vector<char> whole = with_part(sink, payload, head.size);
    if (!whole.empty()) payload = whole.data();
    return handle_item(
        *stream, sink,
        {head.n, head.kind(), head.deaths(), whole.empty() ? head.size : whole.size(), payload});
}

// Return the whole item, which ends with `rest`. Return nothing if none of it arrived earlier.
std::vector<char> Link::with_part(Sink& sink, const char* rest, uint64_t size) {
    std::vector<char> whole = std::exchange(sink.part, {});
    if (!whole.empty()) whole.insert(whole.end(), rest, rest + size);
    return whole;
}

// --- items ---

// Return the owner side's number for the worker's item `key`, or KEYLESS if the outputs are for no item.
uint64_t Link::number_for(LinkStream& stream, const Sink& sink, uint64_t key) {
    if (key == Slot::KEYLESS || !owner_side_) return Slot::KEYLESS;
    if (const Source* source = numbering(stream, sink)) return source->entries[key - source->base].number;
    return sink.replays ? key : Slot::KEYLESS;
}

bool Link::is_valid_key(LinkStream& stream, const Sink& sink, uint64_t key) {
    if (!owner_side_) return key == sink.got;
    if (key == Slot::KEYLESS) return true;
    if (const Source* source = numbering(stream, sink))
        return key >= std::max(source->base, sink.settled) && key < source->sent;
    return !sink.replays || key == 0;
}

// Return whether all items before item `key` are settled: finished by the worker, with all outputs in place.
// Their leases must end first, because after a worker's death the ring knows only the outputs for the
// worker's last item.
bool Link::is_settled(LinkStream& stream, const Sink& sink, uint64_t key) {
    Source* source = key == Slot::KEYLESS ? nullptr : numbering(stream, sink);
    if (!source || source->base + source->held() >= key) return true;
    source->done = std::max(source->done, key);
    release_ring();
    settle(stream);
    return source->base + source->held() >= key;
}

bool Link::handle_item(LinkStream& stream, Sink& sink, const Received& item) {
    if (sink.drops_items()) {
        sink.drop(sink.got, item.key);
        count_arrival(sink, false);
        return true;
    }
    if (!is_valid_key(stream, sink, item.key)) return false;
    if (item.kind == REFERENCE && !owner_side_) return handle_location(stream, sink, item);
    uint64_t id = 0;
    if (item.kind == REFERENCE) {
        id = add_kept(stream, sink, item);
        if (!id) return false;
        return receive_item(stream, sink, {item.key, REFERENCE, 0, sizeof id, reinterpret_cast<char*>(&id)});
    }
    return receive_item(stream, sink, item);
}

bool Link::receive_item(LinkStream& stream, Sink& sink, const Received& item) {
    Step step = Step::Wait;
    if (is_of_replay(stream, sink, item.key)) {
        replace_lost(stream, sink, item);
        step = Step::Done;
    } else if (sink.staged.empty() && is_settled(stream, sink, item.key)) {
        hold(sink, 1);
        step = put(stream, sink, item, sink.got, held_->wakes);
    }
    if (step == Step::Done) {
        count_arrival(sink, owner_side_);
        return true;
    }
    release_ring();
    has_news_ = true;
    if (step == Step::TooLarge) refuse(stream, sink, item.size);
    if (sink.check_ended() || sink.drops_items())
        sink.drop(sink.got, item.key);
    else if (!sink.stage(item, {item.at, item.at + item.size}))
        return false;
    count_arrival(sink, owner_side_);
    return true;
}

// Count one more arrival. The owner side must acknowledge an output soon, because the worker's side keeps it
// on lease until then. An item stays on lease until it is finished, so its acknowledgement can wait for the
// next report of the worker's progress.
void Link::count_arrival(Sink& sink, bool is_news) {
    sink.got += 1;
    note_progress();
    sink.dirty = sink.dirty || is_news;
    has_news_ = has_news_ || is_news;
}

// Refuse an item that exceeds the memory limit on this side, although it was within the limit on its own
// host. No later item is put.
void Link::refuse(const LinkStream& stream, Sink& sink, uint64_t size) {
    sink.refuses = true;
    sink.forget_staged();
    const auto port = std::ranges::find(stream.sinks, &sink, [](const Sink& one) { return &one; });
    report({.kind = LinkEvent::Kind::TooLarge,
            .stream = stream.number,
            .port = uint16_t(port - stream.sinks.begin()),
            .size = size});
}

// --- states ---

bool Link::handle_part(Source& source, const Head& head) {
    if (!source.set_part(head.n, head.a)) return false;
    if (source.part > source.largest_part) note_progress();
    source.largest_part = std::max(source.largest_part, source.part);
    return true;
}

void Link::note_acknowledged(Source& source, uint64_t got) {
    if (got > std::exchange(source.acknowledged, got)) note_progress();
}

bool Link::handle_input(LinkStream& stream, const Head& head, const char* payload) {
    Source& source = stream.sources[head.port];
    if (head.a > source.base + source.entries.size() && !source.left) return false;
    if (!source.known) seen_generation_ = 0;  // its items count as sent from now on, so report their moves
    source.resume_after(head.a);
    if (source.left) return true;
    if (head.b > source.sent) return false;
    note_acknowledged(source, head.a);
    if (head.b > source.done) source.progress_at = now_ns();
    if (head.flags & RECALLED) {
        for (const Sink& sink : stream.sinks)
            for (const Sink::Staged& output : sink.staged)
                if (output.key != Slot::KEYLESS && output.key >= head.a) return false;
        if (source.done > head.a) return false;
        source.handle_recalled(head.a);
    }
    // On a new connection, the worker's first report may be outdated.
    source.done = std::max(source.done, head.b);
    source.started = head.n;
    source.starved = head.flags & STARVED && head.a == source.base + source.entries.size();
    if (head.flags & BREAK) {
        RingLock holding(*source.ring);
        source.ring->break_(std::string(payload, head.size), holding.wakes);
    }
    source.leaving = source.leaving || head.flags & NO_MORE;
    // If the worker and its host die together, the supervisor reads this state (R10).
    Session& session = source.ring->session(source.reader.session);
    session.begun = head.n;
    session.at = head.flags & USERS       ? Session::USERS
                 : head.flags & UNPICKLED ? Session::UNPICKLING
                                          : Session::OURS;
    source.update_fetches(head.flags & STARVED);
    settle(stream);
    source.update_byte_window(least_trip_);
    source.window.update(source.starved, head.flags & STARVED, head.n > 0, source.active(), source.done,
                         round_trip());
    return true;
}

bool Link::handle_output(LinkStream& stream, const Head& head, const char* payload) {
    Source& source = stream.sources[head.port];
    if (source.left) return true;
    if (head.a > source.base + source.entries.size() || head.b < source.base) return false;
    source.resume_after(head.a);
    note_acknowledged(source, head.a);
    source.free_oldest(head.b - source.base);
    source.remakes = head.flags & REMAKES;
    source.allowance.update(head.b, round_trip());
    source.update_byte_window(least_trip_);
    if (source.ring->is_limited() && !(head.flags & NO_MORE)) {
        RingLock holding(*source.ring);
        source.ring->allow(head.n, holding.wakes);
    }
    if (head.flags & BREAK) {
        RingLock holding(*source.ring);
        source.ring->break_(std::string(payload, head.size), holding.wakes);
    }
    if (head.flags & NO_MORE) source.leave();
    event_added_.notify_all();  // wakes `await_used`
    return true;
}

// The owner reports how much room there is now, and reports again when there is more. If no writer on the
// other side waits for room, other writers get the room.
bool Link::handle_want(Sink& sink, bool wanted) {
    sink.wanted = wanted;
    sink.dirty = true;
    if (wanted || sink.over) return true;
    RingLock holding(*sink.ring);
    sink.queue_place.leave();
    if (sink.ring->has_room(0)) sink.ring->wake_all_writers(holding.wakes);
    return true;
}

bool Link::handle_end(LinkStream& stream, Sink& sink, const Head& head, const char* payload) {
    if (bool(head.flags & IS_OUTPUT) != owner_side_) return false;
    if (sink.over) return true;
    sink.pending_end = head.flags & BREAK ? Ending::Broke : Ending::Drained;
    sink.pending_cause.assign(payload, head.size);
    if (sink.pending_end == Ending::Broke) sink.forget_staged();
    move_staged(stream);
    return true;
}

}  // namespace flowchan
