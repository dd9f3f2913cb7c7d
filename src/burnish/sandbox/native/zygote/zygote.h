/* The helper of the native sandbox (design/0005-native-sandbox.md).
 *
 *   main.c   the loop: the owner's messages, boxes and layers by number, the ends of inits
 *   image.c  HELLO: a mount namespace that holds one image and nothing else of the host
 *   box.c    CREATE: from clone3 to an init that is ready
 *   init.c   process 1 of a box: commands, files, listening sockets
 *   job.c    its children: programs, and the writing and reading of files
 *   wire.c   messages
 *
 * In the helper's mount namespace: /r the rootfs, /s the skeleton, /b/N the binds, /d the template
 * of /dev, /e an empty directory, /proc the host's, /m where a box puts its root together, and
 * /l/N, in a box that puts its root together, its writable layer (0) and those below it. */
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
enum { RDONLY = 1, NOSUID = 2, NODEV = 4, NOEXEC = 8, IDMAP = 0x100000 }; /* of mounts */
struct clone_arguments {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid,
        set_tid_size, cgroup;
};
/* A detached copy of all that is mounted at a path; the empty path is the descriptor itself. */
static inline int copy_tree(int at, const char *path) {
    return (int)syscall(SYS_open_tree, at, path, 1 | O_CLOEXEC | AT_RECURSIVE | AT_EMPTY_PATH);
}
static inline int attach(int tree, int at, const char *path) {
    return (int)syscall(SYS_move_mount, tree, "", at, path, 0x4 | (*path ? 0 : 0x40));
}
static inline int set_mount(int tree, uint64_t set, int user_namespace, int flags) {
    uint64_t attributes[4] = {set, 0, 0, (uint64_t)user_namespace};
    return (int)syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | flags, attributes,
                        sizeof attributes);
}

/* Never a group of processes, and never -1: that is every process of our user on this machine. */
static inline void kill_one(pid_t pid) {
    if (pid > 1) kill(pid, SIGKILL);
}

/* A step has failed: errno says why, the stage which, in words for people. Returns -1. */
int fail(const char *stage);
extern const char *failed_stage;
#define TRY(call, stage) do { if ((call) < 0) return fail(stage); } while (0)

struct pair { const char *first, *second; };
struct image {
    uint32_t uid_first, gid_first, num_ids, job_uid, num_binds, num_links, num_hidden, num_files;
    uint32_t abilities;
    const char *rootfs, **hidden;
    struct pair *binds, *links, *files;
    struct sock_fprog filter;
    bool is_root;
};
int read_filter(struct image *image, int fd);
int enter(struct image *image);
int write_ids(const struct image *image, pid_t pid);
/* A tmpfs with `u`, an overlay's upper directory, `w`, its work directory, and `s`, shared memory.
 * Detached. */
int make_upper(const struct image *image, uint64_t num_bytes, uint32_t num_inodes);
/* The same on an empty file system that the owner has made and mounted nowhere. */
int furnish_upper(const struct image *image, int given);
int resize_upper(int mount, uint64_t num_bytes, uint32_t num_inodes);
/* For good, whoever has it mounted; fails while a file in it is open for writing. */
int make_read_only(int mount);

void lower_limits(void); /* of this process, for the boxes: those that nobody asks for */
struct creation {
    uint32_t box, num_layers;
    uint64_t shm_bytes;
    bool deterministic, packages;
};
int start_network(void); /* we go into a new network namespace, whose loopback is up */
struct ready { int32_t error; char stage[100]; };
/* What the child of clone3 does. On `control` it reads a byte, when it has its ids, and a CREATE with a `struct creation`, the tmpfs
 * of the box and those of its layers, lowest first; then it writes a `struct ready`. */
_Noreturn void become_box(const struct image *image, int control, char **arguments);

enum { CONTROL = 3 };
/* `init` is the id that no job may have, `reader` the one that reads files. */
_Noreturn void serve(uint32_t init, uint32_t reader, bool packages);

/* Children share our memory and report in this record. */
struct job {
    int fds[4];
    uint32_t uid, gid, num_limits, mode;
    bool packages, box_has_packages;
    char *cwd, **argv, **env, *path;
    struct limit { uint32_t resource; struct rlimit values; } *limits;
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
