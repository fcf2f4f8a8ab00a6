/* Which kind of machine the library works for, and the threads that it works with. */

#include <omp.h>

#include "vectors.h"

/* What this machine can. Tests ask for less. */
static int machine_max(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bf16"))
        return AVX512_BF16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return AVX2;
#endif
    return PLAIN;
}

int machine = UNKNOWN;

/* Give back the threads that help the calling one. With more of OpenMP's threads than cores none
   of them waits awake, and waking one costs more than a small product; so a thread that has
   loaded a model lets go of its helpers before another runs it. */
void preamble_rest(void) { omp_pause_resource_all(omp_pause_soft); }

int preamble_abi(void) { return ABI; }

int preamble_machine(void) { return machine; }

/* Work for such a machine, or for the best there is. */
void preamble_choose(int wanted)
{
    int most = machine_max();
    machine = wanted < 0 || wanted > most ? most : wanted;
}
