#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "zygote.h"

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST "unknown"
#endif
/* How native/binary.py knows what a binary was built from. */
__attribute__((used)) static const char built_from[] = "burnish-helper-source:" SOURCE_DIGEST;

enum state { CREATING, ALIVE, ENDING, DEAD };
enum { NUM_BUCKETS = 4096, MAX_CREATING = 32 };
/* A box, or a layer, which has a number and a tmpfs only. */
struct box {
    struct box *next;
    uint32_t number;
    int tmpfs; /* detached mount */
    pid_t pid;
    enum state state;
    int control, pidfd;                /* while CREATING */
    uint32_t create_id, end_id, layer; /* ids of the CREATE and of what ENDING is for */
    bool freezes, early;               /* FREEZE; answered before the end of the init */
    bool has_disk;                     /* of the owner, in place of a tmpfs */
};
static struct box *boxes[NUM_BUCKETS], *layers[NUM_BUCKETS], *creating[MAX_CREATING];
static struct box spare; /* a child that is no box yet; pid 0: there is none */
static int num_creating, owner, own_network, spare_network = -1;
static bool born_in_group; /* as the last box was */
static struct image image;
static char **main_arguments;

_Noreturn static void die(const char *what, const char *why) {
    dprintf(STDERR_FILENO, "burnish helper: %s: %s\n", what, why);
    exit(1);
}

static struct box *find(struct box **table, uint32_t number) {
    struct box *box = table[number % NUM_BUCKETS];
    while (box != NULL && box->number != number) box = box->next;
    return box;
}

static struct box *add(struct box **table, uint32_t number, int tmpfs) {
    struct box *box = calloc(1, sizeof *box), **bucket = &table[number % NUM_BUCKETS];
    if (box == NULL) die("a new box", "no memory");
    *box = (struct box){.next = *bucket, .number = number, .tmpfs = tmpfs};
    return *bucket = box;
}

static void drop(struct box **table, struct box *box) {
    struct box **link = &table[box->number % NUM_BUCKETS];
    while (*link != box) link = &(*link)->next;
    *link = box->next;
    if (box->tmpfs >= 0) close(box->tmpfs);
    free(box);
}

/* Each handler below answers its message, or returns the stage that failed, with errno set. */

static int open_upper(const struct box *box) {
    return openat(box->tmpfs, "u", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

static const char no_disk[] = "furnishing a disk (is its top root's, and we too?)";

static const char *refuse(int error, const char *stage) {
    errno = error;
    return stage;
}

static const char *send_upper(uint32_t id, const struct box *layer) {
    int directory = open_upper(layer);
    if (directory < 0) return "opening a layer";
    send_message(owner, DONE, id, NULL, 0, &directory, 1);
    close(directory);
    return NULL;
}

/* NEWLAYER, RESIZE */
static const char *size_tmpfs(struct message *m) {
    uint32_t number = take_u32(m);
    uint64_t num_bytes = take_u64(m);
    uint32_t num_inodes = take_u32(m);
    struct box *box = find(m->op == RESIZE ? boxes : layers, number);
    bool given = m->op == NEWLAYER && m->flags & NEWLAYER_UPPER;
    if (!is_complete(m, given ? NEWLAYER_UPPER : 0, given))
        die("malformed message", "NEWLAYER or RESIZE");
    if (!given && (num_bytes == 0 || num_inodes == 0))
        return refuse(EINVAL, "sizes are more than 0");
    if (m->op == RESIZE) {
        if (box == NULL || box->state == ENDING) return refuse(ENOENT, "no such box");
        if (box->has_disk) return refuse(EOPNOTSUPP, "a disk of the owner keeps its size");
        if (resize_upper(box->tmpfs, num_bytes, num_inodes) < 0) return "changing a size";
        send_done(owner, m->id);
        return NULL;
    }
    if (box != NULL) return refuse(EEXIST, "a layer with this number");
    int tmpfs = given ? furnish_upper(&image, m->fds[0])
                      : make_upper(&image, num_bytes, num_inodes);
    return tmpfs < 0 ? given ? no_disk : "making a layer" : send_upper(m->id, add(layers, number, tmpfs));
}

/* DROP, LAYERFD */
static const char *use_layer(struct message *m) {
    struct box *layer = find(layers, take_u32(m));
    if (!is_complete(m, 0, 0)) die("malformed message", "LAYERFD or DROP");
    if (layer == NULL) return refuse(ENOENT, "no such layer");
    if (m->op == LAYERFD) return send_upper(m->id, layer);
    drop(layers, layer);
    send_done(owner, m->id);
    return NULL;
}

/* How many files a directory of a tmpfs holds, or -1. Its processes must have ended if they are to
 * be removed, which directories are not: shared memory has none. */
static int count_files(int tmpfs, const char *name, bool remove) {
    int fd = openat(tmpfs, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW), count = -2;
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (directory == NULL) return -1;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL; count++)
        if (remove && entry->d_type != DT_DIR) unlinkat(fd, entry->d_name, 0);
    closedir(directory);
    return count;
}

/* A copy for a box to mount. Before Linux 6.15 only what is mounted can be copied. */
static int copy_layer(struct box *layer) {
    int copy = copy_tree(layer->tmpfs, "");
    if (copy >= 0 || attach(layer->tmpfs, AT_FDCWD, "/l/0") < 0) return copy;
    int detached = copy_tree(layer->tmpfs, "");
    copy = copy_tree(layer->tmpfs, "");
    if (detached < 0 || umount2("/l/0", MNT_DETACH) < 0) die("copying a mount", strerror(errno));
    close(layer->tmpfs);
    layer->tmpfs = detached;
    return copy;
}

static void forget(struct box *child) {
    close(child->control), close(child->pidfd);
    child->pid = 0;
}

static void abandon(struct box *child) {
    kill_one(child->pid); /* nobody knows it: it is reaped */
    forget(child);
}

/* A process in namespaces of its own that waits to be told what box it is. */
static const char *make_child(struct box *child, int cgroup) {
    int pair[2];
    const char *failed = "making the network of a box (user.max_net_namespaces?)";
    struct clone_arguments arguments = {
        .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS |
                 CLONE_PIDFD | (cgroup >= 0 ? 0x200000000 /* CLONE_INTO_CGROUP */ : 0),
        .pidfd = (uint64_t)(uintptr_t)&child->pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = cgroup >= 0 ? (uint64_t)cgroup : 0};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) return "making a socket";
    bool has_network = spare_network >= 0 ? setns(spare_network, CLONE_NEWNET) == 0
                                          : start_network() == 0;
    child->pid = has_network ? (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments) : -1;
    if (child->pid == 0) become_box(&image, pair[1], main_arguments);
    if (has_network) failed = "making the namespaces of a box (user.max_*_namespaces? processes?)";
    if (child->pid > 0) failed = write_ids(&image, child->pid) == 0 ? NULL : failed_stage;
    if (failed == NULL && send(pair[0], "g", 1, MSG_NOSIGNAL) < 0) failed = "waking the init";
    int error = errno;
    if (setns(own_network, CLONE_NEWNET) < 0) die("going back to a network", strerror(errno));
    if (spare_network >= 0) close(spare_network);
    spare_network = -1;
    child->control = pair[0];
    close(pair[1]);
    if (child->pid < 0) close(pair[0]), child->pid = 0;
    else if (failed != NULL) abandon(child);
    return failed != NULL ? refuse(error, failed) : NULL;
}

/* What costs half of the time of a box and needs to know nothing of it is done while nobody waits:
 * the child; where it is born into its group, its network only. */
static bool prepare_child(void) {
    if (!born_in_group) return make_child(&spare, -1) == NULL;
    if (start_network() == 0) spare_network = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (setns(own_network, CLONE_NEWNET) < 0) die("going back to a network", strerror(errno));
    return spare_network >= 0;
}

static const char *start_child(struct box *box, const struct creation *creation,
                               const struct message *m, int num_groups,
                               struct box *const *stack) {
    char text[16];
    int copies[MAX_LAYERS + 1], num_copies = 0;
    const char *failed = NULL;
    born_in_group = m->flags & CREATE_INTO_CGROUP;
    if (born_in_group && spare.pid > 0) abandon(&spare); /* made before we knew: of no use */
    if (born_in_group || spare.pid == 0)
        failed = make_child(box, born_in_group ? m->fds[0] : -1);
    else box->pid = spare.pid, box->control = spare.control, box->pidfd = spare.pidfd, spare.pid = 0;
    if (failed != NULL) return failed;
    size_t size = (size_t)snprintf(text, sizeof text, "%d", (int)box->pid);
    for (int i = 0; i < num_groups && !born_in_group && failed == NULL; i++)
        if (write(m->fds[i], text, size) < 0) failed = "joining a control group";
    for (uint32_t i = 0; i <= creation->num_layers && failed == NULL; i++)
        if ((copies[num_copies] = copy_layer(stack[i])) < 0) failed = "copying a layer";
        else num_copies++;
    if (failed == NULL && !try_send(box->control, CREATE, 0, creation, sizeof *creation, copies,
                                    num_copies))
        failed = "waking the init";
    int error = errno;
    while (num_copies > 0) close(copies[--num_copies]);
    if (failed != NULL) abandon(box);
    return failed != NULL ? refuse(error, failed) : NULL;
}

static const char *create(struct message *m) {
    struct creation creation = {.box = take_u32(m)};
    uint64_t num_bytes = take_u64(m);
    uint32_t num_inodes = take_u32(m);
    struct box *stack[MAX_LAYERS + 1], new = {0};
    const char *wrong = NULL;
    creation.shm_bytes = take_u64(m);
    creation.num_layers = take_count(m, 4);
    creation.deterministic = m->flags & CREATE_DETERMINISTIC;
    creation.packages = m->flags & CREATE_PACKAGES;
    for (uint32_t i = 1; i <= creation.num_layers; i++) {
        struct box *layer = find(layers, take_u32(m));
        if (layer == NULL) wrong = "no such layer";
        if (i > MAX_LAYERS) continue;
        for (uint32_t j = 1; j < i; j++) wrong = stack[j] == layer ? "a layer twice" : wrong;
        stack[i] = layer;
    }
    bool into = m->flags & CREATE_INTO_CGROUP, given = m->flags & CREATE_UPPER;
    int num_groups = m->num_fds - given;
    if (!is_complete(m, CREATE_INTO_CGROUP | CREATE_DETERMINISTIC | CREATE_PACKAGES | CREATE_UPPER,
                     into ? 1 + given : m->num_fds) ||
        num_groups < 0 || num_groups > MAX_CREATE_FDS)
        die("malformed message", "CREATE");
    if (creation.num_layers > MAX_LAYERS) return refuse(EINVAL, "more than 16 layers");
    if (!given && (num_bytes == 0 || num_inodes == 0))
        return refuse(EINVAL, "sizes must be more than 0");
    if (find(boxes, creation.box) != NULL) return refuse(EEXIST, "a box with this number");
    if (wrong != NULL) return refuse(ENOENT, wrong);
    new.tmpfs = given ? furnish_upper(&image, m->fds[num_groups])
                      : make_upper(&image, num_bytes, num_inodes);
    if (new.tmpfs < 0) return given ? no_disk : "making the writable layer";
    stack[0] = &new;
    wrong = start_child(&new, &creation, m, num_groups, stack);
    if (wrong != NULL) {
        close(new.tmpfs);
        return wrong;
    }
    struct box *box = creating[num_creating++] = add(boxes, creation.box, new.tmpfs);
    box->pid = new.pid, box->control = new.control, box->pidfd = new.pidfd;
    box->create_id = m->id, box->has_disk = given;
    return NULL;
}

/* No longer CREATING: the owner has the descriptors, or nobody. */
static void end_creation(struct box *box, enum state state) {
    for (int i = 0; i < num_creating; i++)
        if (creating[i] == box) creating[i] = creating[--num_creating];
    close(box->control), close(box->pidfd);
    box->state = state;
}

/* The init's ready record has come, or the end of its socket. */
static void finish_creation(struct box *box) {
    struct ready ready, none = {ECHILD, "the init ended while it started"};
    if (recv(box->control, &ready, sizeof ready, MSG_DONTWAIT) != sizeof ready) ready = none;
    int fds[] = {box->control, box->pidfd, ready.error == 0 ? open_upper(box) : -1};
    if (fds[2] >= 0) send_message(owner, CREATED, box->create_id, &box->pid, 4, fds, 3);
    else send_error(owner, box->create_id, ready.error ? ready.error : errno, ready.stage);
    end_creation(box, ALIVE);
    if (fds[2] >= 0) {
        close(fds[2]);
        return;
    }
    kill_one(box->pid);
    drop(boxes, box);
}

static void keep_layer(struct box *box) {
    count_files(box->tmpfs, "s", true); /* shared memory is no part of a snapshot */
    add(layers, box->layer, box->tmpfs);
    box->tmpfs = -1;
    send_done(owner, box->end_id);
}

static void send_died(const struct box *box, int status) {
    uint32_t body[] = {box->number, (uint32_t)status};
    send_message(owner, DIED, 0, body, sizeof body, NULL, 0);
}

/* No process is left. What it held is freed after the answer, for which somebody waits. */
static void complete_end(struct box *box, int status) {
    if (!box->freezes) send_done(owner, box->end_id);
    else if (box->tmpfs >= 0) keep_layer(box);
    if (box->early) send_died(box, status);
    drop(boxes, box);
}

/* DESTROY, FREEZE */
static const char *end_box(struct message *m) {
    struct box *box = find(boxes, take_u32(m));
    bool freezes = m->op == FREEZE, early = freezes && m->flags & FREEZE_EARLY;
    uint32_t layer = freezes ? take_u32(m) : 0;
    int num_files = 0;
    if (!is_complete(m, freezes ? FREEZE_EARLY : 0, 0))
        die("malformed message", "DESTROY or FREEZE");
    if (box == NULL || box->state == ENDING) return refuse(ENOENT, "no such box");
    if (freezes && box->state == CREATING) return refuse(EBUSY, "the box starts");
    if (freezes && find(layers, layer) != NULL) return refuse(EEXIST, "a layer of this number");
    if (freezes && (num_files = count_files(box->tmpfs, "u", false)) <= 0)
        return num_files == 0 ? refuse(ENODATA, "nothing was written") : "reading the layer";
    box->end_id = m->id, box->layer = layer, box->freezes = freezes;
    if (box->state == CREATING) {
        send_error(owner, box->create_id, ECANCELED, "the box was destroyed while it started");
        end_creation(box, ALIVE);
    }
    if (box->state == DEAD) {
        complete_end(box, 0);
        return NULL;
    }
    kill_one(box->pid);
    box->state = ENDING, box->early = early;
    /* The end of many files in an overlay takes milliseconds. Where a process that was kept has one
     * open for writing, there is nothing to gain. */
    if (early && make_read_only(box->tmpfs) == 0) keep_layer(box);
    return NULL;
}

static void reap_inits(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        struct box *box = NULL;
        if (pid == spare.pid) forget(&spare);
        for (int i = 0; i < NUM_BUCKETS && box == NULL; i++)
            for (box = boxes[i]; box != NULL && box->pid != pid;) box = box->next;
        if (box == NULL) continue;
        if (box->state == CREATING) finish_creation(box);
        else if (box->state == ENDING) complete_end(box, status);
        else if (box->state == ALIVE) {
            box->state = DEAD;
            send_died(box, status);
        }
    }
}

static struct pair *take_pairs(struct message *m, uint32_t *count) {
    *count = take_count(m, 8);
    struct pair *pairs = calloc((size_t)*count + 1, sizeof *pairs);
    if (pairs == NULL) die("HELLO", "no memory");
    for (uint32_t i = 0; i < *count; i++)
        pairs[i].first = take_string(m), pairs[i].second = take_string(m);
    return pairs;
}

static void hello(void) {
    static char buffer[MAX_MESSAGE_BYTES]; /* the image's strings stay in it */
    struct message m;
    enum received received = receive(owner, &m, buffer);
    if (received == CLOSED) exit(0);
    if (received == MALFORMED || m.op != HELLO) die("malformed message", "not a HELLO");
    uint32_t version = take_u32(&m);
    image.uid_first = take_u32(&m), image.gid_first = take_u32(&m);
    image.num_ids = take_u32(&m), image.job_uid = take_u32(&m);
    image.rootfs = take_string(&m);
    image.binds = take_pairs(&m, &image.num_binds);
    image.links = take_pairs(&m, &image.num_links);
    image.num_hidden = take_count(&m, 4);
    image.hidden = calloc((size_t)image.num_hidden + 1, sizeof *image.hidden);
    for (uint32_t i = 0; image.hidden != NULL && i < image.num_hidden; i++)
        image.hidden[i] = take_string(&m);
    image.files = take_pairs(&m, &image.num_files);
    if (!is_complete(&m, 0, 1)) die("malformed message", "HELLO");
    image.is_root = geteuid() == 0;
    int result = 0;
    errno = EINVAL;
    if (version != VERSION) result = fail("another version of the protocol");
    else if (image.job_uid >= image.num_ids) result = fail("job_uid is not one of num_ids");
    if (result < 0 || read_filter(&image, m.fds[0]) < 0 || enter(&image) < 0) {
        send_error(owner, m.id, errno, failed_stage);
        exit(1);
    }
    close_fds(&m);
    send_message(owner, READY, m.id, (uint32_t[]){VERSION, image.abilities}, 8, NULL, 0);
}

static void serve_owner(char *buffer) {
    struct message m;
    const char *failed = NULL;
    enum received received = receive(owner, &m, buffer);
    if (received == CLOSED) exit(0);
    if (received == MALFORMED) die("malformed message", "its size or descriptors");
    if (m.op == CREATE) failed = create(&m);
    else if (m.op == DESTROY || m.op == FREEZE) failed = end_box(&m);
    else if (m.op == DROP || m.op == LAYERFD) failed = use_layer(&m);
    else if (m.op == NEWLAYER || m.op == RESIZE) failed = size_tmpfs(&m);
    else die("malformed message", "an unknown operation");
    if (failed != NULL) send_error(owner, m.id, errno, failed);
    close_fds(&m);
}

static void prepare(void) {
    struct rlimit files;
    for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (dup2(null, STDIN_FILENO) < 0 || dup2(null, STDOUT_FILENO) < 0) die("/dev/null", "missing");
    close(null);
    setsid();
    umask(022);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0)
        files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
    lower_limits();
}

int main(int count, char **arguments) {
    static char buffer[MAX_MESSAGE_BYTES];
    char *end = NULL;
    sigset_t child;
    main_arguments = arguments;
    if (count == 2) owner = (int)strtol(arguments[1], &end, 10);
    if (end == NULL || *end != 0 || owner <= STDERR_FILENO || fcntl(owner, F_SETFD, FD_CLOEXEC) < 0)
        die("usage", "helper FD, a SEQPACKET socket");
    prepare();
    hello();
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (children < 0) die("waiting", strerror(errno));
    own_network = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (own_network < 0) die("its network", strerror(errno));
    for (bool can_prepare = true;;) {
        struct pollfd wait[2 + MAX_CREATING] = {{children, POLLIN, 0}};
        struct box *waiting[MAX_CREATING];
        int num_waiting = num_creating;
        memcpy(waiting, creating, sizeof waiting);
        wait[1] = (struct pollfd){num_creating < MAX_CREATING ? owner : -1, POLLIN, 0};
        for (int i = 0; i < num_waiting; i++)
            wait[2 + i] = (struct pollfd){waiting[i]->control, POLLIN, 0};
        bool prepare = can_prepare && num_creating == 0 && spare.pid == 0 && spare_network < 0;
        int num_ready = poll(wait, (nfds_t)(2 + num_waiting), prepare ? 0 : -1);
        if (prepare && num_ready == 0) can_prepare = prepare_child();
        if (num_ready <= 0) continue;
        for (int i = 0; i < num_waiting; i++)
            if (wait[2 + i].revents) finish_creation(waiting[i]);
        struct signalfd_siginfo ignored;
        if (wait[0].revents && read(children, &ignored, sizeof ignored) > 0) reap_inits();
        if (wait[1].revents) serve_owner(buffer);
    }
}
