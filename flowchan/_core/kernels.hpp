// Kernels that combine the values of several members element by element, always in the order of their ranks.
// Therefore every member that computes the result gets the same bits.
//
// float16 and bfloat16 values are summed in float32 over all members, and rounded once. Integers wrap around.
// A NaN stays NaN in minimum and maximum, and NaT (the date or time span without a value) stays NaT in every
// operation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flowchan {

// Element types. Raw elements can be moved but not combined.
enum class Element : uint8_t {
    Raw,
    Bool,
    I8,
    U8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
    F16,
    BF16,
    F32,
    F64,
    C64,
    C128,
    Date,
    Span
};

// In the same order as the names for `op=`.
enum class Op : uint8_t { Sum, Mean, Prod, Min, Max, And, Or, Xor };

// Combines `count` elements of each of the `number` inputs into `out`, which may be one of the inputs.
using Kernel = void (*)(void* out, const void* const* in, size_t number, size_t count);

// null if elements of this type can't be combined with this operation
Kernel find_kernel(Element element, Op op);
size_t size_of_element(Element element);

}  // namespace flowchan
