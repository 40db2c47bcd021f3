// Outputs that stay on the host where they were made, until the reader's host fetches them (references.hpp).
#include "link.hpp"

#include <sys/socket.h>
#include <sys/uio.h>
#include <algorithm>
#include <system_error>

namespace flowchan {

namespace {

constexpr uint64_t GONE = UINT64_MAX;  // the size to send if this host does not have the output

struct Request {
    uint64_t output;
    uint32_t stream;
    uint16_t port, unused;
};

// Send two pieces of memory. Return false if the connection has ended.
bool send_all(int fd, iovec first, iovec second) {
    iovec pieces[] = {first, second};
    size_t at = 0;
    while (at < 2) {
        msghdr message{};
        message.msg_iov = pieces + at;
        message.msg_iovlen = 2 - at;
        ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        for (; at < 2 && size_t(n) >= pieces[at].iov_len; ++at) n -= ssize_t(pieces[at].iov_len);
        if (at == 2) break;
        pieces[at].iov_base = static_cast<char*>(pieces[at].iov_base) + n;
        pieces[at].iov_len -= size_t(n);
    }
    return true;
}

// Receive `size` bytes. Return how many arrived before the connection ended.
uint64_t receive_all(int fd, void* to, uint64_t size) {
    uint64_t have = 0;
    while (have < size) {
        const ssize_t n = recv(fd, static_cast<char*>(to) + have, size - have, MSG_WAITALL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        have += uint64_t(n);
    }
    return have;
}

[[noreturn]] void ended() {
    throw std::system_error(ECONNRESET, std::generic_category(), "the other host closed the connection");
}

bool parse(const std::string& text, Location& location) {
    if (text.size() < sizeof location) return false;
    memcpy(&location, text.data(), sizeof location);
    return location.kind >= 1 && location.kind <= 4 && location.size <= MOST_ITEM;
}

}  // namespace

// --- the owner ---

// Put output number `output` of a port. On the owner side, a dead worker may already have put this output. If
// that copy was on the worker's host, this output replaces it.
Step Link::put(LinkStream& stream, Sink& sink, const Received& item, uint64_t output, Wakes& wakes) {
    const uint64_t number = number_for(stream, sink, item.key);
    const Step step = sink.put(item, number, wakes);
    if (step != Step::Done) return step;
    uint64_t id = 0;
    if (sink.skipped && owner_side_) {
        id = repair(sink, item, number, sink.index);
    } else if (item.kind == REFERENCE) {
        memcpy(&id, item.at, sizeof id);
        references().place(id, sink.ring.get(), number, sink.index);
    }
    if (id) numbering(stream, sink)->entries[item.key - numbering(stream, sink)->base].references += 1;
    sink.count_used(output, id, item.key);
    return step;
}

// Replace a lost output with this output. Return the reference that now refers to this output, or 0.
uint64_t Link::repair(const Sink& sink, const Received& item, uint64_t number, uint64_t index) {
    if (item.kind != REFERENCE) {
        references().repair(sink.ring.get(), number, index, item.kind, {item.at, item.size});
        return 0;
    }
    uint64_t id;
    memcpy(&id, item.at, sizeof id);
    return references().repair(sink.ring.get(), number, index, id);
}

bool Link::is_of_replay(LinkStream& stream, const Sink& sink, uint64_t key) {
    const Source* source = key == Slot::KEYLESS ? nullptr : numbering(stream, sink);
    return source && source->entries[key - source->base].is_replay;
}

// Handle an output of a replay. It is never put, so it needs no room and overtakes staged outputs.
void Link::replace_lost(LinkStream& stream, Sink& sink, const Received& item) {
    sink.begin_lending();
    Source::Entry& entry = numbering(stream, sink)->entries[item.key - numbering(stream, sink)->base];
    const uint64_t id = repair(sink, item, entry.number, entry.outputs++);
    if (id) entry.references += 1;
    sink.count_used(sink.got, id, item.key);
}

// Report a replay that has finished without remaking all lost outputs.
void Link::report_if_not_remade(const LinkStream& stream, const Source::Entry& entry) {
    if (!entry.is_replay) return;
    for (uint16_t port = 0; port < stream.sinks.size(); ++port)
        if (references().is_any_lost(stream.sinks[port].ring.get(), entry.number))
            report({.kind = LinkEvent::Kind::NotRemade, .stream = stream.number, .port = port});
}

// Add a reference to an output on the worker's host. Return its id, or 0 if the frame is invalid.
uint64_t Link::add_kept(const LinkStream& stream, const Sink& sink, const Received& item) {
    const bool has_source = sink.follows && stream.sources.size() == 1;
    Kept kept;
    if (item.size != sizeof kept || item.key == Slot::KEYLESS || !has_source) return 0;
    memcpy(&kept, item.at, sizeof kept);
    if (kept.kind < 1 || kept.kind > 4 || kept.size > MOST_ITEM) return 0;
    const auto port = std::ranges::find(stream.sinks, &sink, [](const Sink& one) { return &one; });
    const_cast<Sink&>(sink).begin_lending();
    return references().add(this, {stream.number, uint16_t(port - stream.sinks.begin()), sink.got}, item.key,
                            kept.size, kept.kind, kept.route);
}

// Handle a frame about an output that stays where it was made.
bool Link::handle_about_reference(LinkStream& stream, const Head& head, const char* payload) {
    switch (head.type) {
        case FrameType::UNREACHABLE:
            return handle_unreachable(stream.sources[head.port], head.n);
        case FrameType::PULL:
            stream.sources[head.port].pulls.push_back(head.n);
            return true;
        case FrameType::MOVED:
            return handle_moved(stream, stream.sinks[head.port], head, payload);
        default:
            references().pulled(this, {head.stream, head.port, head.n}, head.kind(), {payload, head.size});
            return true;
    }
}

bool Link::handle_unreachable(Source& source, uint64_t item) {
    if (source.left || item < source.base) return true;
    if (item - source.base >= source.entries.size()) return false;
    const Source::Entry& entry = source.entries[item - source.base];
    if (entry.kind == REFERENCE) references().pull(entry.reference());
    return true;
}

// If no reader is left for the outputs, free those on the worker's host.
bool Link::free_unread(LinkStream& stream, Sink& sink) {
    if (sink.lent.empty() || sink.has_readers()) return false;
    bool any = false;
    for (Sink::Lent& one : sink.lent) {
        const bool waits = one.reference == Sink::WAITING;
        if (!one.reference || (!waits && !references().is_inside(one.reference, sink.ring.get()))) continue;
        if (!waits) stream.sources[0].release(one.key);
        one.reference = 0;
        any = true;
    }
    sink.forget_reference(0);
    sink.dirty = sink.dirty || any;
    return any;
}

// Return the item to put. Return nothing if its output has not been fetched, or if the order of items and
// outputs does not allow it yet. An output that is already on this host is put without being moved first.
std::optional<Received> Link::to_put(LinkStream& stream, Sink& sink, Sink::Staged& item) {
    const Received staged{item.key, item.kind, item.deaths, item.payload.size(), item.payload.data()};
    if (owner_side_ || item.kind != REFERENCE)
        return is_settled(stream, sink, item.key) ? std::optional(staged) : std::nullopt;
    if (!is_here(item.payload)) return std::nullopt;
    Location location;
    memcpy(&location, item.payload.data(), sizeof location);
    const Source::Entry* entry = find_kept({location.stream, location.port, location.output});
    if (!entry) return item.unreachable = true, std::nullopt;
    return Received{item.key, entry->kind, item.deaths, entry->size, entry->at};
}

// Return whether the output at this location is on this host.
bool Link::is_here(const std::vector<char>& location) const {
    const std::string_view address(location.data() + sizeof(Location), location.size() - sizeof(Location));
    return !fetch_address_.empty() && address == fetch_address_;
}

// Return an output that a worker of this host has made, or null.
const Source::Entry* Link::find_kept(const OutputKey& output, std::shared_ptr<Ring>* ring) {
    LinkStream* stream = find(output.stream);
    if (!stream || output.port >= stream->sources.size()) return nullptr;
    Source& source = stream->sources[output.port];
    if (output.output < source.base || output.output - source.base >= source.entries.size()) return nullptr;
    if (ring) *ring = source.ring;
    return &source.entries[output.output - source.base];
}

// --- frames to send ---

// Owner side: send the next item, which is a reference. Return false if its output is lost at the moment.
bool Link::add_reference(const LinkStream& stream, Source& source, uint16_t port) {
    Source::Entry& entry = source.unsent();
    const auto seen = references().look(entry.reference());
    if (!seen || seen->state == References::Seen::State::Lost) return false;
    const bool here = seen->state == References::Seen::State::Here;
    // An earlier connection may have delivered the first bytes.
    const uint64_t size = seen->payload.size(), begun = source.part.size;
    const uint64_t skipped = here && source.part.item == source.sent && begun < size ? begun : 0;
    Head head{.size = size - skipped, .n = source.sent, .stream = stream.number, .port = port};
    head.type = FrameType::ITEM;
    head.flags = uint8_t((here ? seen->kind : uint64_t(REFERENCE)) | entry.deaths << 3);
    out_.add(&head, Head::SHORT, seen->payload.data() + skipped, head.size);
    entry.moves = seen->moves;
    queued_items_ += 1;
    source.sent += 1;
    return true;
}

// Owner side: report the new locations of outputs to which sent items refer.
void Link::report_moves() {
    const uint64_t now = references().generation();
    if (std::exchange(seen_generation_, now) == now) return;
    for (auto& [number, stream] : streams_) {
        for (uint16_t port = 0; port < stream->sources.size(); ++port) {
            Source& source = stream->sources[port];
            for (uint64_t n = source.base + source.held(); source.known && n < source.sent; ++n) {
                Source::Entry& entry = source.entries[n - source.base];
                if (entry.kind != REFERENCE) continue;
                const auto seen = references().look(entry.reference(), entry.moves);
                if (!seen || seen->state == References::Seen::State::Lost) continue;
                const bool here = seen->state == References::Seen::State::Here;
                Head head{.n = n, .stream = number, .port = port, .type = FrameType::MOVED};
                head.size = seen->payload.size();
                head.flags = uint8_t(here ? seen->kind : uint64_t(REFERENCE));
                add_frame(head, seen->payload);
                entry.moves = seen->moves;
            }
        }
    }
}

// Owner side: carry out the requests of the table of references.
void Link::handle_messages() {
    const References::Inbox inbox = references().collect(this);
    for (const References::Released& one : inbox.released) {
        LinkStream* stream = find(one.stream);
        if (!stream || one.port >= stream->sinks.size()) continue;
        Sink& sink = stream->sinks[one.port];
        sink.forget_reference(one.id);
        sink.dirty = true;
        for (Source& source : stream->sources) source.release(one.key);
    }
    for (const OutputKey& one : inbox.pulls)
        add_frame({.n = one.output, .stream = one.stream, .port = one.port, .type = FrameType::PULL});
}

// Worker side: send the outputs that the owner side wants in full after all.
void Link::add_pulled(const LinkStream& stream, Source& source, uint16_t port) {
    for (const uint64_t n : std::exchange(source.pulls, {})) {
        if (n < source.base || n - source.base >= source.entries.size()) continue;
        const Source::Entry& entry = source.entries[n - source.base];
        Head head{.size = entry.size, .n = n, .stream = stream.number, .port = port};
        head.type = FrameType::PULLED;
        head.flags = entry.kind;
        out_.add(&head, head.length(), entry.at, entry.size);
    }
}

// Worker side: report the items whose outputs could not be fetched.
void Link::report_unreachable_items(LinkStream& stream) {
    for (uint16_t port = 0; port < stream.sinks.size(); ++port) {
        for (Sink::Staged& item : stream.sinks[port].staged) {
            if (!item.unreachable || std::exchange(item.unreachable_sent, true)) continue;
            add_frame({.n = item.key, .stream = stream.number, .port = port, .type = FrameType::UNREACHABLE});
        }
    }
}

// --- the reader's host ---

bool Link::handle_location(LinkStream& stream, Sink& sink, const Received& item) {
    Location location;
    if (!parse({item.at, item.size}, location)) return false;
    release_ring();
    has_news_ = true;
    if (!sink.ring->fits(location.size)) refuse(stream, sink, location.size);
    if (!sink.check_ended() && !sink.drops_items()) {
        if (!sink.stage(item, {item.at, item.at + item.size})) return false;
        report_to_fetch(stream, sink, sink.staged.back().payload);
    }
    count_arrival(sink, false);
    return true;
}

bool Link::handle_moved(const LinkStream& stream, Sink& sink, const Head& head, const char* payload) {
    Location location;
    if (head.kind() == REFERENCE && !parse({payload, head.size}, location)) return false;
    for (Sink::Staged& item : sink.staged) {
        if (item.key != head.n || item.kind != REFERENCE) continue;
        const std::vector<char> now(payload, payload + head.size);
        if (head.kind() == REFERENCE && now == item.payload) return true;
        sink.staged_bytes += now.size() - item.payload.size();
        item.payload = now;
        item.kind = head.kind();
        item.unreachable = item.unreachable_sent = false;
        if (item.kind == REFERENCE) report_to_fetch(stream, sink, now);
        return true;
    }
    return true;  // the output was fetched in the meantime
}

void Link::report_to_fetch(const LinkStream& stream, const Sink& sink, const std::vector<char>& location) {
    if (is_here(location)) return;
    const auto port = std::ranges::find(stream.sinks, &sink, [](const Sink& one) { return &one; });
    report({.kind = LinkEvent::Kind::ToFetch,
            .stream = stream.number,
            .port = uint16_t(port - stream.sinks.begin()),
            .why = {location.data(), location.size()}});
}

// Return the item that waits for the output at this location, or null.
Sink::Staged* Link::find_staged(const Location& location) {
    for (auto& [number, stream] : streams_)
        for (Sink& sink : stream->sinks)
            for (Sink::Staged& item : sink.staged)
                if (item.kind == REFERENCE && !memcmp(item.payload.data(), &location, sizeof location))
                    return &item;
    return nullptr;
}

void Link::request(int fd, const std::string& text) {
    Location location;
    if (!parse(text, location)) return;
    Request request{location.output, location.stream, location.port, 0};
    if (!send_all(fd, {&request, sizeof request}, {nullptr, 0})) ended();
}

bool Link::fetch(int fd, const std::string& text) {
    Location location;
    if (!parse(text, location)) return false;
    uint64_t size = 0;
    if (receive_all(fd, &size, sizeof size) < sizeof size) ended();
    if (size == GONE) return false;
    if (size != location.size) throw std::system_error(EPROTO, std::generic_category());
    std::vector<char> payload(size);
    for (uint64_t have = 0; have < size; have += std::min(GATHER, size - have)) {
        const uint64_t most = std::min(GATHER, size - have);
        if (receive_all(fd, payload.data() + have, most) < most) ended();
        bytes_in.fetch_add(most, std::memory_order_relaxed);
    }
    std::lock_guard lock(mutex_);
    Sink::Staged* item = find_staged(location);
    if (!item) return true;  // the item was recalled, or its output has moved
    item->kind = location.kind;
    item->payload = std::move(payload);
    for (auto& [number, stream] : streams_)
        for (Sink& sink : stream->sinks) {
            sink.staged_bytes = 0;
            for (const Sink::Staged& one : sink.staged) sink.staged_bytes += one.payload.size();
        }
    ring_doorbell();
    return true;
}

void Link::report_unreachable(const std::string& text) {
    Location location;
    if (!parse(text, location)) return;
    std::lock_guard lock(mutex_);
    if (Sink::Staged* item = find_staged(location)) item->unreachable = true;
    ring_doorbell();
}

// --- the host that made the output ---

void Link::serve_fetches(int fd) {
    Request request;
    while (receive_all(fd, &request, sizeof request) == sizeof request) {
        std::shared_ptr<Ring> ring;  // keeps the output mapped
        const char* at = nullptr;
        uint64_t size = GONE;
        {
            std::lock_guard lock(mutex_);
            if (const auto* entry = find_kept({request.stream, request.port, request.output}, &ring)) {
                at = entry->at;
                size = entry->size;
            }
        }
        const uint64_t length = size == GONE ? 0 : size;
        if (!send_all(fd, {&size, sizeof size}, {const_cast<char*>(at), length})) return;
        bytes_out.fetch_add(length, std::memory_order_relaxed);
    }
}

}  // namespace flowchan
