#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "zygote.h"

struct image image;
const char *failed_stage = "";
int fail(const char *stage) {
    failed_stage = stage;
    return -1;
}

int write_ids(pid_t pid) {
    for (int i = 0; i < 2; i++) {
        const char *map = i == 0 ? image.uid_map : image.gid_map;
        char path[40];
        snprintf(path, sizeof path, "/proc/%d/%s_map", (int)pid, i == 0 ? "uid" : "gid");
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        bool written = write(fd, map, strlen(map)) == (ssize_t)strlen(map);
        if (fd >= 0) close(fd);
        TRY(written ? 0 : -1, "mapping user ids");
    }
    return 0;
}

/* What shows the host, its switches or other users' keys. Each costs a hundredth of a box. */
static const char *const covers[][2] = {
    {"/dev/null", "/proc/keys"}, {"/dev/null", "/proc/kallsyms"},
    {"/dev/null", "/proc/interrupts"}, {"/dev/null", "/proc/kcore"},
    {"/dev/null", "/proc/timer_list"}, {"/dev/null", "/proc/sysrq-trigger"},
    {"/empty", "/proc/acpi"}, {"/empty", "/proc/scsi"}, {NULL, "/proc/sys"}, {NULL, "/proc/irq"},
    {NULL, "/proc/bus"}, {NULL, "/proc/fs"}};

/* By itself, read-only, if there is nothing to cover it with. What is absent needs no cover. */
static int cover(const char *with, const char *place) {
    if (mount(with != NULL ? with : place, place, NULL, MS_BIND | MS_REC, NULL) < 0)
        return errno == ENOENT ? 0 : -1;
    unsigned long flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC;
    return with != NULL ? 0 : mount(NULL, place, NULL, flags, NULL);
}

/* What is the same for all boxes, on what the helper has there; it moves into the root later. */
static int mount_system(void) {
    TRY(mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL),
        "mounting /proc (does a container mask its own? systempaths=unconfined)");
    for (size_t i = 0; i < sizeof covers / sizeof *covers; i++)
        TRY(cover(covers[i][0], covers[i][1]), "masking /proc");
    TRY(cover("/dev", "/dev"), "mounting /dev");
    TRY(mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC,
              "newinstance,ptmxmode=0666,mode=0600,max=64" /* few, of a number for all */),
        "mounting /dev/pts");
    return 0;
}

int leave_root(void) {
    TRY(syscall(SYS_pivot_root, ".", "."), "changing the root (is this a chroot?)");
    TRY(umount2(".", MNT_DETACH), "leaving the old root");
    TRY(chdir("/"), "entering the root");
    return 0;
}

static int mount_all(const struct creation *creation, const int *layers) {
    /* 7 bytes for each of 16 layers: far from the page that mount(2) takes. */
    char options[512] = "userxattr,upperdir=/l/0/u,workdir=/l/0/w,lowerdir=", slot[24];
    for (uint32_t i = 0; i <= creation->num_layers; i++) {
        snprintf(slot, sizeof slot, "/l/%u", i);
        TRY(attach(layers[i], slot), "mounting a layer");
        close(layers[i]);
    }
    for (uint32_t i = creation->num_layers; i > 0; i--)
        snprintf(options + strlen(options), 20, "/l/%u/u:", i);
    strcat(options, image.has_rootfs ? "/skel:/image" : "/skel");
    TRY(mount("box", "/m", "overlay", MS_NODEV | MS_NOSUID, options), "mounting the root");
    TRY(chdir("/m"), "entering the root");
    for (int i = 0; image.binds[i] != NULL; i++) {
        snprintf(slot, sizeof slot, "/b%d", i);
        TRY(cover(slot, image.binds[i] + 1), "binding what a box sees of the host");
    }
    TRY(mount("/proc", "proc", NULL, MS_MOVE, NULL), "moving /proc");
    TRY(mount("/dev", "dev", NULL, MS_MOVE, NULL), "moving /dev");
    unsigned long long shm_bytes = creation->shm_bytes;
    snprintf(options, sizeof options, "mode=1777,size=%llu", shm_bytes);
    if (shm_bytes == 0) TRY(cover("/l/0/s", "dev/shm"), "mounting /dev/shm");
    else TRY(mount("shm", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, options), "mounting /dev/shm");
    return leave_root();
}

int start_network(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    if (unshare(CLONE_NEWNET) < 0) return -1;
    int network = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int result = network < 0 ? -1 : ioctl(network, SIOCSIFFLAGS, &request);
    if (network >= 0) close(network);
    return result;
}

static int make_deterministic(uint32_t processor) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(processor % CPU_SETSIZE, &one);
    TRY(personality(ADDR_NO_RANDOMIZE), "fixing addresses");
    TRY(sched_setaffinity(0, sizeof one, &one), "fixing the processor");
    return 0;
}

/* Of the bounding set. Each costs 1.3 us. */
static int keep_capabilities(uint64_t kept) {
    for (int i = 0, has; (has = prctl(PR_CAPBSET_READ, i, 0, 0, 0)) >= 0; i++)
        if (has && !(kept >> i & 1))
            TRY(prctl(PR_CAPBSET_DROP, i, 0, 0, 0), "dropping capabilities");
    return 0;
}

static int drop_privileges(bool has_packages) {
    uint64_t packages = has_packages ? PACKAGE_CAPABILITIES : 0;
    uid_t last = image.num_ids - 1;
    TRY(keep_capabilities(packages), failed_stage);
    TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges");
    /* With packages, root of the box passes its powers on to what it executes, as usual. */
    unsigned long bits = SECBIT_NO_CAP_AMBIENT_RAISE | SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED |
                         (has_packages ? 0 : SECBIT_NOROOT | SECBIT_NOROOT_LOCKED);
    TRY(prctl(PR_SET_SECUREBITS, bits | SECBIT_KEEP_CAPS, 0, 0, 0), "locking the secure bits");
    TRY(setresgid(last, last, last), "becoming the init's user");
    TRY(setresuid(last, last, last), "becoming the init's user");
    TRY(set_capabilities(packages | 1 << CAP_SETUID | 1 << CAP_SETGID | 1 << CAP_SETPCAP |
                         1 << CAP_KILL), "dropping capabilities");
    TRY(prctl(PR_SET_SECUREBITS, bits, 0, 0, 0), "locking the secure bits");
    TRY(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "hiding the init");
    /* After the last change of ids, which clears it. The helper may have ended before. */
    struct pollfd helper = {HELPER, POLLIN, 0};
    TRY(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "tying the init to the helper");
    TRY(poll(&helper, 1, 0), "tying the init to the helper");
    if (helper.revents || close(HELPER) < 0) _exit(1);
    TRY(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &image.filter), "setting the filter");
    return 0;
}

static bool receive_creation(struct message *m, struct creation *creation) {
    static char buffer[MAX_MESSAGE_BYTES];
    bool received = receive(CONTROL, m, buffer) == RECEIVED;
    take(m, creation, sizeof *creation);
    return received;
}

static int build(bool *has_packages) {
    struct creation creation;
    struct message m;
    char go;
    TRY(dup2(STDIN_FILENO, STDERR_FILENO), "closing descriptors");
    TRY(syscall(CLOSE_RANGE, HELPER + 1, ~0U, 0), "closing descriptors");
    if (recv(CONTROL, &go, 1, 0) != 1) _exit(1);
    TRY(setresgid(0, 0, 0), "becoming root of the box");
    if (setgroups(0, NULL) < 0 && image.num_ids > 1) return fail("becoming root of the box");
    TRY(setresuid(0, 0, 0), "becoming root of the box");
    TRY(mount_system(), failed_stage);
    TRY(sethostname("box", 3), "setting the host name");
    TRY(keep_capabilities(PACKAGE_CAPABILITIES), failed_stage);
    if (!receive_creation(&m, &creation)) _exit(1);
    TRY(mount_all(&creation, m.fds), failed_stage);
    if (!receive_creation(&m, &creation)) _exit(1);
    /* Only now are we in our groups, which the box so sees as the top. */
    TRY(unshare(CLONE_NEWCGROUP), "making a control group namespace");
    if (m.flags & CREATE_DETERMINISTIC) TRY(make_deterministic(creation.processor), failed_stage);
    *has_packages = m.flags & CREATE_PACKAGES;
    return drop_privileges(*has_packages);
}

void become_box(int control, int helper, char **arguments) {
    bool has_packages = false;
    signal(SIGCHLD, SIG_DFL);
    prctl(PR_SET_NAME, "init", 0, 0, 0);
    /* Both are above 4, where main.c has put them. */
    if (dup2(control, CONTROL) < 0 || dup2(helper, HELPER) < 0) _exit(1);
    if (build(&has_packages) < 0) {
        send_error(CONTROL, 0, errno, failed_stage);
        _exit(1);
    }
    /* What `ps` in the box shows of us: the kernel reads it from where it put it at exec. */
    char *first = arguments[0], *last = first;
    while (*arguments != NULL) last = *arguments++;
    size_t size = (size_t)(last - first) + strlen(last);
    memset(first, 0, size);
    strncpy(first, "init", size);
    send_message(CONTROL, READY, 0, NULL, 0, NULL, 0);
    serve(image.num_ids > 1 ? image.num_ids - 1 : UINT32_MAX, image.job_uid, has_packages);
}
