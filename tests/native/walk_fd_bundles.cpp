// The fault walk over fd bundles. While an item exists, its descriptors must be in the ring's socket,
// no matter which process dies.
#include <sys/socket.h>

#include "walk.hpp"

namespace testing {

namespace {

constexpr uint64_t SMALL = 300, LARGE = 6000;

// Fill a frame in the layout that codec.cpp uses, where the second word is the id of the fd bundle.
void fill(const Message& message, Frame& frame, int fd) {
    message.fill(frame);
    frame.kind = BUNDLE;
    frame.descriptors = {fd};
    memcpy(&frame.bundle, message.bytes.data() + 8, 8);
}

void put(User& user, uint64_t value, uint64_t size) {
    Ring& ring = user.ring;
    const Message message(value, size);
    Frame frame;
    fill(message, frame, ring.fd());
    if (size <= Taken::LOCAL) {
        must(locked(ring, [&](Wakes& wakes) { return ring.try_put(frame, nullptr, wakes); }) == Step::Done,
             "put");
        return;
    }
    Slot* slot = nullptr;
    must(locked(ring, [&](Wakes&) { return ring.claim(frame, nullptr, user.session, slot); }) == Step::Done,
         "claim");
    ring.write(frame, slot);
    must(locked(ring, [&](Wakes& wakes) { return ring.publish(frame, slot, nullptr, wakes); }) == Step::Done,
         "publish");
}

uint64_t id_of(const char* payload) {
    uint64_t id;
    memcpy(&id, payload + 8, 8);
    return id;
}
void must_open(Ring& ring, const char* payload) {
    std::vector<int> descriptors;
    must(ring.open_bundle(id_of(payload), descriptors) == 0 && descriptors.size() == 1,
         "an item has lost its fd bundle");
    must(close(descriptors[0]) == 0, "its fd bundle has no descriptor");
}

// Check that the bundle of each item inside can be opened.
void bundles_are_right(Scene& scene) {
    Ring& ring = *scene.in;
    locked(ring, [&](Wakes&) {
        Header& h = ring.header();
        for (uint64_t p = h.head; p;) {
            Slot* slot = ring.slot_at(p);
            if (slot->kind == BUNDLE) must_open(ring, ring.payload_of(slot));
            p = slot->next;
        }
    });
}
void none_is_left(Scene& scene) {
    Ring& ring = *scene.in;
    locked(ring, [&](Wakes&) { ring.drop_bundles(); });
    char label[16];
    must(recv(ring.socket(), label, sizeof label, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN,
         "an fd bundle is left");
}

Scenario sending() {
    Scenario s{"put fd bundles"};
    s.prepare = [](Scene& scene) {
        User user = open(*scene.in, Session::PLAIN);
        put(user, 1, SMALL);
        user.leave(true);
    };
    s.act = [](Scene& scene) {
        User user = open(*scene.in, Session::PLAIN);
        for (uint64_t value : {11, 12, 13}) {
            put(user, value, value == 12 ? LARGE : SMALL);
            scene.did();
        }
    };
    s.allowed = [](int done) {
        Values all{1, 11, 12, 13};
        Lists lists{Values(all.begin(), all.begin() + 1 + done)};
        if (done < 3) lists.push_back(Values(all.begin(), all.begin() + 2 + done));
        return lists;
    };
    s.look = [](Scene& scene, int) { bundles_are_right(scene); };
    s.last = none_is_left;
    return s;
}

// A worker opens the descriptors that it received, and drops the bundles of finished items.
Scenario receiving() {
    const Values all{1, 2, 3};
    Scenario s{"receive fd bundles"};
    s.prepare = [=](Scene& scene) {
        User user = open(*scene.in, Session::PLAIN);
        for (uint64_t value : all) put(user, value, value == 2 ? LARGE : SMALL);
        user.leave(true);
        scene.users.push_back(open(*scene.in, Session::READER));
        scene.users.push_back(open(*scene.in, Session::READER));
        scene.in->session(scene.users[0].session).supervised = 1;
    };
    s.act = [](Scene& scene) {
        User& user = scene.users[0];
        Ring& ring = *scene.in;
        locked(ring, [&](Wakes&) { ring.adopt(user.session); });
        for (int i = 0; i < 3; ++i) {
            locked(ring, [&](Wakes& wakes) {
                ring.acknowledge(user.reader, wakes);
                must(ring.try_take(user.taken, &user.reader, user.session, wakes) == Step::Done, "take");
            });
            locked(ring, [&](Wakes&) {
                must_open(ring, user.taken.at);
                ring.drop_bundles();
            });
            scene.did();
        }
    };
    s.take_over = [](Scene& scene) { scene.users[0].leave(false); };
    s.allowed = [=](int done) {
        Lists lists{Values(all.begin() + std::max(0, done - 1), all.end())};
        if (done > 0 && done < 3) lists.push_back(Values(all.begin() + done, all.end()));
        return lists;
    };
    s.look = [](Scene& scene, int) {
        bundles_are_right(scene);
        scene.users[1].leave(true);
    };
    s.last = none_is_left;
    return s;
}

}  // namespace

std::vector<Scenario> bundle_scenarios() { return {sending(), receiving()}; }

}  // namespace testing
