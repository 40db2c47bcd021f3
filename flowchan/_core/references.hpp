// References to outputs that stay on the host that made them, until the host of their reader fetches them.
//
// A large output of a remote worker is not sent to the owner of the channel. The worker's host keeps it on
// lease in the worker's ring, and sends a reference. The owner puts the reference into the channel, so order,
// numbers and leases are those of any other item. When a remote worker takes the reference, its host gets the
// location of the output and fetches it from there. When that worker has finished the item, the owner
// releases the reference, and the host that made the output frees it.
//
// Exactly once. The owner keeps the input item of such an output on lease until the output is released. If
// the host is lost, its references are lost, and the input item goes back to its channel, marked as a replay.
// The outputs of a replay are not put into the channel. Each one takes the place of the lost output that has
// the same input item and index. If that output has been released, the new one is dropped. The reference to the output
// keeps its place in the channel and its lease. If a host cannot connect to another one, the owner pulls the
// output to itself and sends it on.
//
// Threads. One table serves all links of the process. Its lock is taken last: under the locks of a link and
// of a ring, and never around them.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace flowchan {

class Link;
class Ring;

// The place where a remote host finds an output. A reference has this payload on its way to the reader's
// host. The address of the host that has the output follows.
struct Location {
    uint64_t id;      // of the reference
    uint64_t size;    // of the output, in bytes
    uint64_t output;  // number of the output on its stream
    uint32_t stream;
    uint16_t port;
    uint16_t kind;  // of the output
};

// An output of one stream of a link.
struct OutputKey {
    uint32_t stream;
    uint16_t port;
    uint64_t output;
};

class References {
  public:
    struct Released {
        uint32_t stream;
        uint16_t port;
        uint64_t id, key;
    };
    struct Inbox {  // what the table wants a link to do
        std::vector<Released> released;
        std::vector<OutputKey> pulls;
    };
    struct Seen {  // a snapshot of a reference
        enum class State : uint8_t { There, Here, Lost } state;
        uint64_t size, kind, moves;
        std::string payload;  // There: its location; Here: the output itself
    };

    void join(Link* link);   // from now on, the link gets messages
    void leave(Link* link);  // all outputs behind the link are lost

    // Add a reference to an output that a worker made for input item `key` of its stream.
    uint64_t add(Link* link, const OutputKey& output, uint64_t key, uint64_t size, uint64_t kind);
    // Record that the reference is in `ring`, as output `index` for the item that the ring calls `number`.
    void place(uint64_t id, const Ring* ring, uint64_t number, uint64_t index);
    // Let the output of `with` replace the lost output at this place. Return the reference to it, or 0 if no
    // output is lost there. In both cases, `with` is gone.
    uint64_t repair(const Ring* ring, uint64_t number, uint64_t index, uint64_t with);
    // Do the same with an output that has arrived here.
    void repair(const Ring* ring, uint64_t number, uint64_t index, uint64_t kind, std::string bytes);
    bool is_any_lost(const Ring* ring, uint64_t number);
    bool is_any_lost() const { return lost_.load(std::memory_order_acquire) > 0; }
    void wake_links();  // after replays were given back
    // Its reader has finished the item, or will never read it.
    void release(uint64_t id);
    void forget(const Ring* ring);           // the channel has ended with references inside
    void lose(Link* link, uint32_t stream);  // the outputs of this stream are gone
    // Return nothing if the reference was released, or if the caller already knows its `moves`.
    std::optional<Seen> look(uint64_t id, uint64_t moves = UINT64_MAX);
    uint64_t size_of(uint64_t id);
    void pull(uint64_t id);  // ask for the output itself
    void pulled(Link* link, const OutputKey& output, uint64_t kind, std::string bytes);
    void ask_again(Link* link);  // repeat all pulls over a new connection
    Inbox collect(Link* link);
    // changes whenever a lost reference has been repaired or an output has been pulled
    uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
    uint64_t count();

    std::mutex& mutex() { return mutex_; }  // for fork()
    void clear_in_child();                  // has no links; called with the lock held

  private:
    using Place = std::tuple<const Ring*, uint64_t, uint64_t>;
    struct Record {
        Link* link;  // null: the output is lost, unless `bytes` has it
        OutputKey output;
        uint64_t key, size, kind, moves = 0;
        Place place{};
        bool placed = false, here = false, pulling = false;
        std::string bytes;
    };
    void lose_if(Link* link, const uint32_t* stream);
    void changed();  // wakes all links, because a reference has a new location
    std::unordered_map<uint64_t, Record>::iterator erase(
        std::unordered_map<uint64_t, Record>::iterator found);

    std::mutex mutex_;
    uint64_t last_ = 0;
    std::atomic<uint64_t> lost_ = 0;  // written under the lock
    std::unordered_map<uint64_t, Record> records_;
    std::map<Place, uint64_t> places_;
    std::unordered_map<Link*, Inbox> links_;
    std::atomic<uint64_t> generation_{1};
};

References& references();

}  // namespace flowchan
