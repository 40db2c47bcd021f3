// The operations. Each begins with a round that shows everybody what everybody calls, and is judged by all
// alike; what does not fit into that round follows in more of them, chunk by chunk. A chunk is staged in one
// of the two slots while others still read the one before.
#include "group.hpp"

#include <algorithm>
#include <cstring>

namespace flowchan {

namespace {

// Up to this size everybody reads all inputs, and combines them for itself.
size_t exchange_limit(uint32_t size) { return size == 2 ? 256 * 1024 : 32 * 1024; }

constexpr uint32_t NO_MEMORY = 1;
constexpr size_t LEAST_CHUNK = 32 * 1024;

// Chunks of at most BIG bytes, so large that there are two of them at least.
size_t chunk_of(size_t bytes) { return std::clamp((bytes / 2 + LINE - 1) / LINE * LINE, LEAST_CHUNK, BIG); }

size_t chunks(size_t bytes, size_t chunk) { return std::max<size_t>(1, (bytes + chunk - 1) / chunk); }

// Where part i of n begins, of `bytes` that are cut at cache lines.
size_t cut(size_t bytes, uint32_t i, uint32_t n) { return i == n ? bytes : bytes * i / n / LINE * LINE; }

const unsigned char* at(const void* memory, size_t offset) {
    return static_cast<const unsigned char*>(memory) + offset;
}
unsigned char* at(void* memory, size_t offset) { return static_cast<unsigned char*>(memory) + offset; }

void copy(void* to, const void* from, size_t bytes) {
    if (bytes && to != from) memcpy(to, from, bytes);
}

// The inputs of one kernel call; hardly ever are there so many members that they need the heap.
class Inputs {
  public:
    explicit Inputs(uint32_t size) : many_(size > FEW ? size : 0) {}
    const void*& operator[](uint32_t i) { return data()[i]; }
    const void** data() { return many_.empty() ? few_ : many_.data(); }

  private:
    static constexpr uint32_t FEW = 16;
    const void* few_[FEW];
    std::vector<const void*> many_;
};

}  // namespace

template <class Fill>
End Member::show(Call call, uint64_t bytes, size_t payload_size, Fill fill, Patience& patience) {
    if (const End end = begin(call); end != End::Done) return end;
    const bool fits = payload_size <= SMALL || reserve_big();
    if (fits) fill(payload(rank, payload_size));
    publish(fits ? 0 : NO_MEMORY, call.key, bytes);
    if (const End end = await_all(patience); end != End::Done) return end;
    return judge(call.key);
}

End Member::next(Call call, Patience& patience) {
    publish(0, call.key, 0);
    return await_all(patience);
}

End Member::barrier(Call call, Patience& patience) {
    return finish(show(call, 0, 0, [](void*) {}, patience));
}

End Member::allreduce(Call call, const void* in, void* out, size_t count, Element element, Op op, int root,
                      Patience& patience) {
    const bool small = count * size_of_element(element) <= exchange_limit(size);
    return finish(small ? exchange(call, in, out, count, element, op, root, patience)
                        : slices(call, in, out, count, element, op, root, patience));
}

End Member::exchange(Call call, const void* in, void* out, size_t count, Element element, Op op, int root,
                     Patience& patience) {
    const size_t bytes = count * size_of_element(element);
    const End end = show(call, bytes, bytes, [&](void* to) { copy(to, in, bytes); }, patience);
    if (end != End::Done || (root >= 0 && uint32_t(root) != rank)) return end;
    Inputs inputs(size);
    for (uint32_t r = 0; r < size; ++r) inputs[r] = r == rank ? in : payload(r, bytes);
    find_kernel(element, op)(out, inputs.data(), size, count);
    return end;
}

// Round t stages chunk t, but for this member's own part, and shows the result of its part of chunk t - 1.
End Member::slices(Call call, const void* in, void* out, size_t count, Element element, Op op, int root,
                   Patience& patience) {
    const size_t width = size_of_element(element), bytes = count * width, chunk = chunk_of(bytes);
    const size_t rounds = chunks(bytes, chunk);
    const bool gets = root < 0 || uint32_t(root) == rank;
    const Kernel kernel = find_kernel(element, op);
    const auto length = [&](size_t t) { return std::min(chunk, bytes - t * chunk); };
    const auto stage = [&](size_t t, void* to) {
        const size_t from = cut(length(t), rank, size), upto = cut(length(t), rank + 1, size);
        copy(to, at(in, t * chunk), from);
        copy(at(to, upto), at(in, t * chunk + upto), length(t) - upto);
    };
    const auto reduce = [&](size_t t) {
        const size_t from = cut(length(t), rank, size), upto = cut(length(t), rank + 1, size);
        Inputs inputs(size);
        for (uint32_t r = 0; r < size; ++r)
            inputs[r] = r == rank ? at(in, t * chunk + from) : at(big(r), from);
        kernel(result(rank, round_ + 1), inputs.data(), size, (upto - from) / width);
        if (gets) copy(at(out, t * chunk + from), result(rank, round_ + 1), upto - from);
    };
    const auto gather = [&](size_t t) {
        for (uint32_t i = 1; gets && i < size; ++i) {
            const uint32_t r = (rank + i) % size;
            const size_t from = cut(length(t), r, size), upto = cut(length(t), r + 1, size);
            copy(at(out, t * chunk + from), result(r, round_), upto - from);
        }
    };
    End end = show(call, bytes, BIG, [&](void* to) { stage(0, to); }, patience);
    for (size_t t = 0; end == End::Done; ++t) {
        if (t) gather(t - 1);
        if (t == rounds) break;
        reduce(t);
        round_ += 1;
        if (t + 1 < rounds) stage(t + 1, big(rank));
        end = next(call, patience);
    }
    return end;
}

// Each slot holds a part for each member.
End Member::reduce_scatter(Call call, const void* in, void* out, size_t count, Element element, Op op,
                           Patience& patience) {
    const size_t width = size_of_element(element), bytes = count * width;
    const size_t part = std::min(BIG / size / LINE * LINE, (bytes + LINE - 1) / LINE * LINE);
    const size_t rounds = part ? chunks(bytes, part) : 1;
    const auto length = [&](size_t t) { return std::min(part, bytes - t * part); };
    const auto stage = [&](size_t t, void* to) {
        for (uint32_t r = 0; r < size; ++r)
            if (r != rank) copy(at(to, r * part), at(in, r * bytes + t * part), length(t));
    };
    Inputs inputs(size);
    const size_t shown = part * size;
    End end = show(call, bytes, shown, [&](void* to) { stage(0, to); }, patience);
    for (size_t t = 0; end == End::Done; ++t) {
        for (uint32_t r = 0; r < size; ++r)
            inputs[r] = r == rank ? at(in, rank * bytes + t * part) : at(payload(r, shown), rank * part);
        find_kernel(element, op)(at(out, t * part), inputs.data(), size, length(t) / width);
        if (t + 1 == rounds) break;
        round_ += 1;
        stage(t + 1, payload(rank, shown));
        end = next(call, patience);
    }
    return finish(end);
}

End Member::broadcast(Call call, void* data, size_t bytes, uint32_t root, Patience& patience) {
    const size_t chunk = bytes <= exchange_limit(size) ? std::max<size_t>(bytes, 1) : chunk_of(bytes);
    const size_t rounds = chunks(bytes, chunk);
    const auto length = [&](size_t t) { return std::min(chunk, bytes - t * chunk); };
    const auto stage = [&](size_t t, void* to) {
        if (rank == root) copy(to, at(data, t * chunk), length(t));
    };
    End end = show(call, bytes, chunk, [&](void* to) { stage(0, to); }, patience);
    for (size_t t = 0; end == End::Done; ++t) {
        if (rank != root) copy(at(data, t * chunk), payload(root, chunk), length(t));
        if (t + 1 == rounds) break;
        round_ += 1;
        stage(t + 1, payload(rank, chunk));
        end = next(call, patience);
    }
    return finish(end);
}

End Member::allgather(Call call, const void* in, size_t bytes, Place& place, Patience& patience) {
    const size_t first = std::min(bytes, BIG);
    End end = show(call, bytes, first, [&](void* to) { copy(to, in, first); }, patience);
    Sizes sizes(size);
    std::vector<void*> to(size);
    for (uint32_t r = 0; end == End::Done && r < size; ++r) sizes[r] = cell(r).bytes;
    if (end == End::Done && !place(sizes, to)) end = End::Interrupted;
    if (end != End::Done) return finish(end);
    const size_t rounds = chunks(*std::max_element(sizes.begin(), sizes.end()), BIG);
    for (size_t t = 0; end == End::Done; ++t) {
        for (uint32_t i = 0; i < size; ++i) {
            const uint32_t r = (rank + i) % size;
            if (!to[r] || sizes[r] <= t * BIG) continue;
            const size_t length = std::min(BIG, sizes[r] - t * BIG);
            const void* from = r == rank ? at(in, t * BIG) : t ? big(r) : payload(r, length);
            copy(at(to[r], t * BIG), from, length);
        }
        if (t + 1 == rounds) break;
        round_ += 1;
        if (bytes > (t + 1) * BIG)
            copy(big(rank), at(in, (t + 1) * BIG), std::min(BIG, bytes - (t + 1) * BIG));
        end = next(call, patience);
    }
    return finish(end);
}

// The first round shows what each sends to and expects from each, so that all find alike whether that fits.
End Member::alltoall(Call call, const std::vector<const void*>& in, const Sizes& in_sizes,
                     const std::vector<void*>& out, const Sizes& out_sizes, Patience& patience) {
    const size_t row = size * sizeof(uint64_t), part = BIG / size / LINE * LINE;
    const uint64_t mine = *std::max_element(in_sizes.begin(), in_sizes.end());
    const auto tell = [&](void*) {
        memcpy(small(rank), in_sizes.data(), row);
        memcpy(small(rank) + row, out_sizes.data(), row);
    };
    End end = show(call, mine, SMALL, tell, patience);
    if (end != End::Done) return finish(end);
    std::vector<Sizes> sends(size, Sizes(size)), expects(size, Sizes(size));
    uint64_t most = 0;
    for (uint32_t r = 0; r < size; ++r) {
        memcpy(sends[r].data(), small(r), row);
        memcpy(expects[r].data(), small(r) + row, row);
        most = std::max(most, cell(r).bytes);
    }
    for (uint32_t r = 0; r < size; ++r)
        for (uint32_t q = 0; q < size; ++q)
            if (sends[r][q] != expects[q][r]) return finish(End::Mismatch);
    for (size_t t = 0; t * part < most; ++t) {
        round_ += 1;
        const bool fits = reserve_big();
        for (uint32_t r = 0; fits && r < size; ++r)
            if (r != rank && in_sizes[r] > t * part)
                copy(big(rank) + r * part, at(in[r], t * part), std::min(part, in_sizes[r] - t * part));
        publish(fits ? 0 : NO_MEMORY, call.key, 0);
        end = await_all(patience);
        if (end == End::Done) end = judge(call.key);
        if (end != End::Done) return finish(end);
        for (uint32_t i = 0; i < size; ++i) {
            const uint32_t r = (rank + i) % size;
            if (out_sizes[r] <= t * part) continue;
            const void* from = r == rank ? at(in[r], t * part) : big(r) + rank * part;
            copy(at(out[r], t * part), from, std::min(part, out_sizes[r] - t * part));
        }
    }
    return finish(end);
}

}  // namespace flowchan
