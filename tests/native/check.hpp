// Checks that a ring satisfies the invariants of layout.hpp, ring_memory.cpp and ring_items.cpp.
//
// Every slot is in exactly one place. No list has a cycle, and each list has as many slots as its counter
// says. Totals match the sums of their parts. Every viewer named by a slot exists and has the right number
// of views. Offsets are relative to the header, which is at the start of the ring's file.
#pragma once

#include <map>
#include <set>
#include <string>

#include "ring.hpp"

namespace testing {

using namespace flowchan;

constexpr uint64_t PAGE = 4096;

struct Tolerance {
    // Some free slots may be in no list, because a process died in `rebuild_lists` or while taking a bare
    // slot.
    bool lost_free_slots = false;
    // how many dead users a wait queue may still count, because the process that should have removed them
    // also died
    uint32_t waiting = 0;
};

class Check {
  public:
    Check(Ring& ring, Tolerance tolerance = {}) : ring(ring), h(ring.header()), tolerance(tolerance) {}

    // Return a list of all problems, or an empty string. The caller must hold the lock.
    std::string run() {
        for (const Redo& redo : h.redo)
            if (redo.valid) wrong("a redo record is still valid");
        if (h.slots_at > h.length || (h.length - h.slots_at) % sizeof(Slot)) wrong("slots_at is not a slot");
        if (h.slots_at < h.reserved_high || h.blocks_top > h.reserved_low)
            wrong("unreserved memory is in use");
        if (h.blocks_top > h.slots_at) wrong("blocks and slots overlap");
        if (h.blocks_top > h.map_blocks_to || h.slots_at < h.map_slots_from)
            wrong("memory is in use that others do not map");
        if (!problems.empty()) return problems;
        free_lists();
        fifo();
        groups();
        sessions();
        if (h.cause) put_cause();
        rest();
        viewers();
        totals();
        blocks();
        return problems;
    }

  private:
    Ring& ring;
    Header& h;
    Tolerance tolerance;
    std::string problems;
    std::map<uint64_t, std::string> where;  // slot -> name of its list
    uint64_t used = 0, bytes = 0, filling = 0;

    void wrong(const std::string& what) { problems += (problems.empty() ? "" : "; ") + what; }
    void equal(const char* name, uint64_t word, uint64_t counted) {
        if (word == counted) return;
        wrong(std::string(name) + " is " + std::to_string(int64_t(word)) + " where " +
              std::to_string(counted) + " was counted");
    }
    Slot* slot(uint64_t p) { return ring.slot_at(p); }

    // Return the length of the list `name`, and record its slots in `where`.
    template <class Each>
    uint64_t walk(uint64_t head, uint64_t* tail, const std::string& name, Each each) {
        uint64_t n = 0, last = 0;
        for (uint64_t p = head; p; p = slot(p)->next) {
            if (p < h.slots_at || p >= h.length || (p - h.slots_at) % sizeof(Slot)) {
                wrong(name + " leads outside of the slots");
                return n;
            }
            auto [it, fresh] = where.emplace(p, name);
            if (!fresh) {
                wrong("slot " + std::to_string(p) + " is in " + it->second + " and in " + name);
                return n;
            }
            each(*slot(p));
            n += 1;
            last = p;
        }
        if (tail && head && *tail != last) wrong("the tail of " + name + " is not its last slot");
        return n;
    }
    void placed(Slot& s, SlotState place, const std::string& name) {
        // `advance` moves all parked outputs of an item together, and leaves the states of their slots
        // unchanged.
        const bool moved = place == SlotState::Inside && s.place() == SlotState::Parked;
        if (s.place() != place && !moved)
            wrong("a slot in " + name + " is marked " + std::to_string(int(s.place())));
    }

    void free_lists() {
        for (uint32_t c = 0; c < CLASSES; ++c) {
            const std::string name = "the free list of class " + std::to_string(c);
            walk(h.free_slots[c], nullptr, name, [&](Slot& s) {
                placed(s, SlotState::Free, name);
                if (s.cls != c) wrong("a slot of class " + std::to_string(s.cls) + " is in " + name);
            });
        }
    }
    void fifo() {
        uint64_t least = 0;  // lowest number that the next item may have
        uint64_t n = walk(h.head, &h.tail, "the FIFO", [&](Slot& s) {
            placed(s, SlotState::Inside, "the FIFO");
            if (s.numbered() && s.number >= h.numbered)
                wrong("an item has a number that was not assigned yet");
            if (s.numbered() && s.number < least) wrong("a returned item follows a later one");
            least = s.numbered() ? s.number + 1 : UINT64_MAX;
            bytes += s.size;
        });
        equal("puts - takes", h.puts - h.takes, n);
        used += n;
    }
    void groups() {
        Group* g = reinterpret_cast<Group*>(reinterpret_cast<char*>(&h) + h.groups_at);
        uint64_t parked = 0;
        for (uint64_t i = 0; i < h.groups; ++i) {
            const std::string name = "group " + std::to_string(i);
            uint64_t n = walk(g[i].head, &g[i].tail, name, [&](Slot& s) {
                placed(s, SlotState::Parked, name);
                bytes += s.size;
            });
            equal(("count of " + name).c_str(), g[i].count, n);
            parked += n;
            if (i == h.turn % h.groups && (n || g[i].complete))
                wrong("an output is parked for the current turn");
        }
        equal("parked", h.parked, parked);
        used += parked;
    }
    void sessions() {
        uint64_t leased = 0, readers = 0, writers = 0, resumes = 0;
        std::set<uint64_t> numbers;
        for (uint32_t i = 0; i < h.sessions().size(); ++i) {
            Session& s = ring.session(i);
            if (s.role == Session::NONE) continue;
            readers += s.role == Session::READER;
            writers += s.role == Session::WRITER;
            resumes += s.role == Session::RESUME;
            auto on_lease = [&](const char* what, uint64_t head, uint64_t& tail, uint64_t count) {
                const std::string name = what + (" of session " + std::to_string(i));
                uint64_t n = walk(head, &tail, name, [&](Slot& slot) {
                    placed(slot, SlotState::Leased, name);
                    if (!slot.numbered() || !numbers.insert(slot.number).second)
                        wrong("an item on lease has no unique number");
                });
                equal(("count of " + name).c_str(), count, n);
                leased += n;
            };
            on_lease("the lease", s.lease_head, s.lease_tail, s.leased);
            on_lease("the reserved items", s.reserved_head, s.reserved_tail, s.reserved);
        }
        equal("leased", h.leased, leased);
        equal("readers", h.readers, readers);
        equal("writers", h.writers, writers);
        equal("resumes", h.resumes, resumes);
        used += leased;
    }
    void put_cause() {
        for (uint64_t p = h.slots_at; p < h.length; p += sizeof(Slot)) {
            if (slot(p)->block != h.cause && p + offsetof(Slot, data) != h.cause) continue;
            if (!where.emplace(p, "the cause").second) wrong("the cause's slot is in " + where[p] + " too");
            used += 1;
            return;
        }
        wrong("the cause is in no slot");
    }
    // Check the slots that are in no list. A session copies, views or fills the slot, or an interrupted
    // `rebuild_lists` has lost it.
    void rest() {
        for (uint64_t p = h.slots_at; p < h.length; p += sizeof(Slot)) {
            if (where.count(p)) continue;
            Slot& s = *slot(p);
            const std::string name = "slot " + std::to_string(p) + " in no list";
            if (s.place() == SlotState::Free) {
                if (!tolerance.lost_free_slots) wrong(name + " is marked free");
                continue;
            }
            if (s.place() != SlotState::Filling && s.place() != SlotState::Held)
                wrong(name + " is marked " + std::to_string(int(s.place())));
            if (s.owner() == 0 || ring.session(s.owner()).role == Session::NONE)
                wrong(name + " has no owner");
            if (s.place() == SlotState::Filling) {
                filling += 1;
                bytes += s.size;
            }
            used += 1;
        }
    }
    // Check that all viewers exist, and that the sessions and the header have the right number of views.
    void viewers() {
        uint64_t views[SESSIONS] = {}, seen = 0;
        for (uint64_t p = h.slots_at; p < h.length; p += sizeof(Slot)) {
            Slot& s = *slot(p);
            const std::string name = "slot " + std::to_string(p);
            if (lost(p)) continue;
            if (!s.viewer()) {
                if (s.loaned()) wrong(name + " is on loan without a borrower");
                continue;
            }
            views[s.viewer()] += 1;
            seen += s.loaned() ? 0 : s.size;
            if (ring.session(s.viewer()).role == Session::NONE)
                wrong(name + " is viewed by an unused session");
            if (s.cls < VIEWABLE || s.kind != BUFFERS) wrong(name + " has a viewer and can't be viewed");
            if (s.place() == SlotState::Free || s.place() == SlotState::Parked ||
                s.place() == SlotState::Filling)
                wrong(name + " has a viewer and is marked " + std::to_string(int(s.place())));
            if (s.loaned() && s.place() != SlotState::Held) wrong(name + " is on loan and not HELD");
            // If one session views the slot, another session may hold the slot only to copy it.
            const bool copied = !s.loaned() && ring.session(s.owner()).role == Session::PLAIN;
            if (s.place() == SlotState::Held && s.owner() != s.viewer() && !copied)
                wrong(name + " is held by another session than its viewer");
        }
        for (uint32_t i = 0; i < h.sessions().size(); ++i) {
            const Session& s = ring.session(i);
            const std::string name = "session " + std::to_string(i);
            equal(("views of " + name).c_str(), s.views, views[i]);
            if (s.role == Session::RESUME && s.views) wrong(name + " belongs to a dead worker and has views");
            if (s.role == Session::HOLDER && (s.views == 0 || s.lease_head || s.supervised))
                wrong(name + " is a HOLDER without views, with leased items or with a supervisor");
        }
        equal("viewed_bytes", h.viewed_bytes, seen);
    }
    // Return whether a slot is free but in no list, provided that the tolerance permits this.
    bool lost(uint64_t p) {
        return tolerance.lost_free_slots && slot(p)->place() == SlotState::Free && !where.count(p);
    }
    void totals() {
        equal("claimed", h.claimed, filling);
        equal("bytes_in - bytes_out", h.bytes_in - h.bytes_out, bytes);
        equal("slots_used", h.slots_used, used);
        if (h.puts - h.takes + h.parked + h.claimed > h.capacity + SESSIONS)
            wrong("far more inside than the capacity");
    }
    // Check that blocks do not overlap, and that viewable blocks share no page with other blocks.
    void blocks() {
        std::map<uint64_t, uint64_t> ends;
        for (uint64_t p = h.slots_at; p < h.length; p += sizeof(Slot)) {
            Slot& s = *slot(p);
            if (lost(p)) continue;
            if (!s.cls != !s.block) wrong("a slot has a class without a block or a block without a class");
            if (!s.block) continue;
            if (s.cls >= VIEWABLE && (s.block % PAGE || class_size(uint32_t(s.cls)) % PAGE))
                wrong("a block shares a page");
            if (s.block < h.blocks_at || s.block + class_size(uint32_t(s.cls)) > h.blocks_top)
                wrong("a block is outside of the blocks");
            if (!ends.emplace(s.block, s.block + class_size(uint32_t(s.cls))).second)
                wrong("two slots have one block");
        }
        uint64_t end = 0;
        for (auto [from, to] : ends) {
            if (from < end) wrong("two blocks overlap");
            end = to;
        }
    }
};

inline std::string check(Ring& ring, Tolerance tolerance = {}) { return Check(ring, tolerance).run(); }

}  // namespace testing
