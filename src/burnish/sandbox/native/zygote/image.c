#define _GNU_SOURCE
#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <sys/wait.h>

#include "zygote.h"

const char *failed_stage = "";
int fail(const char *stage) {
    failed_stage = stage;
    return -1;
}

static int write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    ssize_t size = (ssize_t)strlen(text), written = fd < 0 ? -1 : write(fd, text, (size_t)size);
    if (fd >= 0) close(fd);
    return written == size ? 0 : -1;
}

int read_filter(struct image *image, int fd) {
    off_t size = lseek(fd, 0, SEEK_END);
    size_t one = sizeof(struct sock_filter), count = size > 0 ? (size_t)size / one : 0;
    errno = EINVAL;
    if (count == 0 || (size_t)size % one != 0 || count > BPF_MAXINSNS)
        return fail("reading the filter");
    image->filter = (struct sock_fprog){(unsigned short)count, malloc((size_t)size)};
    if (image->filter.filter == NULL || pread(fd, image->filter.filter, (size_t)size, 0) != size)
        return fail("reading the filter");
    return 0;
}

/* File systems in memory */

static int configure(int context, uint64_t num_bytes, uint64_t num_inodes, int command) {
    char bytes[24], inodes[24];
    const char *const options[] = {"size", bytes, "nr_inodes", inodes, "mode", "0755"};
    snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)num_bytes);
    snprintf(inodes, sizeof inodes, "%llu", (unsigned long long)num_inodes);
    for (int i = 0; i < 6; i += 2)
        if (syscall(SYS_fsconfig, context, 1, options[i], options[i + 1], 0) < 0) return -1;
    return (int)syscall(SYS_fsconfig, context, command, NULL, NULL, 0);
}

static int make_tmpfs(uint64_t num_bytes, uint64_t num_inodes, unsigned attributes) {
    int context = (int)syscall(SYS_fsopen, "tmpfs", 1), mount = -1;
    if (configure(context, num_bytes, num_inodes, 6) == 0)
        mount = (int)syscall(SYS_fsmount, context, 1, attributes);
    if (context >= 0) close(context);
    return mount;
}

int resize_upper(int mount, uint64_t num_bytes, uint32_t num_inodes) {
    int context = (int)syscall(SYS_fspick, mount, "", 8 | 1);
    int result = configure(context, num_bytes, num_inodes + 8ULL, 7);
    if (context >= 0) close(context);
    return result;
}

int make_read_only(int mount) {
    int context = (int)syscall(SYS_fspick, mount, "", 8 | 1), result = -1;
    if (syscall(SYS_fsconfig, context, 0, "ro", NULL, 0) == 0)
        result = (int)syscall(SYS_fsconfig, context, 7, NULL, NULL, 0);
    if (context >= 0) close(context);
    return result;
}

static uid_t outside_uid(const struct image *image, uint32_t id) {
    return image->is_root ? image->uid_first + id : id;
}

static gid_t outside_gid(const struct image *image, uint32_t id) {
    return image->is_root ? image->gid_first + id : id;
}

/* Returns it, or closes it and returns -1. */
static int furnish(const struct image *image, int mount) {
    static const struct { const char *name; mode_t mode; } made[] = {
        {"u", 0755}, {"w", 0700}, {"s", 01777}};
    for (int i = 0; i < 3 && mount >= 0; i++) {
        const char *name = made[i].name;
        if (mkdirat(mount, name, 0700) < 0 || fchmodat(mount, name, made[i].mode, 0) < 0 ||
            fchownat(mount, name, outside_uid(image, 0), outside_gid(image, 0), 0) < 0) {
            close(mount);
            return -1;
        }
    }
    return mount;
}

int make_upper(const struct image *image, uint64_t num_bytes, uint32_t num_inodes) {
    /* 8 more for the root, the three directories and what the overlay makes in `w`. */
    return furnish(image, make_tmpfs(num_bytes, num_inodes + 8ULL, NOSUID | NODEV));
}

int furnish_upper(const struct image *image, int given) {
    struct stat status;
    if (fstat(given, &status) < 0) return -1;
    errno = EPERM; /* as a disk of root's does not, where we are an ordinary user's helper */
    if (status.st_uid != 0 || set_mount(given, NOSUID | NODEV, 0, 0) < 0) return -1;
    return furnish(image, fcntl(given, F_DUPFD_CLOEXEC, 0));
}

/* Users */

int write_ids(const struct image *image, pid_t pid) {
    char path[40], map[64];
    for (int i = 0; i < 2; i++) {
        uint32_t first = i == 0 ? outside_uid(image, 0) : outside_gid(image, 0);
        snprintf(path, sizeof path, "/proc/%d/%s_map", (int)pid, i == 0 ? "uid" : "gid");
        /* An ordinary user's ids are two ranges in our own map, so they must be two here. */
        if (image->is_root || image->num_ids == 1)
            snprintf(map, sizeof map, "0 %u %u", first, image->num_ids);
        else snprintf(map, sizeof map, "0 0 1\n1 1 %u", image->num_ids - 1);
        TRY(write_file(path, map), "mapping user ids");
    }
    return 0;
}

static int enter_user_namespace(const struct image *image) {
    static const char script[] =
        "read go; newuidmap %d 0 %u 1 1 %u %u && newgidmap %d 0 %u 1 1 %u %u";
    char command[256], map[40];
    unsigned uid = getuid(), gid = getgid(), count = image->num_ids - 1;
    int pid = getpid(), go[2], status = -1;
    snprintf(command, sizeof command, script, pid, uid, image->uid_first, count, pid, gid,
             image->gid_first, count);
    TRY(pipe2(go, O_CLOEXEC), "making a pipe");
    pid_t mapper = count > 0 ? fork() : 0;
    if (count > 0 && mapper == 0) { /* from outside of the namespace, once it is there */
        dup2(go[0], STDIN_FILENO);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    TRY(mapper, "starting newuidmap");
    TRY(unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET),
        "making a user namespace (is it allowed here?)");
    if (count > 0) {
        errno = EPERM;
        if (write(go[1], "\n", 1) != 1 || waitpid(mapper, &status, 0) != mapper || status != 0)
            return fail("running newuidmap and newgidmap (are the ids in /etc/subuid and subgid?)");
    } else {
        TRY(write_file("/proc/self/setgroups", "deny"), "mapping user ids");
        snprintf(map, sizeof map, "0 %u 1", uid);
        TRY(write_file("/proc/self/uid_map", map), "mapping user ids");
        snprintf(map, sizeof map, "0 %u 1", gid);
        TRY(write_file("/proc/self/gid_map", map), "mapping user ids");
    }
    close(go[0]), close(go[1]);
    TRY(setresgid(0, 0, 0), "becoming root of the user namespace");
    TRY(setresuid(0, 0, 0), "becoming root of the user namespace");
    return 0;
}

/* Makes files in `tree` that are ours those of the boxes. */
static bool map_mount(const struct image *image, int tree) {
    struct utsname name;
    int major = 0, minor = 0, hold[2], namespace = -1;
    bool is_new = uname(&name) == 0 && sscanf(name.release, "%d.%d", &major, &minor) == 2 &&
                  (major > 5 || (major == 5 && minor >= 19)); /* overlays of such layers */
    if (!is_new || pipe2(hold, O_CLOEXEC) < 0) return false;
    struct clone_arguments arguments = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
    pid_t child = (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
    if (child == 0) {
        close(hold[1]);
        _exit((int)read(hold[0], &major, 1));
    }
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/ns/user", (int)child);
    if (child > 0 && write_ids(image, child) == 0) namespace = open(path, O_RDONLY | O_CLOEXEC);
    close(hold[0]), close(hold[1]);
    if (child > 0) waitpid(child, NULL, 0);
    bool mapped = namespace >= 0 && set_mount(tree, IDMAP, namespace, 0) == 0;
    if (namespace >= 0) close(namespace);
    return mapped;
}

/* Before anything covers `/`: under a covered root the kernel makes no user namespace. */
static int open_rootfs(struct image *image) {
    struct stat status;
    int tree;
    TRY(tree = copy_tree(AT_FDCWD, image->rootfs), "opening the image");
    TRY(fstat(tree, &status), "opening the image");
    TRY(set_mount(tree, RDONLY | NOSUID | NODEV, 0, AT_RECURSIVE), "making the image read-only");
    if (image->is_root ? map_mount(image, tree) : status.st_uid == 0)
        image->abilities |= ABILITY_IDMAP;
    return tree;
}

/* The namespace. All is made in the working directory, the root to be, whose names are relative. */

/* base + path, which must be absolute and plain; makes the directories above it. */
static int make_place(char into[PATH_MAX], const char *base, const char *path) {
    errno = EINVAL;
    if (path[0] != '/' || strstr(path, "//") != NULL || strstr(path, "/..") != NULL ||
        path[strlen(path) - 1] == '/' || snprintf(into, PATH_MAX, "%s%s", base, path) >= PATH_MAX)
        return -1;
    for (char *slash = strchr(into, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        int result = mkdir(into, 0755);
        *slash = '/';
        if (result < 0 && errno != EEXIST) return -1;
    }
    return 0;
}

static int make_point(const char *path, bool is_directory) {
    int result = is_directory ? mkdir(path, 0755) : write_file(path, "");
    return result < 0 && errno != EEXIST ? -1 : 0;
}

static int add_bind(uint32_t number, const struct pair *bind) {
    char slot[24], path[PATH_MAX];
    int tree;
    struct stat status;
    TRY(tree = copy_tree(AT_FDCWD, bind->first), "opening what a box shall see of the host");
    TRY(fstat(tree, &status), "opening what a box shall see of the host");
    TRY(set_mount(tree, RDONLY | NOSUID | NODEV, 0, AT_RECURSIVE), "making a bind read-only");
    snprintf(slot, sizeof slot, "b/%u", number);
    TRY(make_place(path, "s", bind->second), "the target of a bind");
    TRY(make_point(path, S_ISDIR(status.st_mode)), "the target of a bind");
    TRY(make_point(slot, S_ISDIR(status.st_mode)), "making a mount point");
    TRY(attach(tree, AT_FDCWD, slot), "binding what a box sees of the host");
    return close(tree);
}

/* Covers a directory in a bind. Refuses links, through which it would cover something else. */
static int hide(const struct image *image, const char *hidden) {
    const uint64_t how[3] = {O_PATH | O_CLOEXEC, 0, 4 /* RESOLVE_NO_SYMLINKS */};
    for (uint32_t i = image->num_binds; i-- > 0;) {
        char path[PATH_MAX];
        size_t size = strlen(image->binds[i].second);
        if (strncmp(hidden, image->binds[i].second, size) != 0 || hidden[size] != '/') continue;
        if (snprintf(path, sizeof path, "b/%u%s", i, hidden + size) >= PATH_MAX) break;
        int place = (int)syscall(SYS_openat2, AT_FDCWD, path, how, sizeof how), empty;
        if (place < 0 && errno == ENOENT) return 0;
        TRY(place, "finding a directory to hide (is a part of its path a link?)");
        TRY(empty = copy_tree(AT_FDCWD, "e"), "hiding a directory");
        TRY(attach(empty, place, ""), "hiding a directory");
        return close(empty), close(place);
    }
    errno = EINVAL;
    return fail("hiding a directory that is in no bind");
}

static const struct image *owner_of_skeleton;
static int give_to_box(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status, (void)kind, (void)place;
    return lchown(path, outside_uid(owner_of_skeleton, 0), outside_gid(owner_of_skeleton, 0));
}

static int make_skeleton(const struct image *image) {
    char path[PATH_MAX];
    int tree;
    TRY(tree = make_tmpfs(64 << 20, 65536, NOSUID | NODEV), "making the skeleton");
    TRY(attach(tree, AT_FDCWD, "s"), "making the skeleton");
    for (uint32_t i = 0; i < image->num_binds; i++)
        TRY(add_bind(i, &image->binds[i]), failed_stage);
    for (uint32_t i = 0; i < image->num_files; i++) {
        TRY(make_place(path, "s", image->files[i].first), "making a file of the skeleton");
        TRY(write_file(path, image->files[i].second), "making a file of the skeleton");
    }
    static const char *const places[] = {"s/proc", "s/dev", "s/work", "s/tmp"};
    for (int i = 0; i < 4; i++) TRY(make_point(places[i], true), "making the skeleton");
    TRY(chmod("s/tmp", 01777), "making the skeleton");
    for (uint32_t i = 0; i < image->num_links; i++) { /* last: no path above leads through one */
        TRY(make_place(path, "s", image->links[i].first), "making a link of the skeleton");
        TRY(symlink(image->links[i].second, path), "making a link of the skeleton");
    }
    owner_of_skeleton = image;
    TRY(nftw("s", give_to_box, 16, FTW_PHYS), "giving the skeleton to the box");
    uid_t uid = outside_uid(image, image->job_uid);
    TRY(lchown("s/work", uid, outside_gid(image, image->job_uid)), "giving /work to the job");
    TRY(set_mount(tree, RDONLY, 0, 0), "making the skeleton read-only");
    return close(tree);
}

static int make_devices(void) {
    static const char *const nodes[] = {"null", "zero", "full", "random", "urandom", "tty"};
    static const unsigned minors[] = {3, 5, 7, 8, 9, 0};
    static const char *const links[] = {
        "fd", "/proc/self/fd", "stdin", "/proc/self/fd/0", "stdout", "/proc/self/fd/1",
        "stderr", "/proc/self/fd/2", "ptmx", "pts/ptmx"};
    char path[32], source[32];
    int tree, device;
    TRY(tree = make_tmpfs(1 << 20, 64, NOSUID), "making the devices");
    TRY(attach(tree, AT_FDCWD, "d"), "making the devices");
    for (int i = 0; i < 6; i++) {
        snprintf(path, sizeof path, "d/%s", nodes[i]);
        snprintf(source, sizeof source, "/dev/%s", nodes[i]);
        if (mknod(path, S_IFCHR, makedev(minors[i] == 0 ? 5 : 1, minors[i])) == 0) {
            TRY(chmod(path, 0666), "making a device");
            continue;
        } /* not possible in a user namespace: the host's own */
        TRY(write_file(path, ""), "making a device");
        TRY(device = copy_tree(AT_FDCWD, source), "opening a device");
        TRY(attach(device, AT_FDCWD, path), "binding a device");
        close(device);
    }
    for (int i = 0; i < 10; i += 2)
        TRY(symlinkat(links[i + 1], tree, links[i]), "making the devices");
    TRY(mkdirat(tree, "shm", 0755), "making the devices");
    TRY(mkdirat(tree, "pts", 0755), "making the devices");
    TRY(set_mount(tree, RDONLY | NOEXEC, 0, 0), "making the devices read-only");
    return close(tree);
}

int enter(struct image *image) {
    static const char *const places[] = {"r", "s", "b", "d", "e", "l", "m", "proc"};
    char slot[16];
    int root, proc, empty, rootfs = -1;
    image->abilities = ABILITY_NETWORK | (image->num_ids > 1 ? ABILITY_RANGE : 0);
    if (image->is_root) TRY(unshare(CLONE_NEWNS | CLONE_NEWNET), "making namespaces (may we?)");
    else TRY(enter_user_namespace(image), failed_stage);
    TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "leaving the host's mounts");
    if (*image->rootfs) TRY(rootfs = open_rootfs(image), failed_stage);
    TRY(root = make_tmpfs(1 << 20, 4096, NOSUID | NODEV), "making a root");
    TRY(proc = copy_tree(AT_FDCWD, "/proc"), "opening /proc");
    TRY(attach(root, AT_FDCWD, "/"), "mounting a root");
    TRY(fchdir(root), "entering the root");
    for (int i = 0; i < 8; i++) TRY(mkdir(places[i], 0755), "making a mount point");
    for (int i = 0; i <= MAX_LAYERS; i++) {
        snprintf(slot, sizeof slot, "l/%d", i);
        TRY(mkdir(slot, 0755), "making a mount point");
    }
    TRY(attach(proc, AT_FDCWD, "proc"), "binding /proc");
    TRY(empty = make_tmpfs(4096, 2, RDONLY | NOSUID | NODEV | NOEXEC), "making an empty directory");
    TRY(attach(empty, AT_FDCWD, "e"), "making an empty directory");
    TRY(make_devices(), failed_stage);
    TRY(make_skeleton(image), failed_stage);
    if (rootfs >= 0) TRY(attach(rootfs, AT_FDCWD, "r"), "mounting the image");
    if (rootfs >= 0) close(rootfs);
    for (uint32_t i = 0; i < image->num_hidden; i++)
        TRY(hide(image, image->hidden[i]), failed_stage);
    TRY(syscall(SYS_pivot_root, ".", "."), "changing the root (is this a chroot?)");
    TRY(umount2(".", MNT_DETACH), "leaving the host's files");
    TRY(chdir("/"), "entering the root");
    return close(root), close(proc), close(empty);
}
