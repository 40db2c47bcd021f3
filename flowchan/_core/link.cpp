// The connection of a link, and its streams. The two threads are in link_send.cpp and link_receive.cpp.
#include "link.hpp"
#include "process.hpp"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>
#include <unordered_set>

namespace flowchan {

namespace {

std::mutex live_mutex;
std::unordered_set<Link*> live;

}  // namespace

// A forked child gets a copy of the socket but no threads, so it closes the copy. Otherwise, the other side
// would not notice the end of this process until the child also ended. Before a fork, the process takes the
// locks of all links. The child then finds them in a consistent state, and has no ring locked.
const int Link::fork_hook = pthread_atfork(before_fork, after_fork, in_child);

void Link::before_fork() {
    live_mutex.lock();
    for (Link* link : live) link->mutex_.lock();
    references().mutex().lock();
}

void Link::after_fork() {
    references().mutex().unlock();
    for (Link* link : live) link->mutex_.unlock();
    live_mutex.unlock();
}

void Link::in_child() {
    for (Link* link : live) {
        if (link->fd_ >= 0) ::close(std::exchange(link->fd_, -1));
        link->closed_ = true;
    }
    references().clear_in_child();
    after_fork();
}

Link::Link(bool owner_side) : owner_side_(owner_side), pid_(getpid()) {
    NoSignals none;
    sender_ = std::thread([this] { send_loop(); });
    try {
        receiver_ = std::thread([this] { receive_loop(); });
    } catch (...) {
        close();
        throw;
    }
    if (owner_side_) references().join(this);
    std::lock_guard lock(live_mutex);
    live.insert(this);
}

Link::~Link() {
    {
        std::lock_guard lock(live_mutex);
        live.erase(this);
    }
    if (pid_ == getpid()) {
        close();
        delete &changed_;
        delete &event_added_;
        delete &out_;
        delete &sender_;
        delete &receiver_;
        return;
    }
    // None of these objects belongs to a forked child, so abandon them.
    extra_sleepers_.abandon();
    for (auto& [number, stream] : streams_) stream.release();
}

void Link::close() {
    if (pid_ != getpid()) return;
    std::lock_guard one(closing_);  // a second caller must also wait until everything is closed
    {
        std::lock_guard lock(mutex_);
        closed_ = true;
        if (fd_ >= 0) shutdown(fd_, SHUT_RDWR);
        changed_.notify_all();
        event_added_.notify_all();
    }
    ring_doorbell();
    for (std::thread* thread : {&sender_, &receiver_})
        if (thread->joinable()) thread->join();
    extra_sleepers_.end();
    std::lock_guard lock(mutex_);
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    if (owner_side_) references().leave(this);
    for (auto& [number, stream] : streams_) forget_references(*stream);
    streams_.clear();
}

// Owner side: the worker's host has lost the outputs of this stream. Give back the input item of each output
// that is not released, so that a worker makes the output again.
void Link::forget_references(LinkStream& stream) {
    if (!owner_side_) return;
    references().lose(this, stream.number);
    bool any = false;
    for (Source& source : stream.sources) {
        any = any || source.held();
        source.give_back_replays();
    }
    if (any) references().wake_links();
    for (const Sink& sink : stream.sinks)
        if (sink.is_lent) references().release_unread(*sink.ring);
}

void Link::attach(int fd) {
    std::unique_lock lock(mutex_);
    take_over(lock, fd);
}

void Link::take_over(std::unique_lock<std::mutex>& lock, int fd) {
    // End the old connection before this side uses the new connection to report which frames have arrived.
    // Otherwise, a frame that still arrives over the old connection would be received twice.
    while (fd_ >= 0 && !closed_) {
        if (!std::exchange(lost_, true)) {
            shutdown(fd_, SHUT_RDWR);
            note_break();
        }
        if (users_ == 0)
            ::close(std::exchange(fd_, -1));
        else
            changed_.wait(lock);
    }
    if (closed_) return void(::close(fd));
    fd_ = fd;
    lost_ = false;
    connection_ += 1;
    out_.clear();
    queued_items_ = 0;
    pong_ = false;
    pinged_at_ = 0;
    timed_ = false;
    for (auto& [number, stream] : streams_) {
        stream->announced = false;
        for (Source& source : stream->sources) source.connect();
        for (Sink& sink : stream->sinks) {
            sink.dirty = true;
            sink.part_reported = false;
            for (Sink::Staged& item : sink.staged) item.unreachable_sent = false;
        }
    }
    if (owner_side_) {
        references().ask_again(this);
        has_messages = true;
    }
    connected_at_ = now_ns();
    last_byte_at_.store(connected_at_, std::memory_order_relaxed);
    changed_.notify_all();
    ring_doorbell();
}

// A thread calls this when its connection over `fd` has ended. The last thread to leave closes the
// descriptor.
void Link::leave_connection(int fd, const std::string& why) {
    std::lock_guard lock(mutex_);
    users_ -= 1;
    if (fd == fd_ && !why.empty() && !lost_) {
        lost_ = true;
        shutdown(fd, SHUT_RDWR);
        note_break();
        if (!closed_) report({.kind = LinkEvent::Kind::Broken, .why = why});
    }
    if (fd == fd_ && lost_ && users_ == 0 && !closed_) ::close(std::exchange(fd_, -1));
    changed_.notify_all();
}

// Count a connection that has ended. If it made no progress although items were waiting to be sent, start the
// clock of stuck_for().
void Link::note_break() {
    breaks.fetch_add(1, std::memory_order_relaxed);
    for (auto& [number, stream] : streams_)
        for (Source& source : stream->sources) source.demand = Demand::None;
    const auto carries = [](const auto& pair) {
        const LinkStream& stream = *pair.second;
        return std::ranges::any_of(stream.sources, &Source::owes) ||
               std::ranges::any_of(stream.sinks, [](const Sink& sink) { return !sink.part.empty(); });
    };
    const bool progressed = progress_at_.load(std::memory_order_relaxed) > connected_at_;
    breaks_in_vain_ = progressed ? 0 : breaks_in_vain_ + 1;
    if (progressed || !std::ranges::any_of(streams_, carries))
        stuck_since_ = 0;
    else if (!stuck_since_)
        stuck_since_ = now_ns();
}

uint64_t Link::breaks_in_vain() {
    std::lock_guard lock(mutex_);
    return breaks_in_vain_;
}

int64_t Link::stuck_for() {
    std::lock_guard lock(mutex_);
    return stuck_since_ && breaks_in_vain_ > 1 ? now_ns() - stuck_since_ : 0;
}

void Link::open_stream(uint32_t number, const std::vector<Taking>& takes, const std::vector<Putting>& puts,
                       bool on_demand, bool limited, bool lends) {
    std::lock_guard lock(mutex_);
    auto stream = std::make_unique<LinkStream>();
    stream->number = number;
    for (const Taking& take : takes)
        stream->sources.emplace_back(take.ring, take.session, take.alone).on_demand =
            owner_side_ && on_demand;
    for (const Putting& put : puts) {
        if (!owner_side_) put.ring->header().notify_writer = 1;
        stream->sinks.emplace_back(put.ring, put.writer, put.follows, put.replays).on_demand = on_demand;
        stream->sinks.back().limited = owner_side_ && limited;
    }
    for (Source& source : stream->sources)
        if (owner_side_) source.join(this);
    if (lends && !owner_side_ && !stream->sources.empty()) stream->sources[0].lends = true;
    for (Sink& sink : stream->sinks)
        if (Source* source = numbering(*stream, sink)) source->ascending |= sink.writer.ordered;
    streams_[number] = std::move(stream);
    ring_doorbell();
}

void Link::pair_streams(uint32_t writes, uint32_t reads) {
    std::lock_guard lock(mutex_);
    if (LinkStream* stream = find(writes)) stream->partner = reads;
}

void Link::drop_stream(uint32_t number) {
    std::unique_lock lock(mutex_);
    LinkStream* stream = find(number);
    if (!stream) return;
    changed_.wait(lock, [&] { return !(stream = find(number)) || stream->filling == 0; });
    forget_references(*stream);
    streams_.erase(number);
    event_added_.notify_all();
    ring_doorbell();
}

LinkStream* Link::find(uint32_t number) {
    const auto found = streams_.find(number);
    return found == streams_.end() ? nullptr : found->second.get();
}

bool Link::connected() {
    std::lock_guard lock(mutex_);
    return fd_ >= 0 && !lost_;
}

std::vector<StreamCounts> Link::counts() {
    std::lock_guard lock(mutex_);
    std::vector<StreamCounts> all;
    for (auto& [number, stream] : streams_) {
        StreamCounts counts{number, 0, 0, 0, 0, true, 0, 0, 0};
        for (Source& source : stream->sources) {
            counts.taken += source.taken();
            counts.used += owner_side_ ? 0 : source.base;
            counts.standing += source.queue_place.entered();
            counts.ahead += source.active();
            counts.window += source.byte_window.size();
            counts.started += owner_side_ && !source.left ? source.started : 0;
            counts.starved = counts.starved && source.starved;
        }
        for (Sink& sink : stream->sinks) {
            counts.staged += sink.staged.size();
            counts.used += owner_side_ ? sink.used : 0;
            counts.standing += sink.queue_place.entered();
        }
        all.push_back(counts);
    }
    return all;
}

std::optional<std::pair<uint64_t, bool>> Link::offer(uint32_t number, uint64_t most) {
    std::lock_guard lock(mutex_);
    LinkStream* stream = find(number);
    if (!stream || stream->sources.size() != 1 || stream->sources[0].left)
        return std::pair(uint64_t(0), true);
    Source& source = stream->sources[0];
    if (source.recalling) return std::nullopt;
    source.take(source.active() + std::min(most, MOST_AHEAD));
    ring_doorbell();
    return std::pair(source.taken(), source.ending != Ending::Open);
}

std::pair<uint64_t, bool> Link::room(uint32_t number) {
    std::lock_guard lock(mutex_);
    LinkStream* stream = find(number);
    if (!stream || stream->sinks.size() != 1) return {0, true};
    Sink& sink = stream->sinks[0];
    sink.check_ended();
    RingLock holding(*sink.ring);
    return {sink.limit(prefetched(*stream)), sink.over};
}

std::optional<bool> Link::await_used(uint32_t number, uint64_t count, int64_t until) {
    std::unique_lock lock(mutex_);
    for (;;) {
        LinkStream* stream = find(number);
        if (!stream || stream->sources.size() != 1) return false;
        const Source& source = stream->sources[0];
        if (source.base >= count) return true;
        if (source.left || closed_) return false;
        const int64_t left = until - now_ns();
        if (left <= 0) return std::nullopt;
        event_added_.wait_for(lock, std::chrono::nanoseconds(left));
    }
}

void Link::ring_doorbell() {
    // Pairs with `sleep`, which sets asleep_ and then checks once more.
    doorbell_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) futex_wake(doorbell_, 1, false);
}

void Link::report(LinkEvent event) {
    events_.push_back(std::move(event));
    event_added_.notify_all();
    if (ready_events_) ready_events_->add(ready_number_);
}

void Link::announce(uint64_t number, std::shared_ptr<ReadyLinks> events,
                    std::shared_ptr<ReadyLinks> reports) {
    std::lock_guard lock(mutex_);
    ready_number_ = number;
    ready_events_ = std::move(events);
    ready_items_ = std::move(reports);
}

// Announce items of stream 0 that were put since the last call.
void Link::announce_items() {
    LinkStream* stream = ready_items_ ? find(0) : nullptr;
    if (!stream || stream->sinks.empty()) return;
    const uint64_t used = stream->sinks[0].used;
    if (std::exchange(announced_, used) != used) ready_items_->add(ready_number_);
}

void Link::excuse(int64_t ns) {
    const int64_t heard = last_byte_at_.load(std::memory_order_relaxed);
    last_byte_at_.store(std::min(now_ns(), heard + ns), std::memory_order_relaxed);
}

LinkEvent Link::next_event(int64_t until) {
    std::unique_lock lock(mutex_);
    while (events_.empty() && !closed_) {
        const int64_t left = until - now_ns();
        if (left <= 0) {
            excuse(-left);  // this thread woke up late, so it was delayed itself
            return {};
        }
        event_added_.wait_for(lock, std::chrono::nanoseconds(left));
    }
    if (events_.empty()) return {.kind = LinkEvent::Kind::Closed};
    LinkEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
}

}  // namespace flowchan
