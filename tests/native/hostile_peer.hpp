// Plays the peer's side of a connection with arbitrary frames, for frames.cpp.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <optional>
#include <random>
#include <string>

#include "link.hpp"
#include "users.hpp"

namespace testing {

// The test fails if a connection does not end within this many seconds.
constexpr unsigned HANG_LIMIT_S = 120;
constexpr int64_t EVENT_LIMIT_NS = 20'000'000'000;

class Draw {
  public:
    explicit Draw(uint64_t seed) : random_(seed) {}
    uint64_t below(uint64_t n) { return random_() % n; }
    bool one_in(uint64_t n) { return below(n) == 0; }
    uint64_t any() { return random_(); }
    template <class T, size_t N>
    T of(const T (&choices)[N]) {
        return choices[below(N)];
    }
    // Return a random number, usually at or near a limit.
    uint64_t number() {
        const uint64_t near[] = {
            0, 1, 2, 63, 1 << 16, UINT32_MAX, uint64_t(1) << 46, uint64_t(1) << 63, UINT64_MAX};
        return one_in(4) ? any() : near[below(9)] + below(3) - 1;
    }
    std::string bytes(uint64_t n) {
        std::string made(n, '\0');
        for (char& byte : made) byte = char(any());
        return made;
    }

  private:
    std::mt19937_64 random_;
};

// The peer's side of a connection.
class Peer {
  public:
    Peer(Link& link, Draw& draw) : link_(link), draw_(draw) {
        alarm(HANG_LIMIT_S);
        int ends[2];
        must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
        fd_ = ends[1];
        link.attach(ends[0]);
    }
    ~Peer() { ::close(fd_); }

    void add_frame(const Head& head, const std::string& payload = {}) {
        sent_count += 1;
        last_ = unsent_.size();
        unsent_.append(reinterpret_cast<const char*>(&head), head.length());
        unsent_ += payload;
    }
    void add_frame(const std::string& bytes) {
        sent_count += 1;
        last_ = unsent_.size();
        unsent_ += bytes;
    }
    // Truncate the last frame, or drop it.
    void cut() {
        if (unsent_.size() > last_) unsent_.resize(last_ + draw_.below(unsent_.size() - last_));
    }
    // Send all frames, in pieces of any size. The link may end the connection at any time.
    void send() {
        for (uint64_t at = 0; at < unsent_.size();) {
            const uint64_t most = draw_.one_in(3) ? 1 + draw_.below(64) : unsent_.size();
            const ssize_t n =
                ::send(fd_, unsent_.data() + at, std::min(most, unsent_.size() - at), MSG_NOSIGNAL);
            if (n < 0) break;
            at += uint64_t(n);
        }
        unsent_.clear();
        last_ = 0;
    }
    // Return the next frame, or nothing if the connection has ended.
    std::optional<Head> next_frame() {
        Head head{};
        if (!receive(&head, Head::SHORT)) return {};
        if (!head.carries_item() && !receive(&head.a, Head::LONG - Head::SHORT)) return {};
        must(is_valid(head), "the link has sent an invalid frame");
        std::string payload(head.size, '\0');
        if (!receive(payload.data(), head.size)) return {};
        return head;
    }
    bool has_more() {
        pollfd here{fd_, POLLIN, 0};
        return poll(&here, 1, 0) > 0;
    }
    // Wait until the link has handled all frames that were sent so far. Return whether the connection still
    // exists.
    bool wait() {
        const uint64_t mark = draw_.any() >> 1;
        add_frame({.n = mark, .type = FrameType::PING});
        send();
        while (std::optional<Head> head = next_frame())
            if (head->type == FrameType::PONG && head->n == mark) return true;
        return false;
    }
    static inline uint64_t sent_count = 0;  // frames on all connections

    // Close the sending direction, and wait until the link has reported the end of the connection.
    void end() {
        shutdown(fd_, SHUT_WR);
        while (next_frame()) {}
        for (LinkEvent event; event.kind != LinkEvent::Kind::Broken;) {
            event = link_.next_event(now_ns() + EVENT_LIMIT_NS);
            must(event.kind != LinkEvent::Kind::None,
                 "the link does not report that the connection has ended");
        }
    }

  private:
    bool receive(void* to, uint64_t size) {
        for (uint64_t have = 0; have < size;) {
            const ssize_t n = recv(fd_, static_cast<char*>(to) + have, size - have, 0);
            if (n <= 0) return false;
            have += uint64_t(n);
        }
        return true;
    }
    Link& link_;
    Draw& draw_;
    int fd_;
    std::string unsent_;
    uint64_t last_ = 0;  // where the last frame begins
};

}  // namespace testing
