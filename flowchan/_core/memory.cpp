#include "memory.hpp"

#include "system.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cerrno>

namespace flowchan {

int make_memory(uint64_t length) {
    const int fd = memfd_create("flowchan", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) fail(errno, "memfd_create");
    const bool sized = ftruncate(fd, off_t(length)) == 0;
    if (sized && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) return fd;
    const int error = errno;
    ::close(fd);
    fail(error, sized ? "seal" : "ftruncate");
}

bool reserve_memory(int fd, uint64_t from, uint64_t upto) {
    int error;
    while ((error = fallocate(fd, 0, off_t(from), off_t(upto - from)) ? errno : 0) == EINTR) {}
    errno = error;
    return error == 0;
}

}  // namespace flowchan
