#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "zygote.h"

enum { MAX_BODY_BYTES = 16 << 20, MAX_FILE_TASK_US = 20 * 1000000 };
static const uint64_t MAX_WALL_US = 365ULL * 86400 * 1000000; /* what is longer would overflow */

static struct {
    pid_t pid; /* 0: nothing runs */
    uint32_t id;
    bool keep, forced, has_deadline;
    enum ending ending; /* if forced */
    int64_t started_us, deadline_us;
    struct job job;
    char *body; /* what the job's strings are in */
} command;
static struct { uint64_t user_us, system_us, max_rss_bytes; } used;
static uint32_t init_id, reader_id;
static bool box_has_packages;
static int children; /* signalfd for SIGCHLD */

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

static uint64_t microseconds(struct timeval time) {
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_usec;
}

/* The next child that has ended, 0 if all live, -1 if there is none: then no process is left in the
 * box but us, for each is our child or has an ancestor that is. */
static pid_t reap(int options, int *status) {
    struct rusage usage;
    pid_t pid;
    do pid = wait4(-1, status, options, &usage);
    while (pid < 0 && errno == EINTR);
    if (pid > 0) {
        uint64_t rss_bytes = (uint64_t)usage.ru_maxrss * 1024;
        used.user_us += microseconds(usage.ru_utime);
        used.system_us += microseconds(usage.ru_stime);
        if (rss_bytes > used.max_rss_bytes) used.max_rss_bytes = rss_bytes;
    }
    return pid;
}

static void kill_all(void) {
    int status;
    kill(-1, SIGKILL);
    while (reap(0, &status) > 0) continue;
}

/* Answers the EXEC and forgets it. */
static void finish(enum ending ending, int code) {
    struct __attribute__((packed)) {
        uint32_t ending;
        int32_t code;
        uint64_t wall_us, user_us, system_us, max_rss_bytes;
    } body = {ending, code, (uint64_t)(now_us() - command.started_us), used.user_us, used.system_us,
              used.max_rss_bytes};
    send_message(CONTROL, EXITED, command.id, &body, sizeof body, NULL, 0);
    free(command.body), free(command.job.argv), free(command.job.env), free(command.job.limits);
    free(command.job.files);
    memset(&command, 0, sizeof command);
}

/* Reaps all that has ended: orphans would fill the process table of the box. */
static void reap_ended(void) {
    int status, last = 0;
    bool ended = false;
    pid_t pid;
    while ((pid = reap(WNOHANG, &status)) > 0)
        if (pid == command.pid) ended = true, last = status;
    if (!ended) return;
    if (pid == 0 && (!command.keep || command.forced)) kill_all();
    if (command.job.error != 0) finish(ENDING_NOT_STARTED, command.job.error);
    else if (command.forced) finish(command.ending, 0);
    else if (WIFEXITED(last)) finish(ENDING_EXITED, WEXITSTATUS(last));
    else finish(ENDING_SIGNALED, WTERMSIG(last));
}

/* The end itself is seen by its SIGCHLD. */
static void force_end(enum ending ending) {
    command.forced = true;
    command.ending = ending;
    command.has_deadline = false;
    kill(-1, SIGKILL);
}

static char **take_strings(struct message *m) {
    uint32_t count = take_count(m, 4);
    char **strings = calloc((size_t)count + 1, sizeof *strings);
    for (uint32_t i = 0; strings != NULL && i < count; i++) strings[i] = take_string(m);
    return strings;
}

/* All after the header, copied: the buffer is needed for what comes while the command runs. */
static bool take_body(struct message *m) {
    struct stat status = {.st_size = m->end - m->at};
    bool in_file = m->flags & EXEC_IN_FILE;
    if (in_file && (m->num_fds != 4 || m->end != m->at || fstat(m->fds[3], &status) < 0))
        return false;
    size_t size = (size_t)status.st_size;
    if (size > MAX_BODY_BYTES || (command.body = malloc(size + 1)) == NULL) return false;
    char *start = command.body + 1; /* take_string needs a byte before */
    if (!in_file) memcpy(start, m->at, size);
    else if (pread(m->fds[3], start, size, 0) != (ssize_t)size) return false;
    m->at = start;
    m->end = start + size;
    return true;
}

static bool take_command(struct message *m, struct job *job, uint64_t *wall_us) {
    if (!take_body(m)) return false;
    take(m, wall_us, sizeof *wall_us);
    job->uid = take_u32(m);
    job->gid = take_u32(m);
    job->num_limits = take_count(m, sizeof *job->limits);
    job->limits = calloc((size_t)job->num_limits + 1, sizeof *job->limits);
    if (job->limits == NULL) return false;
    take(m, job->limits, job->num_limits * sizeof *job->limits);
    job->cwd = take_string(m);
    job->files = take_strings(m);
    job->argv = take_strings(m);
    job->env = take_strings(m);
    job->packages = m->flags & EXEC_PACKAGES;
    job->box_has_packages = box_has_packages;
    return job->files != NULL && job->argv != NULL && job->env != NULL &&
           is_complete(m, EXEC_KEEP | EXEC_IN_FILE | EXEC_PACKAGES,
                       m->flags & EXEC_IN_FILE ? 4 : 3);
}

/* False, which ends the box, for what is malformed or finds no memory. */
static bool execute(struct message *m) {
    uint64_t wall_us;
    struct job *job = &command.job;
    if (!take_command(m, job, &wall_us)) return false;
    memset(&used, 0, sizeof used);
    memcpy(job->fds, m->fds, sizeof job->fds);
    command.id = m->id;
    command.keep = m->flags & EXEC_KEEP;
    command.started_us = now_us();
    command.has_deadline = wall_us > 0;
    if (wall_us > MAX_WALL_US) wall_us = MAX_WALL_US;
    command.deadline_us = command.started_us + (int64_t)wall_us;
    errno = EINVAL;
    if (job->argv[0] != NULL && job->uid != init_id && job->gid != init_id &&
        (!job->packages || box_has_packages))
        command.pid = start(run_program, job);
    if (command.pid > 0) return true;
    int error = errno;
    if (!command.keep) kill_all();
    finish(ENDING_NOT_STARTED, error);
    return true;
}

/* Files are written and read by a child with the job's ids; as the box's processes can stop it, its
 * time is bounded. */
static void run_file_task(int (*run)(void *), struct job *job) {
    int64_t deadline_us = now_us() + MAX_FILE_TASK_US;
    pid_t task = start(run, job), pid = 0;
    int status = 0;
    if (task < 0) job->error = errno, job->stage = "starting a child";
    while (task > 0 && pid != task) {
        struct pollfd wait = {children, POLLIN, 0};
        struct signalfd_siginfo ignored;
        int64_t left_us = deadline_us - now_us();
        if (left_us <= 0) kill_one(task);
        if (poll(&wait, 1, left_us > 0 ? (int)(left_us / 1000) + 1 : 1000) > 0 &&
            read(children, &ignored, sizeof ignored) > 0)
            while ((pid = reap(WNOHANG, &status)) > 0 && pid != task) continue;
    }
    if (task > 0 && WIFSIGNALED(status) && job->error == 0)
        job->error = now_us() < deadline_us ? EIO : ETIMEDOUT, job->stage = "a killed child";
}

static bool put_or_get(struct message *m) {
    bool put = m->op == PUT;
    struct job job = {.box_has_packages = box_has_packages, .uid = reader_id, .gid = reader_id,
                      .packages = box_has_packages};
    if (put) job.mode = take_u32(m), job.uid = take_u32(m), job.gid = take_u32(m);
    else take(m, &job.limit_bytes, sizeof job.limit_bytes);
    job.path = take_string(m);
    if (!is_complete(m, 0, 1)) return false;
    job.fds[0] = m->fds[0];
    if (job.uid == init_id || job.gid == init_id) job.error = EINVAL, job.stage = "the init's user";
    else run_file_task(put ? put_file : get_file, &job);
    uint64_t num_bytes = job.num_bytes;
    if (job.error != 0) send_error(CONTROL, m->id, job.error, job.stage);
    else send_message(CONTROL, DONE, m->id, &num_bytes, put ? 0 : sizeof num_bytes, NULL, 0);
    return true;
}

static bool listen_on(struct message *m) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int yes = 1;
    uint16_t port;
    take(m, &port, sizeof port);
    if (!is_complete(m, 0, 0)) return false;
    address.sin_port = htons(port);
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0 || setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) < 0 ||
        bind(server, (struct sockaddr *)&address, sizeof address) < 0 || listen(server, 128) < 0)
        send_error(CONTROL, m->id, errno, "listening on the loopback");
    else send_message(CONTROL, DONE, m->id, NULL, 0, &server, 1);
    if (server >= 0) close(server);
    return true;
}

static bool serve_one(struct message *m) {
    bool is_work = m->op == EXEC || m->op == PUT || m->op == GET;
    if (m->op == PYTHON) send_error(CONTROL, m->id, ENOSYS, "a box without an interpreter");
    else if (is_work && command.pid > 0) send_error(CONTROL, m->id, EBUSY, "a command runs");
    else if (m->op == EXEC) return execute(m);
    else if (is_work) return put_or_get(m);
    else if (m->op == LISTEN) return listen_on(m);
    else if (m->op != KILL || !is_complete(m, 0, 0)) return false;
    else if (command.pid > 0) force_end(ENDING_KILLED);
    return true;
}

void serve(uint32_t init, uint32_t reader, bool packages) {
    static char buffer[MAX_MESSAGE_BYTES];
    struct signalfd_siginfo ignored;
    struct message m;
    sigset_t child;
    if (getpid() != 1) _exit(1); /* kill(-1) below means all of this box, not of the host */
    init_id = init, reader_id = reader, box_has_packages = packages;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    for (;;) {
        struct pollfd wait[2] = {{children, POLLIN, 0}, {CONTROL, POLLIN, 0}};
        int64_t left_us = command.deadline_us - now_us();
        if (left_us < 0) left_us = 0;
        struct timespec left = {left_us / 1000000, left_us % 1000000 * 1000};
        if (ppoll(wait, 2, command.has_deadline ? &left : NULL, NULL) < 0) continue;
        if (wait[0].revents && read(children, &ignored, sizeof ignored) > 0) reap_ended();
        if (command.has_deadline && now_us() >= command.deadline_us) force_end(ENDING_TIMEOUT);
        if (!wait[1].revents) continue;
        if (receive(CONTROL, &m, buffer) != RECEIVED || !serve_one(&m)) _exit(1);
        close_fds(&m);
    }
}
