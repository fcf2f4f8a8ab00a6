/* CPU feature detection: the ISA level that the kernels use. */

#include "vectors.h"

/* The highest ISA level of this CPU. Tests set lower levels. */
static int isa_level_max(void)
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

int isa_level = UNKNOWN;

int preamble_abi(void) { return ABI; }

int preamble_isa_level(void) { return isa_level; }

/* Sets the ISA level. A negative level, or one that this CPU does not support, selects the CPU's
   highest level. */
void preamble_set_isa_level(int level)
{
    int level_max = isa_level_max();
    isa_level = level < 0 || level > level_max ? level_max : level;
}
