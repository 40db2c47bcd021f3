#include "references.hpp"

#include <algorithm>

#include "link.hpp"

namespace flowchan {

References& references() {
    // never destroyed, because link threads may use it until the process ends
    static References& all = *new References;
    return all;
}

void References::join(Link* link) {
    std::lock_guard lock(mutex_);
    links_.try_emplace(link);
}

void References::leave(Link* link) {
    std::lock_guard lock(mutex_);
    lose_if(link, nullptr);
    links_.erase(link);
}

uint64_t References::add(Link* link, const OutputKey& output, uint64_t key, uint64_t size, uint64_t kind,
                         uint32_t route) {
    std::lock_guard lock(mutex_);
    records_.emplace(++last_, Record{link, output, key, size, kind, route});
    return last_;
}

void References::place(uint64_t id, const Ring* ring, uint64_t number, uint64_t index) {
    std::lock_guard lock(mutex_);
    const auto found = records_.find(id);
    if (found == records_.end()) return;
    found->second.place = {ring, number, index};
    found->second.inside = ring;
    found->second.placed = true;
    places_[found->second.place] = id;
}

uint64_t References::repair(const Ring* ring, uint64_t number, uint64_t index, uint64_t with) {
    std::lock_guard lock(mutex_);
    const auto place = places_.find({ring, number, index});
    const auto made = records_.find(with);
    uint64_t repaired = 0;
    if (place != places_.end() && made != records_.end()) {
        Record& lost = records_.at(place->second);
        if (!lost.link && !lost.here) {
            const Record& now = made->second;
            lost.link = now.link;
            lost.output = now.output;
            lost.key = now.key;
            lost.size = now.size;
            lost.kind = now.kind;
            lost.moves += 1;
            lost_ -= 1;
            repaired = place->second;
        }
    }
    if (made != records_.end()) records_.erase(made);
    if (repaired) changed();
    return repaired;
}

void References::repair(const Ring* ring, uint64_t number, uint64_t index, uint64_t kind, std::string bytes) {
    std::lock_guard lock(mutex_);
    const auto place = lost_ ? places_.find({ring, number, index}) : places_.end();
    if (place == places_.end()) return;
    Record& lost = records_.at(place->second);
    if (lost.link || lost.here) return;
    lost.here = true;
    lost.size = bytes.size();
    lost.kind = kind;
    lost.bytes = std::move(bytes);
    lost.moves += 1;
    lost_ -= 1;
    changed();
}

bool References::is_any_lost(const Ring* ring, uint64_t number) {
    std::lock_guard lock(mutex_);
    if (!lost_) return false;
    for (auto at = places_.lower_bound({ring, number, 0});
         at != places_.end() && std::get<0>(at->first) == ring && std::get<1>(at->first) == number; ++at) {
        const Record& one = records_.at(at->second);
        if (!one.link && !one.here) return true;
    }
    return false;
}

void References::release(uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto found = records_.find(id);
    if (found != records_.end()) release_found(found);
}

void References::release_leased(Ring& ring, uint32_t session) {
    std::lock_guard lock(mutex_);
    if (records_.empty()) return;
    for (Slot* slot : ring.leased_slots(session)) {
        uint64_t id;
        if (slot->kind != REFERENCE || slot->size != sizeof id) continue;
        memcpy(&id, ring.payload_of(slot), sizeof id);
        const auto found = records_.find(id);
        if (found != records_.end() && found->second.inside == &ring) release_found(found);
    }
}

void References::release_unread(Ring& ring) {
    if (ring.seen_state() != BROKEN && ring.header().readers > 0) return;
    std::lock_guard lock(mutex_);
    for (auto next = records_.begin(); next != records_.end();) {
        const auto found = next++;
        if (found->second.inside == &ring) release_found(found);
    }
}

bool References::is_inside(uint64_t id, const Ring* ring) {
    std::lock_guard lock(mutex_);
    const auto found = records_.find(id);
    return found != records_.end() && found->second.inside == ring;
}

uint32_t References::move(uint64_t id, const Ring* ring) {
    std::lock_guard lock(mutex_);
    const auto found = records_.find(id);
    if (found == records_.end()) return 0;
    found->second.inside = ring;
    return found->second.route;
}

void References::release_found(std::unordered_map<uint64_t, Record>::iterator found) {
    const Record& one = found->second;
    if (const auto to = links_.find(one.link); one.link && to != links_.end()) {
        to->second.released.push_back({one.output.stream, one.output.port, found->first, one.key});
        one.link->has_messages = true;
        one.link->ring_doorbell();
    }
    if (!one.link && !one.here) lost_ -= 1;
    if (one.placed) places_.erase(one.place);
    records_.erase(found);
}

void References::clear_in_child() {
    records_.clear();
    places_.clear();
    links_.clear();
    readers_.clear();
    lost_ = 0;
}

void References::lose(Link* link, uint32_t stream) {
    std::lock_guard lock(mutex_);
    lose_if(link, &stream);
}

// Mark the outputs of a link, or of one of its streams, as lost, except those that have arrived here.
void References::lose_if(Link* link, const uint32_t* stream) {
    for (auto next = records_.begin(); next != records_.end();) {
        const auto found = next++;
        Record& one = found->second;
        if (one.link != link || (stream && one.output.stream != *stream)) continue;
        if (!one.placed) {  // the output is still waiting for room: its item will be processed again
            records_.erase(found);
            continue;
        }
        one.link = nullptr;
        one.pulling = false;
        if (!one.here) lost_ += 1;
    }
}

std::optional<References::Seen> References::look(uint64_t id, uint64_t moves) {
    std::lock_guard lock(mutex_);
    const auto found = records_.find(id);
    if (found == records_.end() || found->second.moves == moves) return std::nullopt;
    const Record& one = found->second;
    Seen seen{Seen::State::Lost, one.size, one.kind, one.moves, {}};
    if (one.here) {
        seen.state = Seen::State::Here;
        seen.payload = one.bytes;
    } else if (one.link) {
        const Location location{
            id, one.size, one.output.output, one.output.stream, one.output.port, uint16_t(one.kind)};
        seen.state = Seen::State::There;
        seen.payload.assign(reinterpret_cast<const char*>(&location), sizeof location);
        seen.payload += one.link->fetch_address();
    }
    return seen;
}

uint64_t References::size_of(uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto found = records_.find(id);
    return found == records_.end() ? 0 : found->second.size;
}

void References::add_reader(const Ring* ring, Link* link, std::atomic<Demand>* demand) {
    std::lock_guard lock(mutex_);
    readers_.emplace(ring, Reader{link, demand});
}

void References::remove_reader(std::atomic<Demand>* demand) {
    std::lock_guard lock(mutex_);
    std::erase_if(readers_, [demand](const auto& pair) { return pair.second.demand == demand; });
}

bool References::is_on(uint64_t id, const Link* link) {
    std::lock_guard lock(mutex_);
    const auto found = records_.find(id);
    return found != records_.end() && found->second.link == link && !found->second.here;
}

bool References::call_reader(uint64_t id, const Ring* ring, bool local_only, bool late) {
    std::lock_guard lock(mutex_);
    const auto found = records_.find(id);
    const Link* const host = found == records_.end() || found->second.here ? nullptr : found->second.link;
    Link* other = nullptr;
    const auto [first, last] = readers_.equal_range(ring);
    for (auto at = first; at != last; ++at) {
        const auto [link, demand] = at->second;
        const Demand now = demand->load(std::memory_order_acquire);
        if (link == host && now != Demand::None) {
            if (!late) return link->ring_doorbell(), true;
            demand->store(Demand::None, std::memory_order_relaxed);
        } else if (now == Demand::Any && !local_only) {
            other = link;
        }
    }
    if (other) other->ring_doorbell();
    return false;
}

bool References::is_wanted_by_another(const Ring* ring, const std::atomic<Demand>* demand) {
    std::lock_guard lock(mutex_);
    const auto [first, last] = readers_.equal_range(ring);
    return std::any_of(first, last, [demand](const auto& pair) {
        return pair.second.demand != demand && *pair.second.demand == Demand::Any;
    });
}

void References::pull(uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto found = records_.find(id);
    if (found == records_.end()) return;
    Record& one = found->second;
    const auto to = links_.find(one.link);
    if (!one.link || one.here || to == links_.end() || std::exchange(one.pulling, true)) return;
    to->second.pulls.push_back(one.output);
    one.link->has_messages = true;
    one.link->ring_doorbell();
}

void References::pulled(Link* link, const OutputKey& output, uint64_t kind, std::string bytes) {
    std::lock_guard lock(mutex_);
    for (auto& [id, one] : records_) {
        if (one.link != link || one.output.stream != output.stream || one.output.port != output.port ||
            one.output.output != output.output || one.here)
            continue;
        one.here = true;
        one.pulling = false;
        one.kind = kind;
        one.size = bytes.size();
        one.bytes = std::move(bytes);
        one.moves += 1;
        return changed();
    }
}

void References::ask_again(Link* link) {
    std::lock_guard lock(mutex_);
    const auto to = links_.find(link);
    if (to == links_.end()) return;
    to->second.pulls.clear();
    for (const auto& [id, one] : records_)
        if (one.link == link && one.pulling) to->second.pulls.push_back(one.output);
}

References::Inbox References::collect(Link* link) {
    std::lock_guard lock(mutex_);
    const auto found = links_.find(link);
    return found == links_.end() ? Inbox{} : std::exchange(found->second, {});
}

uint64_t References::count() {
    std::lock_guard lock(mutex_);
    return records_.size();
}

void References::wake_links() {
    std::lock_guard lock(mutex_);
    for (auto& [link, inbox] : links_) link->ring_doorbell();
}

void References::changed() {
    generation_.fetch_add(1, std::memory_order_release);
    for (auto& [link, inbox] : links_) link->ring_doorbell();
}

}  // namespace flowchan
