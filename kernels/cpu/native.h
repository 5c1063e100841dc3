/* The dtypes of kernels/cpu/native.c: tensors' memory into tiles of REAL, and back.
 *
 * Doubles become 16 bits by way of float, but float16 at once on aarch64: each as in torch.
 */
#include <stdint.h>
#include <string.h>

#include "vectors.h"

typedef REAL real;
enum { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };
enum { NATIVE = sizeof(real) == 4 ? FLOAT32 : FLOAT64 };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Where the element `at` lies. */
static void *place(void *from, int dtype, int64_t at)
{
    static const int sizes[] = {2, 2, 4, 8};
    return (char *)from + at * sizes[dtype];
}

/* `n` elements from `from + at` on, as `real`: where they lie, or in `tile`, which may be where they
 * are to go. */
static const real *read(const void *from, int dtype, int64_t at, int64_t n, real *tile)
{
    if (dtype == NATIVE)
        return (const real *)from + at;
    if (dtype == FLOAT32) {
        const float *source = (const float *)from + at;
        for (int64_t i = 0; i < n; i++)
            tile[i] = source[i];
    } else if (dtype == BFLOAT16) {
        const uint16_t *source = (const uint16_t *)from + at;
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)source[i] << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            tile[i] = value;
        }
    } else {
        const uint16_t *source = (const uint16_t *)from + at;
        int64_t whole = n - n % 8;
        float value[8];
        for (int64_t i = 0; i < whole; i += 8) {
            floats_of_halves(value, source + i);
            for (int j = 0; j < 8; j++)
                tile[i + j] = value[j];
        }
        if (whole < n) {
            uint16_t half[8] = {0};
            memcpy(half, source + whole, (n - whole) * sizeof *half);
            floats_of_halves(value, half);
            for (int64_t i = whole; i < n; i++)
                tile[i] = value[i - whole];
        }
    }
    return tile;
}

static uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

/* Where to compute what `write` is to write: in its place, or in `tile`. */
static real *place_for(void *to, int dtype, int64_t at, real *tile)
{
    return dtype == NATIVE ? (real *)to + at : tile;
}

static void write(void *to, int dtype, int64_t at, int64_t n, const real *tile)
{
    if (dtype == NATIVE) {
        if ((real *)to + at != tile)
            memcpy((real *)to + at, tile, n * sizeof *tile);
    } else if (dtype == FLOAT32) {
        float *target = (float *)to + at;
        for (int64_t i = 0; i < n; i++)
            target[i] = (float)tile[i];
    } else if (dtype == BFLOAT16) {
        uint16_t *target = (uint16_t *)to + at;
        for (int64_t i = 0; i < n; i++)
            target[i] = to_bfloat16((float)tile[i]);
#ifdef __aarch64__
    } else if (sizeof(real) == 8) {
        uint16_t *target = (uint16_t *)to + at;
        for (int64_t i = 0; i < n; i++)
            target[i] = half_of_double(tile[i]);
#endif
    } else {
        uint16_t *target = (uint16_t *)to + at;
        int64_t whole = n - n % 8;
        float value[8] = {0};
        for (int64_t i = 0; i < whole; i += 8) {
            for (int j = 0; j < 8; j++)
                value[j] = (float)tile[i + j];
            halves_of_floats(target + i, value);
        }
        if (whole < n) {
            uint16_t half[8];
            for (int64_t i = whole; i < n; i++)
                value[i - whole] = (float)tile[i];
            halves_of_floats(half, value);
            memcpy(target + whole, half, (n - whole) * sizeof *half);
        }
    }
}

/* Whether one of `n` elements from `from + at` on is Inf or NaN: has all bits of its exponent. */
static int any_non_finite(const void *from, int dtype, int64_t at, int64_t n)
{
    int found = 0;
    if (dtype == FLOAT64) {
        const uint64_t *bits = (const uint64_t *)from + at, all = 0x7ff0000000000000;
        for (int64_t i = 0; i < n; i++)
            found |= (bits[i] & all) == all;
    } else if (dtype == FLOAT32) {
        const uint32_t *bits = (const uint32_t *)from + at, all = 0x7f800000;
        for (int64_t i = 0; i < n; i++)
            found |= (bits[i] & all) == all;
    } else {
        const uint16_t *bits = (const uint16_t *)from + at, all = dtype == FLOAT16 ? 0x7c00 : 0x7f80;
        for (int64_t i = 0; i < n; i++)
            found |= (bits[i] & all) == all;
    }
    return found;
}

/* Threads set one and the same flag. */
static void note_non_finite(float *found_inf, const void *from, int dtype, int64_t at, int64_t n)
{
    float one = 1;
    if (found_inf && any_non_finite(from, dtype, at, n))
        __atomic_store(found_inf, &one, __ATOMIC_RELAXED);
}
