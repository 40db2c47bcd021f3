// File descriptors that travel with items. An item that contains a channel needs them (C14).
//
// A file stays open while a process has a descriptor for it, or while such a descriptor is queued in a
// socket. Each ring therefore has a datagram socket that its users share. The socket is connected to itself,
// and no other socket may send to it. A put sends the descriptors of its item as one datagram, called an fd
// bundle, and stores the bundle's id in the item. The receiver of the item peeks at the bundle, and the peek
// opens the descriptors. The bundle stays queued, because the next receiver needs it if this receiver dies.
//
// All of this runs under the ring's lock. A put sends the bundle before it commits, so every existing item
// has its bundle. If the put fails or its process dies in between, a bundle without an item remains. Old
// bundles are removed from the front of the queue before each send and after each received item. The removal
// stops at the first bundle whose item still exists.
#include <sys/socket.h>
#include <sys/un.h>
#include <algorithm>
#include <cerrno>

#include "ring.hpp"

namespace flowchan {

namespace {

struct Label {
    uint64_t id, count;
};
constexpr int MOST = 253;  // the kernel's SCM_MAX_FD
constexpr size_t CONTROL_BYTES = CMSG_SPACE(MOST * sizeof(int));

// Choose the datagram that the next peek returns. `offset` is the total size of the datagrams before it, and
// -1 selects the first.
bool peek_at(int socket, int offset) {
    return setsockopt(socket, SOL_SOCKET, SO_PEEK_OFF, &offset, sizeof offset) == 0;
}

bool peek_label(int socket, Label& label) {
    return recv(socket, &label, sizeof label, MSG_PEEK | MSG_DONTWAIT) == ssize_t(sizeof label);
}

}  // namespace

// Return a socket connected to itself, or -1 if the system does not support that. Only items with descriptors
// need this socket.
int socket_to_itself() {
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t length = sizeof address;
    const int room = 1 << 20;
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);  // the system's own limit still applies
    // Bind without a name; the kernel then chooses an abstract name.
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address.sun_family) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
        connect(fd, reinterpret_cast<sockaddr*>(&address), length) == 0)
        return fd;
    close(fd);
    return -1;
}

bool Ring::send_bundle(const Frame& frame) {
    if (socket_ < 0) return frame.refused = EBADF, false;
    if (frame.descriptors.size() > size_t(MOST)) return frame.refused = E2BIG, false;
    drop_bundles();
    Label label{frame.bundle, frame.descriptors.size()};
    iovec piece{&label, sizeof label};
    alignas(cmsghdr) char room[CONTROL_BYTES];
    const size_t size = frame.descriptors.size() * sizeof(int);
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = CMSG_SPACE(size);
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(size);
    memcpy(CMSG_DATA(head), frame.descriptors.data(), size);
    fault_point();
    ssize_t sent;
    while ((sent = sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL)) < 0 && errno == EINTR) {}
    frame.refused = sent < 0 ? errno : 0;
    fault_point();
    return sent >= 0;
}

int Ring::open_bundle(uint64_t id, std::vector<int>& descriptors) {
    Label label{};
    if (socket_ < 0) return EBADF;
    int at = 0;
    for (;; at += int(sizeof label)) {
        if (!peek_at(socket_, at)) return errno;
        if (!peek_label(socket_, label)) return peek_at(socket_, -1), ENOENT;
        if (label.id == id) break;
    }
    iovec piece{&label, sizeof label};
    alignas(cmsghdr) char room[CONTROL_BYTES];
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    peek_at(socket_, at);
    const ssize_t got = recvmsg(socket_, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const int error = got < 0 ? errno : 0;
    peek_at(socket_, -1);
    if (error) return error;
    const cmsghdr* head = CMSG_FIRSTHDR(&message);
    if (head && head->cmsg_type == SCM_RIGHTS) {
        descriptors.resize((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(descriptors.data(), CMSG_DATA(head), descriptors.size() * sizeof(int));
    }
    return descriptors.size() < label.count
               ? EMFILE
               : 0;  // the kernel opened as many as the limits allow, and reported no error
}

void Ring::drop_bundles() {
    Label label{};
    if (socket_ < 0 || !peek_at(socket_, -1) || !peek_label(socket_, label) || !memory_is_valid()) return;
    std::vector<uint64_t> ids;
    for (uint64_t p = first_slot(); p < length_; p += sizeof(Slot)) {
        Slot* slot = at<Slot>(p);
        const bool inside = slot->place() == SlotState::Inside || slot->place() == SlotState::Parked;
        if (slot->place() == SlotState::Free || (inside && h_->state == BROKEN)) continue;
        if (!needs_its_slot(slot->kind) || slot->size < PIN || !payload_exists(slot)) continue;
        ids.emplace_back();
        memcpy(&ids.back(), payload(slot) + 8, 8);
    }
    do {
        if (std::find(ids.begin(), ids.end(), label.id) != ids.end()) return;
        fault_point();
        recv(socket_, &label, sizeof label, MSG_DONTWAIT);
    } while (peek_label(socket_, label));
}

}  // namespace flowchan
