/* The CPU path's arithmetic, each function one pass over memory.
 *
 * real.h is included twice: arithmetic in float for float16, bfloat16 and float32, in double for
 * float64 or where coefficients would leave float's range.
 *
 * Tensors are cut into blocks, and blocks into tiles that stay in a core's first cache: a tile is
 * read from any dtype into REAL, computed on and rounded once where it is written. Its bits depend
 * on neither the number of threads, nor the place in memory, nor the compiler or, but for doubles
 * that become float16, the processor; only which NaN comes of one does.
 *
 * Every `out` may be one of the inputs: a tile is read before it is written.
 *
 * A function takes one argument, a struct of tasks.h, which is generated from kernels/cpu/tasks.py.
 * `findings` is what to report of the values written, `threads` the most that may be used.
 */
#include "tasks.h"
#include "vectors.h"

/* In the order of kernels/cpu/native.py. BLOCK, elements whose dot products are one partial result,
 * comes from there, too, as do TINY and the range of coefficients that are safe in float. */
enum { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };
/* Elements; up to ALONE are not worth a second thread. */
enum { TILE = 1024, LANES = 8, ALONE = 32768 };

/* What is written to may be what is read, element by element; nothing else overlaps. */
#ifdef __clang__
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The address of element `at`. */
static void *element(const void *from, int dtype, int64_t at)
{
    static const int sizes[] = {2, 2, 4, 8};
    return (char *)from + at * sizes[dtype];
}

static uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

/* The largest of `n` integers from `from + at` on, without their signs. */
#define LARGEST(TYPE, MAX)                                                                        \
    ({                                                                                            \
        const TYPE *bits = (const TYPE *)from + at;                                               \
        TYPE most = 0;                                                                            \
        for (int64_t i = 0; i < n; i++)                                                           \
            most = most < (bits[i] & MAX) ? bits[i] & MAX : most;                                 \
        most;                                                                                     \
    })

/* The largest of `n` elements from `from + at` on without their signs, as bits: magnitudes have the
 * order of their bits, in which NaN is above Inf. */
static uint64_t largest_bits(const void *from, int dtype, int64_t at, int64_t n)
{
    if (dtype == FLOAT64)
        return LARGEST(int64_t, INT64_MAX);
    if (dtype == FLOAT32)
        return LARGEST(int32_t, INT32_MAX);
    return LARGEST(int16_t, INT16_MAX);
}

/* Raise the float, or for FLOAT64 the double, at `max_abs` to these bits of `dtype`. Threads meet
 * here. */
static void raise_to(void *max_abs, uint64_t bits, int dtype)
{
    if (dtype == FLOAT64) {
        uint64_t *place = max_abs, seen = __atomic_load_n(place, __ATOMIC_RELAXED);
        while (seen < bits && !__atomic_compare_exchange_n(place, &seen, bits, 1, __ATOMIC_RELAXED,
                                                           __ATOMIC_RELAXED))
            ;
        return;
    }
    uint32_t narrow = dtype == BFLOAT16 ? bits << 16 : bits;
    if (dtype == FLOAT16) {
        uint16_t halves[8] = {bits};
        float floats[8];
        floats_of_halves(floats, halves);
        memcpy(&narrow, floats, sizeof narrow);
    }
    uint32_t *place = max_abs, seen = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (seen < narrow && !__atomic_compare_exchange_n(place, &seen, narrow, 1, __ATOMIC_RELAXED,
                                                         __ATOMIC_RELAXED))
        ;
}

/* The epilogue of every function that writes: what `findings` asks of `n` elements just written.
 * Threads set one and the same flag. */
static void report(const struct findings *findings, const void *from, int dtype, int64_t at, int64_t n)
{
    static const uint64_t infinities[] = {0x7c00, 0x7f80, 0x7f800000, 0x7ff0000000000000};
    if (!findings->found_inf && !findings->max_abs)
        return;
    uint64_t bits = largest_bits(from, dtype, at, n);
    float one = 1;
    if (findings->found_inf && bits >= infinities[dtype])
        __atomic_store(findings->found_inf, &one, __ATOMIC_RELAXED);
    if (findings->max_abs)
        raise_to(findings->max_abs, bits, dtype);
}

/* A block of a segment, each of which is cut for itself; `number` counts those of all. */
struct block {
    int64_t segment, low, high, number;
};

static int64_t blocks_of(const int64_t *bounds, int64_t segment)
{
    return (bounds[segment + 1] - bounds[segment] + BLOCK - 1) / BLOCK;
}

/* Threads: those of torch's own OpenMP, which is in the process where torch uses one. Linking a
 * second one would put two pools of threads on the same cores. */
static struct team team;

/* GOMP_parallel, omp_get_thread_num and omp_get_num_threads; before any other call. */
void use_team(const struct team *found)
{
    team = *found;
}

/* What is done with each block. */
typedef void visitor(const void *task, struct block block);

struct walk {
    visitor *visit;
    const void *task;
    const int64_t *bounds;
    int64_t segments;
};

/* One thread's part of the blocks: as many as any other's, one after the other. */
static void walk_part(const struct walk *walk, int64_t thread, int64_t threads)
{
    const int64_t *bounds = walk->bounds;
    int64_t count = 0;
    for (int64_t segment = 0; segment < walk->segments; segment++)
        count += blocks_of(bounds, segment);
    int64_t number = count * thread / threads, last = count * (thread + 1) / threads;
    int64_t segment = 0, skip = number;
    while (number < last) {
        int64_t blocks = blocks_of(bounds, segment);
        for (; skip < blocks && number < last; skip++, number++) {
            int64_t low = bounds[segment] + skip * BLOCK;
            struct block block = {segment, low, least(low + BLOCK, bounds[segment + 1]), number};
            walk->visit(walk->task, block);
        }
        skip -= blocks;
        segment++;
    }
}

static void walk_in_team(void *walk)
{
    walk_part(walk, team.thread_num(), team.num_threads());
}

/* Visit the blocks of all segments, in any order, on up to so many threads. */
static void walk_blocks(visitor *visit, const void *task, const int64_t *bounds, int64_t segments,
                        int threads)
{
    struct walk walk = {visit, task, bounds, segments};
    if (bounds[segments] - bounds[0] > ALONE && threads > 1 && team.parallel)
        team.parallel(walk_in_team, &walk, threads, 0);
    else
        walk_part(&walk, 0, 1);
}

#define REAL float
#define NATIVE FLOAT32
#define IN(name) name##_float
#include "real.h"
#undef REAL
#undef NATIVE
#undef IN
#define REAL double
#define NATIVE FLOAT64
#define IN(name) name##_double
#include "real.h"

static int has_double(int64_t a, int64_t b)
{
    return a == FLOAT64 || b == FLOAT64;
}

/* out = scale * (inputs[0] + inputs[1] + ...), added in order. */
void sum_n(const struct sum *t)
{
    const int64_t bounds[] = {0, t->numel};
    visitor *visit = has_double(t->dtype, t->out_dtype) ? sum_block_double : sum_block_float;
    walk_blocks(visit, t, bounds, 1, t->threads);
}

/* Between a buffer and `count` tensors, of numels elements, whose slots in it start, and end, at
 * bounds. packing: into the buffer, with zeros into what a slot has beyond its tensor; else out of
 * it. */
void copy(const struct copy *t)
{
    visitor *visit = has_double(t->dtype, t->buffer_dtype) ? copy_block_double : copy_block_float;
    walk_blocks(visit, t, t->bounds, t->count, t->threads);
}

/* Whether the product with any float loses nothing to float's exponent. */
static int is_safe(double coefficient)
{
    double size = __builtin_fabs(coefficient);
    return size == 0 || (SAFE_LOW < size && size < SAFE_HIGH) || size != size;
}

static void blend_block(const void *task, struct block block)
{
    const struct pair *t = task;
    const double *factors = t->coefficients + 2 * block.segment;
    int wide = has_double(t->a_dtype, t->b_dtype) || t->out_dtype == FLOAT64;
    if (wide || !is_safe(factors[0]) || !is_safe(factors[1]))
        blend_double(t, block, factors[0], factors[1]);
    else
        blend_float(t, block, (float)factors[0], (float)factors[1]);
}

/* out = alpha * a + beta * b, by segment: coefficients are its rows (alpha, beta), bounds the
 * elements where segments start, and end. */
void scaled_add(const struct pair *t)
{
    walk_blocks(blend_block, t, t->bounds, t->segments, t->threads);
}

/* dots: (a.b, |a|^2, |b|^2) of each segment. partials: room for three doubles a block. */
void dot_and_norms(const struct pair *t)
{
    visitor *visit = has_double(t->a_dtype, t->b_dtype) ? dots_block_double : dots_block_float;
    walk_blocks(visit, t, t->bounds, t->segments, t->threads);
    double *partials = t->partials, *row = t->dots;
    for (int64_t segment = 0; segment < t->segments; segment++, row += 3) {
        row[0] = row[1] = row[2] = 0;
        for (int64_t k = 0; k < blocks_of(t->bounds, segment); k++, partials += 3)
            for (int i = 0; i < 3; i++)
                row[i] += partials[i];
    }
}

/* 1 - d/(2A); 1 for a norm below TINY, which no NaN is. */
static double coefficient(double dot, double norm)
{
    return norm < TINY ? 1 : 1 - dot / (2 * norm);
}

/* scaled_add with the coefficients that follow from dots; written to coefficients first. */
void combine(const struct pair *t)
{
    for (int64_t k = 0; k < t->segments; k++)
        for (int i = 0; i < 2; i++)
            t->coefficients[2 * k + i] = coefficient(t->dots[3 * k], t->dots[3 * k + 1 + i]);
    scaled_add(t);
}

void adasum(const struct pair *t)
{
    dot_and_norms(t);
    combine(t);
}
