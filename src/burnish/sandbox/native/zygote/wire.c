#include "wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the protocol is little endian");
struct __attribute__((packed)) header {
    uint32_t size;
    uint16_t op, flags;
    uint32_t id;
};
union control { /* room for more than any message may bring, so that they arrive and are closed */
    char bytes[CMSG_SPACE(sizeof(int) * 2 * MAX_FDS)];
    struct cmsghdr align;
};

enum received receive(int socket, struct message *m, char *buffer) {
    union control control;
    struct iovec part = {buffer, MAX_MESSAGE_BYTES};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t size;
    do size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR);
    memset(m, 0, sizeof *m);
    if (size <= 0) return CLOSED;
    bool fits = !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c != NULL && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
        for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (m->num_fds < MAX_FDS) m->fds[m->num_fds++] = fd;
            else close(fd), fits = false;
        }
    }
    struct header header = {0};
    if ((size_t)size >= sizeof header) memcpy(&header, buffer, sizeof header);
    if (!fits || header.size != (size_t)size) {
        close_fds(m);
        return MALFORMED;
    }
    m->op = header.op, m->flags = header.flags, m->id = header.id;
    m->at = buffer + sizeof header, m->end = buffer + size;
    return RECEIVED;
}

void take(struct message *m, void *into, size_t num_bytes) {
    memset(into, 0, num_bytes);
    if (m->bad || (size_t)(m->end - m->at) < num_bytes) {
        m->bad = true;
        return;
    }
    memcpy(into, m->at, num_bytes);
    m->at += num_bytes;
}

uint32_t take_u32(struct message *m) {
    uint32_t value;
    take(m, &value, sizeof value);
    return value;
}

char *take_string(struct message *m) {
    static char empty[1];
    uint32_t size = take_count(m, 1);
    m->bad = m->bad || memchr(m->at, 0, size) != NULL;
    if (m->bad) return empty;
    /* One byte to the left, over the size that has been read: makes room for the NUL. */
    char *string = memmove(m->at - 1, m->at, size);
    string[size] = 0;
    m->at += size;
    return string;
}

uint32_t take_count(struct message *m, size_t item_bytes) {
    uint32_t count = take_u32(m);
    m->bad = m->bad || count > (size_t)(m->end - m->at) / item_bytes;
    return m->bad ? 0 : count;
}

bool is_complete(const struct message *m, int flags, int num_fds) {
    return !m->bad && m->at == m->end && !(m->flags & ~flags) && m->num_fds == num_fds;
}

void close_fds(struct message *m) {
    while (m->num_fds > 0) close(m->fds[--m->num_fds]);
}

bool try_send(int socket, enum op op, int flags, uint32_t id, const void *body, size_t num_bytes,
              const int *fds, int num_fds) {
    struct header header = {
        (uint32_t)(sizeof header + num_bytes), (uint16_t)op, (uint16_t)flags, id};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)body, num_bytes}};
    union control control = {0};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (num_fds > 0) {
        size_t num_fd_bytes = sizeof(int) * (size_t)num_fds;
        control.align = (struct cmsghdr){CMSG_LEN(num_fd_bytes), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.align), fds, num_fd_bytes);
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(num_fd_bytes);
    }
    ssize_t sent;
    do sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent >= 0;
}

void send_message(int socket, enum op op, uint32_t id, const void *body, size_t num_bytes,
                  const int *fds, int num_fds) {
    if (!try_send(socket, op, 0, id, body, num_bytes, fds, num_fds)) _exit(0);
}

void send_done(int socket, uint32_t id) { send_message(socket, DONE, id, NULL, 0, NULL, 0); }

void send_error(int socket, uint32_t id, int error, const char *stage) {
    struct { int32_t error; uint32_t size; char stage[200]; } body = {.error = error};
    body.size = (uint32_t)strnlen(stage, sizeof body.stage);
    memcpy(body.stage, stage, body.size);
    send_message(socket, ERROR, id, &body, 8 + body.size, NULL, 0);
}
