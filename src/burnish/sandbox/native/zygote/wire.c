#include "zygote.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the protocol is little endian");
_Static_assert(offsetof(struct message, num_fds) == HEADER_BYTES, "it begins with the header");
union control {
    char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    struct cmsghdr align;
};
static struct { int32_t error; uint32_t size; char stage[200]; } failure;

/* Nothing here is ever interrupted: no signal has a handler. */
int receive(struct message *m, void *body) {
    union control control;
    struct iovec parts[2] = {{m, HEADER_BYTES}, {body, MAX_MESSAGE_BYTES - HEADER_BYTES}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = &control,
                             .msg_controllen = sizeof control};
    *m = (struct message){0};
    ssize_t size = recvmsg(OWNER, &message, MSG_CMSG_CLOEXEC);
    if (size <= 0) return 0;
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c != NULL && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
        m->num_fds = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(m->fds, CMSG_DATA(c), sizeof(int) * (size_t)m->num_fds);
    }
    bool is_whole = !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
    if (is_whole && size >= HEADER_BYTES && m->size == (size_t)size) return 1;
    close_fds(m);
    return -1;
}

bool is_complete(const struct message *m, size_t num_bytes, int flags, int num_fds) {
    return m->size == HEADER_BYTES + num_bytes && !(m->flags & ~flags) && m->num_fds == num_fds;
}

void close_fds(struct message *m) {
    while (m->num_fds > 0) close(m->fds[--m->num_fds]);
}

bool try_send(int socket, struct message *m, const void *body, size_t num_bytes) {
    union control control = {0};
    struct iovec parts[2] = {{m, HEADER_BYTES}, {(void *)body, num_bytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    m->size = (uint32_t)(HEADER_BYTES + num_bytes);
    if (m->num_fds > 0) {
        size_t num_fd_bytes = sizeof(int) * (size_t)m->num_fds;
        control.align = (struct cmsghdr){CMSG_LEN(num_fd_bytes), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.align), m->fds, num_fd_bytes);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(num_fd_bytes);
    }
    return sendmsg(socket, &message, MSG_NOSIGNAL) >= 0;
}

void send_message(struct message *m, const void *body, size_t num_bytes) {
    if (!try_send(OWNER, m, body, num_bytes)) _exit(0);
}

void send_done(uint32_t id) { send_message(&(struct message){.op = DONE, .id = id}, NULL, 0); }

int fail(int error, const char *stage) {
    failure.error = error;
    failure.size = (uint32_t)strnlen(stage, sizeof failure.stage);
    memcpy(failure.stage, stage, failure.size);
    return -1;
}

void send_error(uint32_t id) {
    send_message(&(struct message){.op = ERROR, .id = id}, &failure, 8 + failure.size);
}
