#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "zygote.h"

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST "unknown"
#endif
/* How native/binary.py knows what a binary was built from. */
__attribute__((used)) static const char built_from[] = "burnish-helper-source:" SOURCE_DIGEST;

enum { MAX_BOXES = 1 << 16, QUIET_MS = 2 };
/* A box or a layer. Its number is the descriptor of its file system, a detached mount. */
static struct box {
    enum { ABSENT, LIVES, ENDS, FREEZES, LAYER } state;
    bool has_disk;    /* of the owner, in place of a tmpfs */
    pid_t pid;        /* 0: no process is left; those of a layer may be ending */
    uint32_t request; /* that ENDS or FREEZES is for */
    int mounts;       /* while it ENDS: what holds its mount namespace, or 0 */
} boxes[MAX_BOXES];
static int num_boxes; /* that were ever there at once: where to look for one */

/* A process in namespaces of its own that waits to be told what box it is. */
struct child {
    pid_t pid;
    int control, pidfd, upper; /* upper -1: it has no root yet */
    struct creation room;      /* of its root */
};
static struct child spare; /* made ahead; pid 0: there is none */
static struct creation expected; /* what the next box is made with, if it is as the last one */
static bool is_plain, born_in_group; /* the last box: it had no layers and no disk of the owner */
static bool hurry = true; /* with the next child: the newest box is gone, so that nobody waits */
static struct box *newest;
static int owner, own_network, own_pidfd, spare_network = -1;
static char **main_arguments;

_Noreturn static void die(const char *what, const char *why) {
    dprintf(STDERR_FILENO, "burnish helper: %s: %s\n", what, why);
    exit(1);
}

static const char *refuse(int error, const char *stage) {
    errno = error;
    return stage;
}

/* The box or the layer of a number, or NULL. */
static struct box *find(uint32_t number, bool is_layer) {
    struct box *box = number < MAX_BOXES ? &boxes[number] : NULL;
    return box != NULL && box->state == (is_layer ? LAYER : LIVES) ? box : NULL;
}

static struct box *add(int upper, struct box box) {
    if (upper >= num_boxes) num_boxes = upper + 1;
    boxes[upper] = box;
    return &boxes[upper];
}

static void drop(struct box *box) {
    if (box->mounts > 0) close(box->mounts);
    close((int)(box - boxes));
    *box = (struct box){0};
}

static int open_upper(int upper) {
    return openat(upper, "u", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

static const char no_upper[] = "making or furnishing a file system (whose disk?)";
static const char no_room[] = "sizes are more than 0";

/* The file system of a box or layer: made, or the last descriptor of the message. */
static int take_upper(const struct message *m, uint64_t num_bytes, uint32_t num_inodes) {
    bool given = m != NULL && m->flags & CREATE_UPPER;
    int upper = given ? furnish_upper(m->fds[m->num_fds - 1]) : make_upper(num_bytes, num_inodes);
    if (upper < MAX_BOXES) return upper;
    close(upper);
    errno = EMFILE;
    return -1;
}

/* A copy for a box to mount. Before Linux 6.15 only what is mounted can be copied. */
static int copy_upper(int upper) {
    int copy = copy_tree(upper);
    if (copy >= 0 || attach(upper, "/l/0") < 0) return copy;
    int detached = copy_tree(upper);
    copy = copy_tree(upper);
    if (detached < 0 || umount2("/l/0", MNT_DETACH) < 0 || dup3(detached, upper, O_CLOEXEC) < 0)
        die("copying a mount", strerror(errno));
    close(detached);
    return copy;
}

static void forget(struct child *child) {
    close(child->control), close(child->pidfd);
    if (child->upper >= 0) close(child->upper);
    child->pid = 0;
}

static void abandon(struct child *child) {
    kill_one(child->pid); /* nobody knows it: it is reaped */
    forget(child);
}

static const char *make_child(struct child *child, int cgroup) {
    int pair[2];
    const char *failed = "making the network of a box (user.max_net_namespaces?)";
    struct {
        uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid,
            set_tid_size, cgroup;
    } arguments = {
        .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS |
                 CLONE_PIDFD | (cgroup >= 0 ? 0x200000000 /* CLONE_INTO_CGROUP */ : 0),
        .pidfd = (uint64_t)(uintptr_t)&child->pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = cgroup >= 0 ? (uint64_t)cgroup : 0};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) return "making a socket";
    bool has_network = spare_network >= 0 ? setns(spare_network, CLONE_NEWNET) == 0
                                          : start_network() == 0;
    child->pid = has_network ? (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments) : -1;
    if (child->pid == 0) become_box(pair[1], own_pidfd, main_arguments);
    if (has_network) failed = "making the namespaces of a box (user.max_*_namespaces? processes?)";
    if (child->pid > 0) failed = write_ids(child->pid) == 0 ? NULL : failed_stage;
    if (failed == NULL && send(pair[0], "g", 1, MSG_NOSIGNAL) < 0) failed = "waking the init";
    int error = errno;
    if (setns(own_network, CLONE_NEWNET) < 0) die("going back to a network", strerror(errno));
    if (spare_network >= 0) close(spare_network);
    spare_network = child->upper = -1;
    child->control = pair[0];
    close(pair[1]);
    if (child->pid < 0) close(pair[0]), child->pid = 0;
    else if (failed != NULL) abandon(child);
    return failed != NULL ? refuse(error, failed) : NULL;
}

/* Has the child put its root together, of `upper` and of layers. */
static const char *give_root(struct child *child, const struct creation *creation, int upper,
                             const int *layers) {
    int copies[MAX_LAYERS + 1], num_copies = 0;
    const char *failed = NULL;
    child->upper = upper, child->room = *creation;
    for (uint32_t i = 0; i <= creation->num_layers && failed == NULL; i++)
        if ((copies[i] = copy_upper(i == 0 ? upper : layers[i - 1])) >= 0) num_copies++;
        else failed = "copying a layer";
    if (failed == NULL && !try_send(child->control, CREATE, 0, 0, creation, sizeof *creation,
                                    copies, num_copies))
        failed = "waking the init";
    int error = errno;
    while (num_copies > 0) close(copies[--num_copies]);
    return failed != NULL ? refuse(error, failed) : NULL;
}

/* What costs most of the time of a box is done while nobody waits: the child, with the root that it
 * has if the next box is as the last one; where it is born into its group, its network only. */
static bool prepare_child(void) {
    if (born_in_group) {
        if (start_network() == 0)
            spare_network = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
        if (setns(own_network, CLONE_NEWNET) < 0)
            die("going back to a network", strerror(errno));
        return spare_network >= 0;
    }
    if (make_child(&spare, -1) != NULL) return false;
    if (!is_plain) return true;
    int upper = take_upper(NULL, expected.num_bytes, expected.num_inodes);
    if (upper >= 0 && give_root(&spare, &expected, upper, NULL) == NULL) return true;
    abandon(&spare);
    return false;
}

/* The child of a CREATE with its root. It is the spare one if that has no root yet, or the right
 * one; the sizes of a file system that holds nothing can be changed. */
static const char *find_child(struct child *child, const struct message *m,
                              const struct creation *creation, const int *layers) {
    const char *failed = NULL;
    bool fits = spare.upper < 0 || creation->shm_bytes == spare.room.shm_bytes;
    if (spare.pid > 0 && (born_in_group || (is_plain && !fits))) abandon(&spare); /* of no use */
    if (spare.pid > 0 && (is_plain || spare.upper < 0)) *child = spare, spare.pid = 0;
    else failed = make_child(child, born_in_group ? m->fds[0] : -1);
    if (failed != NULL) return failed;
    if (child->upper < 0) {
        int upper = take_upper(m, creation->num_bytes, creation->num_inodes);
        failed = upper < 0 ? no_upper : give_root(child, creation, upper, layers);
    } else if ((creation->num_bytes != child->room.num_bytes ||
                creation->num_inodes != child->room.num_inodes) &&
               resize_upper(child->upper, creation->num_bytes, creation->num_inodes) < 0) {
        failed = "changing a size";
    }
    int error = errno;
    if (failed != NULL) abandon(child);
    return failed != NULL ? refuse(error, failed) : NULL;
}

/* Each handler below answers its message, or returns the stage that failed, with errno set. */

static const char *start_box(const struct message *m, int num_groups,
                             const struct creation *creation, const int *layers) {
    struct child child;
    char text[16];
    is_plain = creation->num_layers == 0 && !(m->flags & CREATE_UPPER);
    born_in_group = m->flags & CREATE_INTO_CGROUP;
    const char *failed = find_child(&child, m, creation, layers);
    if (failed != NULL) return failed;
    size_t size = (size_t)snprintf(text, sizeof text, "%d", (int)child.pid);
    for (int i = 0; i < num_groups && !born_in_group && failed == NULL; i++)
        if (write(m->fds[i], text, size) < 0) failed = "joining a control group";
    if (failed == NULL && !try_send(child.control, CREATE, m->flags, 0, creation, sizeof *creation,
                                    NULL, 0))
        failed = "waking the init";
    int fds[] = {child.control, child.pidfd, open_upper(child.upper)}, error = errno;
    if (failed != NULL || fds[2] < 0) {
        abandon(&child);
        if (fds[2] >= 0) close(fds[2]);
        return refuse(error, failed != NULL ? failed : "opening a directory");
    }
    uint32_t answer[] = {(uint32_t)child.upper, (uint32_t)child.pid};
    send_message(owner, CREATED, m->id, answer, sizeof answer, fds, 3);
    for (int i = 0; i < 3; i++) close(fds[i]);
    newest = add(child.upper, (struct box){LIVES, m->flags & CREATE_UPPER, child.pid, 0, 0});
    if (is_plain) expected = *creation;
    return NULL;
}

static const char *create(struct message *m) {
    struct creation creation;
    int layers[MAX_LAYERS];
    const char *wrong = NULL;
    take(m, &creation, sizeof creation);
    for (uint32_t i = 0; i < creation.num_layers && !m->bad; i++) {
        uint32_t layer = take_u32(m);
        if (find(layer, true) == NULL) wrong = "no such layer";
        if (i >= MAX_LAYERS) continue;
        for (uint32_t j = 0; j < i; j++) wrong = layers[j] == (int)layer ? "a layer twice" : wrong;
        layers[i] = (int)layer;
    }
    bool into = m->flags & CREATE_INTO_CGROUP, given = m->flags & CREATE_UPPER;
    int num_groups = m->num_fds - given;
    if (!is_complete(m, CREATE_INTO_CGROUP | CREATE_DETERMINISTIC | CREATE_PACKAGES | CREATE_UPPER,
                     into ? 1 + given : m->num_fds) ||
        num_groups < 0 || num_groups > MAX_CREATE_FDS)
        die("malformed message", "CREATE");
    if (!given && (creation.num_bytes == 0 || creation.num_inodes == 0))
        return refuse(EINVAL, no_room);
    if (creation.num_layers > MAX_LAYERS) return refuse(EINVAL, "more than 16 layers");
    if (wrong != NULL) return refuse(ENOENT, wrong);
    return start_box(m, num_groups, &creation, layers);
}

static const char *send_upper(uint32_t id, uint32_t number) {
    int directory = open_upper((int)number);
    if (directory < 0) return "opening a layer";
    send_message(owner, DONE, id, &number, sizeof number, &directory, 1);
    close(directory);
    return NULL;
}

static const char *make_layer(struct message *m) {
    struct __attribute__((packed)) { uint64_t num_bytes; uint32_t num_inodes; } room;
    bool given = m->flags & NEWLAYER_UPPER;
    take(m, &room, sizeof room);
    if (!is_complete(m, NEWLAYER_UPPER, given)) die("malformed message", "NEWLAYER");
    if (!given && (room.num_bytes == 0 || room.num_inodes == 0)) return refuse(EINVAL, no_room);
    int upper = take_upper(m, room.num_bytes, room.num_inodes);
    if (upper < 0) return no_upper;
    add(upper, (struct box){LAYER, given, 0, 0, 0});
    return send_upper(m->id, (uint32_t)upper);
}

/* FREEZE and DESTROY of a live box: answered at once if nothing can change, or now is gone. */
static void end_box(struct message *m, struct box *box) {
    bool freezes = m->op == FREEZE;
    char path[40];
    /* The end of many files in an overlay takes milliseconds. Where a process that was kept has one
     * open for writing, there is nothing to gain by not waiting for it. */
    bool early = freezes && make_read_only((int)(box - boxes)) == 0;
    /* To take the mounts of a box apart takes half of its end. If it seems that nobody waits for
     * another box, we do it after the answer; else many die at once, without us. To unmount a
     * disk, which writes to it, is for others. */
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", (int)box->pid);
    if (!freezes && box == newest && !box->has_disk)
        box->mounts = open(path, O_RDONLY | O_CLOEXEC);
    kill_one(box->pid);
    box->state = freezes ? early ? LAYER : FREEZES : ENDS;
    box->request = m->id;
    if (early) send_done(owner, m->id);
}

/* All that is about one box or layer: its number, and for RESIZE sizes. */
static const char *use_box(struct message *m) {
    struct __attribute__((packed)) { uint64_t num_bytes; uint32_t num_inodes; } room;
    uint32_t number = take_u32(m);
    struct box *box = find(number, false), *layer = find(number, true);
    if (m->op == RESIZE) take(m, &room, sizeof room);
    if (!is_complete(m, 0, 0)) die("malformed message", "of a box or layer");
    if (m->op == LAYERFD) return layer != NULL ? send_upper(m->id, number)
                                               : refuse(ENOENT, "no such layer");
    if (m->op == DESTROY && box == NULL) box = layer;
    if (box == NULL) return refuse(ENOENT, "no such box");
    if (m->op == RESIZE) {
        if (box->has_disk) return refuse(EOPNOTSUPP, "a disk of the owner keeps its size");
        if (room.num_bytes == 0 || room.num_inodes == 0) return refuse(EINVAL, no_room);
        if (resize_upper((int)number, room.num_bytes, room.num_inodes) < 0)
            return "changing a size";
    } else if (box->pid > 0) {
        end_box(m, box);
        return NULL;
    }
    send_done(owner, m->id); /* before what takes time */
    if (m->op == DESTROY) drop(box);
    if (m->op == FREEZE) box->state = LAYER;
    return NULL;
}

static void send_died(uint32_t number, int status) {
    uint32_t body[] = {number, (uint32_t)status};
    send_message(owner, DIED, 0, body, sizeof body, NULL, 0);
}

static void reap_inits(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        struct box *box = boxes, *end = boxes + num_boxes;
        /* If it cannot live, another one will not, and there is time. */
        if (pid == spare.pid) forget(&spare), hurry = false;
        while (box < end && box->pid != pid) box++;
        if (box == end) continue;
        box->pid = 0;
        hurry = hurry || box == newest;
        if (box->state == ENDS || box->state == FREEZES) send_done(owner, box->request);
        if (box->state != ENDS) send_died((uint32_t)(box - boxes), status);
        if (box->state == ENDS) drop(box);
        else if (box->state == FREEZES) box->state = LAYER;
    }
}

static void serve_owner(void) {
    static char buffer[MAX_MESSAGE_BYTES];
    struct message m;
    const char *failed = NULL;
    enum received received = receive(owner, &m, buffer);
    if (received == CLOSED) exit(0);
    if (received == MALFORMED) die("malformed message", "its size or descriptors");
    if (m.op == CREATE) failed = create(&m), hurry = false;
    else if (m.op == NEWLAYER) failed = make_layer(&m);
    else if (m.op > CREATE && m.op <= RESIZE) failed = use_box(&m);
    else die("malformed message", "an unknown operation");
    if (failed != NULL) send_error(owner, m.id, errno, failed);
    close_fds(&m);
}

/* ../fallback/zygote_start.py puts them together. Its child is where we go. */
static void read_arguments(int count, char **arguments) {
    uint32_t numbers[13];
    for (int i = 0; i < 13; i++) {
        char *end = NULL;
        if (count >= 16) numbers[i] = (uint32_t)strtoul(arguments[1 + i], &end, 10);
        if (end == NULL || *end != 0) die("usage", "started by the helper in Python");
    }
    main_arguments = arguments;
    owner = (int)numbers[0];
    int filter = (int)numbers[1], child = (int)numbers[3], root = (int)numbers[5];
    off_t size = lseek(filter, 0, SEEK_END);
    size_t one = sizeof(struct sock_filter), num_filters = size > 0 ? (size_t)size / one : 0;
    image = (struct image){.uid = numbers[8], .gid = numbers[9], .num_ids = numbers[10],
                           .job_uid = numbers[11], .has_rootfs = numbers[12],
                           .uid_map = arguments[14], .gid_map = arguments[15],
                           .binds = arguments + 16,
                           .filter = {(unsigned short)num_filters, malloc((size_t)size)}};
    if (num_filters == 0 || num_filters > BPF_MAXINSNS || image.filter.filter == NULL ||
        pread(filter, image.filter.filter, (size_t)size, 0) != size)
        die("reading the filter", strerror(errno));
    if (setns(child, (int)numbers[4]) < 0 || fchdir(root) < 0) die("joining", strerror(errno));
    close(filter), close(child), close(root), close((int)numbers[6]); /* the child ends by that */
    if (leave_root() < 0) die(failed_stage, strerror(errno));
    send_message(owner, READY, numbers[2], (uint32_t[]){VERSION, numbers[7]}, 8, NULL, 0);
}

int main(int count, char **arguments) {
    sigset_t child;
    read_arguments(count, arguments);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (children < 0) die("waiting", strerror(errno));
    reap_inits(); /* whose place we have joined may have ended before */
    own_network = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    own_pidfd = fcntl(self, F_DUPFD_CLOEXEC, HELPER); /* a box has a use for those below */
    if (own_network < 0 || own_pidfd < 0) die("its network or process", strerror(errno));
    for (bool can_prepare = true;;) {
        struct pollfd wait[2] = {{children, POLLIN, 0}, {owner, POLLIN, 0}};
        struct signalfd_siginfo ignored;
        bool prepare = can_prepare && spare.pid == 0 && spare_network < 0;
        int num_ready = poll(wait, 2, prepare ? hurry ? 0 : QUIET_MS : -1);
        if (prepare && num_ready == 0) can_prepare = prepare_child();
        if (num_ready <= 0) continue;
        if (wait[0].revents && read(children, &ignored, sizeof ignored) > 0)
            reap_inits();
        if (wait[1].revents) serve_owner();
    }
}
