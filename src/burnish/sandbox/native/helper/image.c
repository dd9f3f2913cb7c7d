#define _GNU_SOURCE
#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <sys/wait.h>

#include "helper.h"
#include "kernel.h"

const char *failed_stage = "";

int fail(const char *stage) {
    failed_stage = stage;
    return -1;
}

static int write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        return -1;
    size_t size = strlen(text);
    ssize_t written = write(fd, text, size);
    int error = written < 0 ? errno : ENOSPC;
    close(fd);
    if (written == (ssize_t)size)
        return 0;
    errno = error;
    return -1;
}

int read_filter(struct image *image, int fd) {
    struct stat status;
    TRY(fstat(fd, &status), "reading the filter");
    size_t size = (size_t)status.st_size, one = sizeof(struct sock_filter);
    errno = EINVAL;
    if (size == 0 || size % one != 0 || size / one > BPF_MAXINSNS)
        return fail("reading the filter");
    image->filter.filter = malloc(size);
    image->filter.len = (unsigned short)(size / one);
    if (image->filter.filter == NULL || pread(fd, image->filter.filter, size, 0) != (ssize_t)size)
        return fail("reading the filter");
    return 0;
}

/* File systems */

static int make_file_system(const char *kind, const char *const *options, unsigned attributes) {
    int context = (int)syscall(SYS_fsopen, kind, 1);
    if (context < 0)
        return -1;
    int mount = -1;
    for (; options[0] != NULL; options += 2)
        if (syscall(SYS_fsconfig, context, CONFIG_STRING, options[0], options[1], 0) < 0)
            goto out;
    if (syscall(SYS_fsconfig, context, CONFIG_CREATE, NULL, NULL, 0) == 0)
        mount = (int)syscall(SYS_fsmount, context, 1, attributes);
out:;
    int error = errno;
    close(context);
    errno = error;
    return mount;
}

static int make_tmpfs_with(uint64_t num_bytes, uint32_t num_inodes, unsigned attributes) {
    char bytes[24], inodes[16];
    snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)num_bytes);
    snprintf(inodes, sizeof inodes, "%u", num_inodes);
    const char *options[] = {"size", bytes, "nr_inodes", inodes, "mode", "0755", NULL};
    return make_file_system("tmpfs", options, attributes);
}

int make_tmpfs(uint64_t num_bytes, uint32_t num_inodes) {
    return make_tmpfs_with(num_bytes, num_inodes, MOUNT_NOSUID | MOUNT_NODEV);
}

int resize_tmpfs(int mount, uint64_t num_bytes, uint32_t num_inodes) {
    char bytes[24], inodes[16];
    snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)num_bytes);
    snprintf(inodes, sizeof inodes, "%u", num_inodes);
    int context = (int)syscall(SYS_fspick, mount, "", PICK_FD | 1);
    if (context < 0)
        return -1;
    int result = 0;
    if (syscall(SYS_fsconfig, context, CONFIG_STRING, "size", bytes, 0) < 0 ||
        syscall(SYS_fsconfig, context, CONFIG_STRING, "nr_inodes", inodes, 0) < 0 ||
        syscall(SYS_fsconfig, context, CONFIG_RECONFIGURE, NULL, NULL, 0) < 0)
        result = -1;
    int error = errno;
    close(context);
    errno = error;
    return result;
}

static uid_t outside_uid(const struct image *image, uint32_t id) {
    return image->is_root ? image->uid_first + id : id;
}

static gid_t outside_gid(const struct image *image, uint32_t id) {
    return image->is_root ? image->gid_first + id : id;
}

int make_upper(const struct image *image, uint64_t num_bytes, uint32_t num_inodes) {
    static const struct { const char *name; mode_t mode; } directories[] = {
        {"u", 0755}, {"w", 0700}, {"s", 01777}};
    /* The root, these three and the overlay's own `work`. */
    int tmpfs = make_tmpfs(num_bytes, num_inodes > UINT32_MAX - 8 ? num_inodes : num_inodes + 8);
    if (tmpfs < 0)
        return -1;
    for (size_t i = 0; i < 3; i++) {
        const char *name = directories[i].name;
        if (mkdirat(tmpfs, name, 0700) < 0 || fchmodat(tmpfs, name, directories[i].mode, 0) < 0 ||
            fchownat(tmpfs, name, outside_uid(image, 0), outside_gid(image, 0), 0) < 0) {
            int error = errno;
            close(tmpfs);
            errno = error;
            return -1;
        }
    }
    return tmpfs;
}

/* Users */

int write_ids(const struct image *image, pid_t pid) {
    static const char *const names[] = {"uid", "gid"};
    for (int i = 0; i < 2; i++) {
        char path[40], map[48];
        uint32_t first = i == 0 ? outside_uid(image, 0) : outside_gid(image, 0);
        snprintf(path, sizeof path, "/proc/%d/%s_map", (int)pid, names[i]);
        snprintf(map, sizeof map, "0 %u %u", first, image->num_ids);
        TRY(write_file(path, map), "mapping user ids");
    }
    return 0;
}

/* `newuidmap` and `newgidmap` for our parent, when it says so. */
_Noreturn static void map_parent(const struct image *image, int go, pid_t parent) {
    const char *const tools[] = {"newuidmap", "newgidmap"};
    const uint32_t own[] = {getuid(), getgid()};
    const uint32_t firsts[] = {image->uid_first, image->gid_first};
    char byte;
    if (read(go, &byte, 1) != 1)
        _exit(1);
    for (int i = 0; i < 2; i++) {
        char pid[16], id[16], first[16], count[16];
        snprintf(pid, sizeof pid, "%d", (int)parent);
        snprintf(id, sizeof id, "%u", own[i]);
        snprintf(first, sizeof first, "%u", firsts[i]);
        snprintf(count, sizeof count, "%u", image->num_ids - 1);
        pid_t child = fork();
        if (child == 0) {
            execlp(tools[i], tools[i], pid, "0", id, "1", "1", first, count, (char *)NULL);
            _exit(127);
        }
        int status;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
            _exit(1);
    }
    _exit(0);
}

static int enter_user_namespace(const struct image *image) {
    char map[40];
    uid_t uid = getuid();
    gid_t gid = getgid();
    pid_t parent = getpid(), mapper = -1;
    int go[2] = {-1, -1};
    if (image->num_ids > 1) {
        TRY(pipe2(go, O_CLOEXEC), "making a pipe");
        TRY(mapper = fork(), "starting newuidmap");
        if (mapper == 0) {
            close(go[1]);
            map_parent(image, go[0], parent);
        }
        close(go[0]);
    }
    TRY(unshare(CLONE_NEWUSER | CLONE_NEWNS), "making a user namespace (does this host allow it?)");
    if (mapper > 0) {
        int status = -1;
        if (write(go[1], "g", 1) != 1 || waitpid(mapper, &status, 0) != mapper || status != 0) {
            errno = EPERM;
            return fail("running newuidmap and newgidmap (are the ids in /etc/subuid, /etc/subgid?)");
        }
        close(go[1]);
    } else {
        TRY(write_file("/proc/self/setgroups", "deny"), "mapping user ids");
        snprintf(map, sizeof map, "0 %u 1", uid);
        TRY(write_file("/proc/self/uid_map", map), "mapping user ids");
        snprintf(map, sizeof map, "0 %u 1", gid);
        TRY(write_file("/proc/self/gid_map", map), "mapping user ids");
    }
    TRY(setresgid(0, 0, 0), "becoming root of the user namespace");
    TRY(setresuid(0, 0, 0), "becoming root of the user namespace");
    return 0;
}

/* A descriptor of a user namespace with the boxes' map, for mounts with those ids. */
static int open_mapped_namespace(const struct image *image) {
    struct clone_arguments arguments = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
    int hold[2];
    if (pipe2(hold, O_CLOEXEC) < 0)
        return -1;
    pid_t child = (pid_t)syscall(SYS_clone3, &arguments, sizeof arguments);
    if (child == 0) {
        char byte;
        close(hold[1]);
        _exit((int)read(hold[0], &byte, 1));
    }
    int namespace = -1;
    if (child > 0 && write_ids(image, child) == 0) {
        char path[40];
        snprintf(path, sizeof path, "/proc/%d/ns/user", (int)child);
        namespace = open(path, O_RDONLY | O_CLOEXEC);
    }
    close(hold[0]);
    close(hold[1]);
    if (child > 0)
        waitpid(child, NULL, 0);
    return namespace;
}

/* The namespace */

/* Overlays of idmapped layers exist since 5.19. */
static bool can_map_mounts(void) {
    struct utsname name;
    int major = 0, minor = 0;
    return uname(&name) == 0 && sscanf(name.release, "%d.%d", &major, &minor) == 2 &&
           (major > 5 || (major == 5 && minor >= 19));
}

static int add_rootfs(struct image *image) {
    int tree;
    TRY(tree = clone_tree(AT_FDCWD, image->rootfs), "opening the image");
    struct mount_attributes attributes = {.set = MOUNT_RDONLY | MOUNT_NOSUID | MOUNT_NODEV};
    TRY(syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attributes,
                sizeof attributes), "making the image read-only");
    struct stat status;
    TRY(fstat(tree, &status), "opening the image");
    if (!image->is_root) {
        image->abilities |= status.st_uid == 0 ? ABILITY_IDMAP : 0;
    } else if (can_map_mounts()) {
        int namespace = open_mapped_namespace(image);
        attributes.set = MOUNT_IDMAP;
        attributes.user_namespace = (uint64_t)namespace;
        if (namespace >= 0 && syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attributes,
                                      sizeof attributes) == 0)
            image->abilities |= ABILITY_IDMAP;
        close(namespace);
    }
    TRY(attach(tree, AT_FDCWD, "r"), "mounting the image");
    close(tree);
    return 0;
}

/* Directories of `path` that are missing, all but the last component unless `whole`. */
static int make_directories(char *path, bool whole) {
    for (char *slash = path + 1;; slash++) {
        if (*slash != '/' && *slash != 0)
            continue;
        bool last = *slash == 0;
        if (last && !whole)
            return 0;
        *slash = 0;
        int result = mkdir(path, 0755);
        if (!last)
            *slash = '/';
        if (result < 0 && errno != EEXIST)
            return -1;
        if (last)
            return 0;
    }
}

/* Where `path` of the box lies below `base`, which has room for it: `/`, no `..`. */
static int below(char into[PATH_MAX], const char *base, const char *path) {
    errno = EINVAL;
    if (path[0] != '/' || path[1] == 0 || strstr(path, "/../") != NULL || strstr(path, "//") != NULL)
        return -1;
    size_t size = strlen(path);
    if (path[size - 1] == '/' || (size >= 3 && strcmp(path + size - 3, "/..") == 0))
        return -1;
    return snprintf(into, PATH_MAX, "%s%s", base, path) < PATH_MAX ? 0 : -1;
}

static int add_bind(uint32_t number, const struct bind *bind) {
    char slot[24], path[PATH_MAX];
    int tree;
    struct stat status;
    TRY(tree = clone_tree(AT_FDCWD, bind->source), "opening what a box shall see of the host");
    TRY(set_mount(tree, MOUNT_RDONLY | MOUNT_NOSUID | MOUNT_NODEV, AT_RECURSIVE),
        "making what a box sees of the host read-only");
    TRY(fstat(tree, &status), "opening what a box shall see of the host");
    bool is_directory = S_ISDIR(status.st_mode);
    TRY(below(path, "s", bind->target), "a target that is not an absolute path");
    snprintf(slot, sizeof slot, "b/%u", number);
    TRY(make_directories(path, is_directory), "making a mount point");
    if (is_directory) {
        TRY(mkdir(slot, 0755), "making a mount point");
    } else {
        TRY(write_file(path, ""), "making a mount point");
        TRY(write_file(slot, ""), "making a mount point");
    }
    TRY(attach(tree, AT_FDCWD, slot), "binding what a box sees of the host");
    close(tree);
    return 0;
}

/* Covers a directory of a bind. Refuses links, through which it would cover something else. */
static int hide(const struct image *image, const char *hidden) {
    for (uint32_t i = image->num_binds; i-- > 0;) {
        size_t size = strlen(image->binds[i].target);
        if (strncmp(hidden, image->binds[i].target, size) != 0 || hidden[size] != '/')
            continue;
        char base[24], path[PATH_MAX];
        snprintf(base, sizeof base, "b/%u", i);
        TRY(below(path, base, hidden + size), "hiding a path that is not absolute");
        struct { uint64_t flags, mode, resolve; } how = {O_PATH | O_CLOEXEC, 0, NO_SYMLINKS};
        int place = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
        if (place < 0 && errno == ENOENT)
            return 0;
        TRY(place, "finding a directory to hide (is a part of its path a link?)");
        int empty;
        TRY(empty = clone_tree(AT_FDCWD, "e"), "making an empty directory");
        TRY(attach(empty, place, ""), "hiding a directory");
        close(empty);
        close(place);
        return 0;
    }
    errno = EINVAL;
    return fail("hiding a directory that no bind shows");
}

static int fill_skeleton(struct image *image) {
    char path[PATH_MAX];
    for (uint32_t i = 0; i < image->num_binds; i++)
        TRY(add_bind(i, &image->binds[i]), failed_stage);
    for (uint32_t i = 0; i < image->num_files; i++) {
        TRY(below(path, "s", image->files[i].source), "a file whose path is not absolute");
        TRY(make_directories(path, false), "making a file of the skeleton");
        TRY(write_file(path, image->files[i].target), "making a file of the skeleton");
    }
    TRY(mkdir("s/proc", 0755), "making the skeleton");
    TRY(mkdir("s/dev", 0755), "making the skeleton");
    if ((mkdir("s/work", 0755) < 0 || mkdir("s/tmp", 0755) < 0) && errno != EEXIST)
        return fail("making the skeleton");
    TRY(chmod("s/tmp", 01777), "making the skeleton");
    for (uint32_t i = 0; i < image->num_links; i++) {
        TRY(below(path, "s", image->links[i].source), "a link whose path is not absolute");
        TRY(make_directories(path, false), "making a link of the skeleton");
        TRY(symlink(image->links[i].target, path), "making a link of the skeleton");
    }
    return 0;
}

static uid_t skeleton_uid;
static gid_t skeleton_gid;

static int give_to_box(const char *path, const struct stat *status, int kind, struct FTW *place) {
    (void)status, (void)kind, (void)place;
    return lchown(path, skeleton_uid, skeleton_gid);
}

static int make_skeleton(struct image *image) {
    int tree;
    TRY(tree = make_tmpfs(64 << 20, 65536), "making the skeleton");
    TRY(attach(tree, AT_FDCWD, "s"), "making the skeleton");
    TRY(fill_skeleton(image), failed_stage);
    skeleton_uid = outside_uid(image, 0);
    skeleton_gid = outside_gid(image, 0);
    TRY(nftw("s", give_to_box, 16, FTW_PHYS), "giving the skeleton to the box");
    TRY(lchown("s/work", outside_uid(image, image->job_uid), outside_gid(image, image->job_uid)),
        "giving /work to the job");
    TRY(set_mount(tree, MOUNT_RDONLY, 0), "making the skeleton read-only");
    close(tree);
    return 0;
}

static int add_device(const char *name, unsigned minor) {
    char path[32], source[32];
    snprintf(path, sizeof path, "d/%s", name);
    unsigned major = strcmp(name, "tty") == 0 ? 5 : 1;
    if (mknod(path, S_IFCHR | 0666, makedev(major, minor)) == 0)
        return chmod(path, 0666);
    /* No mknod in a user namespace: the host's own. */
    snprintf(source, sizeof source, "/dev/%s", name);
    TRY(write_file(path, ""), "making a device");
    int tree;
    TRY(tree = clone_tree(AT_FDCWD, source), "opening a device");
    TRY(attach(tree, AT_FDCWD, path), "binding a device");
    close(tree);
    return 0;
}

static int make_devices(void) {
    static const struct { const char *name; unsigned minor; } nodes[] = {
        {"null", 3}, {"zero", 5}, {"full", 7}, {"random", 8}, {"urandom", 9}, {"tty", 0}};
    static const char *const links[] = {
        "fd", "/proc/self/fd", "stdin", "/proc/self/fd/0", "stdout", "/proc/self/fd/1",
        "stderr", "/proc/self/fd/2", "ptmx", "pts/ptmx"};
    int tree;
    TRY(tree = make_tmpfs_with(1 << 20, 64, MOUNT_NOSUID), "making the devices");
    TRY(attach(tree, AT_FDCWD, "d"), "making the devices");
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++)
        TRY(add_device(nodes[i].name, nodes[i].minor), "making the devices");
    for (size_t i = 0; i < sizeof links / sizeof *links; i += 2)
        TRY(symlinkat(links[i + 1], tree, links[i]), "making the devices");
    TRY(mkdirat(tree, "shm", 0755), "making the devices");
    TRY(mkdirat(tree, "pts", 0755), "making the devices");
    TRY(set_mount(tree, MOUNT_RDONLY | MOUNT_NOEXEC, 0), "making the devices read-only");
    close(tree);
    return 0;
}

/* A mount of its own, read-only, so that nothing can ever be put in. */
static int make_empty(void) {
    int tree = make_tmpfs_with(4096, 2, MOUNT_NOSUID | MOUNT_NODEV | MOUNT_NOEXEC | MOUNT_RDONLY);
    int result = tree < 0 ? -1 : attach(tree, AT_FDCWD, "e");
    close(tree);
    return result;
}

int enter(struct image *image) {
    static const char *const places[] = {"r", "s", "b", "d", "e", "l", "m", "proc"};
    image->abilities = ABILITY_NETWORK | (image->num_ids > 1 ? ABILITY_RANGE : 0);
    if (!image->is_root)
        TRY(enter_user_namespace(image), failed_stage);
    else
        TRY(unshare(CLONE_NEWNS), "making a mount namespace (does this host allow it?)");
    TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "leaving the host's mounts");
    int root, proc;
    TRY(root = make_tmpfs(1 << 20, 4096), "making a root");
    TRY(proc = clone_tree(AT_FDCWD, "/proc"), "opening /proc");
    TRY(attach(root, AT_FDCWD, "/"), "mounting a root");
    TRY(fchdir(root), "entering the root");
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        TRY(mkdir(places[i], 0755), "making a mount point");
    for (int i = 0; i <= MAX_LAYERS; i++) {
        char slot[16];
        snprintf(slot, sizeof slot, "l/%d", i);
        TRY(mkdir(slot, 0755), "making a mount point");
    }
    TRY(attach(proc, AT_FDCWD, "proc"), "binding /proc");
    close(proc);
    TRY(make_empty(), "making an empty directory");
    TRY(make_devices(), failed_stage);
    TRY(make_skeleton(image), failed_stage);
    if (*image->rootfs)
        TRY(add_rootfs(image), failed_stage);
    for (uint32_t i = 0; i < image->num_hidden; i++)
        TRY(hide(image, image->hidden[i]), failed_stage);
    TRY(syscall(SYS_pivot_root, ".", "."), "changing the root (is this a chroot?)");
    TRY(umount2(".", MNT_DETACH), "leaving the host's files");
    TRY(chdir("/"), "entering the root");
    close(root);
    return 0;
}
