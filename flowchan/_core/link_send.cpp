// The sending thread of a link: takes items, sends states, and moves staged items. When it has no work, it
// sleeps in the wait queues of all rings that it waits for.
#include "link.hpp"

#include <sys/socket.h>
#include <algorithm>

namespace flowchan {

namespace {

constexpr int64_t PING_NS = 500'000'000;
// how often to check whether others wait for items that a worker has not started
constexpr int64_t RECALL_NS = 10'000'000;
constexpr uint64_t SOME = 8, MANY = 256;  // items of a run
constexpr std::chrono::microseconds REST{20};
constexpr size_t MOST_PIECES = 64;
constexpr uint64_t IN_PLACE = 16 << 10;    // larger items are sent in place
constexpr int64_t CROWDED_NS = 2'000'000;  // how often to check the words that no thread can sleep on

}  // namespace

void Link::send_loop() {
    for (;;) {
        const uint32_t heard = bell_.load(std::memory_order_seq_cst);
        int fd = -1;
        bool moved = false;
        {
            std::lock_guard lock(mutex_);
            if (closed_) return;
            for (auto& [number, line] : lines_) moved = move_staged(*line) || moved;
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

// While items come fast but are sent in small runs, a short rest makes the runs longer. A system call costs
// as much as a hundred items. A single item never waits.
std::string Link::send_some(int fd) {
    const uint64_t before = out_.size(), items = std::exchange(said_, 0);
    const std::string why = out_.send(fd, GATHER);
    bytes_out.fetch_add(before - out_.size(), std::memory_order_relaxed);
    if (items >= SOME && items < MANY && before < GATHER / 4) std::this_thread::sleep_for(REST);
    return why;
}

// --- what is to be sent ---

void Link::say(const Head& head, const std::string& payload) {
    out_.add(&head, head.length(), payload.data(), payload.size());
}

// Gather frames, as many as are sent at a time, beginning each round with another stream. Return whether
// there is more to do at once.
bool Link::fill() {
    if (is_full()) return true;
    const int64_t now = now_ns();
    if (std::exchange(pong_, false)) say({.n = pong_n_, .say = Say::PONG});
    if (now - pinged_at_ >= PING_NS) {
        pinged_at_ = now;
        say({.n = uint64_t(now), .say = Say::PING});
    }
    bool moved = false;
    auto from = lines_.upper_bound(served_last_);
    for (size_t n = 0; n < lines_.size() && !is_full(); ++n, ++from) {
        if (from == lines_.end()) from = lines_.begin();
        served_last_ = from->first;
        moved = (home_ ? serve_home(*from->second) : serve_away(*from->second)) || moved;
    }
    return moved || is_full();
}

bool Link::serve_home(LinkLine& line) {
    bool moved = false;
    for (uint16_t port = 0; port < line.sinks.size(); ++port) {
        Sink& sink = line.sinks[port];
        sink.look();
        if (!std::exchange(sink.dirty, false)) continue;
        Head head{.line = line.number, .port = port, .say = Say::OUTPUT, .a = sink.got, .b = sink.used};
        std::string cause;
        if (sink.over) {
            Holding holding(*sink.ring);
            const bool broken = sink.ring->header().state == BROKEN;
            head.flags = broken ? BREAK | NO_MORE : NO_MORE;
            if (broken) cause = sink.ring->cause();
        }
        head.size = cause.size();
        say(head, cause);
    }
    for (uint16_t port = 0; port < line.sources.size(); ++port) {
        Source& source = line.sources[port];
        if (!source.known || source.left) continue;
        if (source.has_more() || source.ring->seen_state() != OPEN)
            moved = source.take(allowed(source)) || moved;
        tell_if_refused(line, source, port);
        if (source.should_recall(round_trip())) source.recalling = true;
        if (source.recalling && !std::exchange(source.recall_said, true))
            say({.line = line.number, .port = port, .say = Say::RECALL});
        for (; source.has_unsent() && !is_full(); moved = true) say_item(line, source, port);
        moved = say_end(line, source, port) || moved;
    }
    return moved;
}

bool Link::serve_away(LinkLine& line) {
    for (Sink& sink : line.sinks) sink.look_at_worker();
    if (!std::exchange(line.announced, true)) {
        say({.line = line.number, .say = Say::OPEN});
        say_progress(line);  // the owner side must know which items have come before it gets their outputs
    }
    bool moved = false;
    for (Source& source : line.sources) {
        if (!source.known || source.left) continue;
        if (source.has_more() || source.ring->seen_state() != OPEN)
            moved = source.take(allowed(source)) || moved;
    }
    for (uint16_t port = 0; port < line.sources.size(); ++port)
        tell_if_refused(line, line.sources[port], port);
    moved = say_outputs(line) || moved;
    say_progress(line);
    // A worker that ends its outputs has ended its inputs before and finished its leased items: the owner
    // side must know that first.
    for (uint16_t port = 0; port < line.sources.size(); ++port) {
        Source& source = line.sources[port];
        if (source.ending == Ending::Open || source.told) continue;
        for (Sink& sink : line.sinks) sink.look_at_worker();
        say_progress(line);
        moved = say_end(line, source, port) || moved;
    }
    return moved;
}

// Send the worker's outputs, over all its ports in the order of their items. So with an output for item n the
// owner side knows that all outputs for earlier items have come. An output that is still in a ring counts
// too: a worker puts all outputs for an item before any output for a later one.
bool Link::say_outputs(LinkLine& line) {
    bool any = false;
    while (!is_full()) {
        size_t next = line.sources.size();
        uint64_t first = Slot::KEYLESS, number = 0;
        for (size_t port = 0; port < line.sources.size(); ++port) {
            Source& source = line.sources[port];
            if (source.left || (number = source.first_key()) > first || number == Slot::KEYLESS) continue;
            first = number;
            next = port;
        }
        if (next == line.sources.size() || !line.sources[next].has_unsent()) break;
        say_item(line, line.sources[next], uint16_t(next));
        any = true;
    }
    return any;
}

// Send the worker's progress. An item counts as finished only after its outputs have been sent.
void Link::say_progress(LinkLine& line) {
    uint64_t first = Slot::KEYLESS;
    for (Source& source : line.sources)
        if (!source.left) first = std::min(first, source.first_key());
    for (uint16_t port = 0; port < line.sinks.size(); ++port) {
        Sink& sink = line.sinks[port];
        Sink::Progress now = sink.seen;
        now.done = std::min(now.done, first);
        if (first != Slot::KEYLESS) now.flags &= uint8_t(~NO_MORE);  // all its outputs come first
        if (now == sink.told && !sink.dirty) continue;
        sink.told = now;
        sink.dirty = false;
        sink.has_told();
        Head head{.n = now.in_hand, .line = line.number, .port = port, .say = Say::INPUT};
        head.flags = uint8_t(now.flags | (std::exchange(sink.recalled, false) ? RECALLED : 0));
        head.a = sink.got;
        head.b = now.done;
        std::string cause;
        if (now.flags & BREAK) {
            Holding holding(*sink.ring);
            cause = sink.ring->cause();
        }
        head.size = cause.size();
        say(head, cause);
    }
}

void Link::say_item(LinkLine& line, Source& source, uint16_t port) {
    const Source::Entry& entry = source.unsent();
    Head head{.size = entry.size, .n = home_ ? source.sent : entry.key, .line = line.number, .port = port};
    head.say = home_ ? Say::ITEM : Say::OUT;
    head.flags = uint8_t(entry.kind | entry.deaths << 3);
    const bool copied = entry.size < IN_PLACE;
    out_.add(&head, Head::SHORT, entry.at, copied ? entry.size : 0);
    if (!copied) out_.add_in_place(source.ring, entry.at, entry.size);
    said_ += 1;
    source.sent += 1;
}

bool Link::say_end(LinkLine& line, Source& source, uint16_t port) {
    if (source.ending == Ending::Open || source.told || !source.known) return false;
    const bool broke = source.ending == Ending::Broke;
    if (!broke && source.has_unsent()) return false;
    source.told = true;
    Head head{.line = line.number, .port = port, .say = Say::END};
    head.size = broke ? source.cause.size() : 0;
    head.flags = uint8_t((broke ? BREAK : 0) | (home_ ? 0 : IS_OUTPUT));
    say(head, broke ? source.cause : std::string());
    return true;
}

// --- what is on its way out ---

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

// Sent bytes are removed half of the buffer at a time, because there may always be more to send. So each byte
// moves at most once.
void Outgoing::forget_sent() {
    const auto first = std::ranges::find_if(pieces_, [](const Piece& piece) { return !piece.ring; });
    const uint64_t sent = first == pieces_.end() ? copied_.size() : first->begin;
    if (2 * sent < copied_.size()) return;
    copied_.erase(copied_.begin(), copied_.begin() + ptrdiff_t(sent));
    for (Piece& piece : pieces_)
        if (!piece.ring) piece.begin -= sent;
}

// --- what waits for room ---

// Put staged items as far as there is room. Return whether anything moved.
bool Link::move_staged(LinkLine& line) {
    bool moved = home_ && settle(line);
    for (Sink& sink : line.sinks) {
        if (sink.over) continue;
        while (!sink.staged.empty()) {
            const Sink::Staged& first = sink.staged.front();
            if (sink.gate.changed()) {
                Holding holding(*sink.ring);
                sink.gate.leave();
            }
            if (!is_settled(line, sink, first.key)) break;
            Holding holding(*sink.ring);
            const Received item{first.key, first.kind, first.deaths, first.payload.size(),
                                first.payload.data()};
            const Step step = sink.put(item, number_for(line, sink, first.key), holding.wakes);
            if (step != Step::Done) break;  // `look` finds rings that have ended
            sink.gate.leave();
            sink.unstage();
            sink.used += 1;
            sink.dirty = moved = true;
        }
        if (sink.look()) moved = true;
        if (!sink.over && sink.coming != Ending::Open && sink.staged.empty()) {
            const Source* numbers = numbering(line, sink);
            if (numbers && sink.settled < numbers->done && sink.coming == Ending::Drained) continue;
            sink.end(sink.coming, sink.coming_cause);
            moved = true;
        }
    }
    moved = (home_ && settle(line)) || moved;
    tell_if_finished(line);
    return moved;
}

// Report an item with descriptors, which cannot go to another host. It stays in the ring until a caller
// breaks the channel.
void Link::tell_if_refused(const LinkLine& line, Source& source, uint16_t port) {
    if (!source.refused || std::exchange(source.refused_told, true)) return;
    tell({.kind = LinkEvent::Kind::Refused, .line = line.number, .port = port});
}

// Owner side: report that the worker sends nothing more, and that everything is put.
void Link::tell_if_finished(LinkLine& line) {
    const auto has_left = [](const Source& source) { return source.left; };
    const auto is_over = [](const Sink& sink) { return sink.over; };
    if (!home_ || line.finished || !std::ranges::all_of(line.sources, has_left) ||
        !std::ranges::all_of(line.sinks, is_over))
        return;
    line.finished = true;
    tell({.kind = LinkEvent::Kind::Finished, .line = line.number});
}

// Owner side: mark the items that the worker has finished as having no more outputs, where turns depend on
// that. Then end their leases. Return whether anything moved.
bool Link::settle(LinkLine& line) {
    bool moved = false;
    line.settling = false;
    for (Source& source : line.sources) {
        uint64_t upto = source.done;
        for (Sink& sink : line.sinks) {
            if (numbering(line, sink) != &source) {
                // A worker with several inputs does not say which item an output belongs to.
                if (line.sources.size() > 1 && !sink.staged.empty()) upto = source.base;
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
                Holding holding(*sink.ring);
                if (sink.gate.changed()) sink.gate.leave();
                if (!settle_sink(line, sink, most, holding.wakes)) line.settling = true;
            }
            upto = std::min(upto, sink.settled);
        }
        if (upto > source.base) {
            source.free_oldest(upto - source.base);
            moved = true;
        }
        if (source.leaving && !source.left && source.base >= source.done) {
            source.leave();
            moved = true;
        }
    }
    return moved;
}

// The caller holds the lock of the sink's ring.
bool Link::settle_sink(LinkLine& line, Sink& sink, uint64_t upto, Wakes& wakes) {
    Source& source = line.sources[0];
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

// Sleep until there may be work: a ring has changed in whose wait queue this thread is, or the doorbell was
// rung.
void Link::sleep(uint32_t heard) {
    // The words that this thread sleeps on, then those of the extra sleepers. A stream counts one word for
    // each port, watched or not. So a busy stream changes the words of one sleeper and does not shift those
    // of the others.
    Watched own;
    std::vector<Watched> others;
    size_t ports = 0;
    own.add({heard, reinterpret_cast<uint64_t>(&bell_), FUTEX_WORD_32 | FUTEX_PRIVATE_FLAG, 0}, {});
    int64_t until = now_ns() + SLICE_NS;
    {
        std::lock_guard lock(mutex_);
        if (closed_) return;
        for (auto& [number, line] : lines_) {
            const size_t more = line->sources.size() + line->sinks.size();
            if ((ports += more) >= words_at_once()) ports = more, others.emplace_back();
            if (!collect(*line, others.empty() ? own : others.back(), until)) return;
            if (home_ && std::ranges::any_of(line->sources, &Source::may_recall))
                until = std::min(until, now_ns() + RECALL_NS);
        }
        if (!lookouts_.watch(std::move(others))) until = std::min(until, now_ns() + CROWDED_NS);
    }
    asleep_.store(true, std::memory_order_seq_cst);
    if (bell_.load(std::memory_order_seq_cst) == heard) sleep_on_any(own.words, until);
    asleep_.store(false, std::memory_order_relaxed);
}

// Add the words of a stream to watch. Return false if there is work to do.
bool Link::collect(LinkLine& line, Watched& all, int64_t& until) {
    const bool connected = fd_ >= 0 && !lost_;
    auto watch = [&](Stand& gate, const std::shared_ptr<Ring>& ring) { all.add(gate.waited(), ring); };
    for (Source& source : line.sources) {
        if (connected && source.known && source.wants(allowed(source))) {
            if (!source.stand()) return false;
            watch(source.gate, source.ring);
        } else if (source.gate.entered()) {
            Holding holding(*source.ring);
            source.gate.leave();
        }
    }
    bool again = false;
    for (Sink& sink : line.sinks) {
        if (sink.look()) return false;
        if ((!sink.staged.empty() || line.settling) && !sink.over) {
            again = !sink.gate.entered() || again;
            sink.stand();
            watch(sink.gate, sink.ring);
        } else if (sink.alone_until > now_ns()) {
            until = std::min(until, sink.alone_until);
        } else if (!home_ && !(sink.seen.flags & NO_MORE)) {
            if (!sink.stand_for_worker()) return false;
            watch(sink.gate, sink.ring);
        } else if (sink.gate.entered()) {
            Holding holding(*sink.ring);
            sink.gate.leave();
        }
    }
    // After entering a wait queue, try once more: later changes wake this thread.
    return !again || !move_staged(line);
}

}  // namespace flowchan
