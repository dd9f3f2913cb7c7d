/* System calls newer than some C libraries, and what they take. Their numbers are the same on
 * every architecture that we know. */
#ifndef BURNISH_KERNEL_H
#define BURNISH_KERNEL_H

#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#define SYS_fsopen 430
#define SYS_fsconfig 431
#define SYS_fsmount 432
#define SYS_fspick 433
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef AT_EMPTY_PATH
#define AT_EMPTY_PATH 0x1000
#endif
#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif

enum {
    TREE_CLONE = 1,
    MOVE_FROM_FD = 4,
    MOVE_TO_FD = 0x40,
    CONFIG_STRING = 1, CONFIG_CREATE = 6, CONFIG_RECONFIGURE = 7,
    PICK_FD = 8,
    MOUNT_RDONLY = 1, MOUNT_NOSUID = 2, MOUNT_NODEV = 4, MOUNT_NOEXEC = 8, MOUNT_IDMAP = 0x100000,
    NO_SYMLINKS = 4,
    WITH_PIDFD = 0x1000, NEW_CGROUP_NAMESPACE = 0x02000000,
};
#define INTO_CGROUP 0x200000000ULL

struct clone_arguments {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid,
        set_tid_size, cgroup;
};

struct mount_attributes {
    uint64_t set, clear, propagation, user_namespace;
};

/* A detached copy of what is mounted at a path, with all below. */
static inline int clone_tree(int at, const char *path) {
    unsigned flags = TREE_CLONE | O_CLOEXEC | AT_RECURSIVE | (*path ? 0 : AT_EMPTY_PATH);
    return (int)syscall(SYS_open_tree, at, path, flags);
}

static inline int attach(int tree, int at, const char *path) {
    return (int)syscall(SYS_move_mount, tree, "", at, path, MOVE_FROM_FD | (*path ? 0 : MOVE_TO_FD));
}

static inline int set_mount(int tree, uint64_t set, unsigned flags) {
    struct mount_attributes attributes = {.set = set};
    return (int)syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | flags, &attributes,
                        sizeof attributes);
}

#endif
