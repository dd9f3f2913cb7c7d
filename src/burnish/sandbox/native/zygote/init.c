#include "zygote.h"

#include <arpa/inet.h>
#include <time.h>

enum { MAX_BODY_BYTES = 16 << 20 };
static const uint64_t MAX_WALL_US = 365ULL * 86400 * 1000000; /* what is longer would overflow */

static struct command {
    pid_t pid; /* 0: nothing runs */
    uint32_t id;
    bool keep;
    enum ending forced; /* or ENDING_EXITED */
    int64_t started_us, deadline_us;
    struct job job;
    char *body, **strings; /* what the job is in, if it came in a file; where its strings are */
    struct __attribute__((packed)) {
        uint32_t ending;
        int32_t code;
        uint64_t wall_us, user_us, system_us, max_rss_bytes;
    } end; /* the body of EXITED */
} command = {.deadline_us = INT64_MAX};

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

/* The next child that has ended, 0 if all live, -1 if there is none: then no process is left in the
 * box but us, for each is our child or has an ancestor that is. */
static pid_t reap(int options, int *status) {
    struct rusage usage;
    pid_t pid = wait4(-1, status, options, &usage);
    if (pid <= 0) return pid;
    uint64_t rss_bytes = (uint64_t)usage.ru_maxrss * 1024;
    command.end.user_us += (uint64_t)(usage.ru_utime.tv_sec * 1000000LL + usage.ru_utime.tv_usec);
    command.end.system_us += (uint64_t)(usage.ru_stime.tv_sec * 1000000LL + usage.ru_stime.tv_usec);
    if (rss_bytes > command.end.max_rss_bytes) command.end.max_rss_bytes = rss_bytes;
    return pid;
}

static void kill_all(void) {
    kill(-1, SIGKILL);
    while (reap(0, NULL) > 0) continue;
}

/* Answers the EXEC, PUT or GET and forgets it. */
static void finish(enum ending ending, int code) {
    command.end.ending = ending;
    command.end.code = code;
    command.end.wall_us = (uint64_t)(now_us() - command.started_us);
    send_message(&(struct message){.op = EXITED, .id = command.id}, &command.end,
                 sizeof command.end);
    free(command.body), free(command.strings);
    command = (struct command){.deadline_us = INT64_MAX};
}

/* Reaps all that has ended: orphans would fill the process table of the box. */
static void reap_ended(void) {
    int status, last = -1;
    pid_t pid;
    while ((pid = reap(WNOHANG, &status)) > 0)
        if (pid == command.pid) last = status;
    if (last < 0) return;
    if (pid == 0 && !command.keep) kill_all();
    if (command.job.error != 0) finish(ENDING_NOT_STARTED, command.job.error);
    else if (command.forced != ENDING_EXITED) finish(command.forced, 0);
    else if (WIFEXITED(last)) finish(ENDING_EXITED, WEXITSTATUS(last));
    else finish(ENDING_SIGNALED, WTERMSIG(last));
}

/* The end itself is seen by its SIGCHLD. What was kept may stop PUT and GET, but does not end with
 * them. */
static void force_end(enum ending ending) {
    command.forced = ending;
    command.deadline_us = INT64_MAX;
    command.keep = command.job.op != EXEC;
    if (command.keep) kill_one(command.pid);
    else kill(-1, SIGKILL);
}

/* All that a job is stays where it came in. False if it is malformed or finds no memory. */
static bool take_job(const struct message *m, char *body, struct job *job) {
    bool in_file = m->flags & EXEC_IN_FILE;
    size_t size = m->size - HEADER_BYTES, num_strings = 1; /* the directory */
    if (!is_complete(m, in_file ? 0 : size, EXEC_KEEP | EXEC_IN_FILE | EXEC_PACKAGES,
                     in_file ? 4 : 3)) return false;
    if (in_file) {
        struct stat status;
        if (fstat(m->fds[3], &status) < 0 || status.st_size > MAX_BODY_BYTES) return false;
        size = (size_t)status.st_size;
        body = command.body = malloc(size + 1);
        if (body == NULL || pread(m->fds[3], body, size, 0) != (ssize_t)size) return false;
    }
    const struct asked *asked = job->asked = (void *)body;
    if (size < sizeof *asked || body[size - 1] != 0) return false;
    char *at = body + sizeof *asked, *end = body + size;
    if (asked->num_limits > (size_t)(end - at) / sizeof *job->limits) return false;
    job->limits = (void *)at;
    at += asked->num_limits * sizeof *job->limits;
    for (int i = 0; i < 3; i++) num_strings += asked->num_strings[i];
    if (num_strings > (size_t)(end - at)) return false; /* each takes a byte */
    char **next = command.strings = calloc(num_strings + 3, sizeof *next); /* lists end in NULL */
    if (next == NULL) return false;
    job->cwd = at;
    at += strlen(at) + 1;
    for (int i = 0; i < 3; i++, next++) {
        job->lists[i] = next;
        for (uint32_t j = 0; j < asked->num_strings[i]; j++, at += strlen(at) + 1) {
            if (at == end) return false;
            *next++ = at;
        }
    }
    return at == end;
}

static bool execute(const struct message *m, char *body) {
    struct job *job = &command.job;
    if (!take_job(m, body, job)) return false;
    uint64_t wall_us = job->asked->wall_us;
    uint32_t init = settings.num_ids > 1 ? settings.num_ids - 1 : UINT32_MAX;
    memcpy(job->fds, m->fds, sizeof job->fds);
    job->op = m->op;
    job->packages = m->flags & EXEC_PACKAGES;
    command.id = m->id;
    command.keep = m->flags & EXEC_KEEP;
    command.end.user_us = command.end.system_us = command.end.max_rss_bytes = 0;
    command.started_us = now_us();
    if (wall_us > MAX_WALL_US) wall_us = MAX_WALL_US;
    if (wall_us > 0) command.deadline_us = command.started_us + (int64_t)wall_us;
    errno = EINVAL;
    if (*job->lists[1] != NULL && job->asked->uid != init && job->asked->gid != init &&
        (!job->packages || box_has_packages))
        command.pid = start(job);
    if (command.pid > 0) return true;
    int error = errno;
    if (!command.keep) kill_all();
    finish(ENDING_NOT_STARTED, error);
    return true;
}

static bool listen_on(const struct message *m, const void *body) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct message answer = {.op = DONE, .id = m->id, .num_fds = 1};
    if (!is_complete(m, sizeof(uint16_t), 0, 0)) return false;
    address.sin_port = htons(*(const uint16_t *)body);
    int server = answer.fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool listens = setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)) == 0 &&
                   bind(server, (struct sockaddr *)&address, sizeof address) == 0 &&
                   listen(server, 128) == 0;
    if (listens) send_message(&answer, NULL, 0);
    else fail(errno, "listening on the loopback"), send_error(m->id);
    close(server);
    return true;
}

/* False, which ends the box, for what is malformed. */
static bool serve_one(const struct message *m, char *body) {
    bool is_job = m->op == EXEC || m->op == PUT || m->op == GET;
    if (m->op == LISTEN) return listen_on(m, body);
    if (is_job && command.pid == 0) return execute(m, body);
    if (is_job || m->op == PYTHON) {
        fail(is_job ? EBUSY : ENOSYS, is_job ? "a command runs" : "a box without an interpreter");
        send_error(m->id);
        return true;
    }
    if (m->op == KILL && command.pid > 0) force_end(ENDING_KILLED);
    return m->op == KILL && is_complete(m, 0, 0, 0);
}

void serve(void) {
    /* The second one is for what comes while a command runs, which is in the first. */
    static _Alignas(8) char bodies[2][MAX_MESSAGE_BYTES];
    struct signalfd_siginfo ignored;
    struct message m;
    if (getpid() != 1) _exit(1); /* kill(-1) above means all of this box, not of the host */
    for (;;) {
        struct pollfd wait[2] = {{CHILDREN, POLLIN, 0}, {OWNER, POLLIN, 0}};
        int64_t left_us = command.deadline_us - now_us();
        if (left_us < 0) left_us = 0;
        struct timespec left = {left_us / 1000000, left_us % 1000000 * 1000};
        if (ppoll(wait, 2, &left, NULL) < 0) continue;
        if (wait[0].revents && read(CHILDREN, &ignored, sizeof ignored) > 0) reap_ended();
        if (now_us() >= command.deadline_us) force_end(ENDING_TIMEOUT);
        if (!wait[1].revents) continue;
        char *body = bodies[command.pid > 0];
        if (receive(&m, body) <= 0 || !serve_one(&m, body)) _exit(1);
        close_fds(&m);
    }
}
