#include "zygote.h"

#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <sys/personality.h>

bool box_has_packages;

int write_ids(pid_t pid) {
    static const char *const files[] = {"uid_map", "gid_map"};
    char path[40];
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, files[i]);
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        int written = write(fd, settings.maps[i], strlen(settings.maps[i])) > 0 ? 0 : -1;
        if (written < 0) fail(errno, "mapping user ids");
        if (fd >= 0) close(fd);
        if (written < 0) return -1;
    }
    return 0;
}

/* Mounts, as ../fallback/zygote_start.py lists them: source, target, kind, flags, data and what
 * failing is called, up to an empty source. If they are optional, absent targets are left out. */
static int mount_rows(const char **at, bool optional) {
    while (**at != 0) {
        const char *field[6];
        for (int i = 0; i < 6; *at += strlen(*at) + 1) field[i++] = *at;
        unsigned long flags = strtoul(field[3], NULL, 10);
        if (mount(field[0], field[1], field[2], flags, field[4]) < 0 &&
            !(optional && errno == ENOENT))
            return fail(errno, field[5]);
    }
    ++*at;
    return 0;
}

int leave_root(void) {
    TRY(syscall(SYS_pivot_root, ".", "."), "changing the root (is this a chroot?)");
    TRY(umount2(".", MNT_DETACH), "leaving the old root");
    TRY(chdir("/"), "entering the root");
    return 0;
}

static int mount_all(const struct request *creation, const int *layers, const char *rows) {
    /* 7 bytes for each of 16 layers: far from the page that mount(2) takes. */
    char options[512] = "userxattr,upperdir=/l/0/u,workdir=/l/0/w,lowerdir=", slot[24];
    for (uint32_t i = 0; i <= creation->num_layers; i++) {
        snprintf(slot, sizeof slot, "/l/%u", i);
        TRY(attach(layers[i], slot), "mounting a layer");
        close(layers[i]);
    }
    for (uint32_t i = creation->num_layers; i > 0; i--)
        snprintf(options + strlen(options), 20, "/l/%u/u:", i);
    strcat(options, settings.lower);
    TRY(mount("box", "/m", "overlay", MS_NODEV | MS_NOSUID, options), "mounting the root");
    TRY(chdir("/m"), "entering the root");
    if (mount_rows(&rows, true) < 0 || mount_rows(&rows, false) < 0) return -1;
    bool own = creation->shm_bytes > 0; /* else it is a part of the file system */
    snprintf(options, sizeof options, own ? "mode=1777,size=%llu" : "",
             (unsigned long long)creation->shm_bytes);
    TRY(mount("/l/0/s", "dev/shm", "tmpfs", own ? MS_NOSUID | MS_NODEV : MS_BIND, options),
        "mounting /dev/shm");
    return leave_root();
}

static int make_deterministic(uint32_t processor) {
    cpu_set_t one = {0};
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

static int drop_privileges(void) {
    uint64_t packages = box_has_packages ? PACKAGE_CAPABILITIES : 0;
    uid_t last = settings.num_ids - 1;
    if (keep_capabilities(packages) < 0) return -1;
    TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges");
    /* With packages, root of the box passes its powers on to what it executes, as usual. */
    unsigned long bits = SECBIT_NO_CAP_AMBIENT_RAISE | SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED |
                         (box_has_packages ? 0 : SECBIT_NOROOT | SECBIT_NOROOT_LOCKED);
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
    struct sock_fprog filter = {(unsigned short)settings.num_filters, (void *)settings.rest};
    TRY(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter), "setting the filter");
    return 0;
}

static int build(void) {
    static char body[MAX_MESSAGE_BYTES];
    const struct request *creation = (void *)body;
    const char *rows = settings.rest + settings.num_filters * sizeof(struct sock_filter);
    struct message m;
    TRY(dup2(STDIN_FILENO, STDERR_FILENO), "closing descriptors");
    TRY(syscall(CLOSE_RANGE, CHILDREN + 1, ~0U, 0), "closing descriptors");
    if (recv(OWNER, body, 1, 0) != 1) _exit(1);
    TRY(setresgid(0, 0, 0), "becoming root of the box");
    if (settings.num_ids > 1) TRY(setgroups(0, NULL), "becoming root of the box");
    TRY(setresuid(0, 0, 0), "becoming root of the box");
    if (mount_rows(&rows, false) < 0 || mount_rows(&rows, true) < 0) return -1;
    TRY(sethostname("box", 3), "setting the host name");
    if (keep_capabilities(PACKAGE_CAPABILITIES) < 0) return -1;
    if (receive(&m, body) <= 0) _exit(1);
    if (mount_all(creation, m.fds, rows) < 0) return -1;
    if (receive(&m, body) <= 0) _exit(1);
    /* Only now are we in our groups, which the box so sees as the top. */
    TRY(unshare(CLONE_NEWCGROUP), "making a control group namespace");
    if (m.flags & CREATE_DETERMINISTIC && make_deterministic(creation->processor) < 0) return -1;
    box_has_packages = m.flags & CREATE_PACKAGES;
    return drop_privileges();
}

void become_box(int control) {
    prctl(PR_SET_NAME, "init", 0, 0, 0);
    if (dup2(control, OWNER) < 0) _exit(1);
    if (build() < 0) send_error(0), _exit(1);
    send_message(&(struct message){.op = READY}, NULL, 0);
    serve();
}
