// References to outputs that stay on the host where they were made, until the reader's host fetches them.
//
// A large output of a remote worker does not travel to the channel's owner. The worker's host keeps it on
// lease in the worker's ring, and sends a reference. The owner puts the reference into the channel, where it
// has a position, a number and a lease like any other item. When a remote worker takes the reference, its
// host learns the location of the output and fetches it from there. After that worker has finished the item,
// the owner releases the reference, and the host that made the output frees it.
//
// Exactly once. The owner keeps an output's input item on lease until the output is released. If the host is
// lost, its outputs are lost too, and the input item returns to its channel, marked as a replay. The outputs
// of a replay are not put into the channel. Each of them instead replaces the lost output that had the same
// input item and index. If that output was released in the meantime, the new one is dropped. Either way, the
// reference keeps its lease and its position in the channel.
//
// Routing. A stage with keys has one channel for each worker. The stage `route` before it runs in the owner's
// process, and must not fetch the outputs just to compute their keys. So the host that makes an output
// chooses the worker (Frame::route), and the stage moves the reference from one channel to another.
//
// If one host cannot connect to another, the owner pulls the output to itself and sends it on.
//
// Locality. A reader on the host that has an output need not fetch it. So a reader leaves a reference for a
// reader on that host to take, if that reader has room. The channel remains a FIFO: the question is only who
// takes the item at its head. References that were given back go to any reader.
//
// Threads. One table serves all links of the process. A thread must take the table's lock last, after the
// locks of links and rings.
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

// Where a remote host finds an output. A reference that is sent to the reader's host has this payload,
// followed by the address of the host that has the output.
struct Location {
    uint64_t id;      // id of the reference
    uint64_t size;    // size of the output in bytes
    uint64_t output;  // number of the output in its stream
    uint32_t stream;
    uint16_t port;
    uint16_t kind;  // kind of the output
};

// Identifies an output of a link.
struct OutputKey {
    uint32_t stream;
    uint16_t port;
    uint64_t output;
};

// Which references a reader takes now: none, those to outputs on its host, or any.
enum class Demand : uint8_t { None, Local, Any };

class References {
  public:
    struct Released {
        uint32_t stream;
        uint16_t port;
        uint64_t id, key;
    };
    struct Inbox {  // requests from the table to a link
        std::vector<Released> released;
        std::vector<OutputKey> pulls;
    };
    struct Seen {  // a snapshot of one reference
        enum class State : uint8_t { There, Here, Lost } state;
        uint64_t size, kind, moves;
        std::string payload;  // There: the location; Here: the output itself
    };

    void join(Link* link);   // from now on, the link gets requests
    void leave(Link* link);  // call when the link is gone; its outputs are lost

    // Add a reference to an output for input item `key` of a worker's stream.
    // `route`: see Frame::route.
    uint64_t add(Link* link, const OutputKey& output, uint64_t key, uint64_t size, uint64_t kind,
                 uint32_t route = 0);
    // Record that the reference is in `ring`, as output `index` for item `number`.
    void place(uint64_t id, const Ring* ring, uint64_t number, uint64_t index);
    // Replace the lost output at this position with the output of reference `with`. Return the reference that
    // now has the output, or 0 if no output is lost there. In both cases, the reference `with` no longer
    // exists.
    uint64_t repair(const Ring* ring, uint64_t number, uint64_t index, uint64_t with);
    // Replace the lost output with an output that has arrived on this host.
    void repair(const Ring* ring, uint64_t number, uint64_t index, uint64_t kind, std::string bytes);
    bool is_any_lost(const Ring* ring, uint64_t number);
    bool is_any_lost() const { return lost_.load(std::memory_order_acquire) > 0; }
    void wake_links();  // call after giving back replays
    // Release a reference, because its reader has finished the item, or because no reader will ever take it.
    void release(uint64_t id);
    // Release the references that a reader has taken and finished. Call this before its session ends, while
    // holding the ring's lock. The reader's link may not have heard that the items are finished.
    void release_leased(Ring& ring, uint32_t session);
    void release_unread(Ring& ring);  // if no reader is left, release the references in this channel
    bool is_inside(uint64_t id, const Ring* ring);
    // Record that the reference moves to another channel. Its position does not change, so that `repair` still
    // finds it. `ring` is null while the reference is in no channel. Return its route.
    uint32_t move(uint64_t id, const Ring* ring);
    void lose(Link* link, uint32_t stream);  // call when the outputs of this stream are lost
    // Return nothing if the reference was released, or if `moves` is still its number of moves.
    std::optional<Seen> look(uint64_t id, uint64_t moves = UINT64_MAX);
    uint64_t size_of(uint64_t id);
    // Readers of a channel, each with its current demand. A reader must be removed before it ends.
    void add_reader(const Ring* ring, Link* link, std::atomic<Demand>* demand);
    void remove_reader(std::atomic<Demand>* demand);
    bool is_on(uint64_t id, const Link* link);  // whether the output is on the host of this link
    // Wake a reader on the host that has the output, so that it takes this reference, and return true. If there
    // is none, wake a reader that takes any reference, unless `local_only` is set, and return false. `late`: the
    // readers on that host have had enough time, so they do not count until they report their demand again.
    bool call_reader(uint64_t id, const Ring* ring, bool local_only, bool late);
    // Return whether any other reader of the ring takes any reference.
    bool is_wanted_by_another(const Ring* ring, const std::atomic<Demand>* demand);
    void pull(uint64_t id);  // requests the output itself
    void pulled(Link* link, const OutputKey& output, uint64_t kind, std::string bytes);
    void ask_again(Link* link);  // repeats all pulls on a new connection
    Inbox collect(Link* link);
    // Return a number that changes whenever a lost reference is repaired or an output is pulled.
    uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
    uint64_t count();

    std::mutex& mutex() { return mutex_; }  // for fork()
    void clear_in_child();                  // a forked child has no links; call under the lock

  private:
    using Place = std::tuple<const Ring*, uint64_t, uint64_t>;
    struct Record {
        Link* link;  // null: the output is lost, or it is in `bytes`
        OutputKey output;
        uint64_t key, size, kind;
        uint32_t route;
        uint64_t moves = 0;
        Place place{};
        const Ring* inside = nullptr;  // the channel that contains the reference now
        bool placed = false, here = false, pulling = false;
        std::string bytes;
    };
    void release_found(std::unordered_map<uint64_t, Record>::iterator found);
    void lose_if(Link* link, const uint32_t* stream);
    void changed();  // a reference has a new location, so this wakes all links

    std::mutex mutex_;
    uint64_t last_ = 0;
    std::atomic<uint64_t> lost_ = 0;  // written under the lock
    std::unordered_map<uint64_t, Record> records_;
    std::map<Place, uint64_t> places_;
    std::unordered_map<Link*, Inbox> links_;
    struct Reader {
        Link* link;
        std::atomic<Demand>* demand;
    };
    std::unordered_multimap<const Ring*, Reader> readers_;
    std::atomic<uint64_t> generation_{1};
};

References& references();

}  // namespace flowchan
