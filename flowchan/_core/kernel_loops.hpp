// The loops of kernels.cpp, which includes this file once per instruction set, each time in a different
// namespace.

// How many elements to combine at a time; a block of this size fits into the first-level cache.
constexpr size_t BLOCK = 512;

struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};
template <class T>
struct Complex {
    T re, im;
};
struct Truth {
    uint8_t is;
};
// A date or time span, in units of its type. As in NumPy, the smallest integer is NaT.
struct Time {
    int64_t ticks;
    bool is_none() const { return ticks == INT64_MIN; }
};

inline float bits_to_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t float_to_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

// These conversions have no branches, so that the compiler can vectorize the loops.
inline float widen(Half half) {
    const uint32_t sign = uint32_t(half.bits & 0x8000) << 16, rest = uint32_t(half.bits & 0x7fff) << 13;
    const float scaled = bits_to_float(rest) * 0x1p112f;  // also correct for subnormals
    const uint32_t infinite = (half.bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
    return bits_to_float(float_to_bits(scaled) | infinite | sign);
}

inline Half to_half(float value) {
    const uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000;
    const uint32_t size = bits & 0x7fffffff;
    const uint32_t normal =
        (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;  // rounds to nearest, ties to even
    const uint32_t small = float_to_bits(bits_to_float(size) + 0.5f) - 0x3f000000u;
    uint32_t half = size < (113u << 23) ? small : normal;
    half = size >= 0x477ff000u ? 0x7c00u : half;
    half = size > 0x7f800000u ? 0x7e00u : half;
    return {uint16_t(half | sign)};
}

inline float widen(Brain brain) { return bits_to_float(uint32_t(brain.bits) << 16); }

inline Brain to_brain(float value) {
    const uint32_t bits = float_to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0u : rounded)};
}

// The type in which elements are summed, with conversions from and to the stored type.
template <class T>
struct As {
    using Sum = T;
    static T load(T value) { return value; }
    static T store(T value) { return value; }
};
template <>
struct As<Half> {
    using Sum = float;
    static float load(Half value) { return widen(value); }
    static Half store(float value) { return to_half(value); }
};
template <>
struct As<Brain> {
    using Sum = float;
    static float load(Brain value) { return widen(value); }
    static Brain store(float value) { return to_brain(value); }
};

template <class T>
inline Complex<T> operator+(Complex<T> a, Complex<T> b) {
    return {T(a.re + b.re), T(a.im + b.im)};
}
template <class T>
inline Complex<T> operator*(Complex<T> a, Complex<T> b) {
    return {T(a.re * b.re - a.im * b.im), T(a.re * b.im + a.im * b.re)};
}
template <class T>
inline Complex<T> operator/(Complex<T> a, T by) {
    return {T(a.re / by), T(a.im / by)};
}

inline Time operator/(Time a, int64_t by) { return {a.is_none() ? a.ticks : a.ticks / by}; }

struct Add {
    template <class T>
    static T of(T a, T b) {
        return T(a + b);
    }
    static Time of(Time a, Time b) {
        return a.is_none() || b.is_none() ? Time{INT64_MIN} : Time{of(a.ticks, b.ticks)};
    }
    static int64_t of(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }
    static int32_t of(int32_t a, int32_t b) { return int32_t(uint32_t(a) + uint32_t(b)); }
    static Truth of(Truth a, Truth b) { return {uint8_t((a.is | b.is) != 0)}; }
};
struct Multiply {
    template <class T>
    static T of(T a, T b) {
        return T(a * b);
    }
    static int64_t of(int64_t a, int64_t b) { return int64_t(uint64_t(a) * uint64_t(b)); }
    static int32_t of(int32_t a, int32_t b) { return int32_t(uint32_t(a) * uint32_t(b)); }
    static uint16_t of(uint16_t a, uint16_t b) { return uint16_t(uint32_t(a) * b); }
    static Truth of(Truth a, Truth b) { return {uint8_t(a.is && b.is)}; }
};
struct Least {
    template <class T>
    static T of(T a, T b) {
        return a < b || a != a ? a : b;
    }
    static Time of(Time a, Time b) { return {of(a.ticks, b.ticks)}; }
    static Truth of(Truth a, Truth b) { return Multiply::of(a, b); }
};
struct Most {
    template <class T>
    static T of(T a, T b) {
        return a > b || a != a ? a : b;
    }
    static Time of(Time a, Time b) {
        return a.is_none() || b.is_none() ? Time{INT64_MIN} : Time{of(a.ticks, b.ticks)};
    }
    static Truth of(Truth a, Truth b) { return Add::of(a, b); }
};
struct BitAnd {
    template <class T>
    static T of(T a, T b) {
        return T(a & b);
    }
    static Truth of(Truth a, Truth b) { return Multiply::of(a, b); }
};
struct BitOr {
    template <class T>
    static T of(T a, T b) {
        return T(a | b);
    }
    static Truth of(Truth a, Truth b) { return Add::of(a, b); }
};
struct BitXor {
    template <class T>
    static T of(T a, T b) {
        return T(a ^ b);
    }
    static Truth of(Truth a, Truth b) { return {uint8_t((a.is != 0) != (b.is != 0))}; }
};

template <bool IS_MEAN, class S>
inline S divided(S sum, size_t by) {
    if constexpr (IS_MEAN)
        return sum / decltype(scale_of(sum))(by);
    else
        return sum;
}

// `out` may be one of the inputs, because each result depends only on elements with the same index.
template <class T, class O, bool IS_MEAN = false>
void combine(void* out, const void* const* in, size_t number, size_t count) {
    using S = typename As<T>::Sum;
    T* to = static_cast<T*>(out);
    const T* first = static_cast<const T*>(in[0]);
    if (number == 2) {
        const T* second = static_cast<const T*>(in[1]);
#pragma GCC ivdep
        for (size_t i = 0; i < count; ++i)
            to[i] =
                As<T>::store(divided<IS_MEAN>(S(O::of(As<T>::load(first[i]), As<T>::load(second[i]))), 2));
        return;
    }
    S sum[BLOCK];
    for (size_t from = 0; from < count; from += BLOCK) {
        const size_t n = count - from < BLOCK ? count - from : BLOCK;
        for (size_t i = 0; i < n; ++i) sum[i] = As<T>::load(first[from + i]);
        for (size_t r = 1; r < number; ++r) {
            const T* next = static_cast<const T*>(in[r]) + from;
            for (size_t i = 0; i < n; ++i) sum[i] = O::of(sum[i], As<T>::load(next[i]));
        }
        for (size_t i = 0; i < n; ++i) to[from + i] = As<T>::store(divided<IS_MEAN>(sum[i], number));
    }
}

template <class T>
Kernel ordered(Op op) {
    return op == Op::Sum    ? combine<T, Add>
           : op == Op::Prod ? combine<T, Multiply>
           : op == Op::Min  ? combine<T, Least>
           : op == Op::Max  ? combine<T, Most>
                            : nullptr;
}
template <class T>
Kernel integer(Op op) {
    return op == Op::And   ? combine<T, BitAnd>
           : op == Op::Or  ? combine<T, BitOr>
           : op == Op::Xor ? combine<T, BitXor>
                           : ordered<T>(op);
}
template <class T>
Kernel real(Op op) {
    return op == Op::Mean ? combine<T, Add, true> : ordered<T>(op);
}
template <class T>
Kernel complex(Op op) {
    return op == Op::Sum    ? combine<T, Add>
           : op == Op::Mean ? combine<T, Add, true>
           : op == Op::Prod ? combine<T, Multiply>
                            : nullptr;
}
inline Kernel date(Op op) {
    return op == Op::Min ? combine<Time, Least> : op == Op::Max ? combine<Time, Most> : nullptr;
}
inline Kernel span(Op op) {
    return op == Op::Sum ? combine<Time, Add> : op == Op::Mean ? combine<Time, Add, true> : date(op);
}

inline Kernel find(Element element, Op op) {
    switch (element) {
        case Element::Raw:
            return nullptr;
        case Element::Bool:
            return op == Op::Mean ? nullptr : integer<Truth>(op);
        case Element::I8:
            return integer<int8_t>(op);
        case Element::U8:
            return integer<uint8_t>(op);
        case Element::I16:
            return integer<int16_t>(op);
        case Element::U16:
            return integer<uint16_t>(op);
        case Element::I32:
            return integer<int32_t>(op);
        case Element::U32:
            return integer<uint32_t>(op);
        case Element::I64:
            return integer<int64_t>(op);
        case Element::U64:
            return integer<uint64_t>(op);
        case Element::F16:
            return real<Half>(op);
        case Element::BF16:
            return real<Brain>(op);
        case Element::F32:
            return real<float>(op);
        case Element::F64:
            return real<double>(op);
        case Element::C64:
            return complex<Complex<float>>(op);
        case Element::C128:
            return complex<Complex<double>>(op);
        case Element::Date:
            return date(op);
        case Element::Span:
            return span(op);
    }
    return nullptr;
}
