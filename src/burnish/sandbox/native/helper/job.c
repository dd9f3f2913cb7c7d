#define _GNU_SOURCE
#include <errno.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>

#include "helper.h"
#include "kernel.h"

uint64_t package_capabilities(void) {
    static const int kept[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_SETUID,
                               CAP_SETGID, CAP_KILL, CAP_SYS_CHROOT, CAP_SETFCAP};
    uint64_t set = 0;
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        set |= 1ULL << kept[i];
    return set;
}

int set_capabilities(uint64_t permitted) {
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {
        {.permitted = (uint32_t)permitted, .effective = (uint32_t)permitted},
        {.permitted = (uint32_t)(permitted >> 32), .effective = (uint32_t)(permitted >> 32)}};
    return (int)syscall(SYS_capset, &header, data);
}

/* The child shares our memory, as after vfork, but we do not wait for it: a job that is kept could
 * stop it on its way, and us with it. Its stack is free again when it has been reaped. */
pid_t start(int (*run)(void *), struct job *job) {
    static _Alignas(64) char stack[64 * 1024];
    job->error = 0;
    return clone(run, stack + sizeof stack, CLONE_VM | SIGCHLD, job);
}

static int failed(struct job *job, const char *stage) {
    job->stage = stage;
    job->error = errno;
    return 1;
}

/* Raw calls: the C library's would also change the threads that it thinks this process has. */
static int become_job(const struct job *job) {
    if (job->box_has_packages && !job->packages)
        for (uint64_t left = package_capabilities(), i = 0; left >> i != 0; i++)
            if (left >> i & 1 && prctl(PR_CAPBSET_DROP, i, 0, 0, 0) < 0)
                return -1;
    /* EPERM where an ordinary user has one id only: then there are no groups to drop. */
    if (syscall(SYS_setgroups, 0, NULL) < 0 && errno != EPERM)
        return -1;
    if (syscall(SYS_setresgid, job->gid, job->gid, job->gid) < 0 ||
        syscall(SYS_setresuid, job->uid, job->uid, job->uid) < 0)
        return -1;
    return set_capabilities(job->packages ? package_capabilities() : 0);
}

static void set_limits(const struct job *job) {
    for (uint32_t i = 0; i < job->num_limits; i++) {
        struct rlimit wanted = job->limits[i], old;
        if (setrlimit((int)job->resources[i], &wanted) == 0 || errno != EPERM)
            continue;
        /* The host's own hard limit is lower: then that one holds. */
        if (getrlimit((int)job->resources[i], &old) < 0)
            continue;
        wanted.rlim_max = wanted.rlim_max < old.rlim_max ? wanted.rlim_max : old.rlim_max;
        wanted.rlim_cur = wanted.rlim_cur < wanted.rlim_max ? wanted.rlim_cur : wanted.rlim_max;
        setrlimit((int)job->resources[i], &wanted);
    }
}

static void execute(const struct job *job) {
    const char *name = job->argv[0], *path = "/usr/local/bin:/usr/bin:/bin";
    int error = ENOENT;
    if (strchr(name, '/') != NULL) {
        execve(name, job->argv, job->env);
        return;
    }
    for (char **variable = job->env; *variable != NULL; variable++)
        if (strncmp(*variable, "PATH=", 5) == 0)
            path = *variable + 5;
    while (*name) {
        char file[4096];
        const char *end = strchrnul(path, ':');
        int size = snprintf(file, sizeof file, "%.*s%s%s", (int)(end - path), path,
                            end > path ? "/" : "", name);
        if (size < (int)sizeof file)
            execve(file, job->argv, job->env);
        if (errno == EACCES)
            error = EACCES;
        else if (errno != ENOENT && errno != ENOTDIR)
            return;
        if (*end == 0)
            break;
        path = end + 1;
    }
    errno = error;
}

int run_program(void *argument) {
    struct job *job = argument;
    setsid();
    for (int i = 0; i < 3; i++)
        if (dup2(job->fds[i], i) < 0)
            return failed(job, "connecting streams");
    syscall(SYS_close_range, CONTROL, ~0U, 0);
    set_limits(job);
    if (become_job(job) < 0)
        return failed(job, "becoming the job's user");
    if (chdir(job->cwd) < 0)
        return failed(job, "entering the working directory");
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execute(job);
    return failed(job, "executing the program");
}

/* Files. The job's user does it, one name at a time and never through a link. */

/* The directory that holds the last component of the path, which `*name` becomes. */
static int open_parent(struct job *job, char **name, bool make) {
    int directory = open("/work", O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    char *rest = job->path;
    while (directory >= 0) {
        char *slash = strchr(rest, '/');
        if (slash != NULL)
            *slash = 0;
        if (*rest == 0 || strcmp(rest, ".") == 0 || strcmp(rest, "..") == 0) {
            close(directory);
            errno = EINVAL;
            return -1;
        }
        if (slash == NULL) {
            *name = rest;
            return directory;
        }
        if (make && mkdirat(directory, rest, 0755) < 0 && errno != EEXIST)
            break;
        int next = openat(directory, rest, O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
        int error = errno;
        close(directory);
        errno = error;
        directory = next;
        rest = slash + 1;
    }
    return -1;
}

static int copy(int to, int from, uint64_t limit, volatile uint64_t *num_bytes) {
    off_t offset = 0;
    for (*num_bytes = 0; *num_bytes < limit;) {
        uint64_t left = limit - *num_bytes;
        ssize_t copied = sendfile(to, from, &offset, left < 1 << 20 ? left : 1 << 20);
        if (copied < 0)
            return -1;
        if (copied == 0)
            break;
        *num_bytes += (uint64_t)copied;
    }
    return 0;
}

int put_file(void *argument) {
    struct job *job = argument;
    char *name, temporary[32];
    if (become_job(job) < 0)
        return failed(job, "becoming the job's user");
    int directory = open_parent(job, &name, true), file = -1;
    if (directory < 0)
        return failed(job, "making the directories");
    for (int i = 0; i < 1000 && file < 0; i++) {
        snprintf(temporary, sizeof temporary, ".put-%d", i);
        file = openat(directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (file < 0 && errno != EEXIST)
            break;
    }
    if (file < 0)
        return failed(job, "making a file");
    if (copy(file, job->fds[0], UINT64_MAX, &job->num_bytes) < 0 ||
        fchmod(file, job->mode & 0777) < 0 ||
        renameat(directory, temporary, directory, name) < 0) {
        failed(job, "writing the file");
        unlinkat(directory, temporary, 0);
    }
    return job->error;
}

int get_file(void *argument) {
    struct job *job = argument;
    char *name;
    if (become_job(job) < 0)
        return failed(job, "becoming the job's user");
    int directory = open_parent(job, &name, false), file = -1;
    if (directory >= 0) /* O_NONBLOCK: a FIFO must not hold us */
        file = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file < 0) {
        if (errno == ELOOP || errno == ENOTDIR || errno == ENXIO)
            errno = ENOENT;
        return failed(job, "opening the file");
    }
    struct stat status;
    if (fstat(file, &status) < 0 || !S_ISREG(status.st_mode)) {
        errno = ENOENT;
        return failed(job, "opening the file");
    }
    if (copy(job->fds[0], file, job->limit_bytes, &job->num_bytes) < 0)
        return failed(job, "reading the file");
    return 0;
}
