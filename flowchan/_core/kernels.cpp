#include "kernels.hpp"

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC optimize("O3")
#endif

namespace flowchan {

namespace plain {

float scale_of(float);
double scale_of(double);
template <class C>
auto scale_of(C value) -> decltype(value.re);
template <class C>
auto scale_of(C value) -> decltype(value.ticks);

#include "kernel_loops.hpp"

}  // namespace plain

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// The same loops with 32-byte vectors. They avoid fused operations, so they compute the same bits.
#    pragma GCC push_options
#    pragma GCC target("avx2")

namespace wide {

using plain::scale_of;

#    include "kernel_loops.hpp"

}  // namespace wide

#    pragma GCC pop_options
#endif

Kernel find_kernel(Element element, Op op) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    if (__builtin_cpu_supports("avx2")) return wide::find(element, op);
#endif
    return plain::find(element, op);
}

size_t size_of_element(Element element) {
    constexpr size_t SIZES[] = {1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16, 8, 8};
    return SIZES[size_t(element)];
}

}  // namespace flowchan
