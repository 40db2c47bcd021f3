// The fault walk over loans, and over `rebuild_lists`, which divides the memory into blocks again.
#include <algorithm>

#include "walk.hpp"

namespace testing {

namespace {

constexpr uint64_t LENT = 20'000;

void fill(Ring& ring, const Values& values) {
    User user = open(ring, Session::PLAIN);
    for (uint64_t value : values) must(user.put(Message(value), Deadline{0}) == Step::Done, "filling");
    user.leave(true);
}
// Return what may be inside after `done` of the `puts`: `before`, followed by the items that were put. The
// current put may or may not have taken effect.
Lists put_so_far(const Values& before, const Values& puts, int done) {
    Values list = before;
    list.insert(list.end(), puts.begin(), puts.begin() + std::min<int>(done, int(puts.size())));
    Lists lists{list};
    if (size_t(done) < puts.size()) {
        list.push_back(puts[size_t(done)]);
        lists.push_back(list);
    }
    return lists;
}
void nothing_left(Scene& scene) {
    Header& h = scene.in->header();
    must(h.slots_used == 0 && h.viewed_bytes == 0, "slots, views or sessions are left");
    for (const Session& s : h.sessions())
        must(s.views == 0 && s.role != Session::HOLDER, "memory is still on loan");
}
void lend(User& user, uint64_t value, uint64_t size = LENT) {
    must(user.loan(value, size, Deadline{0}) == Step::Done, "loan");
}

Scenario lending() {
    Scenario s{"loan, put it or drop it"};
    s.prepare = [](Scene& scene) { fill(*scene.in, {1, 2}); };
    s.act = [](Scene& scene) {
        User user = open(*scene.in, Session::PLAIN);
        lend(user, 11);
        lend(user, 77, 70'000);
        must(user.put_loan(user, Deadline{0}) == Step::Done, "put");
        scene.did();
        lend(user, 12, 100);
        user.drop_view();
        must(user.put_loan(user, Deadline{0}) == Step::Done, "put");
        scene.did();
        user.leave(true);
    };
    s.allowed = [](int done) { return put_so_far({1, 2}, {11, 12}, done); };
    s.last = nothing_left;
    return s;
}

// A port closes with memory on loan. The port's session remains until another port puts that memory or drops
// it.
Scenario lent_by_closed_port() {
    Scenario s{"end a port with memory on loan"};
    s.twice = false;
    s.prepare = [](Scene& scene) {
        fill(*scene.in, {1});
        scene.users.push_back(open(*scene.in, Session::WRITER));
    };
    s.act = [](Scene& scene) {
        User dropped = open(*scene.in, Session::WRITER), put = open(*scene.in, Session::WRITER),
             user = open(*scene.in, Session::PLAIN);
        lend(dropped, 77);
        lend(put, 11);
        dropped.leave(true);
        put.leave(true);
        must(user.put_loan(put, Deadline{0}) == Step::Done, "put");
        scene.did();
        must(scene.in->session(put.session).role == Session::NONE, "the session still exists");
        must(scene.in->session(dropped.session).role == Session::HOLDER, "the session is not a HOLDER");
        dropped.drop_view();
        must(scene.in->session(dropped.session).role == Session::NONE, "the session still exists");
        user.leave(true);
    };
    s.allowed = [](int done) { return put_so_far({1}, {11}, done); };
    s.look = [](Scene& scene, int) { scene.users[0].leave(true); };
    s.last = nothing_left;
    return s;
}

// Loans in an ordered stage: the output for item 1 waits for its turn.
Scenario lent_ordered() {
    Scenario s{"put a loan, parked"};
    s.twice = false;
    s.has_in = false, s.has_out = true;
    s.prepare = [](Scene& scene) {
        for (int i = 0; i < 3; ++i) {
            scene.users.push_back(open(*scene.out, Session::WRITER));
            scene.users[size_t(i)].writer.ordered = true;
        }
        scene.out->session(scene.users[0].session).supervised = 1;
    };
    auto work = [](User& writer) {
        const uint64_t item = 1;
        for (uint64_t value : {21, 22}) {
            lend(writer, value);
            must(writer.put_loan(writer, Deadline{0}, &item) == Step::Done, "put");
        }
        must(writer.done_with(item) == Step::Done, "done");
    };
    s.act = [=](Scene& scene) {
        locked(*scene.out, [&](Wakes&) { scene.out->adopt(scene.users[0].session); });
        work(scene.users[0]);
        scene.did();
    };
    s.take_over = [](Scene& scene) {
        Ring& ring = *scene.out;
        std::vector<uint64_t> items;
        if (!scene.journal->done) items.push_back(1);
        locked(ring, [&](Wakes& wakes) {
            if (ring.session(scene.users[0].session).role == Session::WRITER)
                ring.retire_writer(scene.users[0].session, items, wakes);
        });
    };
    s.finish = [=](Scene& scene) {
        if (!scene.journal->done) work(scene.users[1]);
        const uint64_t first = 0;
        must(scene.users[2].put(Message(11), Deadline{0}, &first) == Step::Done, "put");
        must(scene.users[2].done_with(first) == Step::Done, "done");
        scene.users[1].leave(true);
        scene.users[2].leave(true);
        User one = open(*scene.out, Session::PLAIN), other = open(*scene.out, Session::PLAIN);
        must(Walk::drain(one, other) == Values{11, 21, 22}, "the outputs are wrong");
        must(scene.out->header().slots_used == 0 && scene.out->header().resumes == 0,
             "slots, views or sessions are left");
    };
    return s;
}

Scenario putting(const char* name, std::vector<uint64_t> sizes) {
    Values puts;
    for (size_t i = 0; i < sizes.size(); ++i) puts.push_back(11 + i);
    Scenario s{name};
    s.tolerance.lost_free_slots = true;
    s.act = [=](Scene& scene) {
        User user = open(*scene.in, Session::PLAIN);
        for (size_t i = 0; i < puts.size(); ++i) {
            must(user.put(Message(puts[i], sizes[i], BUFFERS), Deadline{0}) == Step::Done, "put");
            scene.did();
        }
    };
    s.allowed = [=](int done) { return put_so_far({}, puts, done); };
    return s;
}

// Many items have cut the memory into blocks that are larger than max_bytes in total. All of them are free,
// but none has the right size.
Scenario all_free() {
    Scenario s = putting("cut memory again, all of it free", {15'000, 8, 3000});
    s.max_bytes = 30'000;
    s.prepare = [](Scene& scene) {
        User user = open(*scene.in, Session::PLAIN);
        uint64_t value;
        for (uint64_t size : {100, 600, 2200, 5000, 6000, 9000, 12'000}) {
            must(user.put(Message(1, size), Deadline{0}) == Step::Done, "put");
            must(user.get(value, Deadline{0}) == Step::Done, "get");
        }
        user.leave(true);
        Header& h = scene.in->header();
        must(h.slots_used == 0 && h.blocks_top - h.blocks_at > h.max_bytes,
             "the memory would not be cut again");
    };
    s.look = [](Scene& scene, int done) {
        Header& h = scene.in->header();
        if (done) must(h.blocks_top - h.blocks_at < h.max_bytes + 5000, "the memory was not cut again");
    };
    s.last = nothing_left;
    return s;
}

// All memory is cut, and every third block is viewed, so larger blocks must come from the gaps. `again`: the
// process that takes over after the death also cuts blocks, and dies doing so.
Scenario gaps(const char* name, bool again) {
    Scenario s = putting(
        name, again ? std::vector<uint64_t>{36'000, 8} : std::vector<uint64_t>{36'000, 8, 3000, 12'000});
    s.max_bytes = 60'000;
    s.twice = again;
    s.prepare = [](Scene& scene) {
        scene.users.push_back(open(*scene.in, Session::PLAIN));
        User& user = scene.users[0];
        std::vector<HeldView> keep;
        for (uint64_t value = 1000; user.loan(value, 20'000, Deadline{0}) == Step::Done; ++value) {}
        must(user.held_views.size() > 8, "the memory is not used up");
        for (size_t n = user.held_views.size(), i = 0; i < n; ++i) {
            if (i % 3) {
                user.drop_view();
            } else {
                keep.push_back(user.held_views.front());
                user.held_views.erase(user.held_views.begin());
            }
        }
        user.held_views = keep;
    };
    if (again)
        s.take_over = [](Scene& scene) {
            User user = open(*scene.in, Session::PLAIN);
            lend(user, 78, 36'000);
            user.drop_view();
            user.leave(true);
        };
    s.look = [](Scene& scene, int) {
        for (const HeldView& view : scene.users[0].held_views) view.verify();
    };
    s.last = [](Scene& scene) {
        User& user = scene.users[0];
        while (!user.held_views.empty()) user.drop_view();
        nothing_left(scene);
        user.leave(true);
    };
    return s;
}

}  // namespace

std::vector<Scenario> memory_scenarios() {
    return {
        lending(),
        lent_by_closed_port(),
        lent_ordered(),
        all_free(),
        gaps("cut memory again between used blocks", false),
        gaps("cut memory again after a death", true),
    };
}

}  // namespace testing
