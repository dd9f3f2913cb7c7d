/* The parts of the helper.
 *
 *   main.c    the loop: owner's messages, ends of inits, boxes and layers by number
 *   image.c   HELLO: the mount namespace that holds one image and nothing else of the host
 *   box.c     CREATE: from clone3 to an init that is ready
 *   init.c    pid 1 of a box: commands, files, listening sockets
 *   job.c     what init starts: programs, and the writing and reading of files
 *   wire.c    messages
 *
 * In the helper's mount namespace: /r the rootfs, /s the skeleton, /b/N the binds, /d the template
 * of /dev, /e an empty directory, /proc the host's, /m where a box puts its root together, and /l/N
 * where the writable layer (0) and the frozen ones of a box are for the moment of its clone3.
 */
#ifndef BURNISH_HELPER_H
#define BURNISH_HELPER_H

#include <linux/filter.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "wire.h"

struct bind {
    const char *source, *target;
};

struct image {
    uint32_t uid_first, gid_first, num_ids, job_uid;
    const char *rootfs;
    struct bind *binds, *links, *files;
    const char **hidden;
    uint32_t num_binds, num_links, num_hidden, num_files;
    struct sock_fprog filter;
    bool is_root; /* of the user namespace that the helper was started in */
    uint32_t abilities;
};

struct creation {
    uint32_t box, num_layers;
    uint64_t shm_bytes;
    bool deterministic, packages;
};

/* A step failed: which, in words for people. Returns -1, errno stays. */
int fail(const char *stage);
extern const char *failed_stage;
#define TRY(call, stage)            \
    do {                            \
        if ((call) < 0)             \
            return fail(stage);     \
    } while (0)

/* image.c */
int read_filter(struct image *image, int fd);
int enter(struct image *image);
int write_ids(const struct image *image, pid_t pid);
int make_tmpfs(uint64_t num_bytes, uint32_t num_inodes);
int resize_tmpfs(int mount, uint64_t num_bytes, uint32_t num_inodes);
/* A tmpfs of a box: `u` for the overlay's upper directory, `w` its work, `s` shared memory. */
int make_upper(const struct image *image, uint64_t num_bytes, uint32_t num_inodes);

/* box.c: what the child of clone3 does; never returns. */
struct ready {
    int32_t error;
    char stage[100];
};
_Noreturn void become_box(const struct image *image, const struct creation *creation, int control);
void forget_arguments(void);
extern char **main_arguments;

/* init.c */
enum { CONTROL = 3 };
struct ids {
    uint32_t init; /* no job is this one; UINT32_MAX: there is no other */
    uint32_t reader; /* who reads files */
    bool packages;
};
_Noreturn void serve(const struct ids *ids);

/* job.c: each runs in a child that shares our memory, and reports in the record itself. */
struct job {
    int fds[4];
    uint32_t uid, gid;
    bool packages, box_has_packages;
    char *cwd, **argv, **env;
    struct rlimit *limits;
    uint32_t *resources;
    uint32_t num_limits;
    uint32_t mode;
    uint64_t limit_bytes;
    char *path;
    volatile int error; /* of the step that failed */
    const char *volatile stage;
    volatile uint64_t num_bytes;
};
uint64_t package_capabilities(void);
int set_capabilities(uint64_t permitted);
pid_t start(int (*run)(void *), struct job *job);
int run_program(void *job);
int put_file(void *job);
int get_file(void *job);

#endif
