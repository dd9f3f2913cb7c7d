/* Steps of one parallel region, in order: threads wait for each other in between.

   Leaving a region and entering the next costs a wake-up where idle threads sleep (OMP_WAIT_POLICY
   = passive), and the one that wakes may land on the core that is busy: a layer's seven short regions
   then ran one after the other. */
#pragma once
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

struct meeting {
    atomic_int arrived, round;
};

/* Tries before the core is offered to others, some 20 us: most waits are shorter. */
enum { PATIENCE = 2000 };

/* Go on when all `team` threads are here. What each has written is seen by all. */
static inline void meet(struct meeting *m, int team) {
    int round = atomic_load(&m->round);
    if (atomic_fetch_add(&m->arrived, 1) == team - 1) {
        atomic_store(&m->arrived, 0);
        atomic_store(&m->round, round + 1);
        return;
    }
    for (int tries = 0; atomic_load(&m->round) == round; tries++) {
        if (tries < PATIENCE) {
            __builtin_ia32_pause();
        } else {
            tries = PATIENCE;
            sched_yield();
        }
    }
}
