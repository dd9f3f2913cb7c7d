/* Messages between owner, helper and inits. ../protocol.py has the layouts; a test compares the
 * constants. What is sent ends the process if the other side is gone. */
#ifndef BURNISH_WIRE_H
#define BURNISH_WIRE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { VERSION = 2, MAX_MESSAGE_BYTES = 128 * 1024, MAX_LAYERS = 16, MAX_CREATE_FDS = 8,
       MAX_FDS = MAX_LAYERS + 1 };
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
enum ability { ABILITY_IDMAP = 1, ABILITY_RANGE = 2, ABILITY_NETWORK = 4 };
enum ending {
    ENDING_EXITED, ENDING_SIGNALED, ENDING_TIMEOUT, ENDING_NOT_STARTED, ENDING_KILLED,
};

struct message {
    uint16_t op, flags;
    uint32_t id;
    char *at, *end; /* what the take_* functions have left */
    bool bad;       /* something did not fit */
    int fds[MAX_FDS], num_fds;
};
enum received { RECEIVED, CLOSED, MALFORMED };

/* `buffer` has MAX_MESSAGE_BYTES and must outlive the strings that are taken out of it. */
enum received receive(int socket, struct message *m, char *buffer);
void take(struct message *m, void *into, size_t num_bytes);
uint32_t take_u32(struct message *m);
/* Never NULL: empty if `bad`. The NUL at its end is written over the message itself. */
char *take_string(struct message *m);
/* A count of things that take `item_bytes` or more each, which bounds what it allocates. */
uint32_t take_count(struct message *m, size_t item_bytes);
/* Nothing missing, nothing left over, no flag but these, exactly so many descriptors. */
bool is_complete(const struct message *m, int flags, int num_fds);
void close_fds(struct message *m);
/* False if the other side is gone. */
bool try_send(int socket, enum op op, int flags, uint32_t id, const void *body, size_t num_bytes,
              const int *fds, int num_fds);
void send_message(int socket, enum op op, uint32_t id, const void *body, size_t num_bytes,
                  const int *fds, int num_fds);
void send_done(int socket, uint32_t id);
void send_error(int socket, uint32_t id, int error, const char *stage);
#endif
