// The list of threads that wait on one side of a `threads` channel.
//
// Algorithm. Each waiting thread has a node on its stack, with a futex word. A node is asleep (in a list,
// oldest first), or woken but not running yet. When a call becomes possible, only the oldest sleeper is
// woken, so the cost is one wake-up even if a thousand waiters sleep. Until that waiter runs, no other is
// woken. An operation that leaves another call possible then wakes the next waiter (LocalQueue::try_put,
// try_take). A woken waiter that does not use its wake-up also wakes the next waiter. If k calls are
// possible, k waiters are therefore woken, each by the waiter before it.
//
// A running thread may make all k calls before a woken thread gets the GIL. In that case, only one wake-up
// was useless. The woken waiter returns to the head of the list. Newcomers may overtake it (see waiting.hpp)
// until two wake-ups have failed and PATIENCE_NS have passed. It is then `starving`, and newcomers let it go
// first while its call is possible.
//
// The workers of a stage are interchangeable. The last worker to arrive goes to the head of the list, because
// the caches still have its stack and its function's data. If there is work for only two of 300 workers, the
// same few workers therefore do it, and the others sleep.
//
// Writers of an ordered stage wait for their turns, sorted by the numbers of their items. Only the first
// writer can continue, so only the first writer is woken. Workers without an output come last (ANY_TURN).
// While CROWD other workers wait with outputs, a worker waits for room before it takes an item. If a
// stage has many workers but a cheap function, a few of them therefore do all the work. The others keep
// sleeping instead of waking for each item.
//
// All of this runs under the queue's lock. No thread can die while it holds the lock, so no repair is needed.
#pragma once

#include <map>

#include "waiting.hpp"

namespace flowchan {

constexpr uint64_t ANY_TURN = UINT64_MAX;  // used instead of an item's number by a worker without an output
constexpr uint32_t CROWD = 2;

struct Node {
    enum State { NOT_WAITING, ASLEEP, WOKEN };
    std::atomic<uint32_t> word{0};  // the futex word
    uint32_t seen = 0;
    State state = NOT_WAITING;
    Node *before = nullptr, *after = nullptr;
    Caller caller{};
    bool selecting = false;
    bool for_turn = false;  // waits for its turn, not for room
};

class WaitList {
  public:
    void enter(Node& node, const Caller& caller, bool selecting, bool again, bool for_turn = false) {
        const int64_t now = now_ns();
        if (waiting == 0 && !again) since_ns_ = now;
        waited_ns_ -= now;
        waiting += 1;
        node.caller = caller;
        node.selecting = selecting;
        node.for_turn = for_turn;
        turns.set(turns.waiting + for_turn, now);
        if (caller.clock) caller.clock->begin(for_turn);
        selecting_ += selecting;
        with_turn_ += has_turn(node);
        node.seen = node.word.load(std::memory_order_relaxed);
        sleep(node, again || caller.exchangeable);
    }
    // Remove a node. Return whether the waiter had been woken.
    bool leave(Node& node) {
        const bool called = node.state == Node::WOKEN;
        if (called)
            woken_(node) -= 1;
        else
            take_out(node);
        node.state = Node::NOT_WAITING;
        selecting_ -= node.selecting;
        with_turn_ -= has_turn(node);
        waiting -= 1;
        const int64_t now = now_ns();
        waited_ns_ += now;
        turns.set(turns.waiting - node.for_turn, now);
        if (node.caller.clock) node.caller.clock->end(node.for_turn);
        return called;
    }

    // Wake the first waiter, apart from those that wait for a turn.
    void call(Wakes& wakes) {
        if (woken_without_) return;
        if (starving && starving->state == Node::ASLEEP)
            wake(*starving, wakes);
        else if (first_)
            wake(*first_, wakes);
    }
    // Wake the waiter with the lowest number, provided that `may(number)` is true.
    template <class May>
    void wake_turn(May may, Wakes& wakes) {
        if (!woken_with_turn_ && !turns_.empty() && may(turns_.begin()->first))
            wake(*turns_.begin()->second, wakes);
    }
    // Return whether another waiter comes before this sleeper.
    bool is_behind(const Node& node) const {
        return node.caller.ordered && turns_.begin()->first < node.caller.number;
    }
    // Wake all threads that wait through this port.
    void wake_port(const void* port, Wakes& wakes) {
        for (Node *node = first_, *next; node; node = next) {
            next = node->after;
            if (node->caller.port == port) wake(*node, wakes);
        }
        for (auto at = turns_.begin(); at != turns_.end();) {
            Node& node = *(at++)->second;
            if (node.caller.port == port) wake(node, wakes);
        }
    }
    void call_all(Wakes& wakes) {
        while (first_) wake(*first_, wakes);
        while (!turns_.empty()) wake(*turns_.begin()->second, wakes);
    }

    uint32_t woken() const { return woken_without_ + woken_with_turn_; }
    uint32_t selecting() const { return selecting_; }
    uint32_t with_turn() const { return with_turn_; }
    int64_t waiting_for_ns() const { return waiting ? now_ns() - since_ns_ : 0; }
    int64_t total_wait_ns() const { return waited_ns_ + int64_t(waiting) * now_ns(); }

    uint32_t waiting = 0;
    WaitClock turns;           // counts waits for a turn, but not for room
    Node* starving = nullptr;  // newcomers must not overtake this waiter while it could continue

  private:
    static bool has_turn(const Node& node) { return node.caller.ordered && node.caller.number != ANY_TURN; }
    uint32_t& woken_(const Node& node) { return node.caller.ordered ? woken_with_turn_ : woken_without_; }

    // `first`: insert at the head of the list.
    void sleep(Node& node, bool first) {
        node.state = Node::ASLEEP;
        if (node.caller.ordered) {
            // Insert before nodes with the same number. The last of the ANY_TURN waiters to arrive has the
            // warmest caches.
            turns_.emplace_hint(turns_.lower_bound(node.caller.number), node.caller.number, &node);
            return;
        }
        node.before = first ? nullptr : last_;
        node.after = first ? first_ : nullptr;
        (node.before ? node.before->after : first_) = &node;
        (node.after ? node.after->before : last_) = &node;
    }
    void take_out(Node& node) {
        if (node.caller.ordered) {
            auto [one, end] = turns_.equal_range(node.caller.number);
            while (one != end && one->second != &node) ++one;
            turns_.erase(one);
            return;
        }
        (node.before ? node.before->after : first_) = node.after;
        (node.after ? node.after->before : last_) = node.before;
    }
    void wake(Node& node, Wakes& wakes) {
        take_out(node);
        node.state = Node::WOKEN;
        woken_(node) += 1;
        // Relaxed, because releasing the lock publishes this store before the wake-up.
        node.word.store(node.seen + 1, std::memory_order_relaxed);
        wakes.add(node.word, false);
    }

    Node *first_ = nullptr, *last_ = nullptr;  // sleepers, except those that wait for a turn
    std::multimap<uint64_t, Node*> turns_;     // sleepers that wait for a turn, by the number of their item
    uint32_t woken_without_ = 0, woken_with_turn_ = 0, selecting_ = 0;
    uint32_t with_turn_ = 0;  // waiters with an output, asleep or woken
    // total waiting time, as the sum of all end times minus the sum of all start times
    int64_t waited_ns_ = 0;
    int64_t since_ns_ = 0;  // when the first of the current waiters arrived
};

}  // namespace flowchan
