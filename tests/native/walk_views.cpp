// The fault walk over views. A view of a block must last until its reader drops it, even if the block's slot
// moves to another list.
#include <algorithm>

#include "walk.hpp"

namespace testing {

namespace {

constexpr uint64_t SEEN = 20'000;  // large enough for a view

void fill(Ring& ring, const Values& values) {
    User user = open(ring, Session::PLAIN);
    for (uint64_t value : values)
        must(user.put(Message(value, SEEN, BUFFERS), Deadline{0}) == Step::Done, "filling");
    user.leave(true);
}
User viewer(Ring& ring, Session::Role role) {
    User user = open(ring, role);
    user.keeps = true;
    return user;
}
void get(User& user, uint64_t expected, bool more = false) {
    const size_t before = user.held_views.size();
    uint64_t value = 0;
    must(user.get(value, Deadline{0}, more) == Step::Done && value == expected, "get");
    must(user.held_views.size() == before + 1, "the item was copied, not viewed");
}
void get_more(User& user, uint64_t expected) { get(user, expected, true); }
void acknowledge(User& user) {
    locked(user.ring, [&](Wakes& wakes) { user.ring.acknowledge(user.reader, wakes); });
}
void verify_all(const User& user) {
    for (const HeldView& view : user.held_views) view.verify();
}
// Check that all views have ended.
void nothing_seen(Scene& scene) {
    Header& h = scene.in->header();
    must(h.viewed_bytes == 0, "bytes count as viewed without a viewer");
    for (const Session& s : h.sessions()) must(s.views == 0 && s.role != Session::HOLDER, "a view is left");
}
void nothing_left(Scene& scene) {
    nothing_seen(scene);
    must(scene.in->header().slots_used == 0, "a slot is left");
}

// Return the lists that may be left of `all` after its first `least` to `most` items have gone.
Lists gone(const Values& all, int least, int most) {
    Lists lists;
    for (int n = std::min<int>(least, int(all.size())); n <= std::min<int>(most, int(all.size())); ++n)
        lists.push_back(Values(all.begin() + n, all.end()));
    return lists;
}

// No view remains, no matter when the viewer dies.
Scenario viewing(const char* name, Values all) {
    Scenario s{name};
    s.prepare = [=](Scene& scene) {
        fill(*scene.in, all);
        scene.users.push_back(open(*scene.in, Session::READER));  // another reader, which never ends
    };
    s.look = [](Scene& scene, int) {
        nothing_seen(scene);
        must(scene.in->header().state == OPEN, "the channel was closed");
        scene.users[0].leave(true);
    };
    s.last = nothing_left;
    return s;
}

// A plain user takes an item with a view, which makes the slot HELD at once.
Scenario taking() {
    const Values all{1, 2, 3, 4};
    Scenario s = viewing("take a view", all);
    s.twice = false;
    s.act = [](Scene& scene) {
        User user = viewer(*scene.in, Session::PLAIN);
        for (uint64_t value : {1, 2, 3}) {
            get(user, value);
            scene.did();
            if (value == 2) user.drop_view();
        }
        verify_all(user);
        user.drop_view();
        user.drop_view();
        user.leave(true);
    };
    s.allowed = [=](int done) { return gone(all, done, std::min(done + 1, 3)); };
    return s;
}

// An item returns to the front of the ring while a plain user views it. The next user makes a copy.
Scenario putting_back() {
    const Values all{1, 2, 3};
    Scenario s = viewing("put back a viewed item", all);
    s.twice = false;
    s.act = [](Scene& scene) {
        User user = viewer(*scene.in, Session::PLAIN);
        get(user, 1);
        locked(*scene.in, [&](Wakes& wakes) { scene.in->put_back(user.taken, nullptr, wakes); });
        scene.did();
        verify_all(user);
        user.drop_view();
        scene.did();
        user.leave(true);
    };
    s.allowed = [=](int done) { return gone(all, 0, done ? 0 : 1); };
    return s;
}

// A reader drops its view of an acknowledged item (HELD), and then its view of a leased item.
Scenario leasing() {
    const Values all{1, 2, 3};
    Scenario s = viewing("lease a view and acknowledge it", all);
    s.prepare = [before = s.prepare](Scene& scene) {
        before(scene);
        scene.users.push_back(viewer(*scene.in, Session::READER));
        scene.in->session(scene.users[1].session).supervised = 1;
    };
    s.act = [](Scene& scene) {
        User& user = scene.users[1];
        locked(*scene.in, [&](Wakes&) { scene.in->adopt(user.session); });
        get(user, 1);
        scene.did();
        get(user, 2);
        scene.did();
        must(user.held_views[0].slot->place() == SlotState::Held &&
                 user.held_views[1].slot->place() == SlotState::Leased,
             "the items are in the wrong places");
        user.drop_view();
        user.drop_view();
        acknowledge(user);
        scene.did();
    };
    s.take_over = [](Scene& scene) { scene.users[1].leave(false); };
    s.allowed = [=](int done) { return gone(all, std::max(0, done - 1), std::min(done, 2)); };
    return s;
}

// A reader closes, and then drops its views of items that it gave back. The items are INSIDE, with the reader
// as viewer.
Scenario given_back() {
    const Values all{1, 2, 3};
    Scenario s = viewing("give back viewed items, then drop the views", all);
    s.twice = false;
    s.act = [](Scene& scene) {
        User user = viewer(*scene.in, Session::READER);
        get(user, 1);
        get_more(user, 2);
        user.leave(false);
        scene.did();
        must(scene.in->session(user.session).role == Session::HOLDER, "the session is not a HOLDER");
        must(user.held_views[0].slot->place() == SlotState::Inside, "the item was not given back");
        user.drop_view();
        verify_all(user);
        user.drop_view();
    };
    s.allowed = [=](int) { return Lists{all}; };
    return s;
}

// A session ends while it still has views of HELD and LEASED slots. The session remains as a HOLDER until the
// last view has ended.
Scenario holding() {
    const Values all{1, 2, 3};
    Scenario s = viewing("end a session with views", all);
    s.act = [](Scene& scene) {
        User user = viewer(*scene.in, Session::READER);
        get(user, 1);
        scene.did();
        get(user, 2);
        scene.did();
        user.leave(true);
        scene.did();
        must(scene.in->session(user.session).role == Session::HOLDER, "the session is not a HOLDER");
        verify_all(user);
        user.drop_view();
        must(scene.in->session(user.session).role == Session::HOLDER,
             "the session ended before its last view");
        user.drop_view();
        must(scene.in->session(user.session).role == Session::NONE, "the session still exists");
    };
    s.allowed = [=](int done) { return gone(all, done == 3 ? 2 : std::max(0, done - 1), std::min(done, 2)); };
    return s;
}

Scenario holding_plain() {
    const Values all{1, 2, 3};
    Scenario s = viewing("end a plain session with views", all);
    s.act = [](Scene& scene) {
        User user = viewer(*scene.in, Session::PLAIN);
        get(user, 1);
        scene.did();
        get(user, 2);
        scene.did();
        user.leave(true);
        verify_all(user);
        user.drop_view();
        user.drop_view();
    };
    s.allowed = [=](int done) { return gone(all, done, std::min(done + 1, 2)); };
    return s;
}

// A process dies while it views slots in every state and has memory on loan. The process that cleans up also
// dies.
Scenario died(const char* name, bool supervised) {
    const Values all{1, 2, 3, 4, 5};
    Scenario s = viewing(name, all);
    s.prepare = [=, before = s.prepare](Scene& scene) {
        before(scene);
        scene.users.push_back(open(*scene.in, Session::READER));
        if (supervised) scene.in->session(scene.users[1].session).supervised = 1;
        fflush(nullptr);
        pid_t child = fork();
        must(child >= 0, "fork");
        if (child == 0) {
            Ring& ring = *scene.in;
            User plain = viewer(ring, Session::PLAIN), leaver = viewer(ring, Session::READER),
                 &reader = scene.users[1];
            locked(ring, [&](Wakes&) { ring.adopt(reader.session); });
            reader.keeps = true;
            get(plain, 1);   // HELD
            get(leaver, 2);  // INSIDE again
            leaver.leave(false);
            must(leaver.held_views[0].slot->place() == SlotState::Inside, "the item is not inside");
            uint64_t value;  // a copy, so LEASED without a view
            must(reader.get(value, Deadline{0}) == Step::Done && value == 2 && reader.held_views.empty(),
                 "the item was not copied");
            get_more(reader, 3);  // LEASED
            must(plain.loan(77, SEEN, Deadline{0}) == Step::Done, "loan");
            _exit(0);
        }
        int status;
        must(waitpid(child, &status, 0) == child && status == 0, "the child failed before its death");
        must(scene.in->header().viewed_bytes == 3 * SEEN, "the dead process has too few views");
    };
    s.act = [=](Scene& scene) { supervised ? scene.users[1].leave(false) : find_dead(*scene.in); };
    s.take_over = [=](Scene& scene) {
        if (supervised) scene.users[1].leave(false);
    };
    s.allowed = [=](int) { return Lists{{2, 3, 4, 5}}; };
    s.look = [=, before = s.look](Scene& scene, int done) {
        if (!supervised)
            must(scene.in->session(scene.users[1].session).role == Session::NONE,
                 "the dead reader's session is left");
        before(scene, done);
    };
    return s;
}

// A reader has given back items that it still views, and other users take and copy them. A finished item's
// slot becomes HELD for the first reader, which can still read it.
Scenario second_reader(const char* name, Session::Role role) {
    const Values all{1, 2, 3, 4};
    Scenario s{name};
    s.twice = false;
    s.prepare = [=](Scene& scene) {
        fill(*scene.in, all);
        scene.users.push_back(viewer(*scene.in, Session::READER));
        get(scene.users[0], 1);
        get_more(scene.users[0], 2);
        scene.users.push_back(open(*scene.in, role == Session::READER ? role : Session::WRITER));
        scene.users[0].leave(false);
    };
    s.act = [=](Scene& scene) {
        User user = open(*scene.in, role);
        for (uint64_t i = 1; i <= 3; ++i) {
            uint64_t value = 0;
            must(user.get(value, Deadline{0}) == Step::Done && value == i, "get");
            must(i == 3 || !user.taken.viewed, "an item has two viewers");
            scene.did();
        }
        user.leave(true);
        scene.did();
    };
    s.allowed = [=](int done) {
        if (role == Session::PLAIN) return gone(all, std::min(done, 3), std::min(done + 1, 3));
        return gone(all, done == 4 ? 3 : std::max(0, done - 1), std::min(done, 3));
    };
    s.look = [](Scene& scene, int) {
        must(scene.in->header().viewed_bytes == 2 * SEEN, "the first reader's views are wrong");
        verify_all(scene.users[0]);
        scene.users[1].leave(true);
    };
    s.last = [](Scene& scene) {
        User& first = scene.users[0];
        for (const HeldView& view : first.held_views)
            must(view.slot->place() == SlotState::Held && view.slot->viewer() == first.session,
                 "another session views the item");
        first.drop_view();
        verify_all(first);
        first.drop_view();
        nothing_left(scene);
    };
    return s;
}

// The first reader drops its view while the second reader is copying. The block must not change before the
// copy is complete.
Scenario copying() {
    const Values all{1, 2};
    Scenario s = viewing("drop a view while another user copies", all);
    s.twice = false;
    s.act = [](Scene& scene) {
        Ring& ring = *scene.in;
        User first = viewer(ring, Session::READER), second = open(ring, Session::PLAIN);
        get(first, 1);
        first.leave(false);
        must(locked(ring,
                    [&](Wakes& wakes) {
                        return ring.try_take(second.taken, nullptr, second.session, wakes);
                    }) == Step::Done,
             "take");
        must(second.taken.held && !second.taken.viewed, "an item has two viewers");
        scene.did();
        first.drop_view();
        must(second.put(Message(11, SEEN, BUFFERS), Deadline{0}) == Step::Done, "put");
        scene.did();
        must(Message::value_of(second.taken.at, second.taken.size) == 1,
             "the item was overwritten during the copy");
        second.finish_copy();
        second.leave(true);
    };
    s.allowed = [](int done) {
        Lists lists{{2, 11}};
        if (done == 0) lists = {{1, 2}, {2}};
        if (done == 1) lists.push_back({2});
        return lists;
    };
    return s;
}

// A port moves to another process. The former process's views stay valid, whatever happens to the new
// process.
Scenario moving() {
    const Values all{1, 2, 3};
    Scenario s{"adopt a port whose former owner has views"};
    s.prepare = [=](Scene& scene) {
        fill(*scene.in, all);
        scene.users.push_back(viewer(*scene.in, Session::READER));
        get(scene.users[0], 1);
        get(scene.users[0], 2);
        scene.users.push_back(open(*scene.in, Session::READER));
        scene.in->session(scene.users[0].session).supervised = 1;
    };
    s.act = [](Scene& scene) {
        User user(*scene.in, scene.users[0].session, Session::READER);
        locked(*scene.in, [&](Wakes&) { scene.in->adopt(user.session); });
        must(scene.in->session(user.session).views == 0, "the port still has the former process's views");
        user.reader = scene.users[0].reader;
        user.keeps = true;
        get(user, 3);
        scene.did();
        acknowledge(user);
        scene.did();
    };
    s.take_over = [](Scene& scene) { scene.users[0].leave(false); };
    s.allowed = [](int done) { return done ? done == 2 ? Lists{{}} : Lists{{3}, {}} : Lists{{2, 3}, {3}}; };
    s.look = [](Scene& scene, int) {
        must(scene.in->header().viewed_bytes == 2 * SEEN, "the former process's views are wrong");
        verify_all(scene.users[0]);
        scene.users[1].leave(true);
    };
    s.last = [](Scene& scene) {
        verify_all(scene.users[0]);
        scene.users[0].drop_view();
        scene.users[0].drop_view();
        nothing_left(scene);
    };
    return s;
}

}  // namespace

std::vector<Scenario> view_scenarios() {
    return {
        taking(),
        putting_back(),
        leasing(),
        given_back(),
        holding(),
        holding_plain(),
        died("sweep up after a dead viewer", false),
        died("end the session of a dead viewer", true),
        second_reader("take an item that another reader views", Session::PLAIN),
        second_reader("lease an item that another reader views", Session::READER),
        copying(),
        moving(),
    };
}

}  // namespace testing
