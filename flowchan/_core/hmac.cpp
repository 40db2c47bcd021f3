#include "hmac.hpp"

#include <bit>

namespace flowchan {

namespace {

constexpr uint64_t BLOCK = 64;

constexpr std::array<uint32_t, 64> ROUND{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

void mix(State& state, const uint8_t* block) {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 16; ++i)
        for (size_t k = 0; k < 4; ++k) w[i] = w[i] << 8 | block[4 * i + k];
    for (size_t i = 16; i < 64; ++i) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t i = 0; i < 64; ++i) {
        const uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                             ((e & f) ^ (~e & g)) + ROUND[i] + w[i];
        const uint32_t two =
            (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + one;
        d = c, c = b, b = a, a = one + two;
    }
    const State mixed{a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += mixed[i];
}

template <class Bytes>
std::string text(const Bytes& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

Digest sha256(const std::string& message) {
    State state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::string padded = message + '\x80';
    padded.resize((padded.size() + 8 + BLOCK - 1) / BLOCK * BLOCK - 8);
    for (int shift = 56; shift >= 0; shift -= 8) padded += char(8 * message.size() >> shift);
    for (size_t at = 0; at < padded.size(); at += BLOCK)
        mix(state, reinterpret_cast<const uint8_t*>(padded.data() + at));
    Digest digest{};
    for (size_t i = 0; i < digest.size(); ++i) digest[i] = uint8_t(state[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
}

Digest hmac_sha256(const Digest& key, const std::string& message) {
    std::string inner(BLOCK, '\x36'), outer(BLOCK, '\x5c');
    for (size_t i = 0; i < key.size(); ++i) {
        inner[i] = char(inner[i] ^ key[i]);
        outer[i] = char(outer[i] ^ key[i]);
    }
    return sha256(outer + text(sha256(inner + message)));
}

bool is_same(const Digest& one, const Digest& other) {
    volatile uint8_t differs = 0;
    for (size_t i = 0; i < one.size(); ++i) differs = differs | uint8_t(one[i] ^ other[i]);
    return differs == 0;
}

}  // namespace flowchan
