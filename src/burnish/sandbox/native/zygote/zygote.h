/* The helper of the native sandbox (design/0005-native-sandbox.md). `../fallback/` has made a place
 * without the host's files and network, says in our arguments what is there, and becomes us.
 *
 *   main.c   the loop: the owner's messages, boxes and layers by number, the ends of inits
 *   upper.c  the file systems that boxes write to
 *   box.c    from clone3 to an init that is ready
 *   init.c   process 1 of a box: commands, files, listening sockets
 *   job.c    its children: programs, and the writing and reading of files
 *   wire.c   messages
 *
 * Our root is that of ../fallback/stage.py: /image the rootfs, /skel the skeleton, /bN the binds,
 * /dev the template of it, /empty a directory, /proc the host's, /m where a box puts its root
 * together, and /l/N, in a box that does so, its writable layer (0) and those below it. */
#ifndef BURNISH_HELPER_H
#define BURNISH_HELPER_H
#include <fcntl.h>
#include <linux/filter.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include "wire.h"

/* Newer than some C libraries; the numbers are the same on every architecture. */
enum { CLOSE_RANGE = 436, MOUNT_SETATTR = 442, RECURSIVE = 0x8000 };
enum { RDONLY = 1, NOSUID = 2, NODEV = 4, NOEXEC = 8 }; /* of mounts */

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

/* A step has failed: errno says why, the stage which, in words for people. Returns -1. */
int fail(const char *stage);
extern const char *failed_stage;
#define TRY(call, stage) do { if ((call) < 0) return fail(stage); } while (0)

/* What the arguments say. Set before the first box is made. */
struct image {
    const char *uid_map, *gid_map; /* of the boxes' user namespaces */
    uint32_t uid, gid;             /* root of the boxes, as we see it */
    uint32_t num_ids, job_uid;
    bool has_rootfs;
    char **binds; /* where /bN goes in a box */
    struct sock_fprog filter;
};
extern struct image image;

/* A tmpfs with `u`, an overlay's upper directory, `w`, its work directory, and `s`, shared memory.
 * Detached. */
int make_upper(uint64_t num_bytes, uint32_t num_inodes);
/* The same on an empty file system that the owner has made and mounted nowhere. */
int furnish_upper(int given);
int resize_upper(int mount, uint64_t num_bytes, uint32_t num_inodes);
/* For good, whoever has it mounted; fails while a file in it is open for writing. */
int make_read_only(int mount);

struct __attribute__((packed)) creation { /* a CREATE without the numbers of its layers */
    uint64_t num_bytes;
    uint32_t num_inodes;
    uint64_t shm_bytes;
    uint32_t processor, num_layers;
};
int start_network(void); /* we go into a new network namespace, whose loopback is up */
int leave_root(void);    /* the working directory becomes the root, and the old one goes */
int write_ids(pid_t pid);
/* What the child of clone3 does. On `control` it reads a byte, when it has its ids; a CREATE with
 * a `struct creation`, its file system and those of its layers, lowest first; and another CREATE,
 * when it is in its groups, with that of the box. Then it writes READY or ERROR, for the owner. */
_Noreturn void become_box(int control, int helper, char **arguments);

enum { CONTROL = 3, HELPER };
/* `init` is the id that no job may have, `reader` the one that reads files. */
_Noreturn void serve(uint32_t init, uint32_t reader, bool packages);

/* Children share our memory and report in this record. */
struct job {
    int fds[4];
    uint32_t uid, gid, num_limits, mode;
    bool packages, box_has_packages;
    char *cwd, **files, **argv, **env, *path;
    struct __attribute__((packed)) limit { uint32_t resource; uint64_t soft, hard; } *limits;
    uint64_t limit_bytes;
    volatile uint64_t num_bytes;
    volatile int error;
    const char *volatile stage;
};
extern const uint64_t PACKAGE_CAPABILITIES;
int set_capabilities(uint64_t permitted);
pid_t start(int (*run)(void *), struct job *job);
int run_program(void *job);
int put_file(void *job);
int get_file(void *job);
#endif
