/* The helper of the native sandbox (design/0005-native-sandbox.md). `../fallback/` has made a place
 * without the host's files and network, says in a file what is there, and becomes us.
 *
 *   main.c   the loop: the owner's messages, boxes and layers by number, the ends of inits
 *   upper.c  the file systems that boxes write to
 *   box.c    from clone3 to an init that is ready
 *   init.c   process 1 of a box: commands, listening sockets
 *   job.c    its children: programs, and the writing and reading of files
 *   wire.c   messages
 *
 * Our root is that of ../fallback/stage.py: /image the rootfs, /skel the skeleton, /bN the binds,
 * /dev the template of it, /empty a directory, /proc the host's, /m where a box puts its root
 * together, and /l/N, in a box that does so, its writable layer (0) and those below it. */
#pragma once
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "wire.h"

/* Newer than some C libraries; the numbers are the same on every architecture. */
enum { CLOSE_RANGE = 436, MOUNT_SETATTR = 442, RECURSIVE = 0x8000 };
enum { NOSUID = 2, NODEV = 4 }; /* of mounts */
/* Descriptors of helper and inits alike: the helper's process, and the ends of their children (a
 * signalfd tells each reader of his own). */
enum { HELPER = OWNER + 1, CHILDREN };

/* A detached copy of all that is mounted at a descriptor. */
static inline int copy_tree(int tree) {
    return (int)syscall(SYS_open_tree, tree, "", 1 | O_CLOEXEC | RECURSIVE | AT_EMPTY_PATH);
}
static inline int attach(int tree, const char *path) {
    return (int)syscall(SYS_move_mount, tree, "", AT_FDCWD, path, 4 /* from the descriptor */);
}

/* Never a group of processes, and never -1: that is every process of our user on this machine. */
static inline void kill_one(pid_t pid) {
    if (pid > 1) kill(pid, SIGKILL);
}

/* What ../fallback/zygote_start.py says. Set before the first box is made. */
extern struct settings {
    uint32_t request, abilities;   /* for READY */
    uint32_t namespaces;           /* that we go into */
    uint32_t uid, gid;             /* root of the boxes, as we see it */
    uint32_t num_ids, num_filters; /* of boxes; instructions of the filter */
    char maps[2][64];              /* of user and group ids of the boxes' user namespaces */
    char lower[32];                /* end of the list of layers of each box */
    char rest[1 << 16];            /* the filter; then mounts, see box.c */
} settings;

/* What the owner says of boxes and layers: each message has the first so many fields. */
struct __attribute__((packed)) request {
    uint32_t number; /* 0 if there is none yet */
    uint64_t num_bytes;
    uint32_t num_inodes;
    uint64_t shm_bytes;
    uint32_t processor, num_layers, layers[MAX_LAYERS];
};

/* A tmpfs with `u`, an overlay's upper directory, `w`, its work directory, and `s`, shared memory.
 * Detached. */
int make_upper(const struct request *room);
/* The same on an empty file system that the owner has made and mounted nowhere. */
int furnish_upper(int given);
/* To other sizes; or, without, read-only for good, whoever has it mounted: that fails while a file
 * in it is open for writing. */
int change_upper(int mount, const struct request *room);

int leave_root(void); /* the working directory becomes the root, and the old one goes */
int write_ids(pid_t pid);
/* What the child of clone3 does. On `control` it reads a byte, when it has its ids; a CREATE with
 * its file system and those of its layers, lowest first; and another CREATE, when it is in its
 * groups, with that of the box. Then it writes READY or ERROR, for the owner. */
_Noreturn void become_box(int control);
_Noreturn void serve(void);
extern bool box_has_packages; /* of the box that this is the init of */

/* Children share our memory and report in this record. */
struct job {
    int fds[3];
    uint16_t op;
    bool packages;
    const struct __attribute__((packed)) asked {
        uint64_t wall_us, detail; /* of PUT the mode, of GET the most bytes */
        uint32_t uid, gid, num_limits, num_strings[3];
    } *asked;
    const struct __attribute__((packed)) limit { uint32_t resource; uint64_t soft, hard; } *limits;
    char *cwd, **lists[3]; /* the files that may be the program; its arguments; its environment */
    volatile int error;
};
static const uint64_t PACKAGE_CAPABILITIES =
    1 << CAP_CHOWN | 1 << CAP_DAC_OVERRIDE | 1 << CAP_FOWNER | 1 << CAP_FSETID | 1 << CAP_SETUID |
    1 << CAP_SETGID | 1 << CAP_KILL | 1 << CAP_SYS_CHROOT | 1U << CAP_SETFCAP;
int set_capabilities(uint64_t permitted);
pid_t start(struct job *job);
