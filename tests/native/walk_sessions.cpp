// The fault walk over sessions, and over all ways to end a channel.
#include "walk.hpp"

namespace testing {

namespace {

void fill(Ring& ring, const Values& values, uint64_t size = 8) {
    User user = open(ring, Session::PLAIN);
    for (uint64_t value : values) must(user.put(Message(value, size), Deadline{0}) == Step::Done, "filling");
    user.leave(true);
}

Scenario closing() {
    Scenario s{"close"};
    s.prepare = [](Scene& scene) { fill(*scene.in, {1, 2}); };
    s.act = [](Scene& scene) {
        locked(*scene.in, [&](Wakes& wakes) { scene.in->close(wakes); });
        scene.did();
    };
    s.allowed = [](int) { return Lists{{1, 2}}; };
    s.look = [](Scene& scene, int done) {
        must(!done || scene.in->header().state == CLOSED, "the channel is not closed");
    };
    return s;
}

// A channel that breaks discards its items. A leased item can still be finished.
Scenario breaking(const char* name, uint64_t cause_size) {
    const std::string cause(cause_size, 'x');
    Scenario s{name};
    s.prepare = [](Scene& scene) {
        fill(*scene.in, {1, 2, 3});
        scene.users.push_back(open(*scene.in, Session::READER));
        uint64_t value;
        must(scene.users[0].get(value, Deadline{0}) == Step::Done, "get");
    };
    s.act = [=](Scene& scene) {
        locked(*scene.in, [&](Wakes& wakes) { scene.in->break_(cause, wakes); });
        scene.did();
    };
    s.look = [=](Scene& scene, int done) {
        Header& h = scene.in->header();
        must(h.state == BROKEN || (!done && h.state == OPEN), "the channel is neither broken nor open");
        if (h.state == BROKEN)
            must(scene.in->cause() == cause, "the cause is lost");
        else
            must(h.cause == 0, "the channel has a cause but is not broken");
    };
    s.finish = [](Scene& scene) {
        locked(*scene.in, [&](Wakes& wakes) { scene.in->break_("", wakes); });
        uint64_t value;
        must(scene.users[0].get(value, Deadline{0}) == Step::Broken,
             "a read from a broken channel did not return Broken");
        must(scene.in->header().leased == 0, "an item is still leased");
        User writer = open(*scene.in, Session::PLAIN);
        must(writer.put(Message(1), Deadline{0}) == Step::Broken,
             "a put into a broken channel did not return Broken");
        scene.users[0].leave(true);
    };
    return s;
}

// A session is opened, used and ended. No other session has its role, so its end always closes the channel.
Scenario last_of(const char* name, Session::Role role) {
    Scenario s{name};
    s.prepare = [](Scene& scene) { fill(*scene.in, {1, 2}); };
    s.act = [=](Scene& scene) {
        User user = open(*scene.in, role);
        scene.did();
        user.leave(true);
        scene.did();
    };
    s.allowed = [](int) { return Lists{{1, 2}}; };
    s.look = [=](Scene& scene, int done) {
        Header& h = scene.in->header();
        must(h.readers == 0 && h.writers == 0, "a port is still counted");
        must(!done || h.state == CLOSED, "the last port has left, but the channel is open");
        must(!h.cut_off || role == Session::WRITER, "a reader's death was recorded as a writer's death");
        must(!h.cut_off || done < 2, "a writer that had left was recorded as dead");
    };
    return s;
}

// One of two sessions ends, and the channel stays open.
Scenario one_of_two(const char* name, Session::Role role) {
    Scenario s{name};
    s.prepare = [=](Scene& scene) {
        fill(*scene.in, {1, 2});
        scene.users.push_back(open(*scene.in, role));
    };
    s.act = last_of("", role).act;
    s.allowed = [](int) { return Lists{{1, 2}}; };
    s.look = [](Scene& scene, int) {
        Header& h = scene.in->header();
        must(h.readers + h.writers == 1 && h.state == OPEN, "the other port was ended too");
    };
    return s;
}

// A reader's leased items go back to the front, in order.
Scenario giving_back(const char* name, uint64_t left_inside) {
    Scenario s{name};
    Values all{1, 2, 3};
    for (uint64_t i = 0; i < left_inside; ++i) all.push_back(4 + i);
    s.prepare = [=](Scene& scene) {
        fill(*scene.in, all);
        User user = open(*scene.in, Session::READER);
        scene.in->session(user.session).supervised = 1;
        for (int i = 0; i < 3; ++i)
            must(locked(*scene.in,
                        [&](Wakes& wakes) {
                            return scene.in->try_take(user.taken, &user.reader, user.session, wakes);
                        }) == Step::Done,
                 "take");
        scene.users.push_back(user);
        scene.users.push_back(open(*scene.in, Session::READER));
    };
    s.act = [](Scene& scene) { scene.users[0].leave(false); };
    s.take_over = [](Scene& scene) { scene.users[0].leave(false); };
    s.allowed = [=](int) { return Lists{all}; };
    s.look = [](Scene& scene, int) { scene.users[1].leave(true); };
    return s;
}

// The session leased item 3 before items 1 and 2, which another reader had given back. Item 4 is already back
// in the ring.
Scenario giving_back_between() {
    Scenario s = giving_back("give back items taken out of order", 2);
    s.prepare = [](Scene& scene) {
        fill(*scene.in, {1, 2, 3, 4, 5});
        for (int i = 0; i < 4; ++i) scene.users.push_back(open(*scene.in, Session::READER));
        uint64_t value = 0;
        for (size_t user : {1u, 1u, 0u, 2u}) {
            const bool more = scene.users[user].reader.leases > 0;
            must(scene.users[user].get(value, Deadline{0}, more) == Step::Done, "get");
        }
        scene.users[1].leave(false);
        for (uint64_t expected : {1, 2})
            must(scene.users[0].get(value, Deadline{0}, true) == Step::Done && value == expected,
                 "get again");
        scene.users[2].leave(false);
        scene.in->session(scene.users[0].session).supervised = 1;
    };
    s.look = [](Scene& scene, int) { scene.users[3].leave(true); };
    return s;
}

// Each leased item is finished with one Change. If the process dies in between, the unfinished items go back.
Scenario finishing() {
    Scenario s = giving_back("end a session, its items finished", 2);
    s.act = [](Scene& scene) { scene.users[0].leave(true); };
    s.allowed = [](int) { return Lists{{1, 2, 3, 4, 5}, {2, 3, 4, 5}, {3, 4, 5}, {4, 5}}; };
    return s;
}

// A process has died with one operation of every kind unfinished. The process that cleans up after it also
// dies.
Scenario sweeping() {
    Scenario s{"sweep up after a dead process"};
    s.tolerance.waiting = 1;
    s.prepare = [](Scene& scene) {
        fill(*scene.in, {1, 2, 3}, 6000);
        scene.users.push_back(open(*scene.in, Session::READER));
        scene.users.push_back(open(*scene.in, Session::WRITER));
        pid_t child = fork();
        must(child >= 0, "fork");
        if (child == 0) {
            Ring& ring = *scene.in;
            User plain = open(ring, Session::PLAIN), reader = open(ring, Session::READER);
            open(ring, Session::WRITER);
            Message message(77, 7000);
            Frame frame;
            message.fill(frame);
            Slot* slot;
            locked(ring, [&](Wakes& wakes) {
                must(ring.try_take(plain.taken, nullptr, plain.session, wakes) == Step::Done, "take");
                must(ring.try_take(reader.taken, &reader.reader, reader.session, wakes) == Step::Done,
                     "lease");
                must(ring.claim(frame, nullptr, plain.session, slot) == Step::Done, "claim");
                ring.header().reader_queue.enter();
                ring.session(plain.session).in_reader_queue += 1;
            });
            _exit(0);
        }
        int status;
        must(waitpid(child, &status, 0) == child && status == 0, "the child failed before its death");
    };
    s.act = [](Scene& scene) { find_dead(*scene.in); };
    s.allowed = [](int) { return Lists{{2, 3}}; };
    s.look = [](Scene& scene, int) {
        Header& h = scene.in->header();
        must(h.readers == 1 && h.writers == 1 && h.state == OPEN,
             "more than the dead one's sessions were ended");
        must(h.cut_off != 0, "the dead writer was not recorded");
        scene.users[0].leave(true);
        must(h.state == CLOSED, "the last reader has left, but the channel is not closed");
    };
    return s;
}

}  // namespace

std::vector<Scenario> session_scenarios() {
    return {
        closing(),
        breaking("break without a cause", 0),
        breaking("break, small cause", 20),
        breaking("break, large cause", 3000),
        last_of("open and end the last writer", Session::WRITER),
        last_of("open and end the last reader", Session::READER),
        one_of_two("open and end one of two writers", Session::WRITER),
        one_of_two("open and end one of two readers", Session::READER),
        giving_back("give back", 2),
        giving_back("give back into an empty channel", 0),
        giving_back_between(),
        finishing(),
        sweeping(),
    };
}

}  // namespace testing
