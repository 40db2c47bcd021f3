// Random SIGKILLs. A source and the workers of a stage run as processes over two rings, and are killed
// repeatedly, at any instruction. A supervisor returns their leased items and starts replacements, as the
// supervisor in flowchan/run does. The supervisor also reads the outputs. Each output must arrive exactly
// once and, if the stage is ordered, in order. Unsupervised processes may also take part.
#pragma once

#include <sys/prctl.h>
#include <sys/wait.h>
#include <csignal>
#include <random>
#include <set>

#include "check.hpp"
#include "users.hpp"

namespace testing {

// A process that may be killed: the source (without a reader), a worker, or an unsupervised process (without
// ports).
struct Worker {
    uint32_t reader = 0, writer = 0;
    pid_t pid = 0;
};

class Kills {
  public:
    static constexpr uint64_t WORKERS = 3;

    Kills(uint64_t seed, bool ordered, uint64_t max_bytes, uint64_t others)
        : random(seed),
          ordered(ordered),
          in(4, max_bytes),
          out(5, max_bytes),
          sink(open(out, Session::PLAIN)),
          workers(1 + WORKERS + others) {}
    virtual ~Kills() = default;

    // Run until all values in `missing` have arrived.
    void run(std::set<uint64_t> missing) {
        for (uint64_t i = 0; i <= WORKERS; ++i) open_ports(workers[i], i == 0);
        for (Worker& worker : workers) start(worker);
        uint64_t until_next = 0, value = 0;
        for (;;) {
            Step step = sink.get(value, Deadline{now_ns() + 1'000'000});
            if (step == Step::Drained) break;
            if (step == Step::Done) {
                must(missing.count(value),
                     "an output came twice or was not expected: " + std::to_string(value));
                must(!ordered || *missing.begin() == value, "an output came out of order");
                missing.erase(value);
                passed += 1;
            } else {
                must(step == Step::NotNow, "the sink's read ended with " + std::to_string(int(step)));
            }
            after_read(step == Step::Done);
            if (step == Step::Done && until_next-- == 0) {
                until_next = random() % 12;
                Worker& worker = workers[random() % 8 ? 1 + random() % (workers.size() - 1) : 0];
                for (uint64_t n = random() % 2000; n; --n)
                    cpu_relax();  // a random delay, so that the kill may hit any instruction
                if (worker.pid) kill(worker.pid, SIGKILL);
            }
            check_for_dead();
        }
        while (std::any_of(workers.begin(), workers.end(), [](Worker& w) { return w.pid != 0; }))
            check_for_dead(0);
        must(missing.empty(), std::to_string(missing.size()) + " outputs were lost");
        while (!sink.held_views.empty()) sink.drop_view();
        sink.leave(true);
        for (Ring* ring : {&in, &out}) {
            std::string problems;
            locked(*ring, [&](Wakes& wakes) {
                ring->header().swept_ns.store(0, std::memory_order_relaxed);
                ring->sweep(wakes);
                problems = check(*ring, {.lost_free_slots = true});
            });
            must(problems.empty(), problems);
            Header& h = ring->header();
            must(ring->drained() && h.slots_used == 0 && h.readers + h.writers + h.resumes == 0,
                 "something is left");
            for (const Session& s : h.sessions()) must(s.role == Session::NONE, "a session is left");
        }
        printf("%s: %lu passed, %lu kills\n", ordered ? "ordered" : "unordered",
               static_cast<unsigned long>(passed), static_cast<unsigned long>(kills));
    }

  protected:
    std::mt19937_64 random;
    bool ordered;
    Ring in, out;
    User sink;
    uint64_t passed = 0, kills = 0;

    // These functions run in the processes that may be killed.
    virtual void produce(User& writer) = 0;
    virtual void work(User& reader, User& writer) = 0;
    virtual void take_part() {}
    // This function runs in the supervisor.
    virtual void after_read(bool) {}

  private:
    std::vector<Worker> workers;  // [0] is the source; unsupervised processes are at the end

    static uint32_t supervised(Ring& ring, Session::Role role) {
        uint32_t session = open_session(ring, role);
        ring.session(session).supervised = 1;
        return session;
    }
    static User adopt(Ring& ring, uint32_t session, Session::Role role) {
        locked(ring, [&](Wakes&) { ring.adopt(session); });
        return {ring, session, role};
    }
    void open_ports(Worker& worker, bool source) {
        worker.reader = source ? 0 : supervised(in, Session::READER);
        worker.writer = supervised(source ? in : out, Session::WRITER);
    }
    void start(Worker& worker) {
        fflush(nullptr);
        worker.pid = fork();
        must(worker.pid >= 0, "fork");
        if (worker.pid) return;
        prctl(PR_SET_PDEATHSIG, SIGKILL);  // a failed test leaves no process behind
        if (worker.reader) {
            User reader = adopt(in, worker.reader, Session::READER),
                 writer = adopt(out, worker.writer, Session::WRITER);
            writer.writer.ordered = ordered;
            work(reader, writer);
        } else if (worker.writer) {
            User writer = adopt(in, worker.writer, Session::WRITER);
            produce(writer);
        } else {
            take_part();
        }
        _exit(0);
    }
    // End the sessions of all processes that have ended, and replace those that were killed.
    void check_for_dead(int options = WNOHANG) {
        for (int status; pid_t pid = waitpid(-1, &status, options);) {
            if (pid < 0) return;
            for (Worker& worker : workers) {
                if (worker.pid != pid) continue;
                must(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL),
                     "a worker ended with status " + std::to_string(status));
                replace(worker, status != 0);
            }
        }
    }
    // Do the same as ActionExecutor._replace: open the replacement's ports, retire the writer, and then give
    // the items back.
    void replace(Worker& worker, bool killed) {
        const Worker old = worker;
        worker = {};
        kills += killed;
        if (!old.writer) {
            if (killed) start(worker);
            return;
        }
        Ring& target = old.reader ? out : in;
        if (killed) {
            open_ports(worker, old.reader == 0);
            std::vector<uint64_t> numbers;
            if (old.reader)
                locked(in, [&](Wakes&) {
                    for (Slot* slot : in.leased_slots(old.reader)) numbers.push_back(slot->number);
                });
            else
                numbers = {0};
            locked(target, [&](Wakes& wakes) { target.retire_writer(old.writer, numbers, wakes); });
        } else {
            locked(target, [&](Wakes& wakes) { target.end_session(old.writer, true, wakes); });
        }
        if (old.reader) locked(in, [&](Wakes& wakes) { in.end_session(old.reader, !killed, wakes); });
        if (killed) start(worker);
    }
};

}  // namespace testing
