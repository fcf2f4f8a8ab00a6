/* Thread pool of the kernels: the parallel loops that thread_pool.h declares.

   The process has one pool, which runs one loop at a time. The calling thread publishes a loop,
   works on it, closes it when no chunk is left, and waits for the workers that are inside. It does
   not wait for a worker that has not entered yet: such a worker finds the loop closed. */

#define _GNU_SOURCE
#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WORKERS_MAX 1024
#define QUEUES_MAX 64 /* With more threads than queues, several threads begin at the same queue. */
#define CACHE_LINE 64
#define STACK_BYTES (1 << 20)
/* How long a thread spins before it sleeps. Between two loops of a forward pass a thread waits for
   less; waking a sleeping thread takes about 50 us. A preemption lasts one to four milliseconds, of
   which each thread that waits for the preempted thread wastes at most SPIN_NS. */
#define SPIN_NS 50000
#define SPINS_PER_CLOCK_READ 8

/* The chunks of a loop that one thread takes first. `next`: the number of chunks taken so far. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic int64_t next;
} Queue;

typedef struct {
    LoopBody body;
    void *context;
    int64_t count, chunk, chunks, threads, queue_count;
    Queue queues[QUEUES_MAX];
} Loop;

/* `Pool.entry` is the number of workers inside of the loop, plus these flags. */
#define CLOSED (1u << 31)         /* No worker may enter. */
#define CALLER_SLEEPS (1u << 30)  /* The last worker that leaves wakes the caller. */
#define WORKERS_INSIDE (CALLER_SLEEPS - 1)

typedef struct {
    pthread_mutex_t lock; /* Held by the thread that runs a loop. */
    int64_t workers;      /* The number of started worker threads. */
    int has_refused_thread; /* The system has refused to start a thread; no more are requested. */
    Loop loop;
    _Alignas(CACHE_LINE) _Atomic uint32_t entry;
    _Alignas(CACHE_LINE) _Atomic uint32_t published; /* The number of published loops. */
    _Alignas(CACHE_LINE) _Atomic uint32_t sleepers;  /* The number of sleeping workers. */
} Pool;

static Pool pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .entry = CLOSED};
static _Thread_local int64_t thread_index;

int64_t worker_index(void) { return thread_index; }

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

static void relax_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleeps while `word` equals `value`. May return early. */
static void sleep_while_equal(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_sleepers(_Atomic uint32_t *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Spins while `word` equals `value`, for at most SPIN_NS. Returns whether `word` has changed. */
static int spin_while_equal(_Atomic uint32_t *word, uint32_t value)
{
    for (int64_t spins = 1, end = 0;; spins++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value)
            return 1;
        relax_cpu();
        if (spins % SPINS_PER_CLOCK_READ)
            continue;
        const int64_t now = now_ns();
        if (!end)
            end = now + SPIN_NS;
        else if (now > end)
            return 0;
    }
}

static void run_chunks(Loop *loop)
{
    for (int64_t turn = 0; turn < loop->queue_count; turn++) {
        const int64_t owner = (thread_index + turn) % loop->queue_count;
        const int64_t first_chunk = loop->chunks * owner / loop->queue_count;
        const int64_t size = loop->chunks * (owner + 1) / loop->queue_count - first_chunk;
        _Atomic int64_t *next = &loop->queues[owner].next;
        while (atomic_load_explicit(next, memory_order_relaxed) < size) {
            const int64_t index = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
            if (index >= size)
                break;
            const int64_t first = (first_chunk + index) * loop->chunk,
                          end = first + loop->chunk < loop->count ? first + loop->chunk
                                                                  : loop->count;
            loop->body(loop->context, first, end);
        }
    }
}

/* Enters the current loop, if it is open. While a worker is inside, the loop does not change. */
static int enter_loop(void)
{
    uint32_t entry = atomic_load_explicit(&pool.entry, memory_order_relaxed);
    do
        if (entry & CLOSED)
            return 0;
    while (!atomic_compare_exchange_weak_explicit(&pool.entry, &entry, entry + 1,
                                                  memory_order_acquire, memory_order_relaxed));
    return 1;
}

static void leave_loop(void)
{
    const uint32_t before = atomic_fetch_sub_explicit(&pool.entry, 1, memory_order_acq_rel);
    if ((before & CALLER_SLEEPS) && (before & WORKERS_INSIDE) == 1)
        wake_sleepers(&pool.entry, 1);
}

static void *run_worker(void *index)
{
    thread_index = (intptr_t)index;
    for (uint32_t seen = 0;; seen = atomic_load_explicit(&pool.published, memory_order_acquire)) {
        if (enter_loop()) {
            if (thread_index < pool.loop.threads)
                run_chunks(&pool.loop);
            leave_loop();
        }
        if (spin_while_equal(&pool.published, seen))
            continue;
        atomic_fetch_add(&pool.sleepers, 1);
        while (atomic_load(&pool.published) == seen)
            sleep_while_equal(&pool.published, seen);
        atomic_fetch_sub(&pool.sleepers, 1);
    }
    return NULL;
}

/* Starts workers until there are `count`, or until the system refuses another thread: the loops
   then run on fewer threads. */
static void start_workers(int64_t count)
{
    sigset_t blocked_signals, caller_signals;
    pthread_attr_t attributes;
    if (pool.workers >= count || pool.has_refused_thread)
        return;
    /* Other threads handle the signals of the process; a worker only those of its own faults. */
    sigfillset(&blocked_signals);
    sigdelset(&blocked_signals, SIGSEGV);
    sigdelset(&blocked_signals, SIGBUS);
    sigdelset(&blocked_signals, SIGFPE);
    sigdelset(&blocked_signals, SIGILL);
    pthread_sigmask(SIG_SETMASK, &blocked_signals, &caller_signals);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; pool.workers < count; pool.workers++)
        if (pthread_create(&thread, &attributes, run_worker,
                           (void *)(intptr_t)(pool.workers + 1))) {
            pool.has_refused_thread = 1;
            break;
        }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &caller_signals, NULL);
}

/* A child process after fork has no workers, and no thread that runs a loop. */
static void reset_pool(void)
{
    memset(&pool, 0, sizeof pool);
    pthread_mutex_init(&pool.lock, NULL);
    atomic_init(&pool.entry, CLOSED);
    thread_index = 0;
}

__attribute__((constructor)) static void reset_pool_in_forked_child(void)
{
    pthread_atfork(NULL, NULL, reset_pool);
}

static void publish_loop(void)
{
    for (int64_t i = 0; i < pool.loop.queue_count; i++)
        atomic_store_explicit(&pool.loop.queues[i].next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.entry, 0, memory_order_release);
    atomic_fetch_add(&pool.published, 1);
    if (atomic_load(&pool.sleepers))
        wake_sleepers(&pool.published, WORKERS_MAX);
}

/* Closes the loop, and waits until no worker is inside. */
static void close_loop(void)
{
    uint32_t entry = atomic_fetch_or_explicit(&pool.entry, CLOSED, memory_order_acquire) | CLOSED;
    while (entry & WORKERS_INSIDE) {
        if (!spin_while_equal(&pool.entry, entry)) {
            entry = atomic_fetch_or_explicit(&pool.entry, CALLER_SLEEPS, memory_order_acquire);
            entry |= CALLER_SLEEPS;
            if (entry & WORKERS_INSIDE)
                sleep_while_equal(&pool.entry, entry);
        }
        entry = atomic_load_explicit(&pool.entry, memory_order_acquire);
    }
}

void parallel_for(int64_t count, int64_t chunk, int64_t threads, LoopSchedule schedule,
                  LoopBody body, void *context)
{
    const int64_t chunks = (count + chunk - 1) / chunk;
    if (threads > chunks)
        threads = chunks;
    if (threads > WORKERS_MAX)
        threads = WORKERS_MAX;
    if (threads <= 1 || thread_index || pthread_mutex_trylock(&pool.lock)) {
        const int64_t own_index = thread_index;
        thread_index = 0;
        if (count > 0)
            body(context, 0, count);
        thread_index = own_index;
        return;
    }
    start_workers(threads - 1);
    Loop *loop = &pool.loop;
    loop->body = body, loop->context = context, loop->count = count, loop->chunk = chunk;
    loop->chunks = chunks, loop->threads = threads;
    loop->queue_count = schedule == IN_ORDER ? 1 : threads < QUEUES_MAX ? threads : QUEUES_MAX;
    publish_loop();
    run_chunks(loop);
    close_loop();
    pthread_mutex_unlock(&pool.lock);
}
