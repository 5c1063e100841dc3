/* The CPU path's arithmetic, each function one pass over memory.
 *
 * real.h is included twice: arithmetic in float for float16, bfloat16 and float32, in double for
 * float64 or where coefficients would leave float's range.
 *
 * Tensors are cut into blocks, and blocks into tiles that stay in a core's first cache. A tile is
 * converted from any dtype to REAL, computed, and rounded once when it is written. Its bits do not
 * depend on the number of threads, the place in memory or the compiler, nor on the processor,
 * except for doubles that become float16. Only the bits of NaNs may differ.
 *
 * Every `out` may be one of the inputs: a tile is read before it is written.
 *
 * Each function takes one argument, the struct of task.h. The compiler's flags in setup.py matter:
 * products must not be fused with sums.
 */
#include "task.h"
#include "vectors.h"

#include <math.h>

/* The hash of these files: kernels/cpu/native.py refuses a library compiled from other ones. */
const char compiled_from[] = COMPILED_FROM;

/* Numbered as in kernels/cpu/native.py. */
enum { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };
/* Numbers of elements; up to ALONE elements are not worth a second thread. */
enum { TILE = 1024, LANES = 8, ALONE = 32768 };
/* Maximum number of tensors that `sum_n` reads side by side. */
enum { FEW = 8 };
/* Tensors that are read side by side, elements of each at a time, and the multiple to which those
 * are padded. */
enum { GROUP = 8, STRIP = 512, STEP = 16 };

#define INLINE static inline __attribute__((always_inline))


/* A loop's output may be one of its inputs, element by element; other overlaps do not occur. */
#ifdef __clang__
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The largest one that is at most n, which is positive. */
static int64_t largest_power_of_two(int64_t n)
{
    return (int64_t)1 << (63 - __builtin_clzll(n));
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

/* The value, rounded to bfloat16. */
static float in_bfloat16(float value)
{
    uint32_t bits = (uint32_t)to_bfloat16(value) << 16;
    memcpy(&value, &bits, sizeof bits);
    return value;
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

/* The largest magnitude of `n` elements from `from + at` on, as bits: magnitudes compare as their
 * bits do, with NaN above Inf. */
static uint64_t largest_bits(const void *from, int dtype, int64_t at, int64_t n)
{
    if (dtype == FLOAT64)
        return LARGEST(int64_t, INT64_MAX);
    if (dtype == FLOAT32)
        return LARGEST(int32_t, INT32_MAX);
    return LARGEST(int16_t, INT16_MAX);
}

/* Convert eight of float16 or bfloat16. */
static inline void floats_of_16_bits(float *to, const uint16_t *from, int dtype)
{
    if (dtype == BFLOAT16)
        floats_of_bfloats(to, from);
    else
        floats_of_halves(to, from);
}

/* The epilogue of every function that writes: set the task's flag, if it has one, unless all of `n`
 * elements just written are finite. Threads share the flag, and set it to the same value. */
static void report(const struct task *t, const void *from, int dtype, int64_t at, int64_t n)
{
    static const uint64_t infinities[] = {0x7c00, 0x7f80, 0x7f800000, 0x7ff0000000000000};
    float one = 1;
    if (t->found_inf && largest_bits(from, dtype, at, n) >= infinities[dtype])
        __atomic_store(t->found_inf, &one, __ATOMIC_RELAXED);
}

/* A block of a segment. Each segment is cut separately; `number` counts the blocks of all. */
struct block {
    int64_t segment, low, high, number;
};

static int64_t blocks_of(const int64_t *bounds, int64_t segment)
{
    return (bounds[segment + 1] - bounds[segment] + BLOCK - 1) / BLOCK;
}

/* The function to call on each block. */
typedef void visitor(const struct task *t, struct block block);

struct walk {
    visitor *visit;
    const struct task *task;
};

/* Visit one thread's share of the blocks: consecutive ones, nearly as many for each thread. */
static void walk_part(const struct walk *walk, int64_t thread, int64_t threads)
{
    const int64_t *bounds = walk->task->bounds;
    int64_t count = 0;
    for (int64_t segment = 0; segment < walk->task->segments; segment++)
        count += blocks_of(bounds, segment);
    int64_t first = count * thread / threads, last = count * (thread + 1) / threads, number = 0;
    for (int64_t segment = 0; segment < walk->task->segments; segment++)
        for (int64_t low = bounds[segment]; low < bounds[segment + 1]; low += BLOCK, number++) {
            struct block block = {segment, low, least(low + BLOCK, bounds[segment + 1]), number};
            if (first <= number && number < last)
                walk->visit(walk->task, block);
        }
}

static void walk_in_team(void *walk)
{
    const struct task *t = ((const struct walk *)walk)->task;
    walk_part(walk, t->thread_num(), t->num_threads());
}

/* Visit the blocks of all segments, in any order, on up to t->threads threads of torch's OpenMP.
 * Linking a second OpenMP would put two pools of threads on the same cores. */
static void walk_blocks(visitor *visit, const struct task *t)
{
    struct walk walk = {visit, t};
    if (t->bounds[t->segments] - t->bounds[0] > ALONE && t->threads > 1 && t->parallel)
        t->parallel(walk_in_team, &walk, t->threads, 0);
    else
        walk_part(&walk, 0, 1);
}

/* The place of the dot product of tensors i <= j of a block; places are row by row. */
static double *entry(const struct task *t, int64_t number, int64_t i, int64_t j)
{
    int64_t pairs = t->count * (t->count + 1) / 2, at = i * t->count - i * (i - 1) / 2 + j - i;
    return t->partials + (pairs * number + at) * (t->precise ? 2 : 1);
}

#define REAL double
#define NATIVE FLOAT64
#define IN(name) name##_double
#include "real.h"
#include "gram.h"
#undef REAL
#undef NATIVE
#undef IN
#define REAL float
#define NATIVE FLOAT32
#define IN(name) name##_float
#include "real.h"
#include "gram.h"
#include "replay.h"

static int has_double(int64_t a, int64_t b)
{
    return a == FLOAT64 || b == FLOAT64;
}

/* out = coefficients[0] * (tensors[0] + tensors[1] + ...), added in order or as a balanced tree;
 * all tensors have one dtype. */
void sum_n(const struct task *t)
{
    walk_blocks(has_double(t->dtypes[0], t->out_dtype) ? sum_block_double : sum_block_float, t);
}

static void copy_block(const struct task *t, struct block block)
{
    if (has_double(t->dtypes[block.segment], t->out_dtype))
        copy_block_double(t, block);
    else
        copy_block_float(t, block);
}

/* Copy between tensors, of numels elements, and their slots in the buffer `out`, which are the
 * segments, times coefficients[0]. If `packing`, copy into the buffer and fill the rest of each
 * slot with zeros; otherwise copy out of it. */
void copy(const struct task *t)
{
    walk_blocks(copy_block, t);
}

/* Whether the product with any float loses nothing to the limits of float's exponent. */
static int is_safe(double coefficient)
{
    double size = __builtin_fabs(coefficient);
    return size == 0 || (SAFE_LOW < size && size < SAFE_HIGH) || size != size;
}

/* Whether alpha a + beta b is so short, compared with both terms, that float would lose it:
 * whether its square is below CANCELLED times the sum of their squares, or NaN. row: (a.b, |a|^2,
 * |b|^2). */
static int cancels(const double *row, const double *factors)
{
    double alpha = factors[0], beta = factors[1];
    double apart = alpha * alpha * row[1] + beta * beta * row[2];
    return !(apart + 2 * alpha * beta * row[0] >= CANCELLED * apart);
}

static void blend(const struct task *t, struct block block, int wide)
{
    const double *factors = t->coefficients + 2 * block.segment;
    wide |= has_double(t->dtypes[0], t->dtypes[1]) || t->out_dtype == FLOAT64;
    if (wide || !is_safe(factors[0]) || !is_safe(factors[1]))
        blend_double(t, block, factors[0], factors[1]);
    else
        blend_float(t, block, (float)factors[0], (float)factors[1]);
}

static void blend_block(const struct task *t, struct block block)
{
    blend(t, block, 0);
}

static void combine_block(const struct task *t, struct block block)
{
    int64_t segment = block.segment;
    blend(t, block, cancels(t->dots + 3 * segment, t->coefficients + 2 * segment));
}

/* out = alpha * a + beta * b of the two tensors; coefficients: one row (alpha, beta). */
void scaled_add(const struct task *t)
{
    walk_blocks(blend_block, t);
}

/* dots: (a.b, |a|^2, |b|^2) of each segment. partials: room for three doubles per block. */
void dot_and_norms(const struct task *t)
{
    /* Their places in `gram`'s order: |a|^2, a.b, |b|^2. */
    static const int places[] = {1, 0, 2};
    walk_blocks(t->dtypes[0] == FLOAT64 ? gram_block_double : gram_block_float, t);
    double *partials = t->partials, *row = t->dots;
    for (int64_t segment = 0; segment < t->segments; segment++, row += 3) {
        row[0] = row[1] = row[2] = 0;
        for (int64_t k = 0; k < blocks_of(t->bounds, segment); k++, partials += 3)
            for (int i = 0; i < 3; i++)
                row[i] += partials[places[i]];
    }
}

/* 1 - d/(fA). It is 1 for a norm below TINY, but NaN for NaN; and NaN if fA overflows, unless the
 * factor is infinite because one weight is negligible compared with the other. */
static double coefficient(double dot, double factor, double norm)
{
    double scaled = factor * norm;
    int lost = scaled == INFINITY && factor < INFINITY;
    return norm < TINY ? 1 : lost ? NAN : 1 - dot / scaled;
}

/* Blend a and b with one row of coefficients per segment, computed from dots. The rows are written
 * to `coefficients`, which at first holds the factors of a's and b's squared norm. */
void combine(const struct task *t)
{
    const double *row = t->dots, factors[] = {t->coefficients[0], t->coefficients[1]};
    for (int64_t segment = 0; segment < t->segments; segment++, row += 3)
        for (int i = 0; i < 2; i++)
            t->coefficients[2 * segment + i] = coefficient(row[0], factors[i], row[1 + i]);
    walk_blocks(combine_block, t);
}

void adasum(const struct task *t)
{
    dot_and_norms(t);
    combine(t);
}

/* Add up the blocks of each segment in order: in float64 for all segments or, if `precise`, in
 * double-double for the chosen ones. */
static void add_blocks(const struct task *t, int precise)
{
    int64_t size = t->count, step = t->precise ? 2 : 1, number = 0;
    double *out = t->out;
    for (int64_t segment = 0; segment < t->segments; segment++, out += size * size * step) {
        int64_t blocks = blocks_of(t->bounds, segment), first = number;
        number += blocks;
        if (precise && !is_chosen(t, segment))
            continue;
        memset(out, 0, size * size * step * sizeof *out);
        for (int64_t k = first; k < number; k++)
            for (int64_t i = 0; i < size; i++)
                for (int64_t j = i; j < size; j++)
                    add_entry(out + (i * size + j) * step, entry(t, k, i, j), precise);
        for (int64_t i = 0; i < size; i++)
            for (int64_t j = i + 1; j < size; j++)
                memcpy(out + (j * size + i) * step, out + (i * size + j) * step, 8 * step);
    }
}

/* out: the matrix of dot products of each segment. If t->precise, segments whose vectors may
 * cancel are computed once more in double-double. */
void gram(const struct task *t)
{
    int64_t entries = t->count * t->count;
    int any = 0;
    walk_blocks(t->dtypes[0] == FLOAT64 ? gram_block_double : gram_block_float, t);
    add_blocks(t, 0);
    for (int64_t segment = 0; t->precise && segment < t->segments; segment++) {
        double *matrix = (double *)t->out + segment * entries * 2;
        int chosen = may_cancel(t, matrix);
        t->coefficients[segment] = chosen;
        any |= chosen;
        for (int64_t i = 0; i < entries; i++)
            matrix[i * 2 + 1] = 0;
    }
    if (any) {
        walk_blocks(precise_block, t);
        add_blocks(t, 1);
    }
}

/* out: the factors with which the leaves' vectors add up to the tree's result. */
void adasum_coefficients(const struct task *t)
{
    struct replay r = {.matrix = (struct wide *)t->partials};
    r.factors = r.matrix + t->count * t->count;
    r.lengths = (lanes *)(r.factors + t->count);
    r.places = (int64_t *)(r.lengths + t->count);
    for (int64_t segment = 0; segment < t->segments; segment += 4)
        replay_segments(t, segment, &r);
}

/* out = coefficients[0] * tensors[0] + coefficients[1] * tensors[1] + ..., with one row of
 * coefficients per segment. */
void weighted_sum(const struct task *t)
{
    walk_blocks(t->dtypes[0] == FLOAT64 ? weigh_block_double : weigh_block_float, t);
}

#include "calls.h"
