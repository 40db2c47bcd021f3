// HMAC-SHA256 (RFC 2104, FIPS 180-4), for the few bytes by which two hosts prove a key to each other again
// (link_again.hpp). All else that is proved or encrypted is so in Python, by the system's OpenSSL.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace flowchan {

using Digest = std::array<uint8_t, 32>;

Digest sha256(const std::string& message);
Digest hmac_sha256(const Digest& key, const std::string& message);
// In a time that does not say where they differ.
bool is_same(const Digest& one, const Digest& other);

}  // namespace flowchan
