#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/seccomp.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "helper.h"
#include "kernel.h"

/* What shows the host, or the kernel's switches, or other users' keys. Files not named are safe by
 * their own permissions, or say what timing says as well. */
static const char *const masked_files[] = {
    "proc/kcore", "proc/keys", "proc/key-users", "proc/kallsyms", "proc/timer_list",
    "proc/sysrq-trigger", "proc/interrupts", "proc/sched_debug", "proc/latency_stats"};
static const char *const masked_directories[] = {"proc/scsi", "proc/acpi", "proc/asound"};
static const char *const read_only[] = {"proc/sys", "proc/bus", "proc/fs", "proc/irq"};

static int cover(const char *with, const char *place) {
    int tree = clone_tree(AT_FDCWD, with);
    if (tree < 0)
        return -1;
    int result = attach(tree, AT_FDCWD, place);
    int error = errno;
    close(tree);
    errno = error;
    return result < 0 && error == ENOENT ? 0 : result;
}

static int mount_root(const struct image *image, const struct creation *creation) {
    /* At most 16 layers of 7 bytes: far from the page that mount(2) takes. */
    char options[512] = "userxattr,upperdir=/l/0/u,workdir=/l/0/w,lowerdir=";
    for (uint32_t i = creation->num_layers; i > 0; i--)
        snprintf(options + strlen(options), 20, "/l/%u/u:", i);
    strcat(options, *image->rootfs ? "/s:/r" : "/s");
    TRY(mount("box", "/m", "overlay", MS_NODEV | MS_NOSUID, options), "mounting the root overlay");
    TRY(chdir("/m"), "entering the root overlay");
    for (uint32_t i = 0; i < image->num_binds; i++) {
        char slot[24];
        snprintf(slot, sizeof slot, "/b/%u", i);
        TRY(cover(slot, image->binds[i].target + 1), "binding what a box sees of the host");
    }
    return 0;
}

static int mount_proc(void) {
    TRY(mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL),
        "mounting /proc (a container must not mask its own: systempaths=unconfined)");
    for (size_t i = 0; i < sizeof masked_files / sizeof *masked_files; i++)
        TRY(cover("/d/null", masked_files[i]), "masking a file of /proc");
    for (size_t i = 0; i < sizeof masked_directories / sizeof *masked_directories; i++)
        TRY(cover("/e", masked_directories[i]), "masking a directory of /proc");
    for (size_t i = 0; i < sizeof read_only / sizeof *read_only; i++) {
        int tree = clone_tree(AT_FDCWD, read_only[i]);
        if (tree < 0 && errno == ENOENT)
            continue;
        TRY(tree, "making a part of /proc read-only");
        TRY(set_mount(tree, MOUNT_RDONLY, 0), "making a part of /proc read-only");
        TRY(attach(tree, AT_FDCWD, read_only[i]), "making a part of /proc read-only");
        close(tree);
    }
    return 0;
}

static int mount_devices(const struct creation *creation) {
    TRY(cover("/d", "dev"), "mounting /dev");
    TRY(mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC,
              "newinstance,ptmxmode=0666,mode=0600"), "mounting /dev/pts");
    if (creation->shm_bytes == 0) {
        TRY(cover("/l/0/s", "dev/shm"), "binding /dev/shm");
        return 0;
    }
    char options[64];
    snprintf(options, sizeof options, "mode=1777,size=%llu", (unsigned long long)creation->shm_bytes);
    TRY(mount("shm", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, options), "mounting /dev/shm");
    return 0;
}

static int leave_host(void) {
    TRY(syscall(SYS_pivot_root, ".", "."), "changing the root");
    TRY(umount2(".", MNT_DETACH), "leaving the helper's files");
    TRY(chdir("/"), "entering the root");
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int network;
    TRY(network = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "bringing up the loopback");
    TRY(ioctl(network, SIOCSIFFLAGS, &request), "bringing up the loopback");
    close(network);
    TRY(sethostname("box", 3), "setting the host name");
    return 0;
}

static int make_deterministic(uint32_t box) {
    cpu_set_t allowed, one;
    TRY(personality(ADDR_NO_RANDOMIZE), "fixing addresses");
    TRY(sched_getaffinity(0, sizeof allowed, &allowed), "choosing a processor");
    int skip = (int)(box % (uint32_t)CPU_COUNT(&allowed)), cpu = 0;
    while (!CPU_ISSET(cpu, &allowed) || skip-- > 0)
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    TRY(sched_setaffinity(0, sizeof one, &one), "choosing a processor");
    return 0;
}

static int drop_privileges(const struct image *image, const struct creation *creation) {
    uint64_t packages = creation->packages ? package_capabilities() : 0;
    for (int capability = 0; capability < 64; capability++)
        if (!(packages >> capability & 1) && prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0)
            break; /* EINVAL: after the last one */
    TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges");
    unsigned long bits = SECBIT_NO_CAP_AMBIENT_RAISE | SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED;
    if (!creation->packages) /* with packages, root of the box passes its powers on as usual */
        bits |= SECBIT_NOROOT | SECBIT_NOROOT_LOCKED;
    TRY(prctl(PR_SET_SECUREBITS, bits, 0, 0, 0), "locking the secure bits");
    if (image->num_ids > 1) {
        uid_t last = image->num_ids - 1;
        TRY(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "becoming the init's user");
        TRY(setresgid(last, last, last), "becoming the init's user");
        TRY(setresuid(last, last, last), "becoming the init's user");
        TRY(prctl(PR_SET_KEEPCAPS, 0, 0, 0, 0), "becoming the init's user");
    }
    TRY(set_capabilities(packages | 1 << CAP_SETUID | 1 << CAP_SETGID | 1 << CAP_SETPCAP |
                         1 << CAP_KILL), "dropping capabilities");
    TRY(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "hiding the init");
    /* After the last change of ids, which clears it. The helper's end before this line shows as the
     * end of the control socket. */
    TRY(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "tying the init to the helper");
    TRY(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &image->filter), "setting the filter");
    return 0;
}

static int build(const struct image *image, const struct creation *creation) {
    char go;
    close(STDERR_FILENO);
    TRY(dup2(0, STDERR_FILENO), "closing descriptors");
    TRY(syscall(SYS_close_range, CONTROL + 1, ~0U, 0), "closing descriptors");
    if (recv(CONTROL, &go, 1, 0) != 1)
        _exit(1);
    TRY(setresgid(0, 0, 0), "becoming root of the box");
    if (setgroups(0, NULL) < 0 && (image->is_root || image->num_ids > 1))
        return fail("becoming root of the box");
    TRY(setresuid(0, 0, 0), "becoming root of the box");
    /* Only now are we where the owner put us, so that the box sees its group as the top. */
    TRY(unshare(NEW_CGROUP_NAMESPACE), "making a control group namespace");
    TRY(mount_root(image, creation), failed_stage);
    TRY(mount_proc(), failed_stage);
    TRY(mount_devices(creation), failed_stage);
    TRY(leave_host(), failed_stage);
    if (creation->deterministic)
        TRY(make_deterministic(creation->box), failed_stage);
    TRY(setsid(), "starting a session");
    TRY(drop_privileges(image, creation), failed_stage);
    return 0;
}

char **main_arguments;

/* What `ps` in the box shows of us. The kernel reads it from where it put it at exec. */
void forget_arguments(void) {
    char *first = main_arguments[0], *last = first;
    for (char **argument = main_arguments; *argument != NULL; argument++)
        last = *argument + strlen(*argument);
    memset(first, 0, (size_t)(last - first));
    strncpy(first, "init", (size_t)(last - first));
    prctl(PR_SET_NAME, "init", 0, 0, 0);
}

void become_box(const struct image *image, const struct creation *creation, int control) {
    struct ready ready = {0};
    if (control != CONTROL && dup2(control, CONTROL) < 0)
        _exit(1);
    forget_arguments();
    if (build(image, creation) < 0) {
        ready.error = errno;
        strncpy(ready.stage, failed_stage, sizeof ready.stage - 1);
    }
    if (send(CONTROL, &ready, sizeof ready, MSG_NOSIGNAL) < 0 || ready.error != 0)
        _exit(1);
    struct ids ids = {.init = image->num_ids > 1 ? image->num_ids - 1 : UINT32_MAX,
                      .reader = image->job_uid, .packages = creation->packages};
    serve(&ids);
}
