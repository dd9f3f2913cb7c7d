/* Messages between owner, helper and inits. ../protocol.py has the layouts; a test compares the
 * constants. To helper and inits, the owner is the other side of descriptor 3: if it is gone, what
 * is sent to it ends the process. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { VERSION = 3, MAX_MESSAGE_BYTES = 128 * 1024, MAX_LAYERS = 16, MAX_CREATE_FDS = 8 };
/* More than any message may bring, so that they arrive and are closed. */
enum { OWNER = 3, HEADER_BYTES = 12, MAX_FDS = MAX_LAYERS * 2 + 2 };
enum op {
    HELLO = 1, CREATE, FREEZE, DESTROY, NEWLAYER, LAYERFD, RESIZE,
    EXEC = 32, KILL, PUT, GET, LISTEN, PYTHON,
    READY = 64, CREATED, DONE, ERROR, DIED, EXITED,
};
enum flag {
    CREATE_INTO_CGROUP = 1, CREATE_DETERMINISTIC = 2, CREATE_PACKAGES = 4,
    CREATE_UPPER = 8, NEWLAYER_UPPER = 8,
    EXEC_KEEP = 1, EXEC_IN_FILE = 2, EXEC_PACKAGES = 4,
};
enum ending { ENDING_EXITED, ENDING_SIGNALED, ENDING_TIMEOUT, ENDING_NOT_STARTED, ENDING_KILLED };

struct message {
    uint32_t size; /* of header and body */
    uint16_t op, flags;
    uint32_t id; /* so far the header */
    int num_fds, fds[MAX_FDS];
};

/* From the owner: 1, 0 if it is gone, -1 if that is no message (its descriptors are closed). `body`
 * has MAX_MESSAGE_BYTES. */
int receive(struct message *m, void *body);
/* A body of this size, no flag but these, exactly so many descriptors. */
bool is_complete(const struct message *m, size_t num_bytes, int flags, int num_fds);
void close_fds(struct message *m);
/* False if the other side is gone. Sets the size. */
bool try_send(int socket, struct message *m, const void *body, size_t num_bytes);
void send_message(struct message *m, const void *body, size_t num_bytes);
void send_done(uint32_t id);

/* A step has failed: an errno, and the stage in words for people. Returns -1. */
int fail(int error, const char *stage);
#define TRY(call, stage) do { if ((call) < 0) return fail(errno, stage); } while (0)
void send_error(uint32_t id); /* what was told to `fail` last */
