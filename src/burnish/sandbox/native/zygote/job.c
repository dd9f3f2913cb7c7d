#include "zygote.h"

#include <sys/sendfile.h>

int set_capabilities(uint64_t set) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    uint32_t low = (uint32_t)set;
    struct __user_cap_data_struct data[2] = {{low, low, 0}, {0, 0, 0}};
    return (int)syscall(SYS_capset, &header, data);
}

/* What a program did to `/` itself is in no layer, so no snapshot has it: it ends here. The owner of
 * files is all that we become, by which nobody may trace or signal us. */
static void restore_root(void) {
    struct stat root;
    if (stat("/", &root) < 0 ||
        ((root.st_mode & 07777) == 0755 && root.st_uid == 0 && root.st_gid == 0))
        return;
    long uid = syscall(SYS_setfsuid, 0), gid = syscall(SYS_setfsgid, 0);
    if (chown("/", 0, 0) == 0) chmod("/", 0755);
    syscall(SYS_setfsgid, gid), syscall(SYS_setfsuid, uid);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* of the init too, as below */
}

/* Raw calls: the C library's would change the threads that it thinks this process has. */
static int become_job(const struct job *job) {
    uid_t uid = job->asked->uid, gid = job->asked->gid;
    for (int i = 0; box_has_packages && !job->packages && i < 64; i++)
        if (PACKAGE_CAPABILITIES >> i & 1 && prctl(PR_CAPBSET_DROP, i, 0, 0, 0) < 0) return -1;
    /* EPERM where an ordinary user has one id only: then there are no groups to drop. */
    if ((syscall(SYS_setgroups, 0, NULL) < 0 && errno != EPERM) ||
        syscall(SYS_setresgid, gid, gid, gid) < 0 || syscall(SYS_setresuid, uid, uid, uid) < 0)
        return -1;
    /* We share the init's memory, and where fs.suid_dumpable is 1 the change of user has opened it
     * to the processes of this user, as soon as we have no more capabilities than they. */
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0) return -1;
    return set_capabilities(job->packages ? PACKAGE_CAPABILITIES : 0);
}

/* The first that there is of the files. Returns if none can be executed: errno. */
static int execute(const struct job *job) {
    bool denied = false;
    errno = ENOENT;
    for (char **file = job->lists[0]; *file != NULL; file++) {
        execve(*file, job->lists[1], job->lists[2]);
        denied = denied || errno == EACCES;
        if (errno != EACCES && errno != ENOENT && errno != ENOTDIR) return -1;
    }
    if (denied) errno = EACCES;
    return -1;
}

/* The directory that holds the last component of the path, which `*name` becomes. The job's user
 * goes there one name at a time and never through a link. */
static int open_parent(char *path, char **name, bool make) {
    const int flags = O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
    int directory = open("/work", flags);
    for (char *slash, *rest = path; directory >= 0; rest = slash + 1) {
        slash = strchrnul(rest, '/');
        bool last = *slash == 0;
        *slash = 0;
        errno = EINVAL;
        if (*rest == 0 || strcmp(rest, ".") == 0 || strcmp(rest, "..") == 0) return -1;
        *name = rest;
        if (last) break;
        if (make && mkdirat(directory, rest, 0755) < 0 && errno != EEXIST) return -1;
        int next = openat(directory, rest, flags);
        close(directory);
        directory = next;
    }
    return directory;
}

static int copy(int to, int from, uint64_t left) {
    off_t offset = 0;
    for (ssize_t copied = 1; copied > 0 && left > 0; left -= (uint64_t)copied) {
        copied = sendfile(to, from, &offset, left < 1 << 20 ? left : 1 << 20);
        if (copied < 0) return -1;
    }
    return 0;
}

static int put_file(struct job *job) {
    char *name, temporary[32];
    unsigned long long random;
    int directory = open_parent(*job->lists[1], &name, true);
    /* A name that no program can have made before. */
    if (directory < 0 || syscall(SYS_getrandom, &random, sizeof random, 0) < 0) return -1;
    snprintf(temporary, sizeof temporary, ".incoming-%016llx", random);
    int file = openat(directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return -1;
    if (copy(file, STDIN_FILENO, UINT64_MAX) == 0 && fchmod(file, job->asked->detail & 0777) == 0 &&
        renameat(directory, temporary, directory, name) == 0)
        return 0;
    job->error = errno;
    unlinkat(directory, temporary, 0);
    return -1;
}

static int get_file(const struct job *job) {
    struct stat status;
    char *name;
    int directory = open_parent(*job->lists[1], &name, false), file = -1;
    if (directory >= 0) /* O_NONBLOCK: a FIFO must not hold us */
        file = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file >= 0 && fstat(file, &status) == 0 && S_ISREG(status.st_mode))
        return (uint64_t)status.st_size > job->asked->detail
                   ? ftruncate(STDOUT_FILENO, status.st_size) /* a hole tells how large it is */
                   : copy(STDOUT_FILENO, file, job->asked->detail);
    if (file >= 0 || errno == ELOOP || errno == ENOTDIR || errno == ENXIO) errno = ENOENT;
    return -1;
}

static int work(struct job *job) {
    sigset_t none;
    if (job->op == EXEC) setsid(); /* 30 us */
    for (int i = 0; i < 3; i++)
        if (dup2(job->fds[i], i) < 0) return -1;
    syscall(CLOSE_RANGE, OWNER, ~0U, 0);
    for (uint32_t i = 0; i < job->asked->num_limits; i++) { /* the owner knows what is possible */
        const struct limit *limit = &job->limits[i];
        setrlimit((int)limit->resource, &(struct rlimit){limit->soft, limit->hard});
    }
    restore_root();
    if (become_job(job) < 0 || chdir(job->cwd) < 0) return -1;
    if (job->op == PUT) return put_file(job);
    if (job->op == GET) return get_file(job);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    return execute(job);
}

static int run(void *argument) {
    struct job *job = argument;
    if (work(job) < 0 && job->error == 0) job->error = errno;
    return 0;
}

/* The child shares our memory, as after vfork, but we do not wait for it: a process that was kept
 * could stop it on its way, and us with it. Its stack is free again when it has been reaped. */
pid_t start(struct job *job) {
    static _Alignas(64) char stack[64 * 1024];
    return clone(run, stack + sizeof stack, CLONE_VM | SIGCHLD, job);
}
