// Coming back: a link whose connection broke is connected again by its own receiving thread, so that nobody
// waits for the GIL of two busy processes meanwhile. Home keeps a port for this link alone, the end away from
// home dials it, and both prove that they know the link's key:
//
//     dialled   greeting   "flowchan back 1\n", 32 fresh random bytes
//     listens   answer     32 fresh random bytes, HMAC-SHA256(key, "listens: back" + both)
//     dialled   proof      HMAC-SHA256(key, "dialled: back" + both)
//
// Every message has a fixed size, and nothing is read beyond it: frames come behind the proof, and are read by
// the link. Who repeats what crossed before meets fresh bytes, who sends our own messages back the wrong role.
// Whatever fails here, Python dials as it did first.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "hmac.hpp"

namespace flowchan {

// A connection whose peer has not proved the key yet. Never waits.
class Proving {
  public:
    enum class Now : uint8_t { Waits, Proved, Refused };

    Proving(int fd, bool dialled, int64_t give_up) : fd_(fd), dialled_(dialled), give_up_(give_up) {}
    Proving(Proving&& other) noexcept { *this = std::move(other); }
    Proving& operator=(Proving&& other) noexcept;
    ~Proving();

    Now go_on(const Digest& key);  // with what has come
    int release() { return std::exchange(fd_, -1); }
    int64_t give_up() const { return give_up_; }
    pollfd awaited() const { return {fd_, short(dialled_ && !said_ ? POLLOUT : POLLIN), 0}; }

  private:
    Now greet();
    Now hear(const Digest& key);
    bool say(const std::string& message) const;

    int fd_ = -1;
    bool dialled_ = false;
    bool said_ = false;  // our greeting, or answer
    int64_t give_up_ = 0;
    std::string both_;  // the fresh bytes of who dialled, then those of the other
    std::string came_;  // of the message that is awaited
};

// What a link needs for that. All under its mutex, for a forked child closes the descriptors.
class Again {
  public:
    void listen(int fd, const Digest& key);
    void dial_at(uint16_t port, const Digest& key);
    bool is_ready() const { return alarm_ >= 0; }
    void note(int fd);  // a connection to come back from: where it leads, and how it was set up
    // The way back begins. Nothing, if it can't.
    void begin(int64_t round_trip);
    bool is_trying() const { return listener_ >= 0 || !provings_.empty(); }
    std::vector<pollfd> awaited() const;
    int64_t due() const;  // when `serve` has something to do though nothing comes
    int serve();          // the connection on which the key was proved; -1: none yet
    void end() { provings_.clear(); }
    void ring();   // ends the wait for `awaited`
    void close();  // for good

    std::string why;  // the connection ended

  private:
    void let_in();

    Digest key_{};
    int alarm_ = -1, listener_ = -1;
    int64_t deaf_until_ = 0;  // this process lacks descriptors
    sockaddr_storage home_{};
    socklen_t home_size_ = 0;
    uint16_t port_ = 0;
    struct Option {
        int level, name, value;
    };
    std::vector<Option> options_;
    std::vector<Proving> provings_;
};

}  // namespace flowchan
