#include "zygote.h"

#include <net/if.h>
#include <sys/ioctl.h>

/* How native/binary.py knows what a binary was built from. */
__attribute__((used)) static const char built_from[] = "burnish-helper-source:" SOURCE_DIGEST;

enum { MAX_BOXES = 1 << 16, QUIET_MS = 2 };
/* What is open at the start, see ../fallback/zygote_start.py; and what is after it. */
enum { SETTINGS = OWNER + 1, PLACE, ROOT, NETWORK = CHILDREN + 1 };

struct settings settings;
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
    struct request room;       /* of its root */
};
static struct child spare; /* made ahead; pid 0: there is none */
static bool has_network; /* we are in that of the next child */
static struct request expected; /* what the next box is made with, if it is as the last one */
static bool is_plain, born_in_group; /* the last box: it had no layers and no disk of the owner */
static bool hurry = true; /* with the next child: the newest box is gone, so that nobody waits */
static struct box *newest;

_Noreturn static void die(const char *what) {
    dprintf(STDERR_FILENO, "burnish helper: %s: %s\n", what, strerror(errno));
    exit(1);
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

/* The file system of a box or layer: made, or the last descriptor of the message. */
static int take_upper(const struct message *m, const struct request *room) {
    bool given = m != NULL && m->flags & CREATE_UPPER;
    int upper = given ? furnish_upper(m->fds[m->num_fds - 1]) : make_upper(room);
    if (upper < MAX_BOXES) return upper;
    close(upper);
    return fail(EMFILE, "numbering a box");
}

/* A copy for a box to mount. Before Linux 6.15 only what is mounted can be copied. */
static int copy_upper(int upper) {
    int copy = copy_tree(upper);
    if (copy >= 0 || attach(upper, "/l/0") < 0) return copy;
    int detached = copy_tree(upper);
    copy = copy_tree(upper);
    if (detached < 0 || umount2("/l/0", MNT_DETACH) < 0 || dup3(detached, upper, O_CLOEXEC) < 0)
        die("copying a mount");
    close(detached);
    return copy;
}

static int abandon(struct child *child) {
    kill_one(child->pid); /* nobody knows it: it is reaped */
    close(child->control), close(child->pidfd);
    if (child->upper >= 0) close(child->upper);
    child->pid = 0;
    return -1;
}

/* We go into the network of the next child, whose loopback is up. */
static int make_network(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    TRY(unshare(CLONE_NEWNET), "making the network of a box (user.max_net_namespaces?)");
    int inside = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    TRY(inside, "making a socket");
    int result = ioctl(inside, SIOCSIFFLAGS, &request);
    if (result < 0) fail(errno, "starting the network of a box");
    close(inside);
    has_network = result == 0;
    return result;
}

static int make_child(struct child *child, int cgroup) {
    int pair[2];
    uint64_t arguments[11] = {
        CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_PIDFD |
            (cgroup >= 0 ? 0x200000000 /* CLONE_INTO_CGROUP */ : 0),
        (uint64_t)&child->pidfd, [4] = SIGCHLD, [10] = cgroup >= 0 ? (uint64_t)cgroup : 0};
    if (!has_network && make_network() < 0) return -1;
    TRY(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), "making a socket");
    *child = (struct child){.control = pair[0], .pidfd = -1, .upper = -1};
    child->pid = (pid_t)syscall(SYS_clone3, arguments, sizeof arguments);
    if (child->pid == 0) become_box(pair[1]);
    if (child->pid < 0)
        fail(errno, "making the namespaces of a box (user.max_*_namespaces? processes?)");
    if (setns(NETWORK, CLONE_NEWNET) < 0) die("going back to a network");
    close(pair[1]);
    has_network = false;
    if (child->pid < 0 || write_ids(child->pid) < 0) return abandon(child);
    send(child->control, "g", 1, MSG_NOSIGNAL);
    return 0;
}

/* Has the child put its root together, of `upper` and of layers. */
static int give_root(struct child *child, const struct request *creation, int upper) {
    struct message m = {.op = CREATE};
    int result = upper < 0 ? -1 : 0;
    child->upper = upper, child->room = *creation;
    for (uint32_t i = 0; i <= creation->num_layers && result == 0; i++) {
        m.fds[i] = copy_upper(i == 0 ? upper : (int)creation->layers[i - 1]);
        if (m.fds[i] >= 0) m.num_fds++;
        else result = fail(errno, "copying a layer");
    }
    if (result == 0 && !try_send(child->control, &m, creation, sizeof *creation))
        result = fail(errno, "waking the init");
    close_fds(&m);
    return result < 0 ? abandon(child) : 0;
}

/* What costs most of the time of a box is done while nobody waits: the child, with the root that it
 * has if the next box is as the last one; where it is born into its group, its network only. */
static int prepare_child(void) {
    if (born_in_group) return make_network();
    if (make_child(&spare, -1) < 0) return -1;
    return is_plain ? give_root(&spare, &expected, take_upper(NULL, &expected)) : 0;
}

/* The child of a CREATE with its root. It is the spare one if that has no root yet, or the right
 * one; the sizes of a file system that holds nothing can be changed. */
static int find_child(struct child *child, const struct message *m,
                      const struct request *creation) {
    bool fits = spare.upper < 0 || creation->shm_bytes == spare.room.shm_bytes;
    if (spare.pid > 0 && (born_in_group || (is_plain && !fits))) abandon(&spare); /* of no use */
    if (spare.pid > 0 && (is_plain || spare.upper < 0)) *child = spare, spare.pid = 0;
    else if (make_child(child, born_in_group ? m->fds[0] : -1) < 0) return -1;
    if (child->upper < 0) return give_root(child, creation, take_upper(m, creation));
    bool same = memcmp(&child->room, creation, offsetof(struct request, shm_bytes)) == 0;
    return same || change_upper(child->upper, creation) == 0 ? 0 : abandon(child);
}

/* Each handler below answers its message, or tells `fail` and returns -1. */

static int create(const struct message *m, const struct request *creation) {
    bool given = m->flags & CREATE_UPPER;
    struct child child;
    char text[16];
    if (creation->num_layers > MAX_LAYERS) return fail(EINVAL, "more than 16 layers");
    for (uint32_t i = 0; i < creation->num_layers; i++) {
        if (find(creation->layers[i], true) == NULL) return fail(ENOENT, "no such layer");
        for (uint32_t j = 0; j < i; j++)
            if (creation->layers[j] == creation->layers[i]) return fail(ENOENT, "a layer twice");
    }
    is_plain = creation->num_layers == 0 && !given;
    born_in_group = m->flags & CREATE_INTO_CGROUP;
    if (find_child(&child, m, creation) < 0) return -1;
    int result = 0;
    size_t size = (size_t)snprintf(text, sizeof text, "%d", (int)child.pid);
    for (int i = 0; i < m->num_fds - given && !born_in_group && result == 0; i++)
        if (write(m->fds[i], text, size) < 0) result = fail(errno, "joining a control group");
    struct message order = {.op = CREATE, .flags = m->flags};
    if (result == 0 && !try_send(child.control, &order, creation, sizeof *creation))
        result = fail(errno, "waking the init");
    struct message answer = {.op = CREATED, .id = m->id, .num_fds = 3,
                             .fds = {child.control, child.pidfd, open_upper(child.upper)}};
    if (result == 0 && answer.fds[2] < 0) result = fail(errno, "opening a directory");
    if (result < 0) return close(answer.fds[2]), abandon(&child);
    send_message(&answer, (uint32_t[]){(uint32_t)child.upper, (uint32_t)child.pid}, 8);
    close_fds(&answer);
    newest = add(child.upper, (struct box){LIVES, given, child.pid, 0, 0});
    if (is_plain) expected = *creation;
    return 0;
}

static int send_upper(uint32_t id, uint32_t number) {
    struct message answer = {.op = DONE, .id = id, .num_fds = 1, .fds = {open_upper((int)number)}};
    TRY(answer.fds[0], "opening a layer");
    send_message(&answer, &number, sizeof number);
    close_fds(&answer);
    return 0;
}

static int make_layer(const struct message *m, const struct request *room) {
    int upper = take_upper(m, room);
    if (upper < 0) return -1;
    add(upper, (struct box){LAYER, m->flags & NEWLAYER_UPPER, 0, 0, 0});
    return send_upper(m->id, (uint32_t)upper);
}

/* FREEZE and DESTROY of a live box: answered at once if nothing can change, or now is gone. */
static int end_box(const struct message *m, struct box *box) {
    bool freezes = m->op == FREEZE;
    char path[40];
    /* The end of many files in an overlay takes milliseconds. Where a process that was kept has one
     * open for writing, there is nothing to gain by not waiting for it. */
    bool early = freezes && change_upper((int)(box - boxes), NULL) == 0;
    /* To take the mounts of a box apart takes half of its end. If it seems that nobody waits for
     * another box, we do it after the answer; else many die at once, without us. To unmount a
     * disk, which writes to it, is for others. */
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", (int)box->pid);
    if (!freezes && box == newest && !box->has_disk)
        box->mounts = open(path, O_RDONLY | O_CLOEXEC);
    kill_one(box->pid);
    box->state = freezes ? early ? LAYER : FREEZES : ENDS;
    box->request = m->id;
    if (early) send_done(m->id);
    return 0;
}

/* All that is about one box or layer. */
static int use_box(const struct message *m, const struct request *asked) {
    struct box *box = find(asked->number, m->op == LAYERFD);
    if (box == NULL && m->op == DESTROY) box = find(asked->number, true);
    if (box == NULL) return fail(ENOENT, "no such box or layer");
    if (m->op == LAYERFD) return send_upper(m->id, asked->number);
    bool resizes = m->op == RESIZE;
    if (resizes && box->has_disk) return fail(EOPNOTSUPP, "a disk of the owner keeps its size");
    if (resizes && change_upper((int)asked->number, asked) < 0) return -1;
    if (!resizes && box->pid > 0) return end_box(m, box);
    send_done(m->id); /* before what takes time */
    if (m->op == DESTROY) drop(box);
    if (m->op == FREEZE) box->state = LAYER;
    return 0;
}

static void reap_inits(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        struct box *box = boxes, *end = boxes + num_boxes;
        /* If it cannot live, another one will not, and there is time. */
        if (pid == spare.pid) spare.pid = 0, abandon(&spare), hurry = false;
        while (box < end && box->pid != pid) box++;
        if (box == end) continue;
        uint32_t died[] = {(uint32_t)(box - boxes), (uint32_t)status};
        box->pid = 0;
        hurry = hurry || box == newest;
        if (box->state == ENDS || box->state == FREEZES) send_done(box->request);
        if (box->state != ENDS) send_message(&(struct message){.op = DIED}, died, sizeof died);
        if (box->state == ENDS) drop(box);
        else if (box->state == FREEZES) box->state = LAYER;
    }
}

/* What each operation has of a request. */
enum { ONE = offsetof(struct request, num_bytes), SIZES = offsetof(struct request, shm_bytes) };
static const uint8_t parts[] = {
    [CREATE] = offsetof(struct request, layers), [FREEZE] = ONE, [DESTROY] = ONE,
    [NEWLAYER] = SIZES, [LAYERFD] = ONE, [RESIZE] = SIZES};

/* Whether a message has all that its operation has, and nothing else. */
static bool is_sound(const struct message *m, const struct request *asked) {
    bool creates = m->op == CREATE, numbered = !creates && m->op != NEWLAYER;
    int flags = creates ? CREATE_INTO_CGROUP | CREATE_DETERMINISTIC | CREATE_PACKAGES | CREATE_UPPER
                        : numbered ? 0 : NEWLAYER_UPPER;
    int num_groups = m->num_fds - (m->flags & CREATE_UPPER ? 1 : 0);
    int least = m->flags & CREATE_INTO_CGROUP ? 1 : 0;
    int most = least ? 1 : creates ? MAX_CREATE_FDS : 0;
    if (m->op < CREATE || m->op > RESIZE || num_groups < least || num_groups > most ||
        (!numbered && asked->number != 0)) return false;
    size_t num_layers = creates ? asked->num_layers : 0;
    return is_complete(m, parts[m->op] + num_layers * sizeof *asked->layers, flags, m->num_fds);
}

static void serve_owner(void) {
    static char body[MAX_MESSAGE_BYTES];
    const struct request *asked = (void *)body;
    struct message m;
    int received = receive(&m, body), result;
    if (received == 0) exit(0);
    errno = EBADMSG;
    if (received < 0 || !is_sound(&m, asked)) die("what the owner says");
    bool has_sizes = asked->num_bytes > 0 && asked->num_inodes > 0;
    if (parts[m.op] >= SIZES && !(m.flags & CREATE_UPPER) && !has_sizes)
        result = fail(EINVAL, "sizes are more than 0");
    else if (m.op == CREATE) result = create(&m, asked), hurry = false;
    else if (m.op == NEWLAYER) result = make_layer(&m, asked);
    else result = use_box(&m, asked);
    if (result < 0) send_error(m.id);
    close_fds(&m);
}

/* Goes to the place that ../fallback/zygote_start.py has made, and opens what is needed there. */
static void begin(void) {
    sigset_t child;
    ssize_t size = pread(SETTINGS, &settings, sizeof settings, 0);
    if (size < (ssize_t)offsetof(struct settings, rest)) die("usage: see ../fallback");
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    if (setns(PLACE, (int)settings.namespaces) < 0 || fchdir(ROOT) < 0) die("joining");
    syscall(CLOSE_RANGE, OWNER + 1, ~0U, 0); /* our child, whose place it is, ends by that */
    if (leave_root() < 0 || syscall(SYS_pidfd_open, getpid(), 0) != HELPER ||
        signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK) != CHILDREN ||
        open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC) != NETWORK)
        die("settling in (is this a chroot?)");
    struct message ready = {.op = READY, .id = settings.request};
    send_message(&ready, (uint32_t[]){VERSION, settings.abilities}, 8);
}

int main(void) {
    begin();
    for (bool can_prepare = true;;) {
        struct pollfd wait[2] = {{CHILDREN, POLLIN, 0}, {OWNER, POLLIN, 0}};
        struct signalfd_siginfo ignored;
        bool prepare = can_prepare && spare.pid == 0 && !has_network;
        int num_ready = poll(wait, 2, prepare ? hurry ? 0 : QUIET_MS : -1);
        if (prepare && num_ready == 0) can_prepare = prepare_child() >= 0;
        if (num_ready <= 0) continue;
        if (wait[0].revents && read(CHILDREN, &ignored, sizeof ignored) > 0) reap_inits();
        if (wait[1].revents) serve_owner();
    }
}
