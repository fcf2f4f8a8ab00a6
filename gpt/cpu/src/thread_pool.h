/* Thread pool of the kernels: parallel loops on worker threads that spin briefly, then sleep.

   The library does not use OpenMP, because OpenMP threads spin for milliseconds at barriers, and a
   barrier waits for every thread. If another process preempts one of the threads, the others then
   waste their CPU time. In this pool a loop ends when its items are done, even if some threads have
   not begun, and a thread that waits longer than SPIN_NS sleeps, so that the kernel can run the
   preempted thread in its place. */

#pragma once

#include <stdint.h>

/* How the chunks of a loop are assigned to threads. STEALING: each thread takes adjacent chunks, so
   that it reads contiguous memory, and then chunks that other threads have not begun. IN_ORDER:
   the threads take the chunks in the order of their items. */
typedef enum { STEALING, IN_ORDER } LoopSchedule;

/* Processes the items from `first` to `end` - 1: one chunk, or on a single thread all items. */
typedef void (*LoopBody)(void *context, int64_t first, int64_t end);

/* Calls `body` for chunks of `chunk` items until all `count` items are done. At most `threads`
   threads call it, and one of them is the calling thread. A loop inside of a loop, or a loop while
   another thread of the process runs one, runs on the calling thread alone. */
__attribute__((visibility("hidden"))) void parallel_for(int64_t count, int64_t chunk,
                                                        int64_t threads, LoopSchedule schedule,
                                                        LoopBody body, void *context);

/* The index of the thread that runs a loop body: at least 0, and less than the `threads` of its
   loop. No other thread of the loop has the same index. For a loop inside of a loop it is 0. */
__attribute__((visibility("hidden"))) int64_t worker_index(void);

/* The number of adjacent items of a chunk. Chunks are small, so that all threads finish at about
   the same time. */
static inline int64_t items_per_chunk(int64_t count, int64_t threads)
{
    return count / (threads * 32) + 1;
}
