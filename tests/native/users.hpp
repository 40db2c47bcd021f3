// Helpers for the native test programs: messages in which every byte can be checked, and users of a ring.
// Users put and take items as puts.cpp and gets.cpp do, with the core's own waiting loop.
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "blocking.hpp"

namespace testing {

using namespace flowchan;

[[noreturn]] inline void die(const std::string& why) {
    fprintf(stderr, "FAILED: %s\n", why.c_str());
    fflush(stderr);
    _exit(2);
}
inline void must(bool holds, const std::string& what) {
    if (!holds) die(what);
}
// `what` is a C string, so that checks in hot loops construct no std::string.
inline void must(bool holds, const char* what) {
    if (!holds) die(what);
}

// A number, followed by bytes that are computed from it, up to `size` bytes in total. Messages above 256
// bytes are sent as BYTES or as the given `kind`. Messages above Taken::LOCAL bytes need a large put.
struct Message {
    static constexpr uint64_t LEAST = sizeof(uint64_t), CYCLE = 256;
    std::vector<char> bytes;
    Kind kind;

    explicit Message(uint64_t value, uint64_t size = LEAST, Kind kind = BYTES)
        : bytes(std::max(size, LEAST)), kind(kind) {
        lay(value, bytes.data(), bytes.size());
    }
    // Return CYCLE bytes of a message, beginning with byte `i`. Byte `i` is value * 31 + i, so the bytes
    // repeat.
    static const char* data_from(uint64_t value, uint64_t i) {
        static const auto bytes = [] {
            std::array<char, 2 * CYCLE> all{};
            for (uint64_t n = 0; n < all.size(); ++n) all[n] = char(n);
            return all;
        }();
        return bytes.data() + (value * 31 + i) % CYCLE;
    }
    static void lay(uint64_t value, char* at, uint64_t size) {
        memcpy(at, &value, sizeof value);
        for (uint64_t i = LEAST; i < size; i += CYCLE)
            memcpy(at + i, data_from(value, i), std::min(CYCLE, size - i));
    }
    // Make `frame` refer to this message.
    void fill(Frame& frame) const {
        frame.size = bytes.size();
        frame.kind = bytes.size() <= Frame::SMALL ? DIRECT : kind;
        if (frame.kind == DIRECT) {
            frame.small_size = frame.size;
            memcpy(frame.small, bytes.data(), bytes.size());
        } else {
            frame.one = {bytes.data(), bytes.size(), 0};
        }
    }
    static uint64_t value_of(const char* at, uint64_t size) {
        uint64_t value;
        memcpy(&value, at, sizeof value);
        for (uint64_t i = LEAST; i < size; i += CYCLE)
            if (memcmp(at + i, data_from(value, i), std::min(CYCLE, size - i)) != 0)
                die("bytes of message " + std::to_string(value) + " are wrong, from byte " +
                    std::to_string(i));
        return value;
    }
};

// Run an operation under the lock. The operation must be one that does not have to wait.
template <class Op>
auto locked(Ring& ring, Op&& op) {
    Wakes wakes;
    ring.lock(true);
    if constexpr (std::is_void_v<decltype(op(wakes))>) {
        op(wakes);
        ring.unlock();
        ring.wake(wakes);
    } else {
        auto result = op(wakes);
        ring.unlock();
        ring.wake(wakes);
        return result;
    }
}

// A block that a user views or fills on loan, and the content that it must have.
struct HeldView {
    Slot* slot;
    char* at;
    uint64_t size, value;

    void verify() const {
        if (Message::value_of(at, size) != value)
            die("a viewed block no longer contains message " + std::to_string(value));
    }
};

// A user of a ring, with or without a port.
struct User {
    Ring& ring;
    uint32_t session = 0;
    bool is_reader = false, is_writer = false;
    ReaderState reader{};
    WriterState writer{};
    Taken taken{};
    bool keeps = false;  // keep views of the items that it gets
    std::vector<HeldView> held_views;

    User(Ring& ring, uint32_t session, Session::Role role) : ring(ring), session(session) {
        is_reader = role == Session::READER;
        is_writer = role == Session::WRITER;
        reader.session = writer.session = session;
    }
    ReaderState* as_reader() { return is_reader ? &reader : nullptr; }
    WriterState* as_writer() { return is_writer ? &writer : nullptr; }
    Caller as_caller() const {  // see `writing` in puts.cpp
        return {Side::Writer, this, session, 0, is_writer && writer.ordered && writer.keyed, writer.number};
    }

    // Put a message, as put_frame and put_large in puts.cpp do. `item`: number of the input item of this
    // output.
    Step put(const Message& message, Deadline deadline = {}, const uint64_t* item = nullptr) {
        Frame frame;
        message.fill(frame);
        const bool large = frame.size > Taken::LOCAL;
        Slot* slot = nullptr;
        Step step = perform(
            ring, [&](bool) { return as_caller(); },
            [&](Wakes& wakes) {
                if (item) begin(*item);
                if (skip()) return Step::Done;
                return large ? ring.claim(frame, as_writer(), session, slot)
                             : ring.try_put(frame, as_writer(), wakes);
            },
            deadline);
        if (step != Step::Done || !slot) return step;
        ring.write(frame, slot);
        Wakes wakes;
        Locked<Ring> locked(ring);
        step = ring.publish(frame, slot, as_writer(), wakes);
        locked.unlock(wakes);
        return step;
    }
    // Get a message, as get_step in gets.cpp does. `more`: keep the leases of earlier items.
    Step get(uint64_t& value, Deadline deadline = {}, bool more = false) {
        Step step = perform(
            ring, [&](bool) { return Caller{Side::Reader, this, session}; },
            [&](Wakes& wakes) {
                if (is_reader && !more) ring.acknowledge(reader, wakes);
                return ring.try_take(taken, as_reader(), session, wakes);
            },
            deadline);
        if (step != Step::Done) return step;
        value = Message::value_of(taken.at, taken.size);
        finish_copy();
        if (taken.viewed) held_views.push_back({taken.slot, const_cast<char*>(taken.at), taken.size, value});
        if (taken.viewed && !keeps) drop_view();
        return step;
    }
    void finish_copy() {
        if (taken.held) locked(ring, [&](Wakes& wakes) { ring.release(taken.held, wakes); });
        taken.held = nullptr;
    }
    // Drop the oldest view or loan.
    void drop_view() {
        held_views.front().verify();
        locked(ring, [&](Wakes& wakes) { ring.unview(held_views.front().slot, wakes); });
        held_views.erase(held_views.begin());
    }
    // Take memory on loan and fill it.
    Step loan(uint64_t value, uint64_t size, Deadline deadline = {}) {
        Slot* slot = nullptr;
        Step step = perform(
            ring, [&](bool) { return as_caller(); }, [&](Wakes&) { return ring.loan(size, session, slot); },
            deadline);
        if (step != Step::Done) return step;
        held_views.push_back({slot, const_cast<char*>(ring.payload_of(slot)), size, value});
        Message::lay(value, held_views.back().at, size);
        return step;
    }
    // Put the oldest loan of `lender`, as put_loaned in puts.cpp does.
    Step put_loan(User& lender, Deadline deadline = {}, const uint64_t* item = nullptr) {
        HeldView& view = lender.held_views.front();
        Frame frame;
        frame.kind = BUFFERS;
        frame.size = view.size;
        bool skipped = false;
        Step step = perform(
            ring, [&](bool) { return as_caller(); },
            [&](Wakes& wakes) {
                if (item) begin(*item);
                if ((skipped = skip())) return Step::Done;
                return ring.put_loan(view.slot, frame, as_writer(), wakes);
            },
            deadline);
        if (skipped)
            lender.drop_view();
        else if (step == Step::Done)
            lender.held_views.erase(lender.held_views.begin());
        return step;
    }
    // Finish an item, as done_with in ports.cpp does.
    Step done_with(uint64_t number) {
        Step step = Step::Done;
        if (!writer.ordered) {
            writer.keyed = false;
        } else if (writer.keyed || writer.count == 0 || writer.number != number) {
            step = perform(
                ring, [&](bool) { return as_caller(); },
                [&](Wakes& wakes) {
                    begin(number);
                    return ring.item_done(writer, wakes);
                },
                Deadline{});
        }
        writer.count = 0;
        return step;
    }
    void leave(bool finished) {
        Wakes wakes;
        Locked<Ring> locked(ring);
        ring.end_session(session, finished, wakes);
        locked.unlock(wakes);
    }

  private:
    void begin(uint64_t number) {
        if (writer.keyed) return;
        ring.begin_item(writer, number);
        writer.keyed = true;
    }
    bool skip() {
        if (!is_writer || !writer.keyed || writer.count >= writer.skip) return false;
        writer.count += 1;
        return true;
    }
};

inline uint32_t open_session(Ring& ring, Session::Role role) {
    return locked(ring, [&](Wakes& wakes) { return ring.open_session(role, wakes); });
}
inline User open(Ring& ring, Session::Role role) { return {ring, open_session(ring, role), role}; }

// Map the memory of a ring a second time.
inline std::unique_ptr<Ring> attach(Ring& ring) {
    int fd = dup(ring.fd());
    must(fd >= 0, "dup");
    return std::make_unique<Ring>(RingHandle{fd});
}

}  // namespace testing
