/* How threads share tasks: each has a run of them for itself, so that it reads what lies together,
   and helps the others once it is through. A thread that something keeps from its core, or whose
   core is slower, does not keep the rest waiting for more than one task. */

#pragma once

#include <omp.h>
#include <stdint.h>

#define SHARERS 64

/* How far each share is. Zeros: nothing is begun. */
typedef struct {
    struct {
        int64_t begun, apart[7]; /* A cache line each, or threads would slow each other down. */
    } of[SHARERS];
} Shares;

/* How many neighbours to take at a time as one task: few enough that all end together. */
static inline int64_t at_once(int64_t count, int64_t threads) { return count / (threads * 32) + 1; }

/* The next task for this thread, of so many in all. Below 0: none is left. */
static inline int64_t next_task(Shares *shares, int64_t tasks)
{
    const int64_t threads = omp_get_num_threads(), all = threads < SHARERS ? threads : SHARERS;
    for (int64_t turn = 0; turn < all; turn++) {
        const int64_t whose = (omp_get_thread_num() + turn) % all;
        const int64_t first = tasks * whose / all, count = tasks * (whose + 1) / all - first;
        int64_t *begun = &shares->of[whose].begun;
        if (__atomic_load_n(begun, __ATOMIC_RELAXED) >= count)
            continue;
        const int64_t place = __atomic_fetch_add(begun, 1, __ATOMIC_RELAXED);
        if (place < count)
            return first + place;
    }
    return -1;
}
