// The sending thread of a link. It takes items, sends states, and moves staged items (link_staged.cpp). When
// it has no work, it sleeps in the wait queues of all rings from which work may come.
#include "link.hpp"

#include <sys/socket.h>
#include <algorithm>

namespace flowchan {

namespace {

constexpr int64_t PING_NS = 500'000'000;
// How often to check whether other workers wait for items that this worker has not started.
constexpr int64_t RECALL_NS = 10'000'000;
constexpr uint64_t SOME = 8, MANY = 256;  // items taken in one batch
constexpr std::chrono::microseconds REST{20};
constexpr size_t MOST_PIECES = 64;
constexpr uint64_t IN_PLACE = 16 << 10;    // larger items are sent without a copy
constexpr int64_t CROWDED_NS = 2'000'000;  // how often to check words on which no thread sleeps

}  // namespace

void Link::send_loop() {
    for (;;) {
        const uint32_t heard = doorbell_.load(std::memory_order_seq_cst);
        int fd = -1;
        bool moved = false;
        {
            std::lock_guard lock(mutex_);
            if (closed_) return;
            if (has_messages.exchange(false)) handle_messages();
            for (auto& [number, stream] : streams_) moved = move_staged(*stream) || moved;
            announce_items();
            if (fd_ >= 0 && !lost_) {
                moved = fill() || moved;
                if (out_.size()) fd = fd_, users_ += 1;
            }
        }
        if (fd >= 0)
            leave_connection(fd, send_some(fd));
        else if (!moved)
            sleep(heard);
    }
}

// Send, and then rest briefly if items come in fast but go out in small batches. Larger batches save system
// calls, each of which costs as much as a hundred items. Do not rest after a single item.
std::string Link::send_some(int fd) {
    const uint64_t before = out_.size(), items = std::exchange(queued_items_, 0);
    const std::string why = out_.send(fd, GATHER);
    bytes_out.fetch_add(before - out_.size(), std::memory_order_relaxed);
    if (items >= SOME && items < MANY && before < GATHER / 4) std::this_thread::sleep_for(REST);
    return why;
}

// --- filling the send buffer ---

void Link::add_frame(const Head& head, const std::string& payload) {
    out_.add(&head, head.length(), payload.data(), payload.size());
}

// Gather as many frames as one send can take. Each call begins with the stream after the last stream that the
// previous call served. Return whether there is more to do right away.
bool Link::fill() {
    if (is_full()) return true;
    const int64_t now = now_ns();
    // A ping that is almost due goes out together with a pong, which saves one wake-up on each side.
    const int64_t pause = pong_ ? PING_NS * 3 / 4 : PING_NS;
    if (std::exchange(pong_, false)) add_frame({.n = pong_n_, .type = FrameType::PONG});
    if (now - pinged_at_ >= pause) {
        pinged_at_ = now;
        add_frame({.n = uint64_t(now), .type = FrameType::PING});
    }
    if (owner_side_) report_moves();
    bool moved = false;
    auto from = streams_.upper_bound(last_served_);
    for (size_t n = 0; n < streams_.size() && !is_full(); ++n, ++from) {
        if (from == streams_.end()) from = streams_.begin();
        last_served_ = from->first;
        moved = (owner_side_ ? serve_as_owner(*from->second) : serve_as_worker(*from->second)) || moved;
    }
    return moved || is_full();
}

bool Link::serve_as_owner(LinkStream& stream) {
    bool moved = false;
    for (uint16_t port = 0; port < stream.sinks.size(); ++port) {
        Sink& sink = stream.sinks[port];
        sink.check_ended();
        moved = free_unread(stream, sink) || moved;
        if (std::exchange(sink.dirty, false) || sink.remakes_sent != has_urgent(stream))
            report_output(stream, sink, port);
    }
    for (uint16_t port = 0; port < stream.sources.size(); ++port) {
        Source& source = stream.sources[port];
        if (!source.known || source.left) continue;
        if (source.has_more() && references().is_any_lost()) source.look_for_replay();
        if (source.has_more() || source.ring->seen_state() != OPEN)
            moved = source.take(allowed(source)) || moved;
        source.update_demand(allowed(source));
        report_if_refused(stream, source, port);
        if (source.should_recall(round_trip())) source.recalling = true;
        if (source.recalling && !std::exchange(source.recall_sent, true))
            add_frame({.stream = stream.number, .port = port, .type = FrameType::RECALL});
        moved = add_items(stream, source, port) || moved;
        moved = add_end(stream, source, port) || moved;
    }
    return moved;
}

// Report the state of an output port.
void Link::report_output(LinkStream& stream, Sink& sink, uint16_t port) {
    Head head{
        .stream = stream.number, .port = port, .type = FrameType::OUTPUT, .a = sink.got, .b = sink.freed()};
    std::string cause;
    sink.remakes_sent = has_urgent(stream);
    if (sink.remakes_sent) head.flags = REMAKES;
    if (sink.limited && !sink.over) {
        RingLock holding(*sink.ring);
        head.n = sink.limit_sent = sink.limit(prefetched(stream));
    }
    if (sink.over) {
        RingLock holding(*sink.ring);
        const bool broken = sink.ring->header().state == BROKEN;
        head.flags |= broken ? BREAK | NO_MORE : sink.lent.empty() ? NO_MORE : 0;
        if (broken) cause = sink.ring->cause();
    }
    head.size = cause.size();
    report_part(stream, sink, port);
    add_frame(head, cause);
}

// Send items until one send has enough bytes. Return whether any item was sent.
bool Link::add_items(LinkStream& stream, Source& source, uint16_t port) {
    const uint64_t before = source.sent;
    while (source.has_unsent() && !is_full()) {
        if (source.unsent().kind != REFERENCE)
            add_item(stream, source, port);
        else if (!add_reference(stream, source, port))
            break;
    }
    return source.sent != before;
}

bool Link::serve_as_worker(LinkStream& stream) {
    for (Sink& sink : stream.sinks) sink.read_progress();
    if (!std::exchange(stream.announced, true)) {
        add_frame({.stream = stream.number, .type = FrameType::OPEN});
        // The owner side must know that an item has arrived before it gets the item's outputs.
        add_progress(stream);
    }
    bool moved = false;
    for (Source& source : stream.sources) {
        if (!source.known || source.left) continue;
        if (source.has_more() || source.ring->seen_state() != OPEN)
            moved = source.take(allowed(source)) || moved;
    }
    for (uint16_t port = 0; port < stream.sources.size(); ++port)
        report_if_refused(stream, stream.sources[port], port);
    moved = add_outputs(stream) || moved;
    add_progress(stream);
    report_unreachable_items(stream);
    for (uint16_t port = 0; port < stream.sources.size(); ++port) {
        add_pulled(stream, stream.sources[port], port);
        report_want(stream, stream.sources[port], port);
    }
    // A worker ends its outputs only after it has ended its inputs and finished its leased items. The owner
    // side must learn about the inputs first.
    for (uint16_t port = 0; port < stream.sources.size(); ++port) {
        Source& source = stream.sources[port];
        if (source.ending == Ending::Open || source.end_sent) continue;
        for (Sink& sink : stream.sinks) sink.read_progress();
        add_progress(stream);
        moved = add_end(stream, source, port) || moved;
    }
    return moved;
}

// Send the worker's outputs through all of its ports, in the order of their input items. When the owner side
// gets an output for item n, it therefore has all outputs for earlier items. This includes outputs still in a
// ring, because a worker puts all outputs for one item before any output for the next.
bool Link::add_outputs(LinkStream& stream) {
    bool any = false;
    while (!is_full()) {
        size_t next = stream.sources.size();
        uint64_t first = Slot::KEYLESS, number = 0;
        for (size_t port = 0; port < stream.sources.size(); ++port) {
            Source& source = stream.sources[port];
            if (source.left || (number = source.first_key()) > first || number == Slot::KEYLESS) continue;
            first = number;
            next = port;
        }
        if (next == stream.sources.size() || !stream.sources[next].has_unsent()) break;
        add_item(stream, stream.sources[next], uint16_t(next));
        any = true;
    }
    return any;
}

void Link::report_want(LinkStream& stream, Source& source, uint16_t port) {
    if (!source.ring->is_limited() || !source.known || source.left) return;
    bool wants;
    {
        RingLock holding(*source.ring);
        wants = source.ring->wants_more();
    }
    if (wants == std::exchange(source.want_sent, wants)) return;
    add_frame({.n = wants, .stream = stream.number, .port = port, .type = FrameType::WANT});
}

// Send the worker's progress. An item counts as finished only once its outputs have been sent.
void Link::add_progress(LinkStream& stream) {
    uint64_t first = Slot::KEYLESS;
    for (Source& source : stream.sources)
        if (!source.left) first = std::min(first, source.first_key());
    for (uint16_t port = 0; port < stream.sinks.size(); ++port) {
        Sink& sink = stream.sinks[port];
        Sink::Progress now = sink.seen;
        now.done = std::min(now.done, first);
        // Send NO_MORE only after all outputs of the worker.
        if (first != Slot::KEYLESS) now.flags &= uint8_t(~NO_MORE);
        if (now == sink.last_sent && !sink.dirty) continue;
        sink.last_sent = now;
        sink.dirty = false;
        sink.mark_progress_sent();
        Head head{.n = now.started, .stream = stream.number, .port = port, .type = FrameType::INPUT};
        head.flags = uint8_t(now.flags | (std::exchange(sink.recalled, false) ? RECALLED : 0));
        head.a = sink.got;
        head.b = now.done;
        std::string cause;
        if (now.flags & BREAK) {
            RingLock holding(*sink.ring);
            cause = sink.ring->cause();
        }
        head.size = cause.size();
        report_part(stream, sink, port);
        add_frame(head, cause);
    }
}

// Report how many bytes of an item an earlier connection has delivered, so that the other side sends only the
// rest.
void Link::report_part(const LinkStream& stream, Sink& sink, uint16_t port) {
    if (std::exchange(sink.part_reported, true) || sink.part.empty()) return;
    add_frame({.n = sink.got,
               .stream = stream.number,
               .port = port,
               .type = FrameType::PART,
               .a = sink.part.size()});
}

void Link::add_item(LinkStream& stream, Source& source, uint16_t port) {
    const Source::Entry& entry = source.unsent();
    const bool in_part = source.part.size && source.part.item == source.sent;
    const bool may_stay = source.lends && entry.key != Slot::KEYLESS && entry.route != Frame::ROUTE_UNKNOWN;
    if (may_stay && entry.size >= LARGE && !in_part) {
        const Kept kept{entry.size, entry.kind, entry.route};
        Head head{.size = sizeof kept, .n = entry.key, .stream = stream.number, .port = port};
        head.type = FrameType::OUT;
        head.flags = uint8_t(REFERENCE);
        out_.add(&head, Head::SHORT, &kept, sizeof kept);
        queued_items_ += 1;
        source.sent += 1;
        return;
    }
    const uint64_t skipped = source.part.item == source.sent ? source.part.size : 0;
    const char* at = entry.at + skipped;
    Head head{.size = entry.size - skipped,
              .n = owner_side_ ? source.sent : entry.key,
              .stream = stream.number,
              .port = port};
    head.type = owner_side_ ? FrameType::ITEM : FrameType::OUT;
    head.flags = uint8_t(entry.kind | entry.deaths << 3);
    const bool copied = head.size < IN_PLACE;
    out_.add(&head, Head::SHORT, at, copied ? head.size : 0);
    if (!copied) out_.add_in_place(source.ring, at, head.size);
    queued_items_ += 1;
    source.sent += 1;
}

bool Link::add_end(LinkStream& stream, Source& source, uint16_t port) {
    if (source.ending == Ending::Open || source.end_sent || !source.known) return false;
    const bool broke = source.ending == Ending::Broke;
    if (!broke && source.has_unsent()) return false;
    source.end_sent = true;
    Head head{.stream = stream.number, .port = port, .type = FrameType::END};
    head.size = broke ? source.cause.size() : 0;
    head.flags = uint8_t((broke ? BREAK : 0) | (owner_side_ ? 0 : IS_OUTPUT));
    add_frame(head, broke ? source.cause : std::string());
    return true;
}

// Report an item that cannot go to another host, because it has descriptors. It stays in the ring until the
// channel is broken.
void Link::report_if_refused(const LinkStream& stream, Source& source, uint16_t port) {
    if (!source.refused || std::exchange(source.refused_reported, true)) return;
    report({.kind = LinkEvent::Kind::Refused, .stream = stream.number, .port = port});
}

// --- the send buffer ---

void Outgoing::add(const void* head, uint64_t length, const void* at, uint64_t size) {
    if (pieces_.empty() || pieces_.back().ring) pieces_.push_back({nullptr, nullptr, copied_.size(), 0});
    const char *first = static_cast<const char*>(head), *second = static_cast<const char*>(at);
    copied_.insert(copied_.end(), first, first + length);
    copied_.insert(copied_.end(), second, second + size);
    pieces_.back().size += length + size;
    size_ += length + size;
}

void Outgoing::add_in_place(std::shared_ptr<Ring> ring, const char* at, uint64_t size) {
    pieces_.push_back({std::move(ring), at, 0, size});
    size_ += size;
}

std::string Outgoing::send(int fd, uint64_t most) {
    for (most = std::min(most, size_); most;) {
        iovec pieces[MOST_PIECES];
        uint64_t count = 0, all = 0;
        for (const Piece& piece : pieces_) {
            const char* at = piece.ring ? piece.at : copied_.data() + piece.begin;
            const uint64_t size = std::min(piece.size, most - all);
            if (count == MOST_PIECES || !size) break;
            pieces[count++] = {const_cast<char*>(at), size};
            all += size;
        }
        msghdr message{};
        message.msg_iov = pieces;
        message.msg_iovlen = count;
        const ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return std::string("sending failed: ") + strerror(errno);
        most -= uint64_t(n);
        size_ -= uint64_t(n);
        for (uint64_t left = uint64_t(n); left;) {
            Piece& first = pieces_.front();
            const uint64_t part = std::min(left, first.size);
            first.at += first.ring ? part : 0;
            first.begin += part;
            first.size -= part;
            left -= part;
            if (!first.size) pieces_.pop_front();
        }
        forget_sent();
    }
    return "";
}

// Remove sent bytes only when they fill half of the buffer, so that each byte moves at most once. Waiting
// until the buffer is empty could take forever, because more data can arrive before it drains.
void Outgoing::forget_sent() {
    const auto first = std::ranges::find_if(pieces_, [](const Piece& piece) { return !piece.ring; });
    const uint64_t sent = first == pieces_.end() ? copied_.size() : first->begin;
    if (2 * sent < copied_.size()) return;
    copied_.erase(copied_.begin(), copied_.begin() + ptrdiff_t(sent));
    for (Piece& piece : pieces_)
        if (!piece.ring) piece.begin -= sent;
}

// --- sleeping ---

// Sleep until there may be work. This thread has entered the wait queues of rings, so it wakes when one of
// these rings changes or the doorbell rings.
void Link::sleep(uint32_t heard) {
    // `own` gets the words that this thread sleeps on, and `others` those of the extra sleepers. Each port of
    // a stream has one word reserved, even while it is not watched. A busy stream therefore changes the words
    // of only one sleeper, and does not shift the words of the other sleepers.
    Watched own;
    std::vector<Watched> others;
    size_t ports = 0;
    own.add({heard, reinterpret_cast<uint64_t>(&doorbell_), FUTEX_WORD_32 | FUTEX_PRIVATE_FLAG, 0}, {});
    int64_t until = now_ns() + SLICE_NS;
    {
        std::lock_guard lock(mutex_);
        if (closed_) return;
        // A driver may have hundreds of idle links. The slices only make up for wake-ups that were lost when
        // a process was killed. If all rings of a link are used only by this process, the link sleeps until
        // its next ping.
        const bool connected = fd_ >= 0 && !lost_;
        if (ready_items_) until = (connected ? pinged_at_ : now_ns()) + PING_NS;
        for (auto& [number, stream] : streams_) {
            const size_t more = stream->sources.size() + stream->sinks.size();
            if ((ports += more) >= words_at_once()) ports = more, others.emplace_back();
            if (!collect(*stream, others.empty() ? own : others.back(), until)) return;
            if (owner_side_ && std::ranges::any_of(stream->sources, &Source::may_recall))
                until = std::min(until, now_ns() + RECALL_NS);
        }
        if (!extra_sleepers_.watch(std::move(others))) until = std::min(until, now_ns() + CROWDED_NS);
    }
    asleep_.store(true, std::memory_order_seq_cst);
    if (doorbell_.load(std::memory_order_seq_cst) == heard) sleep_on_any(own.words, until);
    asleep_.store(false, std::memory_order_relaxed);
}

// Add the words of a stream to the watched ones. Return false if there is already work to do.
bool Link::collect(LinkStream& stream, Watched& all, int64_t& until) {
    const int64_t slice = now_ns() + SLICE_NS;
    const bool connected = fd_ >= 0 && !lost_;
    auto watch = [&](KeptPlace& queue_place, const std::shared_ptr<Ring>& ring) {
        all.add(queue_place.waited(), ring);
        if (!ring->is_used_here_only()) until = std::min(until, slice);
    };
    for (Source& source : stream.sources) {
        if (connected && source.known && source.wants(allowed(source), source.has_references)) {
            if (!source.enter_queue(allowed(source))) return false;
            until = std::min(until, source.leaves_until());
            watch(source.queue_place, source.ring);
        } else if (source.queue_place.entered()) {
            RingLock holding(*source.ring);
            source.queue_place.leave();
        }
    }
    bool again = false;
    for (Sink& sink : stream.sinks) {
        if (sink.check_ended()) return false;
        if (sink.waits_to_put(stream.settling)) {
            again = !sink.queue_place.entered() || again;
            sink.enter_queue();
            watch(sink.queue_place, sink.ring);
        } else if (sink.unwatched_until > now_ns()) {
            until = std::min(until, sink.unwatched_until);
        } else if (connected && !owner_side_ && !(sink.seen.flags & NO_MORE)) {
            if (!sink.enter_queue_for_worker()) return false;
            watch(sink.queue_place, sink.ring);
        } else if (sink.queue_place.entered()) {
            RingLock holding(*sink.ring);
            sink.queue_place.leave();
        }
    }
    // Try once more after entering the wait queues. From now on, each change wakes this thread.
    return !again || !move_staged(stream);
}

}  // namespace flowchan
