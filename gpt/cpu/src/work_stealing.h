/* Work stealing between OpenMP threads: a thread computes its own tasks, then tasks of the others.

   A thread's tasks are adjacent, so it reads contiguous memory. A thread that is preempted, or
   whose core is slower, delays the others by at most one task. */

#pragma once

#include <omp.h>
#include <stdint.h>

#define WORKERS_MAX 64

/* `next`: the number of tasks that were taken from a queue; 0 before the first task. */
typedef struct {
    struct {
        int64_t next, padding[7]; /* One cache line per queue, against false sharing. */
    } queues[WORKERS_MAX];
} WorkQueues;

/* The number of adjacent items of a task. Tasks are small, so that all threads finish at about the
   same time. */
static inline int64_t items_per_task(int64_t count, int64_t threads)
{
    return count / (threads * 32) + 1;
}

/* Returns the next of `tasks` tasks for this thread, or -1 if no task is left. */
static inline int64_t next_task(WorkQueues *queues, int64_t tasks)
{
    const int64_t threads = omp_get_num_threads(),
                  queue_count = threads < WORKERS_MAX ? threads : WORKERS_MAX;
    for (int64_t turn = 0; turn < queue_count; turn++) {
        const int64_t owner = (omp_get_thread_num() + turn) % queue_count;
        const int64_t first = tasks * owner / queue_count,
                      count = tasks * (owner + 1) / queue_count - first;
        int64_t *next = &queues->queues[owner].next;
        if (__atomic_load_n(next, __ATOMIC_RELAXED) >= count)
            continue;
        const int64_t index = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (index < count)
            return first + index;
    }
    return -1;
}
