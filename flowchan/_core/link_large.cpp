// Large items that arrive over a link go directly into the ring's memory, without a copy.
#include "link.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <algorithm>

namespace flowchan {

// Receive a large item, or the rest of a large item. `begun` contains the first `size` bytes, which have
// already arrived. If the ring has room, the item goes into the ring without a copy.
bool Link::receive_large(int fd, uint64_t connection, const Head& head, const char* begun, uint64_t size,
                         Following& following) {
    std::unique_lock lock(mutex_);
    Large large{.item = {head.n, head.kind(), head.deaths(), head.size, nullptr}};
    if (!begin_large(head, large)) return false;
    lock.unlock();
    char* to = large.slot ? const_cast<char*>(large.sink->ring->payload_of(large.slot)) : nullptr;
    bool whole = true;
    if (large.is_to_be_staged()) {
        try {
            large.buffer.resize(large.item.size);
            to = large.buffer.data();
        } catch (const std::bad_alloc&) {  // another connection will carry the item again
            whole = false;
        }
    }
    const uint64_t before = large.part.size();
    if (to && before) memcpy(to, large.part.data(), before);
    const uint64_t came =
        whole ? read_large(fd, to ? to + before : nullptr, begun, size, head.size, following) : 0;
    whole = whole && came == head.size;
    if (came) note_progress();
    if (to && !whole) large.part.assign(to, to + before + came);
    lock.lock();
    if (large.sink) return end_large(large, whole && connection == connection_);
    if (whole && large.stream) pass_over(head);
    return whole;
}

// Decide where a large item goes. Return false if the other side sent invalid data.
bool Link::begin_large(const Head& head, Large& large) {
    LinkStream* stream = large.stream = find(head.stream);
    if (stream && head.port >= stream->sinks.size()) return false;
    if (head.type == (owner_side_ ? FrameType::ITEM : FrameType::OUT)) return false;
    Sink* sink = stream ? &stream->sinks[head.port] : nullptr;
    if (!sink || sink->drops_items()) return true;
    if (!is_valid_key(*stream, *sink, head.n)) return false;
    large.item.size += sink->part.size();
    large.part = std::exchange(sink->part, {});
    if (!sink->ring->fits(large.item.size)) {
        refuse(*stream, *sink, large.item.size);
        return true;
    }
    large.sink = sink;
    large.is_of_replay = is_of_replay(*stream, *sink, large.item.key);
    if (!large.is_of_replay) {
        large.skips = sink->staged.empty() && !claim(*stream, *sink, large.item, large.slot);
        large.index = sink->writer.count - large.skips;
    }
    stream->filling += 1;
    return true;
}

// Count a large item that is dropped.
void Link::pass_over(const Head& head) {
    LinkStream* stream = find(head.stream);
    if (!stream || head.port >= stream->sinks.size()) return;
    Sink& sink = stream->sinks[head.port];
    sink.drop(sink.got, head.n);
    count_arrival(sink, false);
}

// Finish a large item, or keep the part that has arrived. Return false if the other side sent invalid data,
// or if another connection must carry the rest.
bool Link::end_large(Large& large, bool whole) {
    Sink& sink = *large.sink;
    large.stream->filling -= 1;
    changed_.notify_all();
    if (sink.over) ring_doorbell();  // the stream may be finished now
    if (large.slot) {
        RingLock holding(*sink.ring);
        if (!whole)
            sink.ring->unclaim(large.slot, holding.wakes);
        else
            sink.ring->publish(frame_of(large.item), large.slot,
                               owner_side_ && sink.writer.keyed ? &sink.writer : nullptr, holding.wakes);
    }
    if (!whole) {
        // The item will be sent again and must be skipped again.
        if (large.skips) sink.writer.count -= 1;
        if (large.part.size() < large.item.size) sink.part = std::move(large.part);
        return false;
    }
    large.item.at = large.buffer.data();
    if (large.is_of_replay) {
        replace_lost(*large.stream, sink, large.item);
        count_arrival(sink, true);
        return true;
    }
    const bool put = large.slot || large.skips;
    if (large.skips && owner_side_) repair(sink, large.item, sink.writer.number, large.index);
    if (put)
        sink.count_used(sink.got, 0, large.item.key);
    else if (sink.check_ended() || sink.drops_items())
        sink.drop(sink.got, large.item.key);
    else if (!sink.stage(large.item, std::move(large.buffer)))
        return false;
    count_arrival(sink, owner_side_ || !large.slot);
    return true;
}

// Claim memory in the ring for a large item. `slot` stays null if the ring is full. Return false if the item
// must be skipped, because a dead worker has already put it.
bool Link::claim(LinkStream& stream, Sink& sink, const Received& item, Slot*& slot) {
    if (!is_settled(stream, sink, item.key)) return true;
    const uint64_t number = number_for(stream, sink, item.key);
    RingLock holding(*sink.ring);
    if (sink.begin(number) == Step::Done) return false;
    const bool keyed = number != Slot::KEYLESS;
    // This item has no key and must be put without a key, but the writer still has the key of an earlier
    // item. Leave `slot` null, so that the item is staged.
    if (owner_side_ && !keyed && sink.writer.keyed) return true;
    const Step step =
        sink.ring->claim(frame_of(item), keyed ? &sink.writer : nullptr, sink.writer.session, slot);
    if (step != Step::Done) slot = nullptr;
    return true;
}

namespace {

// While a large item arrives, wake this thread only after this many bytes instead of after each segment. A
// wake-up costs as much as copying 50 KB.
constexpr uint64_t WORTH_WAKING = 256 << 10;
// Wake at least this often, so that the other side counts as alive even on a slow connection.
constexpr int MOST_MS = 100;

class LowWaterMark {
  public:
    explicit LowWaterMark(int fd) : fd_(fd) {}
    ~LowWaterMark() { set(1); }
    LowWaterMark(const LowWaterMark&) = delete;
    // Wait for `bytes` bytes or the end of the connection, for at most MOST_MS.
    void await(uint64_t bytes) {
        set(int(bytes));
        pollfd one{fd_, POLLIN, 0};
        poll(&one, 1, MOST_MS);
    }

  private:
    void set(int bytes) {
        if (std::exchange(bytes_, bytes) == bytes) return;
        setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
    }
    const int fd_;
    int bytes_ = 1;
};

}  // namespace

// Return how many of `size` bytes have arrived, including the `have` bytes at `begun`. A null `to` means that
// the item is dropped.
uint64_t Link::read_large(int fd, char* to, const char* begun, uint64_t have, uint64_t size,
                          Following& following) {
    std::vector<char> nowhere(to ? 0 : GATHER);
    if (to) memcpy(to, begun, have);
    LowWaterMark mark(fd);
    const bool waits = size - have >= WORTH_WAKING;
    while (have < size) {
        const uint64_t left = size - have, most = std::min(left, to ? 4 * GATHER : GATHER);
        iovec pieces[] = {{to ? to + have : nowhere.data(), most},
                          {following.at, most == left ? following.room : 0}};
        msghdr message{};
        message.msg_iov = pieces;
        message.msg_iovlen = 2;
        if (waits) mark.await(std::min(left, WORTH_WAKING));
        const ssize_t n = recvmsg(fd, &message, waits ? MSG_DONTWAIT : 0);
        if (n < 0 && (errno == EINTR || (waits && errno == EAGAIN))) continue;
        if (n <= 0) return have;
        const uint64_t part = std::min(uint64_t(n), most);
        have += part;
        following.have = uint64_t(n) - part;
        bytes_in.fetch_add(uint64_t(n), std::memory_order_relaxed);
        last_byte_at_.store(now_ns(), std::memory_order_relaxed);
    }
    return have;
}

}  // namespace flowchan
