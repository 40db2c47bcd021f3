// The sending thread of a link. It takes items, sends states, and moves staged items. When it has no work, it
// sleeps in the wait queues of all rings from which it expects work.
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
constexpr uint64_t IN_PLACE = 16 << 10;    // larger items are not copied before sending
constexpr int64_t CROWDED_NS = 2'000'000;  // how often to check words that no thread sleeps on

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

// If items arrive fast but are sent in small batches, rest briefly, so that the batches become larger. A
// system call costs as much as a hundred items. A single item is sent without a rest.
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

// Gather as many frames as one send takes. Each round begins with the next stream. Return whether there is
// more to do at once.
bool Link::fill() {
    if (is_full()) return true;
    const int64_t now = now_ns();
    if (std::exchange(pong_, false)) add_frame({.n = pong_n_, .type = FrameType::PONG});
    if (now - pinged_at_ >= PING_NS) {
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
        if (std::exchange(sink.dirty, false) || sink.remakes_sent != has_replays(stream))
            report_output(stream, sink, port);
    }
    for (uint16_t port = 0; port < stream.sources.size(); ++port) {
        Source& source = stream.sources[port];
        if (!source.known || source.left) continue;
        if (source.has_more() && references().is_any_lost()) source.look_for_replay();
        if (source.has_more() || source.ring->seen_state() != OPEN)
            moved = source.take(allowed(source)) || moved;
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
    sink.remakes_sent = has_replays(stream);
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

// Send items until there are enough bytes for one send. Return whether any was sent.
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
        // The owner side must know which items have arrived before it gets their outputs.
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
    // A worker that ends its outputs has already ended its inputs and finished its leased items. The owner
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

// Send the worker's outputs through all of its ports, in the order of their input items. So when the owner
// side gets an output for item n, all outputs for earlier items have arrived there. This includes outputs
// that are still in a ring, because a worker puts all outputs for one item before any output for the next.
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

// Send the worker's progress. An item counts as finished only when its outputs have been sent.
void Link::add_progress(LinkStream& stream) {
    uint64_t first = Slot::KEYLESS;
    for (Source& source : stream.sources)
        if (!source.left) first = std::min(first, source.first_key());
    for (uint16_t port = 0; port < stream.sinks.size(); ++port) {
        Sink& sink = stream.sinks[port];
        Sink::Progress now = sink.seen;
        now.done = std::min(now.done, first);
        // All of the worker's outputs must be sent first.
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

// Report how many bytes of an item arrived over an earlier connection, so that the other side sends only the
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
    if (source.lends && entry.size >= LARGE && entry.key != Slot::KEYLESS && !in_part) {
        const Kept kept{entry.size, entry.kind};
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

// Remove sent bytes only when they fill half of the buffer, so that each byte moves at most once. The buffer
// might never become empty, because more data can keep arriving before it drains.
void Outgoing::forget_sent() {
    const auto first = std::ranges::find_if(pieces_, [](const Piece& piece) { return !piece.ring; });
    const uint64_t sent = first == pieces_.end() ? copied_.size() : first->begin;
    if (2 * sent < copied_.size()) return;
    copied_.erase(copied_.begin(), copied_.begin() + ptrdiff_t(sent));
    for (Piece& piece : pieces_)
        if (!piece.ring) piece.begin -= sent;
}

// --- staged items ---

// Put staged items as long as there is room. Return whether anything moved.
bool Link::move_staged(LinkStream& stream) {
    bool moved = owner_side_ && settle(stream);
    for (Sink& sink : stream.sinks) {
        if (sink.over) continue;
        if (sink.waits_for_room() && sink.has_room(prefetched(stream))) sink.dirty = moved = true;
        while (!sink.staged.empty()) {
            const Sink::Staged& first = sink.staged.front();
            if (sink.queue_place.changed()) {
                RingLock holding(*sink.ring);
                sink.queue_place.leave();
            }
            if (!can_put(stream, sink, first)) break;
            RingLock holding(*sink.ring);
            const Received item{first.key, first.kind, first.deaths, first.payload.size(),
                                first.payload.data()};
            const Step step = put(stream, sink, item, first.output, holding.wakes);
            if (step != Step::Done) break;  // `check_ended` finds rings that have ended
            sink.queue_place.leave();
            sink.unstage();
            sink.dirty = moved = true;
        }
        if (sink.check_ended()) moved = true;
        if (!sink.over && sink.pending_end != Ending::Open && sink.staged.empty()) {
            const Source* numbers = numbering(stream, sink);
            if (numbers && sink.settled < numbers->done && sink.pending_end == Ending::Drained) continue;
            sink.end(sink.pending_end, sink.pending_cause);
            moved = true;
        }
    }
    moved = (owner_side_ && settle(stream)) || moved;
    report_if_finished(stream);
    return moved;
}

// Report an item with descriptors, because it cannot go to another host. It stays in the ring until the
// channel is broken.
void Link::report_if_refused(const LinkStream& stream, Source& source, uint16_t port) {
    if (!source.refused || std::exchange(source.refused_reported, true)) return;
    report({.kind = LinkEvent::Kind::Refused, .stream = stream.number, .port = port});
}

// Owner side: report that the worker will send nothing more, and that everything that it sent has been put.
void Link::report_if_finished(LinkStream& stream) {
    const auto has_left = [](const Source& source) { return source.left; };
    const auto is_over = [](const Sink& sink) { return sink.over; };
    if (!owner_side_ || stream.finished || !std::ranges::all_of(stream.sources, has_left) ||
        !std::ranges::all_of(stream.sinks, is_over))
        return;
    stream.finished = true;
    report({.kind = LinkEvent::Kind::Finished, .stream = stream.number});
}

// Owner side: settle the items that the worker has finished. If turns depend on it, first record that there
// are no more outputs for these items. Then end their leases. Return whether anything moved.
bool Link::settle(LinkStream& stream) {
    bool moved = false;
    stream.settling = false;
    for (Source& source : stream.sources) {
        uint64_t upto = source.done;
        for (Sink& sink : stream.sinks) {
            if (numbering(stream, sink) != &source) {
                // If a worker has several inputs, its outputs do not say which item they are for.
                if (stream.sources.size() > 1 && !sink.staged.empty()) upto = source.base;
                continue;
            }
            uint64_t most = source.done;
            for (const Sink::Staged& staged : sink.staged)
                if (staged.key != Slot::KEYLESS) {
                    most = std::min(most, staged.key);
                    break;
                }
            if (sink.over) {
                sink.settled = std::max(sink.settled, most);
            } else if (sink.settled < most) {
                RingLock holding(*sink.ring);
                if (sink.queue_place.changed()) sink.queue_place.leave();
                if (!settle_sink(stream, sink, most, holding.wakes)) stream.settling = true;
            }
            upto = std::min(upto, sink.settled);
        }
        for (uint64_t n = std::max(source.settled, source.base); n < upto; ++n)
            report_if_not_remade(stream, source.entries[n - source.base]);
        source.settle(upto);
        moved = source.free_settled() || moved;
        if (source.leaving && !source.left && source.base >= source.done) {
            source.leave();
            moved = true;
        }
    }
    return moved;
}

// Call this while holding the lock of the sink's ring.
bool Link::settle_sink(LinkStream& stream, Sink& sink, uint64_t upto, Wakes& wakes) {
    Source& source = stream.sources[0];
    while (sink.settled < upto) {
        if (sink.settled >= source.base) {
            const uint64_t number = source.entries[sink.settled - source.base].number;
            if (sink.done_with(number, wakes) != Step::Done) return false;
        }
        sink.settled += 1;
    }
    return true;
}

// --- sleeping ---

// Sleep until there may be work: a ring whose wait queue this thread has entered has changed, or the doorbell
// has rung.
void Link::sleep(uint32_t heard) {
    // `own` gets the words that this thread sleeps on, and `others` those of the extra sleepers. Each port of
    // a stream reserves one word, even if it is not watched. So a busy stream changes the words of one
    // sleeper only, and does not shift the words of the others.
    Watched own;
    std::vector<Watched> others;
    size_t ports = 0;
    own.add({heard, reinterpret_cast<uint64_t>(&doorbell_), FUTEX_WORD_32 | FUTEX_PRIVATE_FLAG, 0}, {});
    int64_t until = now_ns() + SLICE_NS;
    {
        std::lock_guard lock(mutex_);
        if (closed_) return;
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

// Add the words of a stream to those to watch. Return false if there is work to do instead.
bool Link::collect(LinkStream& stream, Watched& all, int64_t& until) {
    const bool connected = fd_ >= 0 && !lost_;
    auto watch = [&](KeptPlace& queue_place, const std::shared_ptr<Ring>& ring) {
        all.add(queue_place.waited(), ring);
    };
    for (Source& source : stream.sources) {
        if (connected && source.known && source.wants(allowed(source))) {
            if (!source.enter_queue()) return false;
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
        } else if (!owner_side_ && !(sink.seen.flags & NO_MORE)) {
            if (!sink.enter_queue_for_worker()) return false;
            watch(sink.queue_place, sink.ring);
        } else if (sink.queue_place.entered()) {
            RingLock holding(*sink.ring);
            sink.queue_place.leave();
        }
    }
    // Try once more after entering the wait queues. From now on, every change wakes this thread.
    return !again || !move_staged(stream);
}

}  // namespace flowchan
