#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "helper.h"

enum { MAX_BODY_BYTES = 16 << 20, MAX_LIMITS = 16, MAX_FILE_TASK_S = 60 };
/* A year: what is longer would overflow, and nobody waits for it. */
static const uint64_t MAX_WALL_US = 365ULL * 86400 * 1000000;

static struct {
    pid_t pid; /* 0: nothing runs */
    uint32_t id;
    bool keep, forced, has_deadline;
    enum ending ending; /* if forced */
    int64_t started_us, deadline_us;
    struct job job;
    char *body; /* what the job's strings are in */
} command;

static struct {
    uint64_t user_us, system_us;
    long max_rss_kib;
} used;

static const struct ids *ids;
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
    do
        pid = wait4(-1, status, options, &usage);
    while (pid < 0 && errno == EINTR);
    if (pid > 0) {
        used.user_us += microseconds(usage.ru_utime);
        used.system_us += microseconds(usage.ru_stime);
        if (usage.ru_maxrss > used.max_rss_kib)
            used.max_rss_kib = usage.ru_maxrss;
    }
    return pid;
}

static void kill_all(void) {
    int status;
    kill(-1, SIGKILL);
    while (reap(0, &status) > 0)
        ;
}

static void send_exited(enum ending ending, int code, uint64_t wall_us) {
    struct __attribute__((packed)) {
        uint32_t ending;
        int32_t code;
        uint64_t wall_us, user_us, system_us, max_rss_bytes;
    } body = {ending, code, wall_us, used.user_us, used.system_us, (uint64_t)used.max_rss_kib * 1024};
    send_message(CONTROL, EXITED, command.id, &body, sizeof body, NULL, 0);
}

static void forget_command(void) {
    free(command.body);
    free(command.job.argv);
    free(command.job.env);
    free(command.job.limits);
    free(command.job.resources);
    memset(&command, 0, sizeof command);
}

static void finish(int status, bool others) {
    uint64_t wall_us = (uint64_t)(now_us() - command.started_us);
    if (others && (!command.keep || command.forced))
        kill_all();
    if (command.job.error != 0)
        send_exited(ENDING_NOT_STARTED, command.job.error, wall_us);
    else if (command.forced)
        send_exited(command.ending, 0, wall_us);
    else if (WIFEXITED(status))
        send_exited(ENDING_EXITED, WEXITSTATUS(status), wall_us);
    else
        send_exited(ENDING_SIGNALED, WTERMSIG(status), wall_us);
    forget_command();
}

/* Reaps all that has ended. With orphans the process table of the box would fill. */
static void reap_ended(void) {
    bool ended = false;
    int status, last = 0;
    pid_t pid;
    while ((pid = reap(WNOHANG, &status)) > 0) {
        if (pid == command.pid) {
            ended = true;
            last = status;
        }
    }
    if (ended)
        finish(last, pid == 0);
}

/* The end of the command itself is seen by its SIGCHLD. */
static void force_end(enum ending ending) {
    command.forced = true;
    command.ending = ending;
    command.has_deadline = false;
    kill(-1, SIGKILL);
}

static char **take_strings(struct message *m) {
    uint32_t count = take_count(m, 4);
    char **strings = calloc((size_t)count + 1, sizeof *strings);
    for (uint32_t i = 0; strings != NULL && i < count; i++)
        strings[i] = take_string(m);
    return strings;
}

/* All after the header, copied, as the buffer is needed for what comes while the command runs.
 * False without memory. */
static bool take_body(struct message *m) {
    struct stat status;
    size_t size = (size_t)(m->end - m->at);
    bool in_file = m->flags & EXEC_IN_FILE;
    if (in_file && (m->num_fds != 4 || size != 0 || fstat(m->fds[3], &status) < 0 ||
                    status.st_size < 0 || status.st_size > MAX_BODY_BYTES)) {
        m->bad = true;
        return true;
    }
    if (in_file)
        size = (size_t)status.st_size;
    /* One byte before, for take_string. */
    command.body = malloc(size + 1);
    if (command.body == NULL)
        return false;
    char *start = command.body + 1;
    if (!in_file)
        memcpy(start, m->at, size);
    for (size_t done = 0; in_file && done < size;) {
        ssize_t got = pread(m->fds[3], start + done, size - done, (off_t)done);
        if (got <= 0) {
            m->bad = true;
            return true;
        }
        done += (size_t)got;
    }
    m->at = start;
    m->end = start + size;
    return true;
}

/* False without memory. */
static bool take_command(struct message *m, struct job *job, uint64_t *wall_us) {
    if (!take_body(m))
        return false;
    *wall_us = take_u64(m);
    job->uid = take_u32(m);
    job->gid = take_u32(m);
    job->num_limits = take_count(m, 20);
    if (job->num_limits > MAX_LIMITS)
        m->bad = true;
    size_t room = m->bad ? 1 : (size_t)job->num_limits + 1;
    job->limits = calloc(room, sizeof *job->limits);
    job->resources = calloc(room, sizeof *job->resources);
    if (job->limits == NULL || job->resources == NULL)
        return false;
    for (uint32_t i = 0; !m->bad && i < job->num_limits; i++) {
        job->resources[i] = take_u32(m);
        job->limits[i].rlim_cur = take_u64(m);
        job->limits[i].rlim_max = take_u64(m);
    }
    job->cwd = take_string(m);
    job->argv = take_strings(m);
    job->env = take_strings(m);
    job->packages = m->flags & EXEC_PACKAGES;
    job->box_has_packages = ids->packages;
    return job->argv != NULL && job->env != NULL;
}

static void execute(struct message *m) {
    uint64_t wall_us;
    struct job *job = &command.job;
    bool enough = take_command(m, job, &wall_us);
    if (enough && !is_complete(m, EXEC_KEEP | EXEC_IN_FILE | EXEC_PACKAGES,
                               m->flags & EXEC_IN_FILE ? 4 : 3))
        _exit(1);
    command.id = m->id;
    memset(&used, 0, sizeof used);
    if (!enough || job->argv[0] == NULL || job->uid == ids->init || job->gid == ids->init ||
        (job->packages && !ids->packages)) {
        if (!enough)
            send_exited(ENDING_NOT_STARTED, ENOMEM, 0);
        else
            send_error(CONTROL, m->id, EINVAL, "a command that cannot be");
        forget_command();
        return;
    }
    memcpy(job->fds, m->fds, sizeof job->fds);
    command.keep = m->flags & EXEC_KEEP;
    command.started_us = now_us();
    command.has_deadline = wall_us > 0;
    command.deadline_us =
        command.started_us + (int64_t)(wall_us < MAX_WALL_US ? wall_us : MAX_WALL_US);
    command.pid = start(run_program, job);
    if (command.pid < 0) {
        int error = errno, status;
        if (!command.keep && waitpid(-1, &status, WNOHANG) >= 0)
            kill_all();
        send_exited(ENDING_NOT_STARTED, error, 0);
        forget_command();
    }
}

/* Files are written and read by a child with the job's ids; the box's processes can stop it, so the
 * time is bounded. */
static void run_file_task(int (*run)(void *), struct job *job) {
    int64_t deadline_us = now_us() + MAX_FILE_TASK_S * 1000000LL;
    pid_t task = start(run, job), pid;
    int status;
    if (task < 0) {
        job->error = errno;
        job->stage = "starting a child";
        return;
    }
    for (;;) {
        while ((pid = reap(WNOHANG, &status)) > 0)
            if (pid == task) {
                if (WIFSIGNALED(status) && job->error == 0) {
                    job->error = now_us() < deadline_us ? EIO : ETIMEDOUT;
                    job->stage = "a child that was killed";
                }
                return;
            }
        int64_t left_us = deadline_us - now_us();
        if (left_us <= 0)
            kill(task, SIGKILL);
        struct pollfd wait = {.fd = children, .events = POLLIN};
        struct signalfd_siginfo ignored;
        if (poll(&wait, 1, left_us > 0 ? (int)(left_us / 1000) + 1 : 1000) > 0 &&
            read(children, &ignored, sizeof ignored) < 0)
            continue;
    }
}

static void put_or_get(struct message *m) {
    struct job job = {.box_has_packages = ids->packages};
    bool put = m->op == PUT;
    if (put) {
        job.mode = take_u32(m);
        job.uid = take_u32(m);
        job.gid = take_u32(m);
    } else {
        job.limit_bytes = take_u64(m);
        job.uid = job.gid = ids->reader;
        job.packages = ids->packages;
    }
    job.path = take_string(m);
    if (!is_complete(m, 0, 1))
        _exit(1);
    job.fds[0] = m->fds[0];
    if (job.uid == ids->init || job.gid == ids->init) {
        send_error(CONTROL, m->id, EINVAL, "a file of the init's user");
        return;
    }
    run_file_task(put ? put_file : get_file, &job);
    uint64_t num_bytes = job.num_bytes;
    if (job.error != 0)
        send_error(CONTROL, m->id, job.error, job.stage);
    else
        send_message(CONTROL, DONE, m->id, &num_bytes, put ? 0 : sizeof num_bytes, NULL, 0);
}

static void listen_on(struct message *m) {
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int yes = 1;
    uint32_t low = 0;
    /* The port is the one u16 of the protocol. */
    if (m->end - m->at == 2)
        low = (uint32_t)(uint8_t)m->at[0] | (uint32_t)(uint8_t)m->at[1] << 8, m->at += 2;
    else
        m->bad = true;
    if (!is_complete(m, 0, 0))
        _exit(1);
    address.sin_port = htons((uint16_t)low);
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (server < 0 || setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) < 0 ||
        bind(server, (struct sockaddr *)&address, sizeof address) < 0 || listen(server, 128) < 0)
        send_error(CONTROL, m->id, errno, "listening on the loopback");
    else
        send_message(CONTROL, DONE, m->id, NULL, 0, &server, 1);
    if (server >= 0)
        close(server);
}

static void serve_one(char *buffer) {
    struct message m;
    if (receive(CONTROL, &m, buffer) != RECEIVED)
        _exit(1);
    bool is_work = m.op == EXEC || m.op == PUT || m.op == GET;
    if (is_work && command.pid > 0)
        send_error(CONTROL, m.id, EBUSY, "a command runs");
    else if (m.op == EXEC)
        execute(&m);
    else if (is_work)
        put_or_get(&m);
    else if (m.op == LISTEN)
        listen_on(&m);
    else if (m.op == KILL && is_complete(&m, 0, 0))
        command.pid > 0 ? force_end(ENDING_KILLED) : (void)0;
    else
        _exit(1);
    close_fds(&m);
}

void serve(const struct ids *box_ids) {
    static char buffer[MAX_MESSAGE_BYTES];
    sigset_t child;
    ids = box_ids;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (children < 0)
        _exit(1);
    for (;;) {
        struct pollfd wait[2] = {{.fd = children, .events = POLLIN},
                                 {.fd = CONTROL, .events = POLLIN}};
        struct timespec left = {0}, *timeout = NULL;
        if (command.has_deadline) {
            int64_t left_us = command.deadline_us - now_us();
            if (left_us > 0)
                left = (struct timespec){left_us / 1000000, left_us % 1000000 * 1000};
            timeout = &left;
        }
        if (ppoll(wait, 2, timeout, NULL) < 0)
            continue;
        struct signalfd_siginfo ignored;
        if (wait[0].revents && read(children, &ignored, sizeof ignored) > 0)
            reap_ended();
        else if (command.has_deadline && now_us() >= command.deadline_us)
            force_end(ENDING_TIMEOUT);
        if (wait[1].revents)
            serve_one(buffer);
    }
}
