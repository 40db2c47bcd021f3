// The fault walk over a stage's worker, which leases items from `in` and puts outputs into `out`. Wherever
// the worker dies, its replacement gets its items. Each output must appear exactly once and, if the stage is
// ordered, in order.
#include <algorithm>
#include <utility>

#include "walk.hpp"

namespace testing {

namespace {

struct Kind {
    bool ordered, single;
    uint64_t size;  // bytes per output
};
using Outputs = std::vector<Values>;  // the outputs for each item, by item number

// Put all outputs for an item, and then report it as finished.
void produce(Scene& scene, User& writer, uint64_t item, const Values& outputs, uint64_t size) {
    for (uint64_t value : outputs)
        must(writer.put(Message(value, size), Deadline{0}, &item) == Step::Done, "output");
    must(writer.done_with(item) == Step::Done, "done");
    scene.did();
}
User writer_of(Scene& scene, const Kind& kind) {
    User writer = open(*scene.out, Session::WRITER);
    writer.writer.ordered = kind.ordered;
    writer.writer.single = kind.single;
    return writer;
}
void adopt(User& user) {
    locked(user.ring, [&](Wakes&) { user.ring.adopt(user.session); });
}
// Do what a supervisor does after a worker's death. The supervisor may die as well, so this may run twice.
void retire(User& writer, const std::vector<uint64_t>& items) {
    locked(writer.ring, [&](Wakes& wakes) {
        if (writer.ring.session(writer.session).role == Session::WRITER)
            writer.ring.retire_writer(writer.session, items, wakes);
    });
}
void expect_out(Scene& scene, Values expected, bool ordered) {
    User one = open(*scene.out, Session::PLAIN), other = open(*scene.out, Session::PLAIN);
    must(scene.out->header().state == CLOSED, "the last writer has left, but the channel is open");
    must(scene.out->header().resumes == 0, "the outputs of a dead writer are still remembered");
    Values values = Walk::drain(one, other);
    if (!ordered) std::sort(values.begin(), values.end()), std::sort(expected.begin(), expected.end());
    must(values == expected, "the outputs were" + Walk::text(values));
}

// A writer of an ordered stage processes items mine[0], mine[1], … Other writers process the items before and
// after these. User 0 is the writer that dies, user 1 its replacement, and user 2 all other writers. Items
// that the dead writer has not finished are on lease.
Scenario writing(const char* name, Kind kind, Outputs outputs, Values first, Values mine, Values last) {
    Scenario s{name};
    s.has_in = false, s.has_out = true;
    s.twice = kind.size <= Taken::LOCAL;
    auto unfinished = [=](Scene& scene) {
        size_t done = size_t(scene.journal->done);
        return done < mine.size() ? std::vector<uint64_t>{mine[done]} : std::vector<uint64_t>{};
    };
    s.prepare = [=](Scene& scene) {
        for (int i = 0; i < 3; ++i) scene.users.push_back(writer_of(scene, kind));
        scene.out->session(scene.users[0].session).supervised = 1;
        for (uint64_t item : first) produce(scene, scene.users[2], item, outputs[item], kind.size);
        scene.journal->done = 0;
    };
    s.act = [=](Scene& scene) {
        adopt(scene.users[0]);
        for (uint64_t item : mine) produce(scene, scene.users[0], item, outputs[item], kind.size);
    };
    s.take_over = [=](Scene& scene) { retire(scene.users[0], unfinished(scene)); };
    s.finish = [=](Scene& scene) {
        for (size_t i = size_t(scene.journal->done); i < mine.size(); ++i)
            produce(scene, scene.users[1], mine[i], outputs[mine[i]], kind.size);
        for (uint64_t item : last) produce(scene, scene.users[2], item, outputs[item], kind.size);
        scene.users[1].leave(true);
        scene.users[2].leave(true);
        Values expected;
        for (const Values& of_item : outputs) expected.insert(expected.end(), of_item.begin(), of_item.end());
        expect_out(scene, expected, kind.ordered);
    };
    return s;
}

// The channel is closed while outputs for items 1 and 3 are parked. Outputs for items 0 and 2 can no longer
// be put.
Scenario closing(const char* name, Kind kind) {
    Scenario s{name};
    s.has_in = false, s.has_out = true;
    s.prepare = [=](Scene& scene) {
        scene.users.push_back(writer_of(scene, kind));
        produce(scene, scene.users[0], 3, {30, 31}, kind.size);
        produce(scene, scene.users[0], 1, {10, 11}, kind.size);
        scene.journal->done = 0;
    };
    s.act = [](Scene& scene) {
        locked(*scene.out, [&](Wakes& wakes) { scene.out->close(wakes); });
        scene.did();
    };
    s.finish = [](Scene& scene) {
        locked(*scene.out, [&](Wakes& wakes) { scene.out->close(wakes); });
        scene.users[0].leave(true);
        expect_out(scene, {10, 11, 30, 31}, true);
    };
    return s;
}

// A writer has died after some outputs for item 0, and the supervisor dies while retiring it.
Scenario retiring(const char* name, Kind kind) {
    const Values outputs{1, 2, 3};
    Scenario s{name};
    s.has_in = false, s.has_out = true;
    s.prepare = [=](Scene& scene) {
        for (int i = 0; i < 2; ++i) scene.users.push_back(writer_of(scene, kind));
        scene.out->session(scene.users[0].session).supervised = 1;
        uint64_t item = 0;
        for (uint64_t value : {1, 2})
            must(scene.users[0].put(Message(value, kind.size), Deadline{0}, &item) == Step::Done, "output");
    };
    s.act = [](Scene& scene) { retire(scene.users[0], {0}); };
    s.take_over = s.act;
    s.finish = [=](Scene& scene) {
        produce(scene, scene.users[1], 0, outputs, kind.size);
        scene.users[1].leave(true);
        expect_out(scene, outputs, true);
    };
    return s;
}

// The replacement also dies, after it has taken over its predecessor's output count.
Scenario resuming(const char* name, Kind kind) {
    Scenario s = retiring(name, kind);
    s.twice = kind.size <= Taken::LOCAL;
    s.prepare = [=, before = s.prepare](Scene& scene) {
        before(scene);
        retire(scene.users[0], {0});
        scene.users.push_back(writer_of(scene, kind));
        scene.out->session(scene.users[1].session).supervised = 1;
    };
    s.act = [=](Scene& scene) {
        adopt(scene.users[1]);
        produce(scene, scene.users[1], 0, {1, 2, 3, 4}, kind.size);
        produce(scene, scene.users[1], 1, {5}, kind.size);
    };
    s.take_over = [](Scene& scene) { retire(scene.users[1], {uint64_t(scene.journal->done)}); };
    s.finish = [=](Scene& scene) {
        int done = scene.journal->done;
        if (done < 1) produce(scene, scene.users[2], 0, {1, 2, 3, 4}, kind.size);
        if (done < 2) produce(scene, scene.users[2], 1, {5}, kind.size);
        scene.users[2].leave(true);
        expect_out(scene, {1, 2, 3, 4, 5}, true);
    };
    return s;
}

// Run a whole worker: it leases items, puts their outputs and acknowledges the items. Users 0 and 1 are the
// reader and writer of the worker that dies, users 2 and 3 those of its replacement. `again`: the worker
// restarts this item once at its first output, without dying.
void work(Scene& scene, User& reader, User& writer, const Kind& kind, const Outputs& outputs,
          int again = -1) {
    for (;;) {
        if (reader.reader.leases) must(writer.done_with(reader.reader.number) == Step::Done, "done");
        uint64_t value = 0;
        Step step = reader.get(value, Deadline{0});
        if (step == Step::Drained) return;
        must(step == Step::Done, "a worker's read ended with " + std::to_string(int(step)));
        bool whole = true;
        for (uint64_t output : outputs[value]) {
            must(writer.put(Message(output, kind.size), Deadline{0}, &reader.reader.number) == Step::Done,
                 "output");
            whole = int(value) != again;
            if (!whole) break;
        }
        if (whole) {
            scene.did();
            continue;
        }
        locked(reader.ring, [&](Wakes&) { reader.ring.begin_again(reader.reader); });
        writer.writer.keyed = false;
        again = -1;
    }
}

// Fill the input channel, and open the ports of two workers.
void prepare_two_workers(Scene& scene, Kind kind, uint64_t items) {
    User source = open(*scene.in, Session::WRITER);
    for (uint64_t item = 0; item < items; ++item)
        must(source.put(Message(item), Deadline{0}) == Step::Done, "filling");
    source.leave(true);
    for (int i = 0; i < 2; ++i) {
        scene.users.push_back(open(*scene.in, Session::READER));
        scene.users.push_back(writer_of(scene, kind));
        scene.in->session(scene.users[size_t(2 * i)].session).supervised = 1;
        scene.out->session(scene.users[size_t(2 * i + 1)].session).supervised = 1;
    }
}

Scenario working(const char* name, Kind kind, Outputs outputs, int again = -1) {
    Scenario s{name};
    s.has_out = true;
    s.twice = false;
    s.prepare = [=](Scene& scene) { prepare_two_workers(scene, kind, outputs.size()); };
    s.act = [=](Scene& scene) {
        adopt(scene.users[0]);
        adopt(scene.users[1]);
        work(scene, scene.users[0], scene.users[1], kind, outputs, again);
        scene.users[0].leave(true);
        scene.users[1].leave(true);
    };
    s.take_over = [](Scene& scene) {
        std::vector<uint64_t> items;
        locked(*scene.in, [&](Wakes&) {
            for (Slot* slot : scene.in->leased_slots(scene.users[0].session)) items.push_back(slot->number);
            for (uint64_t number : scene.in->reserved_numbers(scene.users[0].session))
                items.push_back(number);
        });
        retire(scene.users[1], items);
        scene.users[0].leave(false);
    };
    s.finish = [=](Scene& scene) {
        work(scene, scene.users[2], scene.users[3], kind, outputs);
        scene.users[2].leave(true);
        scene.users[3].leave(true);
        Values expected;
        for (const Values& of_item : outputs) expected.insert(expected.end(), of_item.begin(), of_item.end());
        expect_out(scene, expected, true);
        User plain = open(*scene.in, Session::PLAIN);
        uint64_t value;
        must(plain.get(value, Deadline{0}) == Step::Drained, "the input is not drained");
    };
    return s;
}

// Do what a supervisor does after a reader's death. The supervisor may die as well, so this may run twice.
void reserve_for(User& from, User& to, bool all = false) {
    locked(from.ring, [&](Wakes& wakes) {
        if (from.ring.session(from.session).role != Session::READER) return;
        from.ring.reserve_for(from.session, to.session, all);
        from.ring.end_session(from.session, false, wakes);
    });
}

// A reader has died in user code with items 1 and 2 on lease. Only this reader's replacement gets these
// items, in order, and no other reader waits for them. User 0 is the dead reader, users 1 and 2 are its
// replacements, and user 3 is another reader. `tried`: the first replacement works on one item, and then dies
// outside of user code. Only the other item then stays reserved for the next replacement. `all`: the reader
// died outside of user code, and all its leased items are reserved.
Scenario handing_on(const char* name, bool tried, bool all = false) {
    Scenario s{name};
    s.twice = !tried;
    s.prepare = [=](Scene& scene) {
        User source = open(*scene.in, Session::WRITER);
        for (uint64_t item : {1, 2, 3}) must(source.put(Message(item), Deadline{0}) == Step::Done, "filling");
        source.leave(true);
        for (int i = 0; i < 4; ++i) {
            scene.users.push_back(open(*scene.in, Session::READER));
            scene.in->session(scene.users[size_t(i)].session).supervised = 1;
        }
        uint64_t value = 0;
        for (bool more : {false, true})
            must(scene.users[0].get(value, Deadline{0}, more) == Step::Done, "get");
        scene.in->session(scene.users[0].session).at = all ? Session::OURS : Session::USERS;
        if (tried) reserve_for(scene.users[0], scene.users[1]);
    };
    s.act = [=](Scene& scene) {
        if (!tried) return reserve_for(scene.users[0], scene.users[1], all);
        adopt(scene.users[1]);
        uint64_t value = 0;
        must(scene.users[1].get(value, Deadline{0}) == Step::Done && value == 1,
             "the first suspect was not received");
    };
    s.take_over = [=](Scene& scene) {
        if (tried)
            reserve_for(scene.users[1], scene.users[2]);
        else
            reserve_for(scene.users[0], scene.users[1], all);
    };
    s.finish = [=](Scene& scene) {
        User &replacement = scene.users[tried ? 2 : 1], &other = scene.users[3];
        if (tried && scene.in->session(scene.users[1].session).role == Session::READER)
            reserve_for(scene.users[1], scene.users[2]);
        Values values;
        uint64_t value = 0;
        if (all) {
            must(other.get(value, Deadline{0}) == Step::Done && value == 3,
                 "another reader got a reserved item");
            values.push_back(value);
        }
        while (replacement.get(value, Deadline{0}) == Step::Done) values.push_back(value);
        std::sort(values.begin(), values.end());
        must(values == Values{1, 2, 3}, "the items were" + Walk::text(values));
        must(other.get(value, Deadline{0}) == Step::Drained, "items are left");
        for (User* user : {&scene.users[1], &replacement, &other})
            if (scene.in->session(user->session).role == Session::READER) user->leave(true);
        if (!tried) scene.users[2].leave(true);
    };
    return s;
}

// Process the items of a run, as loop_steps.cpp does. `recalled`: another reader recalls items of the run
// after its first item.
void work_in_runs(User& reader, User& writer, const Kind& kind, User* recalled_by) {
    for (;;) {
        if (reader.reader.leases) must(writer.done_with(reader.reader.number) == Step::Done, "done");
        Ring::InRun run[Redo::MOST];
        uint64_t n = locked(reader.ring, [&](Wakes& wakes) {
            reader.ring.acknowledge(reader.reader, wakes);
            return reader.ring.begin_run(reader.reader, run, wakes);
        });
        if (!n) return;
        for (uint64_t i = 0, first = reader.reader.number; i < n; ++i) {
            if (i) must(writer.done_with(reader.reader.number) == Step::Done, "done");
            if (i && !reader.ring.start_in_run(reader.session, i + 1)) {
                if (!locked(reader.ring, [&](Wakes&) { return reader.ring.may_start(reader.reader); })) break;
                n = reader.reader.leases;
            }
            reader.reader.number = first + i;
            const Slot* slot = run[i].slot;
            const uint64_t value = Message::value_of(reader.ring.payload_of(run[i].slot), slot->size);
            must(
                writer.put(Message(100 + value, kind.size), Deadline{0}, &reader.reader.number) == Step::Done,
                "output");
            if (User* other = std::exchange(recalled_by, nullptr)) {
                uint64_t taken = 0;
                for (uint64_t left = reader.ring.inside() + 1; left; --left)
                    must(other->get(taken, Deadline{0}, true) == Step::Done, "no item was recalled");
                locked(other->ring,
                       [&](Wakes& wakes) { other->ring.end_session(other->session, false, wakes); });
            }
        }
    }
}

// A worker dies inside a run. The worker's replacement processes the other items. Users 0 and 1 are the
// reader and the writer of the worker that dies. Users 2 and 3 are those of its replacement.
Scenario working_in_runs(const char* name, Kind kind, bool recalled) {
    constexpr uint64_t ITEMS = 12;
    Scenario s{name};
    s.capacity = 96;
    s.has_out = true;
    s.twice = false;
    s.prepare = [=](Scene& scene) { prepare_two_workers(scene, kind, ITEMS); };
    s.act = [=](Scene& scene) {
        adopt(scene.users[0]);
        adopt(scene.users[1]);
        User other = open(*scene.in, Session::READER);
        work_in_runs(scene.users[0], scene.users[1], kind, recalled ? &other : nullptr);
        if (!recalled)
            locked(other.ring, [&](Wakes& wakes) { other.ring.end_session(other.session, false, wakes); });
    };
    s.take_over = [](Scene& scene) {
        std::vector<uint64_t> items;
        const uint64_t committed = locked(
            *scene.out, [&](Wakes&) { return scene.out->session(scene.users[1].session).committed_item; });
        locked(*scene.in, [&](Wakes& wakes) {
            scene.in->finish_in_run(scene.users[0].session, committed, wakes);
            for (Slot* slot : scene.in->leased_slots(scene.users[0].session)) items.push_back(slot->number);
        });
        retire(scene.users[1], items);
        scene.users[0].leave(false);
    };
    s.finish = [=](Scene& scene) {
        Outputs outputs;
        for (uint64_t item = 0; item < ITEMS; ++item) outputs.push_back({100 + item});
        work(scene, scene.users[2], scene.users[3], kind, outputs);
        scene.users[2].leave(true);
        scene.users[3].leave(true);
        Values expected;
        for (const Values& of_item : outputs) expected.push_back(of_item[0]);
        expect_out(scene, expected, kind.ordered);
        User plain = open(*scene.in, Session::PLAIN);
        uint64_t value;
        must(plain.get(value, Deadline{0}) == Step::Drained, "the input is not drained");
    };
    return s;
}

}  // namespace

std::vector<Scenario> stage_scenarios() {
    constexpr Kind map{true, true, 8}, flat{true, false, 8}, large{true, false, 6000}, loose{false, false, 8};
    const Outputs one{{1}, {2}, {3}, {4}}, some{{1, 2}, {}, {3}, {4, 5, 6}, {}, {7}}, few{{1, 2}, {}, {3}};
    return {
        writing("put ordered, parked", flat, some, {}, {3, 4, 5}, {0, 1, 2}),
        writing("put ordered, parked, large", large, some, {}, {3, 5}, {0, 1, 2, 4}),
        writing("put ordered, at its turn", flat, some, {}, {0, 1, 2}, {3, 4, 5}),
        writing("advance over several groups", flat, some, {1, 3, 4, 5}, {0, 2}, {}),
        writing("advance over large ones", large, some, {1, 3, 4, 5}, {0, 2}, {}),
        writing("put single, parked", map, one, {}, {2, 3}, {0, 1}),
        writing("put single, at its turn", map, one, {1, 3}, {0, 2}, {}),
        writing("put unordered", loose, some, {1}, {0, 2, 3}, {4, 5}),
        closing("close with parked outputs", flat),
        closing("close with large parked outputs", large),
        retiring("retire a writer", flat),
        retiring("retire a writer, unordered", loose),
        resuming("begin an item of a dead writer", flat),
        resuming("begin an item of a dead writer, large outputs", large),
        resuming("begin an item of a dead writer, unordered", loose),
        handing_on("reserve a suspect", false),
        handing_on("take a suspect", true),
        handing_on("reserve all items", false, true),
        working("a worker of map", map, {{1}, {2}}),
        working("a worker of flat_map", flat, few),
        working("a worker of flat_map, large outputs", large, few),
        working("a worker of flat_map, unordered", loose, few),
        working("a worker that begins an item again", flat, few, 0),
        working("a worker that begins an item again, unordered", loose, few, 2),
        working_in_runs("a worker of map with runs", map, false),
        working_in_runs("a worker of map with runs, unordered", {false, true, 8}, false),
        working_in_runs("a worker of map with runs, some recalled", map, true),
    };
}

}  // namespace testing
