// Arbitrary data over a connection, from a peer that has proved the secret. It sends frames as agents do. It
// also sends frames that are changed, repeated, left out, of absurd sizes or cut, and other bytes, in pieces
// of any size. Arguments: `model`, `home` or `away`, a seed, and how many frames.
//
// `model`: items come to workers, and the test knows which frames are valid. Valid ones are put, once and in
// order, also over the next connection. An invalid one ends the connection and leaves no trace. `home` and
// `away`: the states of ports in both directions, where validity depends on the progress of the link's
// threads. Received items are complete, and the rings are consistent.
#include <poll.h>
#include <sys/socket.h>

#include <optional>
#include <random>
#include <set>

#include "check.hpp"
#include "link.hpp"
#include "tsan.hpp"
#include "users.hpp"

namespace testing {

namespace {

constexpr unsigned HANGS = 120;  // seconds until a connection that does not end is a failure
constexpr uint64_t BYTES_INSIDE = 1 << 20, CAPACITY = 4;
constexpr uint32_t LINES = 3;
constexpr uint16_t PORTS = 2;
constexpr uint64_t SIZES[] = {8, 9, 80, 1000, 16 << 10, 70'000};
constexpr int64_t SOON = 20'000'000'000;  // ns
constexpr uint64_t LIFE = 40;             // connections of one link

class Chance {
  public:
    explicit Chance(uint64_t seed) : random_(seed) {}
    uint64_t below(uint64_t n) { return random_() % n; }
    bool one_in(uint64_t n) { return below(n) == 0; }
    uint64_t any() { return random_(); }
    template <class T, size_t N>
    T of(const T (&choices)[N]) {
        return choices[below(N)];
    }
    // Return a number with a chance to be at a limit.
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

// The other end of a connection.
class Peer {
  public:
    Peer(Link& link, Chance& chance) : link_(link), chance_(chance) {
        alarm(HANGS);
        int ends[2];
        must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
        fd_ = ends[1];
        link.attach(ends[0]);
    }
    ~Peer() { ::close(fd_); }

    void say(const Head& head, const std::string& payload = {}) {
        said += 1;
        unsent_.append(reinterpret_cast<const char*>(&head), head.length());
        unsent_ += payload;
    }
    void say(const std::string& bytes) {
        said += 1;
        unsent_ += bytes;
    }
    void cut() {
        if (!unsent_.empty()) unsent_.resize(chance_.below(unsent_.size()));
    }
    // Send in pieces of any size. The link may end the connection at any of them.
    void send() {
        for (uint64_t at = 0; at < unsent_.size();) {
            const uint64_t most = chance_.one_in(3) ? 1 + chance_.below(64) : unsent_.size();
            const ssize_t n =
                ::send(fd_, unsent_.data() + at, std::min(most, unsent_.size() - at), MSG_NOSIGNAL);
            if (n < 0) break;
            at += uint64_t(n);
        }
        unsent_.clear();
    }
    // Return the next frame; none when the connection has ended.
    std::optional<Head> hear() {
        Head head{};
        if (!receive(&head, Head::SHORT)) return {};
        if (!head.carries_item() && !receive(&head.a, Head::LONG - Head::SHORT)) return {};
        must(is_right(head), "the link has said what can't be right");
        std::string payload(head.size, '\0');
        if (!receive(payload.data(), head.size)) return {};
        return head;
    }
    bool has_said_more() {
        pollfd here{fd_, POLLIN, 0};
        return poll(&here, 1, 0) > 0;
    }
    // Wait until the link has handled all sent frames. Return whether the connection still exists.
    bool wait() {
        const uint64_t mark = chance_.any() >> 1;
        say({.n = mark, .say = Say::PING});
        send();
        while (std::optional<Head> head = hear())
            if (head->say == Say::PONG && head->n == mark) return true;
        return false;
    }
    static inline uint64_t said = 0;  // frames, over all connections

    // End the sending direction and wait until the link has noticed it.
    void end() {
        shutdown(fd_, SHUT_WR);
        while (hear()) {}
        for (LinkEvent event; event.kind != LinkEvent::Kind::Broken;) {
            event = link_.next_event(now_ns() + SOON);
            must(event.kind != LinkEvent::Kind::None, "the link says no end");
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
    Chance& chance_;
    int fd_;
    std::string unsent_;
};

std::string payload_of(uint64_t value, uint64_t size) {
    const Message message(value, size);
    return {message.bytes.data(), size};
}

void sound(Ring& ring) {
    const std::string wrong = locked(ring, [&](Wakes&) { return check(ring); });
    must(wrong.empty(), wrong);
}

// --- the model ---

// A port of a stream as its worker uses it, and the items expected from it.
struct Port {
    std::shared_ptr<Ring> ring = std::make_shared<Ring>(CAPACITY, BYTES_INSIDE);
    const uint32_t feed = open_session(*ring, Session::WRITER);
    User reads = open(*ring, Session::READER);
    std::vector<uint64_t> expected;
    uint64_t got = 0;      // frames
    bool refuses = false;  // one was too large: no more is put

    void expect(uint64_t value) {
        got += 1;
        if (!refuses) expected.push_back(value);
    }
    void take_all() {
        uint64_t value = 0;
        for (uint64_t right : expected) {
            // Items that waited for room when one was too large are dropped with it: the channel breaks.
            const Step step = reads.get(value, Deadline{refuses ? 0 : now_ns() + SOON});
            if (refuses && step == Step::NotNow) break;
            must(step == Step::Done && value == right, "not what was sent, or not in order");
        }
        expected.clear();
        must(reads.get(value, Deadline{0}) == Step::NotNow, "more has come than was right");
    }
    Link::Putting putting() const {
        WriterState writer;
        writer.session = feed;
        return {ring, writer, false, false};
    }
};

class Model {
  public:
    explicit Model(Chance& chance) : chance_(chance) {
        for (uint32_t line = 0; line < LINES; ++line)
            link_.open_line(line, {}, {ports_[line][0].putting(), ports_[line][1].putting()},
                            chance.one_in(2));
    }
    ~Model() {
        link_.close();
        for (auto& line : ports_)
            for (Port& port : line) sound(*port.ring);
    }

    void meet() {
        Peer peer(link_, chance_);
        hear_states(peer);
        Sent sent = Sent::Right;
        for (uint64_t left = chance_.below(12); left && sent == Sent::Right; --left)
            sent = say_something(peer);
        if (sent == Sent::Right) must(peer.wait(), "what is right has ended the connection");
        if (sent == Sent::Wrong) must(!peer.wait(), "what is wrong has not ended the connection");
        peer.end();
        for (auto& line : ports_)
            for (Port& port : line) port.take_all();
    }

  private:
    enum class Sent { Right, Wrong, Cut };

    // Check the reported state against all earlier connections.
    void hear_states(Peer& peer) {
        for (std::set<std::pair<uint32_t, uint16_t>> heard; heard.size() < LINES * PORTS;) {
            const std::optional<Head> head = peer.hear();
            must(head.has_value(), "a new connection has ended");
            if (head->say != Say::INPUT) continue;
            must(head->a == ports_[head->line][head->port].got, "it has not got what was sent");
            heard.emplace(head->line, head->port);
        }
    }

    Sent say_something(Peer& peer) {
        Head head{
            .line = uint32_t(chance_.below(LINES)), .port = uint16_t(chance_.below(PORTS)), .say = Say::ITEM};
        head.size = chance_.one_in(100) ? BYTES_INSIDE + 1 : chance_.of(SIZES);
        head.n = ports_[head.line][head.port].got;
        head.flags = uint8_t((1 + chance_.below(4)) | chance_.below(32) << 3);
        if (chance_.one_in(8))
            head = {.n = chance_.number(), .say = chance_.one_in(2) ? Say::PING : Say::PONG};
        if (chance_.one_in(6)) change(head);
        const bool right = is_right(head), here = right && is_expected(head);
        const bool endless = right && head.size > 2 * BYTES_INSIDE;
        const uint64_t value = next_++;
        peer.say(head, right && !endless ? payload_of(value, head.size) : chance_.bytes(chance_.below(100)));
        const bool cut = here && !endless && chance_.one_in(40);
        if (cut) peer.cut();
        peer.send();
        Port* port =
            here && head.say == Say::ITEM && head.line < LINES ? &ports_[head.line][head.port] : nullptr;
        if (port) port->refuses = port->refuses || head.size > BYTES_INSIDE;
        if (cut || endless) return Sent::Cut;
        if (!here) return Sent::Wrong;
        if (port) port->expect(value);
        return Sent::Right;
    }

    void change(Head& head) {
        switch (chance_.below(7)) {
            case 0:
                head.n = chance_.number();
                break;
            case 1:
                head.n += chance_.below(5) - 2;
                break;
            case 2:
                head.line = uint32_t(chance_.number());
                break;
            case 3:
                head.port = uint16_t(chance_.number());
                break;
            case 4:
                head.say = Say(chance_.below(256));
                break;
            case 5:
                head.flags = uint8_t(chance_.any());
                break;
            default:
                head.size = chance_.number();
        }
        if (head.say == Say::END || head.say == Say::RECALL)
            head.say = Say::OUT;  // only the link itself sends these
        if (head.carries_item()) head.size = std::max(head.size, Message::LEAST);
    }

    // Return whether an agent may receive this frame now.
    bool is_expected(const Head& head) {
        if (head.say == Say::PING) return true;
        if (head.say == Say::PONG) return int64_t(head.n) >= 0 && int64_t(head.n) < now_ns();
        if (head.say != Say::ITEM && head.say != Say::OUTPUT) return false;
        if (head.line >= LINES) return true;        // its stream was dropped here, or is not open yet
        if (head.say == Say::OUTPUT) return false;  // these streams have none
        if (head.port >= PORTS) return false;
        const Port& port = ports_[head.line][head.port];
        return port.refuses || head.n == port.got;
    }

    Chance& chance_;
    Link link_{false};
    Port ports_[LINES][PORTS];
    uint64_t next_ = 1;
};

// --- anything ---

// A stream: the ring that the link takes from, and the one that it puts into.
struct Ends {
    std::shared_ptr<Ring> from = std::make_shared<Ring>(CAPACITY, BYTES_INSIDE);
    std::shared_ptr<Ring> to = std::make_shared<Ring>(CAPACITY, BYTES_INSIDE);
    const uint32_t taker = open_session(*from, Session::READER), putter = open_session(*to, Session::WRITER);
    User feeds = open(*from, Session::WRITER), drains = open(*to, Session::READER);
    uint64_t heard = 0;  // items that the peer received
};

class Anything {
  public:
    Anything(bool home, Chance& chance) : home_(home), chance_(chance), link_(home) {
        for (uint32_t line = 0; line < LINES; ++line) {
            Ends& ends = ends_[line];
            WriterState writer;
            writer.session = ends.putter;
            writer.ordered = home && line == 1;
            link_.open_line(line, {{ends.from, ends.taker}}, {{ends.to, writer, home, home && line == 2}},
                            chance.one_in(2));
        }
    }
    ~Anything() {
        link_.close();
        for (Ends& ends : ends_) {
            sound(*ends.from);
            sound(*ends.to);
        }
    }

    void meet() {
        Peer peer(link_, chance_);
        bool whole = true;
        for (uint64_t left = chance_.below(30); left && whole; --left) {
            move();
            whole = say_something(peer);
            if (chance_.one_in(2)) peer.send();
            if (whole && chance_.one_in(4) && !peer.wait()) break;
            while (peer.has_said_more() && hear(peer)) {}
        }
        if (chance_.one_in(4)) peer.cut();
        peer.send();
        peer.end();
    }

  private:
    // Put an item in on one side, and read items from the other.
    void move() {
        Ends& ends = ends_[chance_.below(LINES)];
        if (chance_.one_in(3)) ends.feeds.put(Message(chance_.any(), chance_.of(SIZES)), Deadline{0});
        uint64_t value = 0;
        while (chance_.one_in(2) && ends.drains.get(value, Deadline{0}) == Step::Done) {}
    }
    bool hear(Peer& peer) {
        const std::optional<Head> head = peer.hear();
        if (head && head->carries_item()) ends_[head->line].heard += 1;
        return head.has_value();
    }

    // Return false if the bytes were not a frame, or one without its end, so that the link handles nothing
    // after it.
    bool say_something(Peer& peer) {
        if (chance_.one_in(100)) return peer.say(chance_.bytes(chance_.below(200))), false;
        const uint32_t line = uint32_t(chance_.below(LINES));
        const Say said[] = {Say::OPEN, Say::INPUT, Say::OUTPUT, Say::ITEM,
                            Say::OUT,  Say::END,   Say::RECALL, Say::PONG};
        const Say mine[] = {home_ ? Say::INPUT : Say::OUTPUT, home_ ? Say::OUT : Say::ITEM};
        Head head{
            .n = near(line), .line = line, .say = chance_.one_in(4) ? chance_.of(said) : chance_.of(mine)};
        head.a = near(line);
        head.b = std::min(head.a, near(line));
        if (head.carries_item()) {
            head.size = chance_.of(SIZES);
            head.flags = uint8_t((1 + chance_.below(4)) | chance_.below(32) << 3);
        } else {
            const uint8_t seldom = uint8_t(chance_.one_in(30) ? BREAK | NO_MORE : RECALLED);
            head.flags = uint8_t(chance_.any() & (STARVED | USERS | UNPICKLED | seldom));
            if (head.say == Say::END) head.flags |= home_ ? IS_OUTPUT : 0;
            if (head.say == Say::END && !chance_.one_in(20)) return true;
            head.size = head.flags & BREAK ? chance_.below(200) : 0;
        }
        if (chance_.one_in(20)) head.n = chance_.number();
        if (chance_.one_in(40)) head.a = chance_.number();
        if (chance_.one_in(40)) head.size = chance_.number();
        if (chance_.one_in(40)) head.port = uint16_t(chance_.number());
        const uint64_t size = std::min(head.size, 2 * BYTES_INSIDE);
        peer.say(head, payload_of(chance_.any(), size));
        return size == head.size;
    }
    uint64_t near(uint32_t line) {
        return ends_[line].heard + (chance_.one_in(8) ? chance_.below(3) - 1 : 0);
    }

    const bool home_;
    Chance& chance_;
    Link link_;
    Ends ends_[LINES];
};

template <class World, class Make>
void meet_often(uint64_t frames, Make make) {
    std::unique_ptr<World> world;
    for (uint64_t n = 0; Peer::said < frames; ++n) {
        if (n % LIFE == 0) world.reset(), world = make();
        world->meet();
    }
}

}  // namespace

}  // namespace testing

int main(int argc, char** argv) {
    using namespace testing;
    must(argc == 4, "arguments: 'model', 'home' or 'away', a seed, and the number of frames");
    const std::string what = argv[1];
    Chance chance(strtoull(argv[2], nullptr, 10));
    const uint64_t frames = strtoull(argv[3], nullptr, 10);
    if (what == "model")
        meet_often<Model>(frames, [&] { return std::make_unique<Model>(chance); });
    else
        meet_often<Anything>(frames, [&] { return std::make_unique<Anything>(what == "home", chance); });
    printf("all connections of %llu frames have ended\n", static_cast<unsigned long long>(Peer::said));
}
