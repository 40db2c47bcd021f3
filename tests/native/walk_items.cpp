// The fault walk over puts and gets.
#include "walk.hpp"

namespace testing {

namespace {

constexpr uint64_t LARGE = 6000, HUGE_ONE = 70'000;

// Return what may be inside after `done` of the `puts`: `before`, followed by the items that were put. The
// current put may or may not have taken effect.
Lists put_so_far(const Values& before, const Values& puts, int done) {
    Values list = before;
    list.insert(list.end(), puts.begin(), puts.begin() + done);
    Lists lists{list};
    if (size_t(done) < puts.size()) {
        list.push_back(puts[size_t(done)]);
        lists.push_back(list);
    }
    return lists;
}
// Return the values of `all` that may remain after `done` gets.
Lists taken_so_far(const Values& all, int done) {
    Lists lists{Values(all.begin() + done, all.end())};
    if (size_t(done) < all.size()) lists.push_back(Values(all.begin() + done + 1, all.end()));
    return lists;
}

void fill(Ring& ring, const Values& values, uint64_t size = 8) {
    User user = open(ring, Session::PLAIN);
    for (uint64_t value : values) must(user.put(Message(value, size), Deadline{0}) == Step::Done, "filling");
    user.leave(true);
}

Scenario putting(const char* name, Values before, std::vector<uint64_t> sizes) {
    Values puts;
    for (size_t i = 0; i < sizes.size(); ++i) puts.push_back(11 + i);
    Scenario s{name};
    s.prepare = [=](Scene& scene) { fill(*scene.in, before); };
    s.act = [=](Scene& scene) {
        User user = open(*scene.in, Session::PLAIN);
        for (size_t i = 0; i < puts.size(); ++i) {
            must(user.put(Message(puts[i], sizes[i]), Deadline{0}) == Step::Done, "put");
            scene.did();
        }
    };
    s.allowed = [=](int done) { return put_so_far(before, puts, done); };
    return s;
}

// The channel is closed during a large put, which then puts nothing.
Scenario close_between() {
    Scenario s{"put large, closed in between"};
    s.prepare = [](Scene& scene) { fill(*scene.in, {1, 2}); };
    s.act = [](Scene& scene) {
        Ring& ring = *scene.in;
        User user = open(ring, Session::PLAIN);
        Message message(11, LARGE);
        Frame frame;
        message.fill(frame);
        Slot* slot = nullptr;
        must(locked(ring, [&](Wakes&) { return ring.claim(frame, nullptr, user.session, slot); }) ==
                 Step::Done,
             "claim");
        ring.write(frame, slot);
        locked(ring, [&](Wakes& wakes) { ring.close(wakes); });
        must(locked(ring, [&](Wakes& wakes) { return ring.publish(frame, slot, nullptr, wakes); }) ==
                 Step::Closed,
             "publish");
    };
    s.allowed = [](int) { return Lists{{1, 2}}; };
    return s;
}

// A run is put completely or not at all. The run's slots held other items before.
Scenario putting_runs(const char* name, const Values& before, uint64_t size) {
    const Values first{11, 12, 13, 14, 15}, second{16, 17, 18};
    Scenario s{name};
    s.prepare = [=](Scene& scene) {
        User user = open(*scene.in, Session::PLAIN);
        fill(*scene.in, Values(before.size() + first.size() + second.size()), size);
        for (uint64_t value; user.get(value, Deadline{0}) == Step::Done;) {}
        user.leave(true);
        fill(*scene.in, before);
    };
    s.act = [=](Scene& scene) {
        for (const Values& values : {first, second}) {
            std::vector<Message> messages;
            for (uint64_t value : values) messages.emplace_back(value, size);
            std::vector<Ring::Small> run;
            for (const Message& one : messages) run.push_back({BYTES, 0, one.bytes.size(), one.bytes.data()});
            must(locked(*scene.in,
                        [&](Wakes& wakes) { return scene.in->put_run(run.data(), run.size(), wakes); }) ==
                     values.size(),
                 "put_run");
            scene.did();
        }
    };
    s.allowed = [=](int done) {
        Lists lists;
        Values list = before;
        for (const Values& more : {Values{}, first, second}) {
            list.insert(list.end(), more.begin(), more.end());
            lists.push_back(list);
        }
        return Lists(lists.begin() + done, lists.begin() + std::min(done + 2, 3));
    };
    return s;
}

Scenario taking(const char* name, uint64_t size) {
    const Values all{1, 2, 3, 4};
    Scenario s{name};
    s.prepare = [=](Scene& scene) { fill(*scene.in, all, size); };
    s.act = [](Scene& scene) {
        User user = open(*scene.in, Session::PLAIN);
        uint64_t value = 0;
        for (uint64_t i = 1; i <= 3; ++i) {
            must(user.get(value, Deadline{0}) == Step::Done && value == i, "get");
            scene.did();
        }
    };
    s.allowed = [=](int done) { return taken_so_far(all, done); };
    return s;
}

// A supervised reader dies. All its leased items come back, except acknowledged items. `runs`: a single
// Change takes the whole batch.
Scenario leasing(const char* name, uint64_t size, int batch, bool runs = false) {
    const Values all{1, 2, 3, 4, 5, 6};
    Scenario s{name};
    s.prepare = [=](Scene& scene) {
        fill(*scene.in, all, size);
        scene.users.push_back(open(*scene.in, Session::READER));
        scene.users.push_back(open(*scene.in, Session::READER));  // another reader, which stays to the end
        scene.in->session(scene.users[0].session).supervised = 1;
    };
    s.act = [=](Scene& scene) {
        User& user = scene.users[0];
        Ring& ring = *scene.in;
        locked(ring, [&](Wakes&) { ring.adopt(user.session); });
        for (int round = 0; round < 2; ++round) {
            Ring::InRun run[8];
            if (runs)
                must(locked(ring,
                            [&](Wakes& wakes) {
                                ring.acknowledge(user.reader, wakes);
                                return ring.take_run(user.reader, run, uint64_t(batch), UINT64_MAX, wakes);
                            }) == uint64_t(batch),
                     "take_run");
            for (int i = 0; i < batch && !runs; ++i)
                must(locked(ring,
                            [&](Wakes& wakes) {
                                if (i == 0) ring.acknowledge(user.reader, wakes);
                                return ring.try_take(user.taken, &user.reader, user.session, wakes);
                            }) == Step::Done,
                     "take");
            scene.did();
        }
        locked(ring, [&](Wakes& wakes) { ring.acknowledge(user.reader, wakes); });
        scene.did();
    };
    s.take_over = [](Scene& scene) { scene.users[0].leave(false); };
    s.allowed = [=](int done) {
        // Acknowledging a batch takes one Change per item, so a death may leave a part of the batch
        // unacknowledged.
        Lists lists;
        int least = std::max(0, done - 1) * batch, most = std::min(done, 2) * batch;
        for (int gone = least; gone <= most; ++gone) lists.push_back(Values(all.begin() + gone, all.end()));
        return lists;
    };
    s.look = [](Scene& scene, int) {
        for (uint64_t p = scene.in->header().head; p;) {
            Slot* slot = scene.in->slot_at(p);
            must(slot->deaths() <= 2, "an item counts more deaths than there were");
            p = slot->next;
        }
        scene.users[1].leave(true);
    };
    return s;
}

// The last item taken cannot be received and returns to the front. If a plain reader dies before that, the
// item counts as taken.
Scenario putting_back(const char* name, uint64_t size, bool leases) {
    const Values all{1, 2, 3, 4};
    Scenario s{name};
    s.prepare = [=](Scene& scene) {
        fill(*scene.in, all, size);
        if (!leases) return;
        scene.users.push_back(open(*scene.in, Session::READER));
        scene.users.push_back(open(*scene.in, Session::READER));
        scene.in->session(scene.users[0].session).supervised = 1;
    };
    s.act = [=](Scene& scene) {
        Ring& ring = *scene.in;
        User user = leases ? scene.users[0] : open(ring, Session::PLAIN);
        if (leases) locked(ring, [&](Wakes&) { ring.adopt(user.session); });
        for (int i = 0; i < 2; ++i) {
            must(locked(ring,
                        [&](Wakes& wakes) {
                            return ring.try_take(user.taken, user.as_reader(), user.session, wakes);
                        }) == Step::Done,
                 "take");
            scene.did();
            if (i == 0 && !leases) user.finish_copy();
        }
        locked(ring, [&](Wakes& wakes) { ring.put_back(user.taken, user.as_reader(), wakes); });
        must(!leases || user.reader.leases == 1, "more items than the last one were put back");
        scene.did();
    };
    s.take_over = [=](Scene& scene) {
        if (leases) scene.users[0].leave(false);
    };
    s.allowed = [=](int done) {
        if (leases) return Lists{all};
        Lists lists{Values(all.begin() + std::min(done, 1), all.end())};
        if (done < 3) lists.push_back(Values(all.begin() + std::min(done, 1) + 1, all.end()));
        return lists;
    };
    s.look = [=](Scene& scene, int) {
        if (leases) scene.users[1].leave(true);
    };
    return s;
}

// The ring needs more slots and blocks than it reserved when it was made.
Scenario growing() {
    Values before;
    for (uint64_t i = 0; i < 79; ++i) before.push_back(100 + i);
    Scenario s = putting("put, memory grows", before, {8, 8, 3000, 200, 4000});
    s.capacity = 200;
    return s;
}

}  // namespace

Scenario planted_scenario() {
    Scenario s = putting("planted", {1, 2}, {8, 8});
    s.act = [](Scene& scene) {
        locked(*scene.in, [&](Wakes&) {
            Header& h = scene.in->header();
            h.slots_used += 1;
            fault_point();
            h.slots_used -= 1;
        });
    };
    return s;
}

std::vector<Scenario> put_scenarios() {
    return {
        putting("put small", {1, 2}, {8, 50, 300}),
        putting("put into an empty channel", {}, {8, 8}),
        putting("put large", {1}, {LARGE, HUGE_ONE, LARGE}),
        putting_runs("put runs", {1, 2}, 8),
        putting_runs("put runs with blocks into an empty channel", {}, 1000),
        growing(),
        close_between(),
    };
}

std::vector<Scenario> take_scenarios() {
    return {
        taking("take small", 8),
        taking("take with a block", 1000),
        taking("take large", LARGE),
        leasing("lease and acknowledge", 8, 1),
        leasing("lease large and acknowledge", LARGE, 1),
        leasing("lease and acknowledge batches", 8, 2),
        leasing("lease and acknowledge runs", 8, 3, true),
        leasing("lease and acknowledge runs with blocks", 1000, 2, true),
        putting_back("put back", 8, false),
        putting_back("put back, large", LARGE, false),
        putting_back("put back a leased item", 8, true),
    };
}

}  // namespace testing
