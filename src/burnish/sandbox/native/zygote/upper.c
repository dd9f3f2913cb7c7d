#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include "zygote.h"

enum { SET_STRING = 1, CMD_CREATE = 6, CMD_RECONFIGURE = 7 }; /* of fsconfig */

static int set(int context, const char *key, uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    return (int)syscall(SYS_fsconfig, context, SET_STRING, key, text, 0);
}

static int configure(int context, uint64_t num_bytes, uint32_t num_inodes, int command) {
    /* 8 more for the root, the three directories and what the overlay makes in `w`. */
    if (set(context, "size", num_bytes) < 0 || set(context, "nr_inodes", num_inodes + 8ULL) < 0)
        return -1;
    return (int)syscall(SYS_fsconfig, context, command, NULL, NULL, 0);
}

static int pick(int mount) {
    return (int)syscall(SYS_fspick, mount, "", 8 /* the descriptor itself */ | 1);
}

static int close_context(int context, int result) {
    if (context >= 0) close(context);
    return result;
}

int resize_upper(int mount, uint64_t num_bytes, uint32_t num_inodes) {
    int context = pick(mount);
    return close_context(context, configure(context, num_bytes, num_inodes, CMD_RECONFIGURE));
}

int make_read_only(int mount) {
    int context = pick(mount), result = -1;
    if (syscall(SYS_fsconfig, context, 0, "ro", NULL, 0) == 0)
        result = (int)syscall(SYS_fsconfig, context, CMD_RECONFIGURE, NULL, NULL, 0);
    return close_context(context, result);
}

/* Returns it, or closes it and returns -1. */
static int furnish(int mount) {
    static const struct { const char *name; mode_t mode; } made[] = {
        {"u", 0755}, {"w", 0700}, {"s", 01777}};
    for (int i = 0; i < 3 && mount >= 0; i++) {
        const char *name = made[i].name;
        if (mkdirat(mount, name, 0700) < 0 || fchmodat(mount, name, made[i].mode, 0) < 0 ||
            fchownat(mount, name, image.uid, image.gid, 0) < 0)
            return close_context(mount, -1);
    }
    return mount;
}

int make_upper(uint64_t num_bytes, uint32_t num_inodes) {
    int context = (int)syscall(SYS_fsopen, "tmpfs", 1), mount = -1;
    if (configure(context, num_bytes, num_inodes, CMD_CREATE) == 0)
        mount = (int)syscall(SYS_fsmount, context, 1, NOSUID | NODEV);
    return furnish(close_context(context, mount));
}

int furnish_upper(int given) {
    uint64_t attributes[4] = {NOSUID | NODEV, 0, 0, 0};
    struct stat status;
    if (fstat(given, &status) < 0) return -1;
    errno = EPERM; /* as a disk of root's does not, where we are an ordinary user's helper */
    if (status.st_uid != 0 || syscall(MOUNT_SETATTR, given, "", AT_EMPTY_PATH, attributes,
                                      sizeof attributes) < 0)
        return -1;
    return furnish(fcntl(given, F_DUPFD_CLOEXEC, 0));
}
