#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
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
#include <sys/wait.h>
#include <dirent.h>

#include "helper.h"
#include "kernel.h"

#ifndef SOURCE_DIGEST
#define SOURCE_DIGEST "unknown"
#endif
/* How native/binary.py knows what a binary was built from. */
__attribute__((used)) static const char built_from[] = "burnish-helper-source:" SOURCE_DIGEST;

enum state { CREATING, ALIVE, ENDING, DEAD };
enum { NUM_BUCKETS = 4096, MAX_CREATING = 32 };

/* A box, or a layer: then only `number` and `tmpfs` mean something. */
struct box {
    struct box *next;
    uint32_t number;
    int tmpfs; /* detached mount */
    pid_t pid;
    enum state state;
    int control, pidfd;  /* while CREATING */
    uint32_t create_id;  /* of the CREATE, while it has no answer */
    uint16_t end_op;     /* what ENDING is for: FREEZE or DESTROY */
    uint32_t end_id, layer;
};

static struct box *boxes[NUM_BUCKETS], *layers[NUM_BUCKETS];
static struct box *creating[MAX_CREATING];
static int num_creating;
static struct image image;
static int owner;

_Noreturn static void die(const char *what) {
    dprintf(STDERR_FILENO, "burnish helper: %s: %s\n", what, strerror(errno));
    exit(1);
}

_Noreturn static void refuse(const char *what) {
    dprintf(STDERR_FILENO, "burnish helper: malformed message: %s\n", what);
    exit(1);
}

static struct box *find(struct box **table, uint32_t number) {
    struct box *box = table[number % NUM_BUCKETS];
    while (box != NULL && box->number != number)
        box = box->next;
    return box;
}

static struct box *add(struct box **table, uint32_t number, int tmpfs) {
    struct box *box = calloc(1, sizeof *box), **bucket = &table[number % NUM_BUCKETS];
    if (box == NULL)
        die("no memory");
    box->number = number;
    box->tmpfs = tmpfs;
    box->next = *bucket;
    *bucket = box;
    return box;
}

static void drop(struct box **table, struct box *box) {
    struct box **link = &table[box->number % NUM_BUCKETS];
    while (*link != box)
        link = &(*link)->next;
    *link = box->next;
    if (box->tmpfs >= 0)
        close(box->tmpfs);
    free(box);
}

/* Layers */

static int open_upper(const struct box *box) {
    return openat(box->tmpfs, "u", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

static int send_upper(enum op op, uint32_t id, const struct box *layer) {
    int directory = open_upper(layer);
    if (directory < 0)
        return -1;
    send_message(owner, op, id, NULL, 0, &directory, 1);
    close(directory);
    return 0;
}

static void new_layer(struct message *m) {
    uint32_t number = take_u32(m);
    uint64_t num_bytes = take_u64(m);
    uint32_t num_inodes = take_u32(m);
    if (!is_complete(m, 0, 0))
        refuse("NEWLAYER");
    if (find(layers, number) != NULL) {
        send_error(owner, m->id, EEXIST, "a layer with this number");
        return;
    }
    errno = EINVAL;
    int tmpfs = num_bytes == 0 || num_inodes == 0 ? -1 : make_upper(&image, num_bytes, num_inodes);
    if (tmpfs < 0) {
        send_error(owner, m->id, errno, "making a layer");
        return;
    }
    struct box *layer = add(layers, number, tmpfs);
    if (send_upper(DONE, m->id, layer) < 0)
        send_error(owner, m->id, errno, "opening a layer");
}

static void use_layer(struct message *m) {
    struct box *layer = find(layers, take_u32(m));
    if (!is_complete(m, 0, 0))
        refuse("LAYERFD or DROP");
    if (layer == NULL)
        send_error(owner, m->id, ENOENT, "no such layer");
    else if (m->op == LAYERFD && send_upper(DONE, m->id, layer) < 0)
        send_error(owner, m->id, errno, "opening a layer");
    else if (m->op == DROP) {
        drop(layers, layer);
        send_done(owner, m->id);
    }
}

/* Shared memory is no part of a snapshot. Its processes have ended, so nobody plays with names. */
static void empty_shared_memory(int tmpfs) {
    int fd = openat(tmpfs, "s", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *entry;
    while (directory != NULL && (entry = readdir(directory)) != NULL)
        if (entry->d_type != DT_DIR)
            unlinkat(fd, entry->d_name, 0);
    if (directory != NULL)
        closedir(directory);
}

/* 1 if nothing was ever written, 0, or -1. */
static int is_unchanged(const struct box *box) {
    int fd = open_upper(box), entries = 0;
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (directory == NULL)
        return -1;
    while (readdir(directory) != NULL)
        entries++;
    closedir(directory);
    return entries == 2;
}

/* Creating */

/* The mounts of a box: its own at /l/0, its layers from the lowest at /l/1. */
static int attach_stack(int *const *mounts, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        char slot[16];
        snprintf(slot, sizeof slot, "/l/%u", i);
        if (attach(*mounts[i], AT_FDCWD, slot) < 0)
            return -1;
    }
    return 0;
}

/* Out of our namespace again: what a box copied stays with it, and we hold detached copies. */
static void detach_stack(int *const *mounts, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        char slot[16];
        snprintf(slot, sizeof slot, "/l/%u", i);
        int copy = clone_tree(*mounts[i], "");
        if (copy < 0 || umount2(slot, MNT_DETACH) < 0)
            die("detaching a layer");
        close(*mounts[i]);
        *mounts[i] = copy;
    }
}

static int join_groups(const struct message *m, pid_t pid) {
    char text[16];
    int size = snprintf(text, sizeof text, "%d", (int)pid);
    for (int i = 0; i < m->num_fds; i++)
        TRY(write(m->fds[i], text, (size_t)size), "joining a control group");
    return 0;
}

/* Fills in pid, pidfd and control. What it has made when it fails is closed and ended. */
static int clone_box(struct box *box, const struct creation *creation, struct message *m) {
    int pair[2];
    bool into_group = m->flags & CREATE_INTO_CGROUP;
    struct clone_arguments arguments = {
        .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC |
                 CLONE_NEWUTS | WITH_PIDFD | (into_group ? INTO_CGROUP : 0),
        .pidfd = (uint64_t)(uintptr_t)&box->pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = into_group ? (uint64_t)m->fds[0] : 0};
    TRY(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), "making a control socket");
    pid_t pid = (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
    if (pid == 0)
        become_box(&image, creation, pair[1]);
    int error = errno;
    close(pair[1]);
    errno = error;
    if (pid < 0) {
        close(pair[0]);
        return fail("making the namespaces of a box (user.max_*_namespaces, a limit of processes?)");
    }
    box->pid = pid;
    box->control = pair[0];
    if (write_ids(&image, pid) == 0 && (into_group || join_groups(m, pid) == 0) &&
        send(box->control, "g", 1, MSG_NOSIGNAL) == 1)
        return 0;
    error = errno;
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(box->control);
    close(box->pidfd);
    errno = error;
    return -1;
}

static const char *take_creation(struct message *m, struct creation *creation, uint64_t *num_bytes,
                                 uint32_t *num_inodes, struct box **stack) {
    creation->box = take_u32(m);
    *num_bytes = take_u64(m);
    *num_inodes = take_u32(m);
    creation->shm_bytes = take_u64(m);
    creation->num_layers = take_count(m, 4);
    creation->deterministic = m->flags & CREATE_DETERMINISTIC;
    creation->packages = m->flags & CREATE_PACKAGES;
    bool too_many = creation->num_layers > MAX_LAYERS;
    const char *wrong = NULL;
    for (uint32_t i = 0; i < creation->num_layers; i++) {
        struct box *layer = find(layers, take_u32(m));
        for (uint32_t j = 0; !too_many && j < i; j++)
            if (stack[j] == layer)
                wrong = "a layer twice in a stack";
        if (!too_many)
            stack[i] = layer;
        if (layer == NULL)
            wrong = "no such layer";
    }
    if (!is_complete(m, CREATE_INTO_CGROUP | CREATE_DETERMINISTIC | CREATE_PACKAGES, m->num_fds) ||
        (m->flags & CREATE_INTO_CGROUP && m->num_fds != 1))
        refuse("CREATE");
    if (too_many)
        return "more than 16 layers: squash them first";
    if (*num_bytes == 0 || *num_inodes == 0)
        return "disk_bytes and num_inodes must be more than 0";
    return find(boxes, creation->box) != NULL ? "a box with this number exists" : wrong;
}

static void create(struct message *m) {
    struct creation creation;
    struct box *stack[MAX_LAYERS], new = {0};
    uint64_t num_bytes;
    uint32_t num_inodes;
    const char *wrong = take_creation(m, &creation, &num_bytes, &num_inodes, stack);
    if (wrong != NULL) {
        send_error(owner, m->id, EINVAL, wrong);
        return;
    }
    new.tmpfs = make_upper(&image, num_bytes, num_inodes);
    if (new.tmpfs < 0) {
        send_error(owner, m->id, errno, "making the writable layer");
        return;
    }
    int *mounts[MAX_LAYERS + 1] = {&new.tmpfs};
    for (uint32_t i = 0; i < creation.num_layers; i++)
        mounts[i + 1] = &stack[i]->tmpfs;
    if (attach_stack(mounts, creation.num_layers + 1) < 0)
        die("attaching a layer");
    int result = clone_box(&new, &creation, m), error = errno;
    detach_stack(mounts, creation.num_layers + 1);
    if (result < 0) {
        close(new.tmpfs);
        send_error(owner, m->id, error, failed_stage);
        return;
    }
    struct box *box = add(boxes, creation.box, new.tmpfs);
    box->pid = new.pid;
    box->control = new.control;
    box->pidfd = new.pidfd;
    box->create_id = m->id;
    creating[num_creating++] = box;
}

/* No longer CREATING: the owner has the descriptors, or nobody. */
static void end_creation(struct box *box) {
    for (int i = 0; i < num_creating; i++)
        if (creating[i] == box)
            creating[i] = creating[--num_creating];
    close(box->control);
    close(box->pidfd);
    box->state = ALIVE;
}

/* The init's ready record, or the end of its socket. The box is gone from the table if it failed;
 * its process is reaped like any that nobody knows. */
static void finish_creation(struct box *box) {
    struct ready ready = {.error = ECHILD, .stage = "the init ended while it started"};
    struct ready received;
    if (recv(box->control, &received, sizeof received, MSG_DONTWAIT) == sizeof received)
        ready = received;
    int upper = ready.error == 0 ? open_upper(box) : -1;
    if (ready.error == 0 && upper >= 0) {
        int fds[] = {box->control, box->pidfd, upper};
        uint32_t pid = (uint32_t)box->pid;
        send_message(owner, CREATED, box->create_id, &pid, sizeof pid, fds, 3);
        close(upper);
        end_creation(box);
        return;
    }
    ready.stage[sizeof ready.stage - 1] = 0;
    send_error(owner, box->create_id, ready.error != 0 ? ready.error : errno, ready.stage);
    kill(box->pid, SIGKILL);
    end_creation(box);
    drop(boxes, box);
}

/* Ending */

static void complete_end(struct box *box) {
    uint32_t id = box->end_id;
    if (box->end_op == FREEZE) {
        empty_shared_memory(box->tmpfs);
        add(layers, box->layer, box->tmpfs);
        box->tmpfs = -1;
    }
    drop(boxes, box);
    send_done(owner, id);
}

static void begin_end(struct box *box, const struct message *m, uint32_t layer) {
    box->end_op = m->op;
    box->end_id = m->id;
    box->layer = layer;
    if (box->state == DEAD) {
        complete_end(box);
        return;
    }
    if (box->state == CREATING) {
        send_error(owner, box->create_id, ECANCELED, "the box was destroyed while it started");
        end_creation(box);
    }
    box->state = ENDING;
    kill(box->pid, SIGKILL);
}

static void destroy_or_freeze(struct message *m) {
    struct box *box = find(boxes, take_u32(m));
    uint32_t layer = m->op == FREEZE ? take_u32(m) : 0;
    if (!is_complete(m, 0, 0))
        refuse("DESTROY or FREEZE");
    int unchanged = 0;
    if (box == NULL || box->state == ENDING)
        send_error(owner, m->id, ENOENT, "no such box");
    else if (m->op == FREEZE && box->state == CREATING)
        send_error(owner, m->id, EBUSY, "the box starts");
    else if (m->op == FREEZE && find(layers, layer) != NULL)
        send_error(owner, m->id, EEXIST, "a layer with this number");
    else if (m->op == FREEZE && (unchanged = is_unchanged(box)) != 0)
        send_error(owner, m->id, unchanged > 0 ? ENODATA : errno, "nothing was written");
    else
        begin_end(box, m, layer);
}

static void resize(struct message *m) {
    struct box *box = find(boxes, take_u32(m));
    uint64_t num_bytes = take_u64(m);
    uint32_t num_inodes = take_u32(m);
    if (!is_complete(m, 0, 0))
        refuse("RESIZE");
    if (box == NULL || box->state == ENDING)
        send_error(owner, m->id, ENOENT, "no such box");
    else if (num_bytes == 0 || num_inodes == 0)
        send_error(owner, m->id, EINVAL, "disk_bytes and num_inodes must be more than 0");
    else if (resize_tmpfs(box->tmpfs, num_bytes, num_inodes) < 0)
        send_error(owner, m->id, errno, "changing the size of the writable layer");
    else
        send_done(owner, m->id);
}

static void reap_inits(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        struct box *box = NULL;
        for (int i = 0; i < NUM_BUCKETS && box == NULL; i++)
            for (box = boxes[i]; box != NULL && box->pid != pid; box = box->next)
                ;
        if (box == NULL)
            continue;
        if (box->state == CREATING)
            finish_creation(box);
        else if (box->state == ENDING)
            complete_end(box);
        else if (box->state == ALIVE) {
            uint32_t body[] = {box->number, (uint32_t)status};
            box->state = DEAD;
            send_message(owner, DIED, 0, body, sizeof body, NULL, 0);
        }
    }
}

/* The loop */

static struct bind *take_pairs(struct message *m, uint32_t *count) {
    *count = take_count(m, 8);
    struct bind *pairs = calloc((size_t)*count + 1, sizeof *pairs);
    if (pairs == NULL)
        die("no memory");
    for (uint32_t i = 0; i < *count; i++) {
        pairs[i].source = take_string(m);
        pairs[i].target = take_string(m);
    }
    return pairs;
}

static void hello(void) {
    static char buffer[MAX_MESSAGE_BYTES]; /* the image's strings stay in it */
    struct message m;
    enum received received = receive(owner, &m, buffer);
    if (received == CLOSED)
        exit(0);
    if (received == MALFORMED || m.op != HELLO)
        refuse("not a HELLO");
    uint32_t version = take_u32(&m);
    image.uid_first = take_u32(&m);
    image.gid_first = take_u32(&m);
    image.num_ids = take_u32(&m);
    image.job_uid = take_u32(&m);
    image.rootfs = take_string(&m);
    image.binds = take_pairs(&m, &image.num_binds);
    image.links = take_pairs(&m, &image.num_links);
    image.num_hidden = take_count(&m, 4);
    image.hidden = calloc((size_t)image.num_hidden + 1, sizeof *image.hidden);
    if (image.hidden == NULL)
        die("no memory");
    for (uint32_t i = 0; i < image.num_hidden; i++)
        image.hidden[i] = take_string(&m);
    image.files = take_pairs(&m, &image.num_files);
    if (!is_complete(&m, 0, 1))
        refuse("HELLO");
    image.is_root = geteuid() == 0;
    errno = EPROTO;
    int result = version != VERSION ? fail("another version of the protocol") : 0;
    errno = EINVAL;
    if (result == 0 && (image.num_ids == 0 || image.job_uid >= image.num_ids))
        result = fail("job_uid is not one of num_ids");
    if (result < 0 || read_filter(&image, m.fds[0]) < 0 || enter(&image) < 0) {
        send_error(owner, m.id, errno, failed_stage);
        exit(1);
    }
    close_fds(&m);
    uint32_t body[] = {VERSION, image.abilities};
    send_message(owner, READY, m.id, body, sizeof body, NULL, 0);
}

static void serve_owner(char *buffer) {
    struct message m;
    enum received received = receive(owner, &m, buffer);
    if (received == CLOSED)
        exit(0);
    if (received == MALFORMED)
        refuse("its size");
    switch (m.op) {
    case CREATE: create(&m); break;
    case DESTROY:
    case FREEZE: destroy_or_freeze(&m); break;
    case DROP:
    case LAYERFD: use_layer(&m); break;
    case NEWLAYER: new_layer(&m); break;
    case RESIZE: resize(&m); break;
    default: refuse("an unknown operation");
    }
    close_fds(&m);
}

static void prepare(void) {
    struct rlimit files;
    for (int signal_number = 1; signal_number < NSIG; signal_number++)
        signal(signal_number, SIG_DFL);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(null, STDOUT_FILENO) < 0)
        die("opening /dev/null");
    close(null);
    setsid();
    umask(022);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

int main(int count, char **arguments) {
    static char buffer[MAX_MESSAGE_BYTES];
    char *end = NULL;
    main_arguments = arguments;
    if (count == 2)
        owner = (int)strtol(arguments[1], &end, 10);
    if (end == NULL || end == arguments[1] || *end != 0 || owner <= STDERR_FILENO) {
        dprintf(STDERR_FILENO, "usage: helper FD, a SEQPACKET socket\n");
        return 2;
    }
    prepare();
    hello();
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    int children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (children < 0)
        die("waiting for children");
    for (;;) {
        struct pollfd wait[2 + MAX_CREATING] = {{.fd = children, .events = POLLIN}};
        struct box *waiting[MAX_CREATING];
        int num_waiting = num_creating;
        memcpy(waiting, creating, sizeof waiting);
        wait[1] = (struct pollfd){.fd = num_creating < MAX_CREATING ? owner : -1, .events = POLLIN};
        for (int i = 0; i < num_waiting; i++)
            wait[2 + i] = (struct pollfd){.fd = waiting[i]->control, .events = POLLIN};
        if (poll(wait, (nfds_t)(2 + num_waiting), -1) < 0)
            continue;
        for (int i = 0; i < num_waiting; i++)
            if (wait[2 + i].revents)
                finish_creation(waiting[i]);
        struct signalfd_siginfo ignored;
        if (wait[0].revents && read(children, &ignored, sizeof ignored) > 0)
            reap_inits();
        if (wait[1].revents)
            serve_owner(buffer);
    }
}
