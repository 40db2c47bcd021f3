#include "queue.hpp"

#include <algorithm>

namespace flowchan {

LocalQueue::~LocalQueue() {
    std::vector<PyObject*> dropped;
    Wakes wakes;
    break_(nullptr, dropped, wakes);
    for (PyObject* o : dropped) Py_DECREF(o);
    Py_XDECREF(cause);
}

void LocalQueue::grow() {
    if (count_ < buffer_.size()) return;
    std::vector<Item> larger(buffer_.empty() ? 16 : 2 * buffer_.size());
    for (uint64_t i = 0; i < count_; ++i) larger[i] = at(i);
    buffer_.swap(larger);
    head_ = 0;
}

void LocalQueue::push(const Item& item) {
    grow();
    at(count_++) = item;
    puts += 1;
}

// Put a returned item at the front, where such items are sorted by number.
void LocalQueue::put_back(const Item& item) {
    grow();
    head_ = (head_ - 1) & (buffer_.size() - 1);
    count_ += 1;
    uint64_t place = 0;
    for (; place + 1 < count_ && at(place + 1).number < item.number; ++place) at(place) = at(place + 1);
    at(place) = item;
}

Step LocalQueue::try_put(const Item& item, WriterState* writer, Wakes& wakes) {
    if (state == BROKEN) return Step::Broken;
    if (state == CLOSED) return Step::Closed;
    if (item.size > max_bytes_) return Step::TooLarge;
    const bool parks = is_parked(writer);
    const bool alone = count_ == 0 && (!parks || parked == 0);  // see Ring::room
    if (bytes_in - bytes_out + item.size > most_inside() && !alone) {
        short_of_bytes = true;
        return Step::Wait;
    }
    if (parks) {
        uint64_t ahead = writer->number - turn;
        if (ahead >= GROUPS || count_ + parked + 1 >= capacity_) return Step::Wait;
        if (groups_.size() <= ahead) groups_.resize(ahead + 1);
        groups_[ahead].items.push_back(item);
        parked += 1;
    } else {
        if (count_ + parked >= capacity_) return Step::Wait;
        push(item);
        if (keeps_numbers_ && writer && writer->keyed) at(count_ - 1).number = writer->number;
        reader_list.call(wakes);
    }
    bytes_in += item.size;
    if (writer && writer->keyed) count_output(*writer, wakes);
    if (writer_list.waiting) wake_waiting(Side::Writer, wakes);
    return Step::Done;
}

void LocalQueue::count_output(WriterState& writer, Wakes& wakes) {
    writer.count += 1;
    if (writer.single && writer.ordered) item_done(writer, wakes);
}

Step LocalQueue::try_take(Item& item, ReaderState* reader, Wakes& wakes) {
    if (state == BROKEN) return Step::Broken;
    if (reader && reader->orders && !reader->leases) {
        if (reader->orders & KEEP_TURNS && !reader->keeps_turns) return Step::KeepTurns;
        if (reader->orders & RETIRE) return Step::Drained;  // the end of this call wakes the next reader
    }
    if (count_ == 0)
        return is_exhausted() && (leased == 0 || (reader && (reader->alone || reader->leases)))
                   ? Step::Drained
                   : Step::Wait;
    item = buffer_[head_];
    buffer_[head_].object = nullptr;
    head_ = (head_ + 1) & (buffer_.size() - 1);
    count_ -= 1;
    bytes_out += item.size;
    if (item.number == Item::UNNUMBERED) item.number = numbered_++;
    if (reader) {
        if (reader->leases++ == 0) reader->number = item.number;
        leased += 1;
    }
    takes += 1;
    wake_writers(reader, wakes);
    if (reader_list.waiting) wake_waiting(Side::Reader, wakes);
    wake_at_end(wakes);
    return Step::Done;
}

void LocalQueue::acknowledge(ReaderState& reader, Wakes& wakes) {
    if (!reader.leases) return;
    leased -= reader.leases;
    reader.leases = 0;
    // At the end of the channel, readers wait until no item is on lease. Waking all of them whenever a lease
    // ends would take quadratic time, so wake them after the last lease.
    if (leased == 0) wake_at_end(wakes);
}

void LocalQueue::give_back(const std::vector<Item>& items, ReaderState& reader, Wakes& wakes) {
    leased -= reader.leases;
    takes -= reader.leases;
    reader.leases = 0;
    for (auto item = items.rbegin(); item != items.rend(); ++item) {
        put_back(*item);
        bytes_out -= item->size;
    }
    reader_list.call(wakes);
}

void LocalQueue::begin_item(WriterState& writer, uint64_t number) {
    writer.number = number;
    writer.count = writer.skip = 0;
}

Step LocalQueue::item_done(WriterState& writer, Wakes& wakes) {
    const bool behind = !writer.ordered || state != OPEN || writer.number < turn;
    if (!behind && writer.number - turn >= GROUPS) return Step::Wait;
    writer.keyed = false;
    if (behind) return Step::Done;
    uint64_t ahead = writer.number - turn;
    if (groups_.size() <= ahead) groups_.resize(ahead + 1);
    groups_[ahead].complete = true;
    if (ahead == 0) advance(wakes);
    return Step::Done;
}

void LocalQueue::advance(Wakes& wakes) {
    uint32_t linked = 0;
    uint64_t before = turn;
    while (!groups_.empty()) {
        Group& g = groups_.front();
        for (const Item& item : g.items) push(item);
        linked += uint32_t(g.items.size());
        parked -= g.items.size();
        g.items.clear();
        if (!g.complete && state == OPEN) break;  // a closed channel gets no more outputs
        groups_.pop_front();
        turn += 1;
    }
    if (linked) reader_list.call(wakes);
    if (turn != before) {
        wake_turn(wakes);
        wake_at_end(wakes);
    }
}

// See Ring::start_turns_at.
void LocalQueue::start_turns_at(uint64_t number, Wakes& wakes) {
    if (state != OPEN || number <= turn) return;
    const uint64_t parked_to = std::min<uint64_t>(number - turn, groups_.size());
    for (uint64_t i = 0; i < parked_to; ++i) groups_[i].complete = true;
    advance(wakes);
    if (!groups_.empty() || turn >= number) return;
    turn = number;
    wake_turn(wakes);
    wake_at_end(wakes);
}

void LocalQueue::order(ReaderState& reader, const void* port, Orders what, Wakes& wakes) {
    reader.orders |= what;
    reader_list.wake_port(port, wakes);
}

void LocalQueue::close(Wakes& wakes) {
    if (state != OPEN) return;
    state = CLOSED;
    advance(wakes);
    reader_list.call_all(wakes);
    writer_list.call_all(wakes);
}

void LocalQueue::break_(PyObject* by, std::vector<PyObject*>& dropped, Wakes& wakes) {
    if (state == BROKEN || drained()) return;
    state = BROKEN;
    cause = Py_XNewRef(by);
    for (uint64_t i = 0; i < count_; ++i) dropped.push_back(at(i).object);
    for (Group& g : groups_)
        for (Item& item : g.items) dropped.push_back(item.object);
    count_ = parked = 0;
    groups_.clear();
    reader_list.call_all(wakes);
    writer_list.call_all(wakes);
}

void LocalQueue::end_port(Side side, const void* port, Wakes& wakes) {
    if (--(side == Side::Writer ? writers : readers) == 0) close(wakes);
    wait_list(side).wake_port(port, wakes);  // threads may be waiting in this port
}

Counts LocalQueue::counts() const {
    return {.items_in = puts + parked,
            .items_out = takes,
            .bytes_in = bytes_in,
            .bytes_inside = bytes_in - bytes_out,
            .inside = inside(),
            .leased = leased,
            .readers = readers,
            .writers = writers,
            .waiting_readers = reader_list.waiting,
            .waiting_writers = writer_list.waiting,
            .read_wait_ns = reader_list.total_wait_ns(),
            .write_wait_ns = writer_list.total_wait_ns(),
            .turn_wait_ns = writer_list.turns.total(now_ns()),
            .readers_waiting_for_ns = reader_list.waiting_for_ns(),
            .writers_waiting_for_ns = writer_list.waiting_for_ns(),
            .selecting = reader_list.selecting() + writer_list.selecting(),
            .woken = reader_list.woken() + writer_list.woken(),
            .short_of_bytes = short_of_bytes && writer_list.waiting > 0};
}

std::vector<LocalQueue::Item> LocalQueue::peek(uint64_t first, uint64_t most) {
    std::vector<Item> seen;
    uint64_t next = numbered_;
    for (uint64_t i = 0; i < std::min(count_, MOST_WALKED) && seen.size() < most; ++i) {
        Item item = at(i);
        if (item.number == Item::UNNUMBERED) item.number = next++;  // as try_take will
        if (item.number < first) continue;
        seen.push_back(item);
        Py_INCREF(item.object);
    }
    return seen;
}

bool LocalQueue::could_continue(const Caller& caller) const {
    if (state != OPEN || caller.side == Side::Reader) return state != OPEN || count_ > 0;
    if (caller.ordered) return has_turn(caller.number);
    const bool fits = bytes_in - bytes_out + caller.size <= most_inside() || count_ == 0;
    return fits && room() > 0;
}

void LocalQueue::wake_waiting(Side side, Wakes& wakes) {
    if (side == Side::Writer) wake_turn(wakes);
    if (side == Side::Reader ? count_ > 0 : room() > 0) wait_list(side).call(wakes);
}

int LocalQueue::traverse(visitproc visit, void* arg) {
    for (uint64_t i = 0; i < count_; ++i) Py_VISIT(at(i).object);
    for (Group& g : groups_)
        for (Item& item : g.items) Py_VISIT(item.object);
    Py_VISIT(cause);
    return 0;
}

}  // namespace flowchan
