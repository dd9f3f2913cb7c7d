/* Runs the tile instructions of the real library on a CPU that has none: each is an illegal
   instruction there, and the handler of that signal does what it would have done. So what the
   compiler made of the kernel is tested, and not its source alone.

   Encodings: VEX.128, map 0F38; what follows the prefix says which (Intel's manual, volume 2). */
#include <signal.h>
#include <ucontext.h>

#include "emulated_tiles.h"

enum { PLAIN, PREFIX_66, PREFIX_F3, PREFIX_F2 };

typedef struct {
    int prefix, opcode, mode, reg, rm, extra;
    const uint8_t *address;
    int64_t stride;
    int64_t length;
} instruction;

static uint64_t number_of(const ucontext_t *c, int reg) {
    static const int names[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)c->uc_mcontext.gregs[names[reg]];
}

/* 0 if this is no instruction of tiles. */
static int decode(const ucontext_t *c, instruction *i) {
    const uint8_t *start = (const uint8_t *)c->uc_mcontext.gregs[REG_RIP], *at = start;
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || (at[2] & 0x84) != 0) return 0;
    int x = !(at[1] & 0x40), b = !(at[1] & 0x20);
    *i = (instruction){.prefix = at[2] & 3, .extra = ~at[2] >> 3 & 15, .opcode = at[3],
                       .mode = at[4] >> 6, .reg = at[4] >> 3 & 7, .rm = at[4] & 7};
    at += 5;
    if (i->mode != 3) {
        uint64_t base = 0;
        int relative = 0, wide = i->mode == 2;
        if (i->rm == 4) {
            int sib = *at++, index = (sib >> 3 & 7) | x << 3;
            if (index != 4) i->stride = (int64_t)number_of(c, index) << (sib >> 6);
            if ((sib & 7) == 5 && i->mode == 0) wide = 1;
            else base = number_of(c, (sib & 7) | b << 3);
        } else if (i->rm == 5 && i->mode == 0) {
            relative = wide = 1;
        } else {
            base = number_of(c, i->rm | b << 3);
        }
        int32_t offset = 0;
        if (i->mode == 1) offset = (int8_t)*at++;
        if (wide) memcpy(&offset, at, 4), at += 4;
        if (relative) base = (uint64_t)at;
        i->address = (const uint8_t *)(base + (uint64_t)(int64_t)offset);
    }
    i->length = at - start;
    return 1;
}

/* 0 if it is none of those that the kernel uses. */
static int perform(const instruction *i) {
    int in_memory = i->mode != 3;
    if (i->opcode == 0x49 && i->prefix == PLAIN && in_memory && i->reg == 0) {
        tile_shapes shapes;
        memcpy(&shapes, i->address, sizeof shapes);
        tiles_open(&shapes);
    } else if (i->opcode == 0x49 && i->prefix == PLAIN && !in_memory) {
        tiles_close();
    } else if (i->opcode == 0x49 && i->prefix == PREFIX_F2 && !in_memory) {
        tile_zero(i->reg);
    } else if (i->opcode == 0x4b && i->prefix == PREFIX_F2 && in_memory && i->rm == 4) {
        tile_load(i->reg, i->address, i->stride);
    } else if (i->opcode == 0x4b && i->prefix == PREFIX_F3 && in_memory && i->rm == 4) {
        tile_store(i->reg, (void *)i->address, i->stride);
    } else if (i->opcode == 0x5c && i->prefix == PREFIX_F3 && !in_memory) {
        tile_dot(i->reg, i->rm, i->extra);
    } else {
        return 0;
    }
    return 1;
}

static atomic_int trapped;
static struct sigaction before;

static void on_illegal(int number, siginfo_t *info, void *context) {
    ucontext_t *c = context;
    instruction found;
    (void)info;
    if (!decode(c, &found) || !perform(&found)) {
        /* Not ours: it is met again, without us. */
        sigaction(number, &before, NULL);
        return;
    }
    trapped++;
    c->uc_mcontext.gregs[REG_RIP] += found.length;
}

int trap_tiles(void) {
    struct sigaction action = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO};
    return sigaction(SIGILL, &action, &before);
}
int leave_tiles(void) { return sigaction(SIGILL, &before, NULL); }
int trapped_tiles(void) { return trapped; }
