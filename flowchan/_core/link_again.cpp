#include "link.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>
#include <algorithm>

namespace flowchan {

namespace {

const std::string GREETING = "flowchan back 1\n";
const char *const DIALLED = "dialled: back", *const LISTENS = "listens: back";
constexpr size_t NONCE = 32, PROOF = sizeof(Digest);
constexpr size_t MOST_PROVINGS = 16;
constexpr int64_t HANDSHAKE_NS = 10'000'000'000;  // with who dials
constexpr int64_t DEAF_NS = 100'000'000;
constexpr int64_t AT_ONCE_NS = 250'000'000;  // and a few round trips: from then on Python dials

std::string fresh_bytes() {
    std::string bytes(NONCE, '\0');
    for (size_t have = 0; have < NONCE;) {
        const ssize_t n = getrandom(bytes.data() + have, NONCE - have, 0);
        if (n < 0 && errno != EINTR) return "";
        have += n > 0 ? size_t(n) : 0;
    }
    return bytes;
}

bool is_loopback(const sockaddr_storage& address) {
    if (address.ss_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
    return address.ss_family == AF_INET &&
           ntohl(reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr) >> 24 == 127;
}

std::string proof(const Digest& key, const char* role, const std::string& both) {
    const Digest digest = hmac_sha256(key, role + both);
    return {digest.begin(), digest.end()};
}

bool is_proof(const Digest& key, const char* role, const std::string& both, const std::string& said) {
    Digest theirs{};
    std::ranges::copy(said, theirs.begin());
    return is_same(theirs, hmac_sha256(key, role + both));
}

void set_blocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK); }

}  // namespace

// --- the two who prove ---

Proving& Proving::operator=(Proving&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(dialled_, other.dialled_);
    std::swap(said_, other.said_);
    std::swap(give_up_, other.give_up_);
    both_.swap(other.both_);
    came_.swap(other.came_);
    return *this;
}

Proving::~Proving() {
    if (fd_ >= 0) ::close(fd_);
}

Proving::Now Proving::go_on(const Digest& key) {
    if (dialled_ && !said_) return greet();
    const size_t wanted = dialled_ ? NONCE + PROOF : said_ ? PROOF : GREETING.size() + NONCE;
    char more[NONCE + PROOF];
    const ssize_t n = recv(fd_, more, wanted - came_.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return Now::Waits;
    if (n <= 0) return Now::Refused;
    came_.append(more, size_t(n));
    return came_.size() < wanted ? Now::Waits : hear(key);
}

// As soon as it is connected.
Proving::Now Proving::greet() {
    both_ = fresh_bytes();
    if (both_.empty()) return Now::Refused;
    said_ = say(GREETING + both_);
    return said_ || errno == EAGAIN || errno == EINTR ? Now::Waits : Now::Refused;
}

// The message that has come.
Proving::Now Proving::hear(const Digest& key) {
    const std::string message = std::exchange(came_, {});
    if (dialled_) {
        both_ += message.substr(0, NONCE);
        const bool right = is_proof(key, LISTENS, both_, message.substr(NONCE));
        return right && say(proof(key, DIALLED, both_)) ? Now::Proved : Now::Refused;
    }
    if (said_) return is_proof(key, DIALLED, both_, message) ? Now::Proved : Now::Refused;
    const std::string ours = fresh_bytes();
    both_ = message.substr(GREETING.size()) + ours;
    said_ = !ours.empty() && message.starts_with(GREETING) && say(ours + proof(key, LISTENS, both_));
    return said_ ? Now::Waits : Now::Refused;
}

bool Proving::say(const std::string& message) const {
    return send(fd_, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL) == ssize_t(message.size());
}

// --- who waits for them ---

void Again::listen(int fd, const Digest& key) {
    if (alarm_ < 0) alarm_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (listener_ >= 0) ::close(listener_);
    listener_ = fd;
    key_ = key;
}

void Again::dial_at(uint16_t port, const Digest& key) {
    if (alarm_ < 0) alarm_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    port_ = port;
    key_ = key;
}

void Again::note(int fd) {
    home_size_ = sizeof(home_);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&home_), &home_size_) != 0) home_size_ = 0;
    options_ = {{SOL_SOCKET, SO_KEEPALIVE, 0},  {IPPROTO_TCP, TCP_NODELAY, 0},
                {IPPROTO_TCP, TCP_KEEPIDLE, 0}, {IPPROTO_TCP, TCP_USER_TIMEOUT, 0},
                {IPPROTO_TCP, TCP_KEEPCNT, 0},  {IPPROTO_TCP, TCP_KEEPINTVL, 0}};
    // Elsewhere the size grows by itself, until it is set.
    if (is_loopback(home_))
        options_.push_back({SOL_SOCKET, SO_SNDBUF, 0});
    else
        options_.push_back({IPPROTO_TCP, TCP_NOTSENT_LOWAT, 0});
    for (Option& option : options_) {
        socklen_t size = sizeof(option.value);
        getsockopt(fd, option.level, option.name, &option.value, &size);
        if (option.name == SO_SNDBUF && option.level == SOL_SOCKET)
            option.value /= 2;  // the kernel doubles it
    }
}

void Again::begin(int64_t round_trip) {
    if (!port_) return;
    if (home_.ss_family == AF_INET)
        reinterpret_cast<sockaddr_in&>(home_).sin_port = htons(port_);
    else if (home_.ss_family == AF_INET6)
        reinterpret_cast<sockaddr_in6&>(home_).sin6_port = htons(port_);
    else
        return;
    const int fd = socket(home_.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return;
    Proving proving(fd, true, now_ns() + AT_ONCE_NS + 8 * round_trip);
    for (const Option& option : options_)
        setsockopt(fd, option.level, option.name, &option.value, sizeof(option.value));
    if (connect(fd, reinterpret_cast<sockaddr*>(&home_), home_size_) == 0 || errno == EINPROGRESS)
        provings_.push_back(std::move(proving));
}

std::vector<pollfd> Again::awaited() const {
    std::vector<pollfd> all{{alarm_, POLLIN, 0}, {now_ns() < deaf_until_ ? -1 : listener_, POLLIN, 0}};
    for (const Proving& proving : provings_) all.push_back(proving.awaited());
    return all;
}

int64_t Again::due() const {
    int64_t due = now_ns() < deaf_until_ ? deaf_until_ : INT64_MAX;
    for (const Proving& proving : provings_) due = std::min(due, proving.give_up());
    return due;
}

int Again::serve() {
    uint64_t rings = 0;
    while (read(alarm_, &rings, sizeof(rings)) > 0) {}
    if (listener_ >= 0 && now_ns() >= deaf_until_) let_in();
    for (auto at = provings_.begin(); at != provings_.end();) {
        const Proving::Now now = at->go_on(key_);
        if (now == Proving::Now::Proved) {
            const int fd = at->release();
            set_blocking(fd);
            return fd;
        }
        at = now == Proving::Now::Refused || now_ns() >= at->give_up() ? provings_.erase(at) : at + 1;
    }
    return -1;
}

// All who have dialled. When too many have, those that have taken longest are sent away.
void Again::let_in() {
    for (;;) {
        const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED || errno == EPROTO)) continue;
        if (fd < 0) {
            if (errno != EAGAIN) deaf_until_ = now_ns() + DEAF_NS;
            return;
        }
        provings_.emplace_back(fd, false, now_ns() + HANDSHAKE_NS);
        if (provings_.size() > MOST_PROVINGS) provings_.erase(provings_.begin());
    }
}

void Again::ring() {
    const uint64_t one = 1;
    if (alarm_ >= 0 && write(alarm_, &one, sizeof(one)) < 0) return;  // it rings already
}

void Again::close() {
    for (int* fd : {&alarm_, &listener_})
        if (*fd >= 0) ::close(std::exchange(*fd, -1));
    end();
}

// --- the link ---

void Link::listen_again(int fd, const Digest& key) {
    std::lock_guard lock(mutex_);
    if (closed_) return void(::close(fd));
    again_.listen(fd, key);
}

void Link::dial_again(uint16_t port, const Digest& key) {
    std::lock_guard lock(mutex_);
    if (!closed_) again_.dial_at(port, key);
}

// The receiver's, when a connection has ended: until there is another one, or the link is closed; away from
// home also until it is clear that Python has to dial.
void Link::come_back(std::unique_lock<std::mutex>& lock) {
    const auto is_over = [&] { return closed_ || (fd_ >= 0 && !lost_); };
    if (!is_over()) again_.begin(round_trip());
    while (!is_over() && again_.is_trying()) {
        std::vector<pollfd> words = again_.awaited();
        const int64_t due = again_.due();
        const int64_t left = std::max<int64_t>(due - now_ns(), 0) / 1'000'000 + 1;
        lock.unlock();
        poll(words.data(), nfds_t(words.size()), due == INT64_MAX ? -1 : int(left));
        lock.lock();
        if (is_over()) break;
        if (const int fd = again_.serve(); fd >= 0) take_over(lock, fd);
    }
    again_.end();
    if (!is_over()) tell({.kind = LinkEvent::Kind::Broken, .why = again_.why});
}

}  // namespace flowchan
