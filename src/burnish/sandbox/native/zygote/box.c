#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <net/if.h>
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

/* With a core limit of 1 the kernel neither writes a file nor starts, as root of the host, what
 * core_pattern may name: with any other it does, 0 too. Queued signals are counted for us as well:
 * one box could leave none to the host. */
void lower_limits(void) {
    static const struct { int which; rlim_t most; } lower[] = {
        {RLIMIT_CORE, 1}, {RLIMIT_SIGPENDING, 256}};
    for (int i = 0; i < 2; i++) {
        struct rlimit limit;
        if (getrlimit(lower[i].which, &limit) < 0) continue;
        if (limit.rlim_max > lower[i].most) limit.rlim_max = lower[i].most;
        limit.rlim_cur = limit.rlim_max;
        setrlimit(lower[i].which, &limit);
    }
}

/* What shows the host, its switches or other users' keys. Each costs a hundredth of a box. */
static const char *const covers[][2] = {
    {"/d/null", "/proc/keys"}, {"/d/null", "/proc/kallsyms"}, {"/d/null", "/proc/interrupts"},
    {"/d/null", "/proc/kcore"}, {"/d/null", "/proc/timer_list"}, {"/d/null", "/proc/sysrq-trigger"},
    {"/e", "/proc/acpi"}, {"/e", "/proc/scsi"}, {NULL, "/proc/sys"}, {NULL, "/proc/irq"},
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
    TRY(cover("/d", "/d"), "mounting /dev");
    TRY(mount("devpts", "/d/pts", "devpts", MS_NOSUID | MS_NOEXEC,
              "newinstance,ptmxmode=0666,mode=0600,max=64" /* few, of a number for all */),
        "mounting /dev/pts");
    return 0;
}

static int mount_all(const struct image *image, const struct creation *creation,
                     const int *layers) {
    /* 7 bytes for each of 16 layers: far from the page that mount(2) takes. */
    char options[512] = "userxattr,upperdir=/l/0/u,workdir=/l/0/w,lowerdir=", slot[24];
    for (uint32_t i = 0; i <= creation->num_layers; i++) {
        snprintf(slot, sizeof slot, "/l/%u", i);
        TRY(attach(layers[i], AT_FDCWD, slot), "mounting a layer");
        close(layers[i]);
    }
    for (uint32_t i = creation->num_layers; i > 0; i--)
        snprintf(options + strlen(options), 20, "/l/%u/u:", i);
    strcat(options, *image->rootfs ? "/s:/r" : "/s");
    TRY(mount("box", "/m", "overlay", MS_NODEV | MS_NOSUID, options), "mounting the root");
    TRY(chdir("/m"), "entering the root");
    for (uint32_t i = 0; i < image->num_binds; i++) {
        snprintf(slot, sizeof slot, "/b/%u", i);
        TRY(cover(slot, image->binds[i].second + 1), "binding what a box sees of the host");
    }
    TRY(mount("/proc", "proc", NULL, MS_MOVE, NULL), "moving /proc");
    TRY(mount("/d", "dev", NULL, MS_MOVE, NULL), "moving /dev");
    unsigned long long shm_bytes = creation->shm_bytes;
    snprintf(options, sizeof options, "mode=1777,size=%llu", shm_bytes);
    if (shm_bytes == 0) TRY(cover("/l/0/s", "dev/shm"), "mounting /dev/shm");
    else TRY(mount("shm", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, options), "mounting /dev/shm");
    TRY(syscall(SYS_pivot_root, ".", "."), "changing the root");
    TRY(umount2(".", MNT_DETACH), "leaving the helper's files");
    TRY(chdir("/"), "entering the root");
    return 0;
}

int start_network(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    if (unshare(CLONE_NEWNET) < 0) return -1;
    int network = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int result = network < 0 ? -1 : ioctl(network, SIOCSIFFLAGS, &request);
    if (network >= 0) close(network);
    return result;
}

static int make_deterministic(uint32_t box) {
    cpu_set_t allowed, one;
    if (personality(ADDR_NO_RANDOMIZE) < 0 || sched_getaffinity(0, sizeof allowed, &allowed) < 0)
        return -1;
    int skip = (int)(box % (uint32_t)CPU_COUNT(&allowed)), cpu = 0;
    while (!CPU_ISSET(cpu, &allowed) || skip-- > 0) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof one, &one);
}

/* Of the bounding set. Each costs 1.3 us. */
static int keep_capabilities(uint64_t kept) {
    for (int i = 0, has; (has = prctl(PR_CAPBSET_READ, i, 0, 0, 0)) >= 0; i++)
        if (has && !(kept >> i & 1))
            TRY(prctl(PR_CAPBSET_DROP, i, 0, 0, 0), "dropping capabilities");
    return 0;
}

static int drop_privileges(const struct image *image, bool has_packages) {
    uint64_t packages = has_packages ? PACKAGE_CAPABILITIES : 0;
    uid_t last = image->num_ids - 1;
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
    /* After the last change of ids, which clears it. If the helper ends before this line, it shows
     * as the end of the control socket. */
    TRY(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "tying the init to the helper");
    TRY(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &image->filter), "setting the filter");
    return 0;
}

static int build(const struct image *image, struct creation *creation) {
    static char buffer[MAX_MESSAGE_BYTES];
    struct message m;
    TRY(dup2(STDIN_FILENO, STDERR_FILENO), "closing descriptors");
    TRY(syscall(SYS_close_range, CONTROL + 1, ~0U, 0), "closing descriptors");
    if (recv(CONTROL, buffer, 1, 0) != 1) _exit(1);
    TRY(setresgid(0, 0, 0), "becoming root of the box");
    if (setgroups(0, NULL) < 0 && image->num_ids > 1) return fail("becoming root of the box");
    TRY(setresuid(0, 0, 0), "becoming root of the box");
    TRY(mount_system(), failed_stage);
    TRY(sethostname("box", 3), "setting the host name");
    TRY(keep_capabilities(PACKAGE_CAPABILITIES), failed_stage);
    if (receive(CONTROL, &m, buffer) != RECEIVED) _exit(1);
    take(&m, creation, sizeof *creation);
    /* Only now are we in our groups, which the box so sees as the top. */
    TRY(unshare(CLONE_NEWCGROUP), "making a control group namespace");
    TRY(mount_all(image, creation, m.fds), failed_stage);
    if (creation->deterministic) TRY(make_deterministic(creation->box), "fixing the processor");
    return drop_privileges(image, creation->packages);
}

void become_box(const struct image *image, int control, char **arguments) {
    struct creation creation;
    struct ready ready = {0};
    /* What `ps` in the box shows of us: the kernel reads it from where it put it at exec. */
    size_t size = (size_t)(arguments[1] - arguments[0]) + strlen(arguments[1]);
    memset(arguments[0], 0, size);
    strncpy(arguments[0], "init", size);
    prctl(PR_SET_NAME, "init", 0, 0, 0);
    if (control != CONTROL && dup2(control, CONTROL) < 0) _exit(1);
    if (build(image, &creation) < 0) {
        ready.error = errno;
        strncpy(ready.stage, failed_stage, sizeof ready.stage - 1);
    }
    if (send(CONTROL, &ready, sizeof ready, MSG_NOSIGNAL) < 0 || ready.error != 0) _exit(1);
    serve(image->num_ids > 1 ? image->num_ids - 1 : UINT32_MAX, image->job_uid, creation.packages);
}
