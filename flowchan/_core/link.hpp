// Link: the connection between two hosts of a run. It serves the ports of remote workers.
//
// The owner side has the channels, and the worker side runs the remote workers. Like any worker, a remote
// worker has ports on the owner side. For each port, the worker side has a ring that the worker reads or
// writes. A stream of the link connects one worker's ports with these rings. On the owner side, a Source
// leases items and sends them as ITEM frames; on the worker side, a Sink puts them into a ring. The worker's
// outputs return as OUT frames (wire.hpp).
//
// Exactly once. A sent item stays on lease in its original ring. The lease of an output ends when the other
// side has put the output into its ring. An item's lease ends only when the worker has finished it *and* all
// of its outputs are in their rings on the owner side (R4).
//
// The frames of each port are ordered and numbered. After a broken connection, each side reports what it has
// received, and the other side continues from there. Only Python code connects, listens and authenticates; it
// passes each new connection to `attach`, with or without TLS.
//
// A worker processes one item after another, so its outputs arrive in the order of its items. Each output
// names its input item, and the owner side puts the output for that item, just as a local worker would. If
// the worker dies, the next worker that gets the item skips the outputs that were already put.
//
// Large outputs for remote workers stay on the host that made them (references.hpp, link_references.cpp).
//
// No thread waits for a receiver. A Source sends only the items that fit into the worker's window. Outputs
// are sent until too many of them are *staged*, that is, waiting for room on the owner side. A slow stage
// therefore never delays the frames of other stages.
//
// Two threads serve a link: the sender also moves staged items, and the receiver reads frames. (With many
// workers, extra threads sleep on the rings and wake the sender.) The sender and the receiver hold `mutex_`
// while they work, except while they send, receive, or copy a large item. They never need the GIL.
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
#include "ready_links.hpp"
#include "references.hpp"

namespace flowchan {

struct LinkStream {
    uint32_t number = 0;
    // owner side: the stream through which the same process gets items from the same channel; 0: none
    uint32_t partner = 0;
    bool announced = false;  // worker side: OPEN was sent over this connection
    int filling = 0;         // how many large items are arriving for the stream's rings
    // owner side: the worker will send nothing more, and all of its outputs have been put
    bool finished = false;
    bool settling = false;       // owner side: an item waits for its turn to finish
    std::deque<Source> sources;  // owner side: the worker's inputs; worker side: its outputs
    std::deque<Sink> sinks;      // ports in the other direction
};

// An event of a link. Each kind sets only some of the fields; flowchan/transport/link_events.py documents
// them.
struct LinkEvent {
    enum class Kind : uint8_t { None, Broken, Finished, Refused, TooLarge, ToFetch, NotRemade, Closed };

    Kind kind = Kind::None;
    uint32_t stream = 0;
    uint16_t port = 0;
    uint64_t size = 0;
    std::string why;  // ToFetch: the location of the output
};

// Counters of a stream, summed over its input ports.
struct StreamCounts {
    uint32_t number;
    // items in transit or at the worker, items started, and outputs that wait for room
    uint64_t ahead, started, staged;
    uint64_t window;       // bytes that this side may have in transit
    bool starved;          // the worker waits for an item
    uint64_t taken, used;  // items taken from this side's rings, and put into them
    // number of wait queues on this side in which the link waits
    uint64_t standing;
};

// The bytes to send, in order. Small pieces are copied; large items are sent directly from the ring. Only the
// sender thread uses this class.
class Outgoing {
  public:
    uint64_t size() const { return size_; }
    void add(const void* head, uint64_t length, const void* at, uint64_t size);
    void add_in_place(std::shared_ptr<Ring> ring, const char* at, uint64_t size);
    // sends up to `most` bytes, waiting until the other side accepts them; returns the error text, or ""
    std::string send(int fd, uint64_t most);
    void clear() { *this = {}; }

  private:
    struct Piece {
        std::shared_ptr<Ring> ring;  // keeps the piece mapped; null if the piece was copied to `copied_`
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
    // `on_demand`: send items only to workers that wait for an item or are processing one. `limited`: grant
    // the other side one put per free place, although another writer may take the place first. `lends`: keep
    // large outputs of the first port on the worker's side until a host fetches them.
    void open_stream(uint32_t number, const std::vector<Taking>& takes, const std::vector<Putting>& puts,
                     bool on_demand, bool limited, bool lends = false);
    // owner side: reduce the room granted to stream `writes` by the number of items prefetched through stream
    // `reads`
    void pair_streams(uint32_t writes, uint32_t reads);
    // Owner side: send up to `most` more items from a stream's input, even if other readers wait. Return how
    // many were sent in total, and whether the channel has ended or the stream is gone. Return nothing during
    // a recall.
    std::optional<std::pair<uint64_t, bool>> offer(uint32_t number, uint64_t most);
    // Return how many puts were granted in total, and whether the channel has ended.
    std::pair<uint64_t, bool> room(uint32_t number);
    // Worker side: wait until the owner has put `count` items of a stream's output. Return true if it has,
    // false if it never will, and nothing at the deadline.
    std::optional<bool> await_used(uint32_t number, uint64_t count, int64_t until);
    void drop_stream(uint32_t number);
    // Outputs that stay on the worker's side until another host fetches them (references.hpp). On both sides,
    // set the address at which hosts fetch them. Do this before opening the first stream.
    void set_fetch_address(std::string address) { fetch_address_ = std::move(address); }
    const std::string& fetch_address() const { return fetch_address_; }
    // Worker side: send fetched outputs over `fd` until the connection ends.
    void serve_fetches(int fd);
    // Worker side: request an output over `fd`, and receive the oldest one that was requested. Several outputs
    // may be requested before the first one arrives. `fetch` returns false if the other host does not have the
    // output. Both throw std::system_error if the connection fails.
    void request(int fd, const std::string& location);
    bool fetch(int fd, const std::string& location);
    // worker side: reports that the output cannot be fetched
    void report_unreachable(const std::string& location);
    void ring_doorbell();
    std::atomic<bool> has_messages{false};  // the table of references has messages for this link
    void close();
    LinkEvent next_event(int64_t until);  // returns an event of kind None at the deadline
    // Add `number` to `events` when an event arrives, and to `reports` when items of stream 0 arrive.
    // Only ports use the rings of such a link.
    void announce(uint64_t number, std::shared_ptr<ReadyLinks> events, std::shared_ptr<ReadyLinks> reports);
    // Do not count the last `ns` as silence of the other side, because this process was itself delayed.
    void excuse(int64_t ns);

    // Times in ns: since the last byte arrived, and for one round trip.
    int64_t silent_for() const { return now_ns() - last_byte_at_.load(std::memory_order_relaxed); }
    int64_t round_trip() const { return round_trip_.load(std::memory_order_relaxed); }
    bool connected();
    // Return how many ns ago connections began to break with items in transit of which none arrived. Return 0
    // until two connections in a row have broken in this way.
    int64_t stuck_for();
    uint64_t breaks_in_vain();  // how many connections in a row broke without progress
    std::vector<StreamCounts> counts();
    std::atomic<uint64_t> bytes_in{0}, bytes_out{0}, breaks{0};

  private:
    static constexpr uint64_t GATHER = 256 << 10;  // maximum number of bytes to send or receive at a time

    // sending (link_send.cpp)
    void send_loop();
    std::string send_some(int fd);  // returns the error text, or ""
    bool fill();
    bool serve_as_owner(LinkStream& stream);
    void report_output(LinkStream& stream, Sink& sink, uint16_t port);
    bool add_items(LinkStream& stream, Source& source, uint16_t port);
    bool free_unread(LinkStream& stream, Sink& sink);
    static bool has_urgent(const LinkStream& stream) {
        return std::ranges::any_of(stream.sources, [](const Source& source) { return source.urgent > 0; });
    }
    std::optional<Received> to_put(LinkStream& stream, Sink& sink, Sink::Staged& item);
    bool is_here(const std::vector<char>& location) const;
    const Source::Entry* find_kept(const OutputKey& output, std::shared_ptr<Ring>* ring = nullptr);
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
    std::string receive(int fd, uint64_t connection);  // returns the reason why the connection ended
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
        Sink* sink = nullptr;  // null: the item is dropped, because no port receives it
        Slot* slot = nullptr;  // null: the item has no room yet
        // whether a dead worker already put this item, and the item's index among the outputs for its input
        bool skips = false;
        uint64_t index = 0;
        bool is_of_replay = false;
        std::vector<char> buffer;
        std::vector<char> part;  // the bytes that earlier connections delivered
        // A skipped item also has a buffer, so that its bytes survive a broken connection.
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
    void announce_items();
    void take_over(std::unique_lock<std::mutex>& lock, int fd);

    static void before_fork();
    static void after_fork();
    static void in_child();
    static const int fork_hook;

    const bool owner_side_;
    const int pid_;
    std::mutex mutex_, closing_;
    // Signals a change to the connection or to `filling`. It is on the heap because a forked child must not
    // destroy it. The destructor would wait for threads that do not exist in the child.
    std::condition_variable& changed_ = *new std::condition_variable;
    std::map<uint32_t, std::unique_ptr<LinkStream>> streams_;
    int fd_ = -1;
    int users_ = 0;  // how many threads are using fd_ to send or receive
    uint64_t connection_ = 0;
    bool closed_ = false;
    int64_t connected_at_ = 0;
    int64_t stuck_since_ = 0;  // see stuck_for()
    uint64_t breaks_in_vain_ = 0;
    bool lost_ = false;  // the connection is unusable; its last user closes fd_
    std::string fetch_address_;
    uint64_t seen_generation_ = 0;  // generation() of the table of references when it was last read
    uint32_t last_served_ = 0;      // the next round starts with the stream after this stream

    // On the heap for the same reason as `changed_`. The sender changes `out_` without the mutex, so a fork
    // may copy it half-changed.
    Outgoing& out_ = *new Outgoing;
    uint64_t queued_items_ = 0;  // how many items are in `out_`
    bool has_news_ = false;      // the receiver has changed something, so the sender must act
    // The receiver keeps the lock of a ring while it puts several items in a row.
    std::optional<RingLock> held_;
    Ring* held_ring_ = nullptr;
    uint32_t held_for_ = 0;
    bool pong_ = false;
    uint64_t pong_n_ = 0;
    int64_t pinged_at_ = 0;
    bool timed_ = false;  // round_trip_ was measured on this connection
    int64_t least_trip_ = 200'000;

    std::atomic<uint32_t> doorbell_{0};
    std::atomic<bool> asleep_{false};
    // when the last byte arrived, when the last (part of an) item or acknowledgement arrived, and the round
    // trip
    std::atomic<int64_t> last_byte_at_{0}, progress_at_{0}, round_trip_{200'000};
    std::deque<LinkEvent> events_;
    // set by announce(): where to report events and items of stream 0, and under which number; also the
    // number of items announced so far
    std::shared_ptr<ReadyLinks> ready_events_, ready_items_;
    uint64_t ready_number_ = 0, announced_ = 0;
    // on the heap for the same reason as `changed_`
    std::condition_variable& event_added_ = *new std::condition_variable;
    // On the heap, because these threads do not exist in a forked child. The child must not even detach them:
    // their state is on their stacks, and the child may have reused that memory.
    std::thread &sender_ = *new std::thread, &receiver_ = *new std::thread;
    // watch the futex words beyond the per-thread limit (words_at_once)
    ExtraSleepers extra_sleepers_{[this] { ring_doorbell(); }};
};

}  // namespace flowchan
