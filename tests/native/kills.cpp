// Random SIGKILLs: a source and the workers of a stage run as processes over two rings and are killed at any instruction,
// again and again. A supervisor, as in flowchan/run, gives back what they had in hand and starts successors; it reads the
// outputs, and each must come exactly once, in order where the stage is ordered. Arguments: seed, number of items.
#include <csignal>
#include <random>
#include <set>
#include <sys/wait.h>

#include "check.hpp"
#include "users.hpp"

namespace testing {

namespace {

constexpr uint64_t WORKERS = 3;
constexpr uint64_t SIZES[] = {8, 300, 5000};

uint64_t outputs_of(uint64_t item) { return item % 4; }

// One process that may be killed: the source (no reader) or a worker.
struct Worker {
    uint32_t reader = 0, writer = 0;
    pid_t pid = 0;
};

class Kills {
public:
    Kills(uint64_t seed, uint64_t items, bool ordered)
        : random(seed), items(items), ordered(ordered), in(4, 1 << 18), out(5, 1 << 18), sink(open(out, Session::PLAIN)) {
        for (uint64_t i = 0; i <= WORKERS; ++i) {
            open_ports(workers[i], i == 0);
        }
        for (Worker& worker : workers) start(worker);
    }
    void run() {
        std::set<uint64_t> missing;
        for (uint64_t i = 0; i < items; ++i)
            for (uint64_t k = 0; k < outputs_of(i); ++k) missing.insert(i * 4 + k);
        uint64_t until_next = 0, value = 0;
        for (;;) {
            Step step = sink.get(value, Deadline{now_ns() + 1'000'000});
            if (step == Step::Drained) break;
            if (step == Step::Done) {
                must(missing.count(value), "an output came twice or never was one: " + std::to_string(value));
                must(!ordered || *missing.begin() == value, "an output came out of order");
                missing.erase(value);
                passed += 1;
            } else {
                must(step == Step::NotNow, "the sink's read ended with " + std::to_string(int(step)));
            }
            if (step == Step::Done && until_next-- == 0) {
                until_next = random() % 12;
                Worker& worker = workers[random() % 8 ? 1 + random() % WORKERS : 0];
                for (uint64_t n = random() % 2000; n; --n) cpu_relax();  // any instruction
                if (worker.pid) kill(worker.pid, SIGKILL);
            }
            look_for_dead();
        }
        while (std::any_of(workers, workers + WORKERS + 1, [](Worker& w) { return w.pid != 0; })) look_for_dead(0);
        must(missing.empty(), std::to_string(missing.size()) + " outputs are lost");
        sink.leave(true);
        for (Ring* ring : {&in, &out}) {
            std::string problems;
            locked(*ring, [&](Wakes&) { problems = check(*ring, {.lost_free_slots = true}); });
            must(problems.empty(), problems);
            Header& h = ring->header();
            must(ring->drained() && h.slots_used == 0 && h.readers + h.writers + h.resumes == 0, "something is left");
        }
        printf("%s: %lu passed, %lu kills\n", ordered ? "ordered" : "unordered", static_cast<unsigned long>(passed),
               static_cast<unsigned long>(kills));
    }

private:
    std::mt19937_64 random;
    uint64_t items;
    bool ordered;
    Ring in, out;
    User sink;
    Worker workers[WORKERS + 1];  // [0] is the source
    uint64_t passed = 0, kills = 0;

    static uint32_t supervised(Ring& ring, Session::Role role) {
        uint32_t session = open_session(ring, role);
        ring.session(session).supervised = 1;
        return session;
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
        worker.reader ? work(worker) : produce(worker);
        _exit(0);
    }
    // Ends what has ended by itself, replaces what was killed.
    void look_for_dead(int options = WNOHANG) {
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
    // As Supervisor._replace: the successor's ports first, then the outputs, then the items.
    void replace(Worker& worker, bool killed) {
        const Worker old = worker;
        Ring& target = old.reader ? out : in;
        worker = {};
        if (killed) {
            kills += 1;
            open_ports(worker, old.reader == 0);
            std::vector<uint64_t> numbers;
            if (old.reader) locked(in, [&](Wakes&) {
                for (Slot* slot : in.in_hand(old.reader)) numbers.push_back(slot->number);
            });
            else numbers = {0};
            locked(target, [&](Wakes& wakes) { target.retire_writer(old.writer, numbers, wakes); });
        } else {
            locked(target, [&](Wakes& wakes) { target.end_session(old.writer, true, wakes); });
        }
        if (old.reader) locked(in, [&](Wakes& wakes) { in.end_session(old.reader, !killed, wakes); });
        if (killed) start(worker);
    }

    // --- in the processes ---

    static void adopt(Ring& ring, uint32_t session) {
        locked(ring, [&](Wakes&) { ring.adopt(session); });
    }
    void produce(const Worker& worker) {
        adopt(in, worker.writer);
        User writer(in, worker.writer, Session::WRITER);
        const uint64_t all = 0;
        for (uint64_t i = 0; i < items; ++i) must(writer.put(Message(i), {}, &all) == Step::Done, "source");
    }
    void work(const Worker& worker) {
        adopt(in, worker.reader);
        adopt(out, worker.writer);
        User reader(in, worker.reader, Session::READER), writer(out, worker.writer, Session::WRITER);
        writer.writer.ordered = ordered;
        for (;;) {
            if (reader.reader.in_hand) must(writer.done_with(reader.reader.number) == Step::Done, "done");
            uint64_t value = 0;
            Step step = reader.get(value);
            if (step == Step::Drained) return;
            must(step == Step::Done, "a worker's read ended with " + std::to_string(int(step)));
            for (uint64_t k = 0; k < outputs_of(value); ++k) {
                Message message(value * 4 + k, SIZES[(value + k) % 3]);
                must(writer.put(message, {}, &reader.reader.number) == Step::Done, "output");
            }
        }
    }
};

}  // namespace

}  // namespace testing

int main(int argc, char** argv) {
    using namespace testing;
    must(argc == 3, "arguments: seed, number of items");
    const uint64_t seed = strtoull(argv[1], nullptr, 10), items = strtoull(argv[2], nullptr, 10);
    Kills(seed, items, true).run();
    Kills(seed + 1, items, false).run();
}
