// The fault walk: a process dies at the n-th fault point of an operation, for n = 1, 2, 3, … until it
// survives. After each death, other processes continue from the state that it left. The walk then repeats
// this death, and kills a second process at the fault points of the recovery, one after another.
//
// The core is compiled with FLOWCHAN_FAULTS. The core then calls `fault_point` before and after each store in
// a critical section, after taking the lock, and before releasing it.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <csignal>
#include <functional>

#include "check.hpp"
#include "users.hpp"

namespace testing {

using Values = std::vector<uint64_t>;
using Lists = std::vector<Values>;

// Progress of the dying process, in separate memory that outlives it.
struct Journal {
    volatile int done;  // number of completed steps
};

// A scenario's rings, as one process maps them, and the sessions opened before the walk.
struct Scene {
    std::unique_ptr<Ring> in, out;  // null if the scenario needs no such ring
    std::vector<User> users;        // users of either ring
    Journal* journal = nullptr;

    void did() { journal->done = journal->done + 1; }
};

struct Scenario {
    std::string name;
    uint64_t capacity = 16, max_bytes = 1 << 20;
    bool has_in = true, has_out = false;
    // Whether to kill a second process during the recovery; false if another scenario covers the same steps.
    bool twice = true;
    Tolerance tolerance{};
    std::function<void(Scene&)> prepare = [](Scene&) {};
    std::function<void(Scene&)> act;  // runs in the process that dies
    std::function<void(Scene&)> take_over = [](Scene&) {
    };  // does the supervisor's work after the death; may run twice
    // Return what `in` may contain after the death.
    std::function<Lists(int done)> allowed = [](int) { return Lists{}; };
    std::function<void(Scene&, int done)> look = [](Scene&, int) {};  // more checks
    std::function<void(Scene&)> finish;                               // replaces reading `in` to its end
    std::function<void(Scene&)> last = [](Scene&) {};                 // drops the remaining views at the end
};

struct Walked {
    long points = 0;      // how many of the operation's steps killed a process
    long recoveries = 0;  // how many of the recovery's steps killed a second process
};

inline long fault_left = 0;  // number of fault points until this process dies; 0: it survives

inline void find_dead(Ring& ring) {
    locked(ring, [&](Wakes& wakes) {
        ring.header().swept_ns.store(0, std::memory_order_relaxed);
        ring.sweep(wakes);
    });
}

class Walk {
  public:
    Walk(const Scenario& scenario, long every) : scenario(scenario), every(every) {
        void* p = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        must(p != MAP_FAILED, "mmap");
        journal = static_cast<Journal*>(p);
    }
    ~Walk() { munmap(journal, 4096); }

    Walked run() {
        Walked walked;
        for (long m = 1;; ++m) {
            // If n is 0, no process dies in the recovery. The first n above 0 depends on m, so that runs with
            // different m together cover every fault point of the recovery.
            for (long n = 0;; n += n ? every : 1 + m % every) {
                at = scenario.name + ", dead at step " + std::to_string(m) +
                     (n ? ", recovery at " + std::to_string(n) : "");
                Scene scene = build();
                const bool died = dies(m, scene, scenario.act);
                if (!died) {
                    finish(scene);
                    return walked;
                }
                const bool again = n && dies(n, scene, [this](Scene& s) { take_over(s); });
                finish(scene);
                if (n == 0) walked.points += 1;
                walked.recoveries += again;
                if (!scenario.twice || (n && !again)) break;
            }
        }
    }

  private:
    const Scenario& scenario;
    const long every;  // one in `every` fault points of a recovery kills a second process
    Journal* journal;
    std::string at;

    void need(bool holds, const std::string& what) {
        if (!holds) die(at + ": " + what);
    }
    Scene build() {
        Scene scene;
        if (scenario.has_in) scene.in = std::make_unique<Ring>(scenario.capacity, scenario.max_bytes);
        if (scenario.has_out) scene.out = std::make_unique<Ring>(scenario.capacity, scenario.max_bytes);
        scene.journal = journal;
        journal->done = 0;
        scenario.prepare(scene);
        return scene;
    }
    // Run `act` in a child that is killed at its n-th fault point. Return whether the child was killed.
    template <class Act>
    bool dies(long n, Scene& scene, Act act) {
        fflush(nullptr);
        pid_t child = fork();
        must(child >= 0, "fork");
        if (child == 0) {
            fault_left = n;
            act(scene);
            fault_left = 0;
            _exit(0);
        }
        int status = 0;
        must(waitpid(child, &status, 0) == child, "waitpid");
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return true;
        need(WIFEXITED(status) && WEXITSTATUS(status) == 0,
             "the child ended with status " + std::to_string(status));
        return false;
    }
    void take_over(Scene& scene) {
        if (scene.in) find_dead(*scene.in);
        if (scene.out) find_dead(*scene.out);
        scenario.take_over(scene);
    }
    void checked(Ring& ring, Tolerance tolerance, const std::string& when) {
        std::string problems;
        locked(ring, [&](Wakes&) { problems = check(ring, tolerance); });
        need(problems.empty(), when + ": " + problems);
    }
    // Check the rings through mappings that existed all along, at different addresses from those in the dead
    // process.
    void finish(Scene& scene) {
        std::vector<std::unique_ptr<Ring>> seen;
        for (auto* ring : {&scene.in, &scene.out})
            if (*ring) seen.push_back(attach(**ring));
        for (auto& ring : seen) checked(*ring, scenario.tolerance, "after the lock was recovered");
        take_over(scene);
        for (auto& ring : seen) {
            checked(*ring, scenario.tolerance, "after the dead process's sessions were ended");
            Header& h = ring->header();
            for (Session& s : h.sessions())
                need(s.role == Session::NONE || s.role == Session::RESUME || s.pid == uint64_t(getpid()),
                     "a session of a dead process is left");
            need(h.reader_queue.waiting <= scenario.tolerance.waiting && h.writer_queue.waiting == 0,
                 "a dead process still counts as waiting");
        }
        scenario.look(scene, journal->done);
        if (scenario.finish)
            scenario.finish(scene);
        else
            read_to_the_end(scene, *seen[0]);
        for (auto& ring : seen) checked(*ring, scenario.tolerance, "after all items were read");
        scenario.last(scene);
        for (auto& ring : seen) checked(*ring, scenario.tolerance, "at the end");
    }
    // Put items with two users, close the ring, and read it to its end.
    void read_to_the_end(Scene& scene, Ring& second) {
        User one = open(*scene.in, Session::PLAIN), other = open(second, Session::PLAIN);
        Values more;
        for (uint64_t value : {901, 902, 903}) {
            User& user = value % 2 ? one : other;
            Step step = user.put(Message(value, value == 902 ? 6000 : 8), Deadline{0});
            if (step == Step::Done)
                more.push_back(value);
            else
                need(second.header().state != OPEN, "a put failed: " + std::to_string(int(step)));
        }
        locked(second, [&](Wakes& wakes) { second.close(wakes); });
        Values values = drain(one, other);
        Lists lists = scenario.allowed(journal->done);
        bool found = false;
        for (Values& list : lists) {
            list.insert(list.end(), more.begin(), more.end());
            found |= list == values;
        }
        need(found, "after " + std::to_string(journal->done) + " steps, the items were" + text(values));
        one.leave(true);
        other.leave(true);
    }

  public:
    static std::string text(const Values& values) {
        std::string text;
        for (uint64_t value : values) text += " " + std::to_string(value);
        return text.empty() ? " nothing" : text;
    }
    // Read a closed ring to its end. Nothing else uses the ring, so a read that must wait is an error.
    static Values drain(User& one, User& other) {
        Values values;
        for (int i = 0; i < 10'000; ++i) {
            uint64_t value = 0;
            Step step = (i % 2 ? other : one).get(value, Deadline{0});
            if (step == Step::Done) {
                values.push_back(value);
                continue;
            }
            const bool cut_off = one.ring.header().cut_off;  // a writer has died, so the end is not clean
            must(step == (cut_off ? Step::Broken : Step::Drained),
                 "a read of the remaining items ended with " + std::to_string(int(step)) + " after" +
                     text(values));
            Header& h = one.ring.header();
            uint64_t views = 0;  // number of views; each keeps a slot in use
            for (const Session& s : h.sessions()) views += s.views;
            must((cut_off ? one.ring.broken() : one.ring.drained()) && h.slots_used == views && h.leased == 0,
                 "the channel still contains items");
            return values;
        }
        die("reading the remaining items does not end");
    }
};

// Scenarios per kind of operation, defined in the walk_*.cpp files. Each kind is walked separately.
std::vector<Scenario> put_scenarios();
std::vector<Scenario> take_scenarios();
std::vector<Scenario> session_scenarios();
std::vector<Scenario> stage_scenarios();
std::vector<Scenario> view_scenarios();
std::vector<Scenario> memory_scenarios();
std::vector<Scenario> bundle_scenarios();
Scenario planted_scenario();  // a put without a redo record, which must fail; walked only on request

}  // namespace testing
