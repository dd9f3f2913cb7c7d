#include "zygote.h"

enum { SET_FLAG, SET_STRING, CMD_CREATE = 6, CMD_RECONFIGURE }; /* of fsconfig */

static int set(int context, const char *key, uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    return (int)syscall(SYS_fsconfig, context, SET_STRING, key, text, 0);
}

static int set_sizes(int context, const struct request *room) {
    /* 8 more for the root, the three directories and what the overlay makes in `w`. */
    if (set(context, "size", room->num_bytes) < 0) return -1;
    return set(context, "nr_inodes", room->num_inodes + 8ULL);
}

static int failed(void) { return fail(errno, "making, furnishing or changing a file system"); }

int change_upper(int mount, const struct request *room) {
    int context = (int)syscall(SYS_fspick, mount, "", 8 /* the descriptor itself */ | 1);
    int result = room != NULL ? set_sizes(context, room)
                              : (int)syscall(SYS_fsconfig, context, SET_FLAG, "ro", NULL, 0);
    if (result == 0) result = (int)syscall(SYS_fsconfig, context, CMD_RECONFIGURE, NULL, NULL, 0);
    if (result < 0) failed();
    close(context);
    return result;
}

/* Returns it, or closes it and returns -1. */
static int furnish(int mount) {
    static const struct { const char *name; mode_t mode; } made[] = {
        {"u", 0755}, {"w", 0700}, {"s", 01777}};
    int result = mount < 0 ? failed() : mount;
    for (int i = 0; i < 3 && result >= 0; i++) {
        const char *name = made[i].name;
        if (mkdirat(mount, name, 0700) < 0 || fchmodat(mount, name, made[i].mode, 0) < 0 ||
            fchownat(mount, name, settings.uid, settings.gid, 0) < 0)
            result = failed();
    }
    if (result < 0) close(mount);
    return result;
}

int make_upper(const struct request *room) {
    int context = (int)syscall(SYS_fsopen, "tmpfs", 1), mount = -1;
    if (set_sizes(context, room) == 0 &&
        syscall(SYS_fsconfig, context, CMD_CREATE, NULL, NULL, 0) == 0)
        mount = (int)syscall(SYS_fsmount, context, 1, NOSUID | NODEV);
    int result = furnish(mount);
    close(context);
    return result;
}

int furnish_upper(int given) {
    uint64_t attributes[4] = {NOSUID | NODEV, 0, 0, 0};
    struct stat status;
    TRY(fstat(given, &status), "looking at a disk");
    if (status.st_uid != 0) return fail(EPERM, "a disk of root's (an ordinary user's helper?)");
    TRY(syscall(MOUNT_SETATTR, given, "", AT_EMPTY_PATH, attributes, sizeof attributes),
        "furnishing a disk");
    return furnish(fcntl(given, F_DUPFD_CLOEXEC, 0));
}
