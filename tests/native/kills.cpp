// Kills a source and its workers at random times. Workers put up to three outputs per item. Arguments: seed,
// number of items.
#include "kills.hpp"

namespace testing {

namespace {

constexpr uint64_t SIZES[] = {8, 300, 5000};

uint64_t outputs_of(uint64_t item) { return item % 4; }

class Stage : public Kills {
  public:
    Stage(uint64_t seed, uint64_t items, bool ordered) : Kills(seed, ordered, 1 << 18, 0), items(items) {
        std::set<uint64_t> outputs;
        for (uint64_t i = 0; i < items; ++i)
            for (uint64_t k = 0; k < outputs_of(i); ++k) outputs.insert(i * 4 + k);
        run(std::move(outputs));
    }

  private:
    uint64_t items;

    void produce(User& writer) override {
        const uint64_t all = 0;
        for (uint64_t i = 0; i < items; ++i) must(writer.put(Message(i), {}, &all) == Step::Done, "source");
    }
    void work(User& reader, User& writer) override {
        for (;;) {
            if (reader.reader.leases) must(writer.done_with(reader.reader.number) == Step::Done, "done");
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
    Stage(seed, items, true);
    Stage(seed + 1, items, false);
}
