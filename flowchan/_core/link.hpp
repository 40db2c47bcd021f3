// Link: the connection between two hosts of a run, and the ports of the remote workers that it serves.
//
// The owner side has the channels, and the worker side runs remote workers. A remote worker has ports on the
// owner side, like every worker. For each of these ports, the worker side has a ring that the worker reads or
// writes. A stream of the link connects the ports of one worker with these rings. On the owner side, a Source
// leases items and sends them as ITEM frames. On the worker side, a Sink puts them into a ring. The outputs
// of the worker come back as OUT frames (wire.hpp).
//
// Exactly once. A sent item stays on lease where it came from. For an output, the lease ends when the other
// side has put it into its ring. For an item, the worker must have finished it, *and* all of its outputs must
// be in their rings on the owner side (R4). The frames of a port are ordered and numbered. After a break,
// each side reports what it has received, and the other side goes on from there. Only Python code connects,
// listens and authenticates. It passes each new connection to `attach`, with or without TLS. A worker
// processes one item after another, so its outputs come in the order of its items. Each output names its
// item, and the owner side puts it as an output for that item, as it does for a local worker. If the worker
// dies, the next worker that gets the item skips the outputs that have already been put.
//
// Large outputs for remote workers stay on the host that made them (references.hpp, link_references.cpp).
//
// No thread waits for a receiver. A Source sends only as many items as fit into the worker's window. Outputs
// are sent until too many of them wait for room on the owner side (these are *staged*). So a slow stage does
// not delay the frames of other stages.
//
// Two threads serve a link: one sends and moves staged items, the other receives. (If there are many workers,
// more threads sleep on the rings and wake the sender.) Both work under `mutex_`, except while they send,
// receive, or copy a large item. Neither ever needs the GIL.
#pragma once

#include <algorithm>
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
#include "references.hpp"

namespace flowchan {

struct LinkStream {
    uint32_t number = 0;
    // owner side: the stream through which the same process gets items from this channel; 0: none
    uint32_t partner = 0;
    bool announced = false;  // worker side: OPEN was sent over the current connection
    int filling = 0;         // number of large items that are arriving for its rings
    // owner side: the worker will send nothing more, and everything that it sent has been put
    bool finished = false;
    bool settling = false;       // owner side: an item can finish only when its turn comes
    std::deque<Source> sources;  // owner side: the worker's inputs; worker side: its outputs
    std::deque<Sink> sinks;      // the other ports
};

// An event of a link. flowchan/transport/link_events.py documents the kinds. Each kind sets only some of the
// fields.
struct LinkEvent {
    enum class Kind : uint8_t { None, Broken, Finished, Refused, TooLarge, ToFetch, NotRemade, Closed };

    Kind kind = Kind::None;
    uint32_t stream = 0;
    uint16_t port = 0;
    uint64_t size = 0;
    std::string why;  // ToFetch: the location
};

// The current counts of a stream, summed over its input ports.
struct StreamCounts {
    uint32_t number;
    // items that are in transit or with the worker; items started; outputs that wait for room
    uint64_t ahead, started, staged;
    uint64_t window;       // how many bytes this side may have in transit
    bool starved;          // the worker waits for an item
    uint64_t taken, used;  // items taken out of the rings on this side, and put into them, in total
    // number of wait queues on this side in which the link waits on behalf of the other side
    uint64_t standing;
};

// The bytes to send, in order. Small pieces are copied, and large items are sent from where they are. Only
// the sender thread uses this.
class Outgoing {
  public:
    uint64_t size() const { return size_; }
    void add(const void* head, uint64_t length, const void* at, uint64_t size);
    void add_in_place(std::shared_ptr<Ring> ring, const char* at, uint64_t size);
    // sends up to `most` bytes, and waits until the other side accepts them; returns the error text, or ""
    std::string send(int fd, uint64_t most);
    void clear() { *this = {}; }

  private:
    struct Piece {
        std::shared_ptr<Ring> ring;  // keeps the piece mapped; null: the piece is in `copied_`
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
    explicit Link(bool owner_side);
    ~Link();
    Link(const Link&) = delete;

    void attach(int fd);  // takes ownership of the descriptor, and resends unacknowledged items
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
    // `on_demand`: send items only to workers that wait for an item or process one. `limited`: the owner side
    // grants the other side one put for each free place, but other writers may still take the place first.
    // `lends`: large outputs of the first port stay on the worker's side until a host fetches them.
    void open_stream(uint32_t number, const std::vector<Taking>& takes, const std::vector<Putting>& puts,
                     bool on_demand, bool limited, bool lends = false);
    // owner side: items prefetched through stream `reads` take up room that stream `writes` would otherwise
    // grant
    void pair_streams(uint32_t writes, uint32_t reads);
    // Owner side: send up to `most` of the next items of a stream's input, even while other readers wait.
    // Return how many were sent in total, and whether the channel has ended or the stream is gone. Return
    // nothing during a recall.
    std::optional<std::pair<uint64_t, bool>> offer(uint32_t number, uint64_t most);
    // Return how many puts were granted in total, and whether the channel has ended.
    std::pair<uint64_t, bool> room(uint32_t number);
    // Worker side: wait until the owner has put `count` items of a stream's output, and return true. Return
    // false if it never will, and nothing at the deadline.
    std::optional<bool> await_used(uint32_t number, uint64_t count, int64_t until);
    void drop_stream(uint32_t number);
    // Outputs that stay on the worker's side until another host fetches them (references.hpp). On the owner
    // side, set the address at which hosts fetch them before opening the first stream.
    void set_fetch_address(std::string address) { fetch_address_ = std::move(address); }
    const std::string& fetch_address() const { return fetch_address_; }
    // Worker side: send outputs to the host behind `fd` until the connection ends.
    void serve_fetches(int fd);
    // Worker side: fetch an output over `fd`. Return false if the other host does not have it. Throw
    // std::system_error if the connection fails.
    bool fetch(int fd, const std::string& location);
    void report_unreachable(const std::string& location);  // worker side: the output cannot be fetched
    void ring_doorbell();
    std::atomic<bool> has_messages{false};  // true if the table of references has messages for this link
    void close();
    LinkEvent next_event(int64_t until);  // returns an event of kind None at the deadline

    // Time in ns: since the last byte arrived, and of a round trip.
    int64_t silent_for() const { return now_ns() - last_byte_at_.load(std::memory_order_relaxed); }
    int64_t round_trip() const { return round_trip_.load(std::memory_order_relaxed); }
    bool connected();
    // Return how long, in ns, connections have kept breaking while items were in transit and none arrived.
    // Return 0 until this has happened to two connections in a row.
    int64_t stuck_for();
    uint64_t breaks_in_vain();  // connections in a row that broke without progress
    std::vector<StreamCounts> counts();
    std::atomic<uint64_t> bytes_in{0}, bytes_out{0}, breaks{0};

  private:
    static constexpr uint64_t GATHER = 256 << 10;  // most bytes to send or receive at a time
    static constexpr uint64_t LARGE = 64 << 10;    // larger items are not copied along the way

    // sending (link_send.cpp)
    void send_loop();
    std::string send_some(int fd);  // returns the error text, or ""
    bool fill();
    bool serve_as_owner(LinkStream& stream);
    void report_output(LinkStream& stream, Sink& sink, uint16_t port);
    bool add_items(LinkStream& stream, Source& source, uint16_t port);
    bool free_unread(LinkStream& stream, Sink& sink);
    static bool has_replays(const LinkStream& stream) {
        return std::ranges::any_of(stream.sources, [](const Source& source) { return source.replays > 0; });
    }
    bool can_put(LinkStream& stream, Sink& sink, const Sink::Staged& item);
    bool serve_as_worker(LinkStream& stream);
    void add_progress(LinkStream& stream);
    void add_item(LinkStream& stream, Source& source, uint16_t port);
    bool add_outputs(LinkStream& stream);
    bool add_end(LinkStream& stream, Source& source, uint16_t port);
    void report_want(LinkStream& stream, Source& source, uint16_t port);
    void report_part(const LinkStream& stream, Sink& sink, uint16_t port);
    bool handle_want(Sink& sink, bool wanted);
    uint64_t allowed(const Source& source) const {
        if (owner_side_) return source.allowed_ahead();
        return source.remakes ? MOST_AHEAD : source.allowance.most();
    }
    uint64_t prefetched(const LinkStream& stream) {
        const LinkStream* reads = stream.partner ? find(stream.partner) : nullptr;
        return reads && reads->sources.size() == 1 ? reads->sources[0].entries.size() : 0;
    }
    bool is_full() const { return out_.size() >= GATHER; }
    Step put(LinkStream& stream, Sink& sink, const Received& item, uint64_t output, Wakes& wakes);
    uint64_t repair(const Sink& sink, const Received& item, uint64_t number, uint64_t index);
    bool is_of_replay(LinkStream& stream, const Sink& sink, uint64_t key);
    void replace_lost(LinkStream& stream, Sink& sink, const Received& item);
    void forget_references(LinkStream& stream);
    void report_if_not_remade(const LinkStream& stream, const Source::Entry& entry);
    void report_if_refused(const LinkStream& stream, Source& source, uint16_t port);
    bool collect(LinkStream& stream, Watched& all, int64_t& until);
    void sleep(uint32_t heard);
    void add_frame(const Head& head, const std::string& payload = {});

    // staged items (link_staged.cpp)
    bool move_staged(LinkStream& stream);
    void report_if_finished(LinkStream& stream);
    bool settle(LinkStream& stream);
    bool settle_sink(LinkStream& stream, Sink& sink, uint64_t upto, Wakes& wakes);

    // references (link_references.cpp)
    void handle_messages();
    void report_moves();
    bool add_reference(const LinkStream& stream, Source& source, uint16_t port);
    void add_pulled(const LinkStream& stream, Source& source, uint16_t port);
    void report_unreachable_items(LinkStream& stream);

    // receiving (link_receive.cpp)
    void receive_loop();
    std::string receive(int fd, uint64_t connection);  // returns why the connection ended
    bool is_sent_here_only(FrameType type) const;
    bool handle_pong(int64_t pinged_at);
    bool handle(const Head& head, const char* payload);  // returns false if the other side sent invalid data
    void release_ring();
    bool handle_item(LinkStream& stream, Sink& sink, const Received& item);
    bool receive_item(LinkStream& stream, Sink& sink, const Received& item);
    uint64_t add_kept(const LinkStream& stream, const Sink& sink, const Received& item);
    bool handle_location(LinkStream& stream, Sink& sink, const Received& item);
    bool handle_moved(const LinkStream& stream, Sink& sink, const Head& head, const char* payload);
    bool handle_about_reference(LinkStream& stream, const Head& head, const char* payload);
    bool handle_unreachable(Source& source, uint64_t item);
    void report_to_fetch(const LinkStream& stream, const Sink& sink, const std::vector<char>& location);
    Sink::Staged* find_staged(const Location& location);
    uint64_t handle_run(const char* at, uint64_t size);
    void hold(Sink& sink, uint64_t items);
    bool handle_input(LinkStream& stream, const Head& head, const char* payload);
    bool handle_output(LinkStream& stream, const Head& head, const char* payload);
    bool handle_end(LinkStream& stream, Sink& sink, const Head& head, const char* payload);
    bool claim(LinkStream& stream, Sink& sink, const Received& item, Slot*& slot);
    void count_arrival(Sink& sink, bool is_news);
    void refuse(const LinkStream& stream, Sink& sink, uint64_t size);
    struct Following {  // the bytes that follow a large item
        char* at;
        uint64_t room, have = 0;
    };
    struct Large {  // a large item that is arriving
        Received item;
        LinkStream* stream = nullptr;
        Sink* sink = nullptr;  // null: no port receives the item
        Slot* slot = nullptr;  // null: the item has no room yet
        // whether a dead worker had already put this item, and the item's index among the outputs for its
        // input
        bool skips = false;
        uint64_t index = 0;
        bool is_of_replay = false;
        std::vector<char> buffer;
        std::vector<char> part;  // what arrived over earlier connections
        // A skipped item also gets a buffer, so that a break does not lose the bytes that have arrived.
        bool is_to_be_staged() const { return sink && !slot; }
    };
    bool begin_large(const Head& head, Large& large);
    bool end_large(Large& large, bool whole);
    void pass_over(const Head& head);
    bool handle_part(Source& source, const Head& head);
    void note_acknowledged(Source& source, uint64_t got);
    void note_progress() {
        progress_at_.store(last_byte_at_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    }
    bool receive_large(int fd, uint64_t connection, const Head& head, const char* begun, uint64_t size,
                       Following& following);
    std::vector<char> with_part(Sink& sink, const char* rest, uint64_t size);
    uint64_t read_large(int fd, char* to, const char* begun, uint64_t have, uint64_t size,
                        Following& following);
    bool is_settled(LinkStream& stream, const Sink& sink, uint64_t key);
    Source* numbering(LinkStream& stream, const Sink& sink) {
        return owner_side_ && sink.follows && stream.sources.size() == 1 ? &stream.sources[0] : nullptr;
    }
    bool is_valid_key(LinkStream& stream, const Sink& sink, uint64_t key);
    uint64_t number_for(LinkStream& stream, const Sink& sink, uint64_t key);
    LinkStream* find(uint32_t number);
    void ring_doorbell_if_news() {
        if (std::exchange(has_news_, false)) ring_doorbell();
    }
    void leave_connection(int fd, const std::string& why);
    void note_break();
    void report(LinkEvent event);
    void take_over(std::unique_lock<std::mutex>& lock, int fd);

    static void before_fork();
    static void after_fork();
    static void in_child();
    static const int fork_hook;

    const bool owner_side_;
    const int pid_;
    std::mutex mutex_, closing_;
    // Signals that the connection or `filling` has changed. It is on the heap, because a forked child must
    // not destroy it. The destructor would wait for threads that the child does not have.
    std::condition_variable& changed_ = *new std::condition_variable;
    std::map<uint32_t, std::unique_ptr<LinkStream>> streams_;
    int fd_ = -1;
    int users_ = 0;  // threads that are sending or receiving over fd_
    uint64_t connection_ = 0;
    bool closed_ = false;
    int64_t connected_at_ = 0;
    int64_t stuck_since_ = 0;  // see stuck_for()
    uint64_t breaks_in_vain_ = 0;
    bool lost_ = false;  // the connection is unusable; its last user closes fd_
    std::string fetch_address_;
    uint64_t seen_generation_ = 0;  // generation() of the table of references when it was last read
    uint32_t last_served_ = 0;      // the next round begins after this stream

    // The sender also changes `out_` without the mutex, so a fork may copy it in the middle of a change.
    // Therefore `out_` is on the heap like `changed_`.
    Outgoing& out_ = *new Outgoing;
    uint64_t queued_items_ = 0;  // items in `out_`
    bool has_news_ = false;      // the receiver has changed something that the sender must handle
    // For the receiver: the lock of the ring into which it is putting items, kept over several items.
    std::optional<RingLock> held_;
    Ring* held_ring_ = nullptr;
    uint32_t held_for_ = 0;
    bool pong_ = false;
    uint64_t pong_n_ = 0;
    int64_t pinged_at_ = 0;
    bool timed_ = false;  // round_trip_ was measured over this connection
    int64_t least_trip_ = 200'000;

    std::atomic<uint32_t> doorbell_{0};
    std::atomic<bool> asleep_{false};
    // when the last byte arrived; when an item, a part of one or an acknowledgement last arrived
    std::atomic<int64_t> last_byte_at_{0}, progress_at_{0}, round_trip_{200'000};
    std::deque<LinkEvent> events_;
    // on the heap, like `changed_`
    std::condition_variable& event_added_ = *new std::condition_variable;
    // On the heap, because a forked child does not have these threads. The child must not even detach them:
    // their state is on their stacks, and its own threads may have reused that memory.
    std::thread &sender_ = *new std::thread, &receiver_ = *new std::thread;
    ExtraSleepers extra_sleepers_{[this] { ring_doorbell(); }};  // for words beyond the sender's own limit
};

}  // namespace flowchan
