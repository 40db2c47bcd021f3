// Plays a hostile peer that knows the secret and sends arbitrary data over a connection. The peer sends the
// frames of an agent. The peer also changes, repeats, omits, truncates and inflates frames, and sends other
// bytes, all in pieces of any size. Arguments: the mode (`model`, `owner` or `worker`), a seed, and the
// number of frames.
//
// `model`: the link gets items for workers, and the test knows which frames are valid. The link must put each
// valid frame once and in order, even across connections. An invalid frame must end the connection and must
// have no other effect. `owner` and `worker`: items and port states go in both directions. Which frames are
// valid then depends on the link's threads, so the test only checks that items are intact and the rings
// consistent.
#include <optional>
#include <set>

#include "check.hpp"
#include "hostile_peer.hpp"
#include "link.hpp"
#include "tsan.hpp"
#include "users.hpp"

namespace testing {

namespace {

constexpr uint64_t BYTES_INSIDE = 1 << 20, CAPACITY = 4;
constexpr uint32_t STREAMS = 3;
constexpr uint16_t PORTS = 2;
constexpr uint64_t SIZES[] = {8, 9, 80, 1000, 16 << 10, 70'000};
constexpr uint64_t CONNECTIONS_PER_LINK = 40;  // connections in the life of one link

std::string payload_of(uint64_t value, uint64_t size) {
    const Message message(value, size);
    return {message.bytes.data(), size};
}

void sound(Ring& ring) {
    const std::string wrong = locked(ring, [&](Wakes&) { return check(ring); });
    must(wrong.empty(), wrong);
}

// --- model ---

// One port of a stream, the user that reads it as a worker would, and the items that must arrive next.
struct Port {
    std::shared_ptr<Ring> ring = std::make_shared<Ring>(CAPACITY, BYTES_INSIDE);
    const uint32_t feed = open_session(*ring, Session::WRITER);
    User reads = open(*ring, Session::READER);
    std::vector<uint64_t> expected;
    uint64_t got = 0;      // how many frames were received
    bool refuses = false;  // an item was too large, so no later item is put
    // the last truncated item, and how many of its bytes the link has reported
    Head cut_head{};
    uint64_t cut_value = 0, part = 0;

    void expect(uint64_t value) {
        got += 1;
        if (!refuses) expected.push_back(value);
    }
    void take_all() {
        uint64_t value = 0;
        for (uint64_t right : expected) {
            // An item that is too large breaks the channel, which drops the items that wait for room.
            const Step step = reads.get(value, Deadline{refuses ? 0 : now_ns() + EVENT_LIMIT_NS});
            if (refuses && step == Step::NotNow) break;
            must(step == Step::Done && value == right, "an item is wrong or out of order");
        }
        expected.clear();
        must(reads.get(value, Deadline{0}) == Step::NotNow, "more items arrived than were valid");
    }
    Link::Putting putting() const {
        WriterState writer;
        writer.session = feed;
        return {ring, writer, false, false};
    }
};

class Model {
  public:
    explicit Model(Draw& draw) : draw_(draw) {
        for (uint32_t stream = 0; stream < STREAMS; ++stream)
            link_.open_stream(stream, {}, {ports_[stream][0].putting(), ports_[stream][1].putting()},
                              draw.one_in(2), false);
    }
    ~Model() {
        link_.close();
        for (auto& stream : ports_)
            for (Port& port : stream) sound(*port.ring);
    }

    void meet() {
        Peer peer(link_, draw_);
        hear_states(peer);
        Sent sent = Sent::Right;
        for (uint64_t left = draw_.below(12); left && sent == Sent::Right; --left)
            sent = send_something(peer);
        if (sent == Sent::Right) must(peer.wait(), "a valid frame has ended the connection");
        if (sent == Sent::Wrong) must(!peer.wait(), "an invalid frame has not ended the connection");
        peer.end();
        for (auto& stream : ports_)
            for (Port& port : stream) port.take_all();
    }

  private:
    enum class Sent { Right, Wrong, Cut };

    // Check the link's report of how many frames earlier connections delivered.
    void hear_states(Peer& peer) {
        for (auto& stream : ports_)
            for (Port& port : stream) port.part = 0;  // the link reports what it still has
        for (std::set<std::pair<uint32_t, uint16_t>> received; received.size() < STREAMS * PORTS;) {
            const std::optional<Head> head = peer.next_frame();
            must(head.has_value(), "a new connection has ended early");
            if (head->type == FrameType::PART) ports_[head->stream][head->port].part = head->a;
            if (head->type != FrameType::INPUT) continue;
            must(head->a == ports_[head->stream][head->port].got,
                 "the reported count differs from the sent frames");
            received.emplace(head->stream, head->port);
        }
    }

    Sent send_something(Peer& peer) {
        Head head{.stream = uint32_t(draw_.below(STREAMS)),
                  .port = uint16_t(draw_.below(PORTS)),
                  .type = FrameType::ITEM};
        head.size = draw_.one_in(100) ? BYTES_INSIDE + 1 : draw_.of(SIZES);
        head.n = ports_[head.stream][head.port].got;
        head.flags = uint8_t((1 + draw_.below(4)) | draw_.below(32) << 3);
        if (draw_.one_in(8))
            head = {.n = draw_.number(), .type = draw_.one_in(2) ? FrameType::PING : FrameType::PONG};
        if (draw_.one_in(6)) change(head);
        if (is_valid(head) && is_expected(head) && head.type == FrameType::ITEM && head.stream < STREAMS)
            if (Port& begun = ports_[head.stream][head.port]; begun.part) return send_rest(peer, begun);
        const bool right = is_valid(head), here = right && is_expected(head);
        const bool endless = right && head.size > 2 * BYTES_INSIDE;
        const uint64_t value = next_++;
        peer.add_frame(head,
                       right && !endless ? payload_of(value, head.size) : draw_.bytes(draw_.below(100)));
        const bool cut = here && !endless && draw_.one_in(40);
        if (cut) peer.cut();
        peer.send();
        Port* port = here && head.type == FrameType::ITEM && head.stream < STREAMS
                         ? &ports_[head.stream][head.port]
                         : nullptr;
        if (port && cut) port->cut_head = head, port->cut_value = value;
        if (port) port->refuses = port->refuses || head.size > BYTES_INSIDE;
        if (cut || endless) return Sent::Cut;
        if (!here) return Sent::Wrong;
        if (port) port->expect(value);
        return Sent::Right;
    }

    // Send the rest of an item whose first bytes arrived on an earlier connection.
    Sent send_rest(Peer& peer, Port& port) {
        Head head = port.cut_head;
        const uint64_t part = std::exchange(port.part, 0);
        const std::string payload = payload_of(port.cut_value, head.size);
        must(part < payload.size(), "the link reports more bytes than were sent");
        head.size -= part;
        peer.add_frame(head, payload.substr(part));
        peer.send();
        port.expect(port.cut_value);
        return Sent::Right;
    }

    void change(Head& head) {
        switch (draw_.below(7)) {
            case 0:
                head.n = draw_.number();
                break;
            case 1:
                head.n += draw_.below(5) - 2;
                break;
            case 2:
                head.stream = uint32_t(draw_.number());
                break;
            case 3:
                head.port = uint16_t(draw_.number());
                break;
            case 4:
                head.type = FrameType(draw_.below(256));
                break;
            case 5:
                head.flags = uint8_t(draw_.any());
                break;
            default:
                head.size = draw_.number();
        }
        if (head.type == FrameType::END || head.type == FrameType::RECALL)
            head.type = FrameType::OUT;  // only the link sends END and RECALL
        if (head.carries_item()) head.size = std::max(head.size, Message::LEAST);
    }

    // Return whether an agent may receive this frame now.
    bool is_expected(const Head& head) {
        if (head.type == FrameType::PING) return true;
        if (head.type == FrameType::PONG) return int64_t(head.n) >= 0 && int64_t(head.n) < now_ns();
        if (head.type != FrameType::ITEM && head.type != FrameType::OUTPUT && head.type != FrameType::MOVED &&
            head.type != FrameType::PULL)
            return false;
        if (head.stream >= STREAMS) return true;  // the stream may be closed, or not open yet
        // The streams have no outputs.
        if (head.type == FrameType::OUTPUT || head.type == FrameType::PULL) return false;
        if (head.port >= PORTS) return false;
        const bool is_reference = head.kind() == REFERENCE_KIND;  // a random payload is never a location
        if (head.type == FrameType::MOVED) return !is_reference;
        const Port& port = ports_[head.stream][head.port];
        return port.refuses || (head.n == port.got && !is_reference);
    }

    Draw& draw_;
    Link link_{false};
    Port ports_[STREAMS][PORTS];
    uint64_t next_ = 1;
};

// --- owner and worker ---

// A stream: the link takes items from one ring and puts items into another.
struct Ends {
    std::shared_ptr<Ring> from = std::make_shared<Ring>(CAPACITY, BYTES_INSIDE);
    std::shared_ptr<Ring> to = std::make_shared<Ring>(CAPACITY, BYTES_INSIDE);
    const uint32_t taker = open_session(*from, Session::READER), putter = open_session(*to, Session::WRITER);
    User feeds = open(*from, Session::WRITER), drains = open(*to, Session::READER);
    uint64_t received = 0;  // items that the peer received
    uint64_t got = 0;       // items that the link received, as far as the peer knows
    std::string sent;       // the last payload sent
    // The link has the first `part` bytes of item number `cut_number`, whose payload is `cut`.
    std::string cut;
    uint64_t cut_number = UINT64_MAX, part = 0;
};

class Anything {
  public:
    Anything(bool owner_side, Draw& draw) : owner_side_(owner_side), draw_(draw), link_(owner_side) {
        for (uint32_t stream = 0; stream < STREAMS; ++stream) {
            Ends& ends = ends_[stream];
            WriterState writer;
            writer.session = ends.putter;
            writer.ordered = owner_side && stream == 1;
            link_.open_stream(stream, {{ends.from, ends.taker}},
                              {{ends.to, writer, owner_side, owner_side && stream == 2}}, draw.one_in(2),
                              draw.one_in(2));
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
        Peer peer(link_, draw_);
        hear_reports(peer);
        bool whole = true;
        for (uint64_t left = draw_.below(30); left && whole; --left) {
            move();
            whole = send_something(peer);
            if (draw_.one_in(2)) peer.send();
            if (whole && draw_.one_in(4) && !peer.wait()) break;
            while (peer.has_more() && count_frame(peer)) {}
        }
        if (draw_.one_in(4)) peer.cut();
        peer.send();
        peer.end();
    }

  private:
    // Put an item into one ring of a stream, and read items from its other ring.
    void move() {
        Ends& ends = ends_[draw_.below(STREAMS)];
        if (draw_.one_in(3)) ends.feeds.put(Message(draw_.any(), draw_.of(SIZES)), Deadline{0});
        uint64_t value = 0;
        while (draw_.one_in(2) && ends.drains.get(value, Deadline{0}) == Step::Done) {}
    }
    // Wait for the link's reports about the items that it has received over earlier connections.
    void hear_reports(Peer& peer) {
        for (Ends& ends : ends_) ends.part = 0;
        for (std::set<uint32_t> reported; reported.size() < STREAMS;) {
            const std::optional<Head> head = count_frame(peer);
            must(head.has_value(), "a new connection has ended early");
            if (is_report(*head)) reported.insert(head->stream);
        }
        for (Ends& ends : ends_)
            if (!ends.part) ends.cut_number = UINT64_MAX;
    }
    static bool is_report(const Head& head) {
        return head.type == FrameType::INPUT || head.type == FrameType::OUTPUT;
    }
    std::optional<Head> count_frame(Peer& peer) {
        const std::optional<Head> head = peer.next_frame();
        if (!head || head->stream >= STREAMS) return head;
        Ends& ends = ends_[head->stream];
        if (head->carries_item()) ends.received += 1;
        if (is_report(*head)) ends.got = head->a;
        if (head->type == FrameType::PART) {
            // Only the last frame of a connection is ever truncated.
            if (std::exchange(ends.cut_number, head->n) != head->n) ends.cut = ends.sent;
            ends.part = head->a;
        }
        return head;
    }

    // Return false if the bytes were not a complete frame, because the link then ignores everything after
    // them.
    bool send_something(Peer& peer) {
        if (draw_.one_in(100)) return peer.add_frame(draw_.bytes(draw_.below(200))), false;
        const uint32_t stream = uint32_t(draw_.below(STREAMS));
        const FrameType sent_count[] = {FrameType::OPEN,   FrameType::INPUT, FrameType::OUTPUT,
                                        FrameType::ITEM,   FrameType::OUT,   FrameType::END,
                                        FrameType::RECALL, FrameType::PONG};
        const FrameType usual[] = {owner_side_ ? FrameType::INPUT : FrameType::OUTPUT,
                                   owner_side_ ? FrameType::OUT : FrameType::ITEM};
        Head head{.n = near(stream),
                  .stream = stream,
                  .type = draw_.one_in(4) ? draw_.of(sent_count) : draw_.of(usual)};
        head.a = near(stream);
        head.b = std::min(head.a, near(stream));
        if (head.carries_item()) {
            if (!owner_side_ && draw_.one_in(2)) head.n = ends_[stream].got++;
            head.size = draw_.of(SIZES);
            head.flags = uint8_t((1 + draw_.below(4)) | draw_.below(32) << 3);
        } else {
            const uint8_t seldom = uint8_t(draw_.one_in(30) ? BREAK | NO_MORE : RECALLED);
            head.flags = uint8_t(draw_.any() & (STARVED | USERS | UNPICKLED | seldom));
            if (head.type == FrameType::END) head.flags |= owner_side_ ? IS_OUTPUT : 0;
            if (head.type == FrameType::END && !draw_.one_in(20)) return true;
            head.size = head.flags & BREAK ? draw_.below(200) : 0;
        }
        if (draw_.one_in(20)) head.n = draw_.number();
        if (draw_.one_in(40)) head.a = draw_.number();
        if (draw_.one_in(40)) head.size = draw_.number();
        if (draw_.one_in(40)) head.port = uint16_t(draw_.number());
        return send_payload(peer, head);
    }
    // Send a frame with its payload. If the link has a part of an item, send the rest of that item instead.
    // Return false if the payload is too long to be sent in full.
    bool send_payload(Peer& peer, Head head) {
        const uint64_t size = std::min(head.size, 2 * BYTES_INSIDE);
        const bool whole = size == head.size;
        std::string payload = payload_of(draw_.any(), size);
        if (head.carries_item() && head.stream < STREAMS) {
            Ends& ends = ends_[head.stream];
            if (const uint64_t part = std::exchange(ends.part, 0)) {
                must(part < ends.cut.size(), "the link reports more bytes than were sent");
                payload = ends.cut.substr(part);
                head.size = payload.size();
            } else {
                ends.sent = payload;
            }
        }
        peer.add_frame(head, payload);
        return whole;
    }
    uint64_t near(uint32_t stream) {
        return ends_[stream].received + (draw_.one_in(8) ? draw_.below(3) - 1 : 0);
    }

    const bool owner_side_;
    Draw& draw_;
    Link link_;
    Ends ends_[STREAMS];
};

template <class World, class Make>
void meet_often(uint64_t frames, Make make) {
    std::unique_ptr<World> world;
    for (uint64_t n = 0; Peer::sent_count < frames; ++n) {
        if (n % CONNECTIONS_PER_LINK == 0) world.reset(), world = make();
        world->meet();
    }
}

}  // namespace

}  // namespace testing

int main(int argc, char** argv) {
    using namespace testing;
    must(argc == 4, "arguments: 'model', 'owner' or 'worker', a seed, and the number of frames");
    const std::string what = argv[1];
    Draw draw(strtoull(argv[2], nullptr, 10));
    const uint64_t frames = strtoull(argv[3], nullptr, 10);
    if (what == "model")
        meet_often<Model>(frames, [&] { return std::make_unique<Model>(draw); });
    else
        meet_often<Anything>(frames, [&] { return std::make_unique<Anything>(what == "owner", draw); });
    printf("all connections of %llu frames have ended\n", static_cast<unsigned long long>(Peer::sent_count));
}
