// Random kills while readers view items in place and writers fill outputs in place. Sizes vary and memory is
// short, so blocks are often cut between viewed blocks. The bytes of a payload are computed from its number.
// The test checks them after the get and right before the view ends, to detect overwritten data.
//
// If the stage is unordered, unsupervised readers also take part. These readers take items and give them
// back, keep views for a while, and fill memory that they never put.
//
// Arguments: seed, number of items.
#include "kills.hpp"

namespace testing {

namespace {

constexpr uint64_t SIZES[] = {8, 300, 5000, 17'000, 21'000, 40'000, 70'000};
constexpr uint64_t MAX_BYTES = 150'000;
constexpr uint64_t MOST_SIGHTS = 3;

Deadline in_a_moment() { return Deadline{now_ns() + 2'000'000}; }

class Viewers : public Kills {
  public:
    Viewers(uint64_t seed, uint64_t items, bool ordered)
        : Kills(seed, ordered, MAX_BYTES, ordered ? 0 : 2), items(items) {
        sink.keeps = true;
        std::set<uint64_t> outputs;
        for (uint64_t i = 0; i < items; ++i) outputs.insert(i);
        run(std::move(outputs));
        must(in.header().viewed_bytes == 0 && out.header().viewed_bytes == 0, "a view is left");
    }

  private:
    uint64_t items;

    static uint64_t size_of(uint64_t value) { return SIZES[value * 2654435761 % 4093 % 7]; }

    // Sometimes move an old view to the end, so that views end in random order.
    void drop_view(User& user, size_t most) {
        while (user.held_views.size() > most) {
            if (user.held_views.size() > 1 && random() % 2)
                std::swap(user.held_views.front(), user.held_views.back());
            user.drop_view();
        }
    }
    // Fill the item in place if memory is soon available, and copy it otherwise.
    void put(User& writer, uint64_t value, const uint64_t& item) {
        const uint64_t size = size_of(value);
        const bool skips = writer.writer.keyed && writer.writer.count < writer.writer.skip;
        Step step = Step::NotNow;
        if (!skips && size > Taken::LOCAL && random() % 3 == 0 &&
            writer.loan(value, size, in_a_moment()) == Step::Done) {
            step = writer.put_loan(writer, in_a_moment(), &item);
            if (step != Step::Done) writer.drop_view();
        }
        if (step == Step::NotNow) step = writer.put(Message(value, size, BUFFERS), {}, &item);
        if (step != Step::Done) die("a put ended with " + std::to_string(int(step)));
    }
    void produce(User& writer) override {
        random.seed(uint64_t(getpid()));
        const uint64_t all = 0;
        for (uint64_t i = 0; i < items; ++i) put(writer, i, all);
    }
    void work(User& reader, User& writer) override {
        random.seed(uint64_t(getpid()));
        reader.keeps = true;
        for (;;) {
            if (reader.reader.leases) must(writer.done_with(reader.reader.number) == Step::Done, "done");
            uint64_t value = 0;
            Step step = reader.get(value, in_a_moment());
            if (step == Step::Drained) break;
            must(step == Step::Done || step == Step::NotNow,
                 "a worker's read ended with " + std::to_string(int(step)));
            // A worker must drop its views before it waits, because they may surround the memory that the
            // source needs.
            if (step == Step::NotNow) drop_view(reader, 0);
            if (step == Step::Done) put(writer, value, reader.reader.number);
            drop_view(reader, random() % (MOST_SIGHTS + 1));
        }
        // Leave a random number of views open, so that the port closes while they exist.
        drop_view(reader, random() % (MOST_SIGHTS + 1));
    }
    void take_part() override {
        random.seed(uint64_t(getpid()));
        for (;;) {
            User reader = open(in, Session::READER), lender = open(in, Session::PLAIN);
            reader.keeps = true;
            Step step = Step::Done;
            for (uint64_t n = 1 + random() % 3, i = 0; i < n && step == Step::Done; ++i) {
                uint64_t value = 0;
                step = reader.get(value, in_a_moment(), true);
            }
            if (random() % 2) lender.loan(1'000'000, SIZES[3 + random() % 4], in_a_moment());
            const bool leaves_first = random() % 2;  // if so, the session ends while the memory is on loan
            if (leaves_first) lender.leave(true);
            reader.leave(false);
            for (uint64_t n = random() % 20'000; n; --n) cpu_relax();
            drop_view(lender, 0);
            drop_view(reader, 0);
            if (!leaves_first) lender.leave(true);
            if (step == Step::Drained) return;
        }
    }
    void after_read(bool read) override { drop_view(sink, read ? random() % (MOST_SIGHTS + 1) : 0); }
};

}  // namespace

}  // namespace testing

int main(int argc, char** argv) {
    using namespace testing;
    must(argc == 3, "arguments: seed, number of items");
    const uint64_t seed = strtoull(argv[1], nullptr, 10), items = strtoull(argv[2], nullptr, 10);
    Viewers(seed, items, true);
    Viewers(seed + 1, items, false);
}
