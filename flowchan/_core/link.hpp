// Link: the connection between two hosts of a run, and the ports of the workers that it serves.
//
// A worker elsewhere has its ports at home, where its channels live, as every worker has. A line couples each
// of them with a ring on the other host that the worker reads or writes: items that a Source takes on lease at
// home go as ITEM frames into the Sink there, its outputs come back as OUT frames (wire.hpp).
//
// Exactly once. What was sent stays on lease where it came from: an output until the other side has put it
// into its ring, an item until the worker has finished it *and* all its outputs are in their rings at home
// (R4). Frames of a port are in order and are counted; after a break each side says what it has got, and the
// other sends from there. Only Python dials, listens and proves secrets; it hands over each new connection
// (`attach`), with TLS as without. A worker does one item after the other, so its outputs come in the order of its
// items, and each says of which item it is: home puts it as that item's output, as if the worker were here,
// and whoever does the item again after a death skips what is out already.
//
// Nothing waits for a receiver: items are sent only as far as the worker's window goes, outputs only until so
// many wait for room at home (staged). So one slow stage does not hold up the frames of the others.
//
// Two threads serve a link: one sends, and moves what is staged; one receives. (With many workers further ones
// sleep on their rings, and wake the sender.) Both work under `mutex_`, but
// not while they send or receive, or copy a large item. Neither ever needs the GIL.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "extra_sleepers.hpp"
#include "link_ports.hpp"

namespace flowchan {

struct LinkLine {
    uint32_t number = 0;
    bool announced = false;      // away: said to be open, over this connection
    int filling = 0;             // large items that are being received into its rings
    bool finished = false;       // home: nothing more comes from the worker, and everything is put
    bool settling = false;       // home: a turn is awaited before an item can be done with
    std::deque<Source> sources;  // home: of the worker's inputs; away: of its outputs
    std::deque<Sink> sinks;      // the other ones
};

// What has happened to a link: flowchan/transport/link_events.py says what each kind means. Only the fields of
// its kind are set.
struct LinkEvent {
    enum class Kind : uint8_t { None, Broken, Finished, Refused, TooLarge, Closed };

    Kind kind = Kind::None;
    uint32_t line = 0;
    uint16_t port = 0;
    uint64_t size = 0;
    std::string why;
};

// The counts of one line at this moment, by input port.
struct LineCounts {
    uint32_t number;
    uint64_t ahead, in_hand, staged;  // on their way or with the worker; begun; outputs that wait for room
    uint64_t window;                  // bytes that may be on their way from here
    bool starved;                     // the worker waits for an item
};

// What is to be sent, in its order: small things are copied, large items lie where they are. Nobody but the
// sender's thread touches it.
class Outgoing {
  public:
    uint64_t size() const { return size_; }
    void add(const void* head, uint64_t length, const void* at, uint64_t size);
    void add_in_place(std::shared_ptr<Ring> ring, const char* at, uint64_t size);
    std::string send(int fd, uint64_t most);  // that much, waiting for the other side; why not, or ""
    void clear() { *this = {}; }

  private:
    struct Piece {
        std::shared_ptr<Ring> ring;  // kept mapped; null: it lies in `copied_`
        const char* at;
        uint64_t begin, size;
    };
    void forget_sent();
    std::vector<char> copied_;
    std::deque<Piece> pieces_;
    uint64_t size_ = 0;
};

class Link {
  public:
    explicit Link(bool home);
    ~Link();
    Link(const Link&) = delete;

    void attach(int fd);  // takes over the descriptor; what was sent and is not acknowledged is sent again
    struct Taking {
        std::shared_ptr<Ring> ring;
        uint32_t session;
        bool alone;
    };
    struct Putting {
        std::shared_ptr<Ring> ring;
        WriterState writer;
        bool follows, replays;
    };
    // `on_demand`: items come for those only who wait for one, or work on one.
    void open_line(uint32_t number, const std::vector<Taking>& takes, const std::vector<Putting>& puts,
                   bool on_demand);
    void drop_line(uint32_t number);
    void close();
    LinkEvent next_event(int64_t until);  // of kind None when there is none by then

    // Since the last byte came, and there and back; in ns.
    int64_t silent_for() const { return now_ns() - heard_at_.load(std::memory_order_relaxed); }
    int64_t round_trip() const { return round_trip_.load(std::memory_order_relaxed); }
    bool connected();
    std::vector<LineCounts> counts();
    std::atomic<uint64_t> bytes_in{0}, bytes_out{0}, breaks{0};

  private:
    static constexpr uint64_t GATHER = 256 << 10;  // bytes sent or received at a time
    static constexpr uint64_t LARGE = 64 << 10;    // items from here on are not copied on their way

    // sending (link_send.cpp)
    void send_loop();
    std::string send_some(int fd);  // why not, or ""
    bool fill();
    bool serve_home(LinkLine& line);
    bool serve_away(LinkLine& line);
    void say_progress(LinkLine& line);
    void say_item(LinkLine& line, Source& source, uint16_t port);
    bool say_outputs(LinkLine& line);
    bool say_end(LinkLine& line, Source& source, uint16_t port);
    uint64_t allowed(const Source& source) const {
        return home_ ? source.allowed_ahead() : source.allowance.most();
    }
    bool is_full() const { return out_.size() >= GATHER; }
    bool move_staged(LinkLine& line);
    bool settle(LinkLine& line);
    void tell_if_finished(LinkLine& line);
    void tell_if_refused(const LinkLine& line, Source& source, uint16_t port);
    bool collect(LinkLine& line, Watched& all, int64_t& until);
    bool settle_sink(LinkLine& line, Sink& sink, uint64_t upto, Wakes& wakes);
    void sleep(uint32_t heard);
    void say(const Head& head, const std::string& payload = {});

    // receiving (link_receive.cpp)
    void receive_loop();
    std::string receive(int fd, uint64_t connection);  // until the connection ends: why
    bool is_said_here_only(Say say) const;
    bool hear_pong(int64_t pinged_at);
    bool hear(const Head& head, const char* payload);  // false: the other side can't be right
    void release_ring();
    bool hear_item(LinkLine& line, Sink& sink, const Received& item);
    uint64_t hear_run(const char* at, uint64_t size);
    void hold(Sink& sink, uint64_t items);
    bool hear_input(LinkLine& line, const Head& head, const char* payload);
    bool hear_output(LinkLine& line, const Head& head, const char* payload);
    bool hear_end(LinkLine& line, Sink& sink, const Head& head, const char* payload);
    bool claim(LinkLine& line, Sink& sink, const Received& item, Slot*& slot);
    void take_note(Sink& sink, bool stirs);
    void refuse(const LinkLine& line, Sink& sink, uint64_t size);
    struct Behind {  // a large item
        char* at;
        uint64_t room, have = 0;
    };
    struct Large {  // a large item that is being received
        Received item;
        LinkLine* line = nullptr;
        Sink* sink = nullptr;  // null: nobody wants it
        Slot* slot = nullptr;  // null: there is no room for it
        bool skips = false;    // a worker that died has put it already
        std::vector<char> apart;
        bool is_to_be_staged() const { return sink && !slot && !skips; }
    };
    bool begin_large(const Head& head, Large& large);
    bool end_large(Large& large, bool whole);
    void pass_over(const Head& head);
    bool hear_large(int fd, uint64_t connection, const Head& head, const char* begun, uint64_t size,
                    Behind& behind);
    bool read_large(int fd, char* to, const char* begun, uint64_t have, uint64_t size, Behind& behind);
    bool is_settled(LinkLine& line, const Sink& sink, uint64_t key);
    Source* numbering(LinkLine& line, const Sink& sink) {
        return home_ && sink.follows && line.sources.size() == 1 ? &line.sources[0] : nullptr;
    }
    bool key_is_right(LinkLine& line, const Sink& sink, uint64_t key);
    uint64_t number_for(LinkLine& line, const Sink& sink, uint64_t key);
    LinkLine* find(uint32_t number);
    void ring_bell();
    void ring_bell_if_stirred() {
        if (std::exchange(stirred_, false)) ring_bell();
    }
    void leave_connection(int fd, const std::string& why);
    void tell(LinkEvent event);
    void take_over(std::unique_lock<std::mutex>& lock, int fd);

    static void before_fork();
    static void after_fork();
    static void in_child();
    static const int fork_hook;

    const bool home_;
    const int pid_;
    std::mutex mutex_, closing_;
    // The connection, or `filling`, has changed. Not a member, for a forked child must not destroy it: that waits
    // for threads which the child does not have.
    std::condition_variable& changed_ = *new std::condition_variable;
    std::map<uint32_t, std::unique_ptr<LinkLine>> lines_;
    int fd_ = -1;
    int users_ = 0;  // threads that send or receive over fd_
    uint64_t connection_ = 0;
    bool closed_ = false;
    bool lost_ = false;         // the connection is of no use any more, its last user closes it
    uint32_t served_last_ = 0;  // the line after which the next round begins

    Outgoing out_;
    uint64_t said_ = 0;     // items among it
    bool stirred_ = false;  // the receiver has heard what the sender has to know
    // The receiver's: the ring that items are being put into, locked for some of them at a time.
    std::optional<Holding> held_;
    Ring* held_ring_ = nullptr;
    uint32_t held_for_ = 0;
    bool pong_ = false;
    uint64_t pong_n_ = 0;
    int64_t pinged_at_ = 0;
    bool timed_ = false;  // over this connection
    int64_t least_trip_ = 200'000;

    std::atomic<uint32_t> bell_{0};
    std::atomic<bool> asleep_{false};
    std::atomic<int64_t> heard_at_{0}, round_trip_{200'000};
    std::deque<LinkEvent> events_;
    std::condition_variable& told_ = *new std::condition_variable;  // likewise
    std::thread sender_, receiver_;
    Lookouts lookouts_{[this] { ring_bell(); }};  // the sender's
};

}  // namespace flowchan
