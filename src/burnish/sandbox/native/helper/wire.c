#include "wire.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the protocol is little endian");

/* Room for more descriptors than any message may bring, so that they arrive and can be closed. */
enum { ROOM_FDS = 16 };

enum received receive(int socket, struct message *m, char *buffer) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * ROOM_FDS)];
        struct cmsghdr align;
    } control;
    struct iovec part = {buffer, MAX_MESSAGE_BYTES};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t size;
    do
        size = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR);
    memset(m, 0, sizeof *m);
    bool fits = size >= 0 && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
    struct cmsghdr *c = size >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
    for (; c != NULL; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (m->num_fds < MAX_CREATE_FDS) {
                m->fds[m->num_fds++] = fd;
            } else {
                close(fd);
                fits = false;
            }
        }
    }
    if (size == 0 || (size < 0 && errno == ECONNRESET))
        return CLOSED;
    struct header header;
    if (!fits || (size_t)size < sizeof header)
        return close_fds(m), MALFORMED;
    memcpy(&header, buffer, sizeof header);
    if (header.size != (size_t)size)
        return close_fds(m), MALFORMED;
    m->op = header.op;
    m->flags = header.flags;
    m->id = header.id;
    m->at = buffer + sizeof header;
    m->end = buffer + size;
    return RECEIVED;
}

static void take(struct message *m, void *into, size_t num_bytes) {
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

uint64_t take_u64(struct message *m) {
    uint64_t value;
    take(m, &value, sizeof value);
    return value;
}

char *take_string(struct message *m) {
    static char empty[1];
    uint32_t size = take_u32(m);
    if (m->bad || size > (size_t)(m->end - m->at) || memchr(m->at, 0, size) != NULL) {
        m->bad = true;
        empty[0] = 0;
        return empty;
    }
    /* One byte to the left, over the length that has been read: makes room for the NUL. */
    char *string = m->at - 1;
    memmove(string, m->at, size);
    string[size] = 0;
    m->at += size;
    return string;
}

uint32_t take_count(struct message *m, size_t item_bytes) {
    uint32_t count = take_u32(m);
    if (m->bad || count > (size_t)(m->end - m->at) / item_bytes) {
        m->bad = true;
        return 0;
    }
    return count;
}

bool is_complete(const struct message *m, unsigned flags, int num_fds) {
    return !m->bad && m->at == m->end && !(m->flags & ~flags) && m->num_fds == num_fds;
}

void close_fds(struct message *m) {
    while (m->num_fds > 0)
        close(m->fds[--m->num_fds]);
}

void send_message(int socket, enum op op, uint32_t id, const void *body, size_t num_bytes,
                  const int *fds, int num_fds) {
    struct header header = {(uint32_t)(sizeof header + num_bytes), (uint16_t)op, 0, id};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)body, num_bytes}};
    union {
        char bytes[CMSG_SPACE(sizeof(int) * MAX_CREATE_FDS)];
        struct cmsghdr align;
    } control;
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = num_bytes > 0 ? 2 : 1};
    if (num_fds > 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)num_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)num_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)num_fds);
    }
    ssize_t sent;
    do
        sent = sendmsg(socket, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent < 0)
        _exit(0);
}

void send_done(int socket, uint32_t id) { send_message(socket, DONE, id, NULL, 0, NULL, 0); }

void send_error(int socket, uint32_t id, int error, const char *stage) {
    char body[8 + 200];
    size_t length = strnlen(stage, sizeof body - 8);
    int32_t number = error;
    uint32_t size = (uint32_t)length;
    memcpy(body, &number, 4);
    memcpy(body + 4, &size, 4);
    memcpy(body + 8, stage, length);
    send_message(socket, ERROR, id, body, 8 + length, NULL, 0);
}
