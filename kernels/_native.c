/* The CPU path's arithmetic, each function one pass over memory. kernels/_native.py compiles this
 * file twice: with REAL=float for float16, bfloat16 and float32, with REAL=double for float64, or
 * where coefficients would leave float's range.
 *
 * Tensors are cut into blocks, and blocks into tiles that stay in a core's first cache: a tile is
 * read from any dtype into REAL, computed on and rounded once where it is written. Its bits depend
 * on neither the number of threads, nor the place in memory, nor the compiler: what may be fused is.
 *
 * Doubles become 16 bits by way of float, as in torch.
 *
 * Every `out` may be one of the inputs: a tile is read before it is written.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef REAL real;
enum { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };
enum { NATIVE = sizeof(real) == 4 ? FLOAT32 : FLOAT64 };
/* Elements; BLOCK comes from kernels/_native.py, too. Up to ALONE are not worth a second thread. */
enum { TILE = 1024, ALONE = 32768, LANES = 8 };

/* What is written to may be what is read, element by element; nothing else overlaps. */
#define ELEMENTWISE _Pragma("GCC ivdep")

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Threads: those of torch's own OpenMP, which is in the process where torch uses one. Linking a
 * second one would put two pools of threads on the same cores. */
extern void GOMP_parallel(void (*start)(void *), void *team, unsigned threads, unsigned flags)
    __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

struct share {
    int64_t thread, threads;
};

struct team {
    void (*work)(const void *task, struct share share);
    const void *task;
};

static void start(void *data)
{
    const struct team *team = data;
    team->work(team->task, (struct share){omp_get_thread_num(), omp_get_num_threads()});
}

static void in_parallel(void (*work)(const void *, struct share), const void *task, int64_t numel,
                        int threads)
{
    struct team team = {work, task};
    int found = GOMP_parallel && omp_get_thread_num && omp_get_num_threads;
    if (numel > ALONE && threads > 1 && found)
        GOMP_parallel(start, &team, threads, 0);
    else
        work(task, (struct share){0, 1});
}

/* A thread's part of `count`, [first, last). */
static void divide(int64_t count, struct share share, int64_t *first, int64_t *last)
{
    *first = count * share.thread / share.threads;
    *last = count * (share.thread + 1) / share.threads;
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
        for (int64_t i = 0; i < n; i += 8) {
            uint16_t half[8] = {0};
            float value[8];
            int64_t few = least(8, n - i);
            if (few == 8)
                memcpy(half, source + i, sizeof half);
            else
                memcpy(half, source + i, few * sizeof *half);
            _mm256_storeu_ps(value, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half)));
            for (int64_t j = 0; j < few; j++)
                tile[i + j] = value[j];
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
    } else {
        uint16_t *target = (uint16_t *)to + at;
        for (int64_t i = 0; i < n; i += 8) {
            uint16_t half[8];
            float value[8] = {0};
            int64_t few = least(8, n - i);
            for (int64_t j = 0; j < few; j++)
                value[j] = (float)tile[i + j];
            __m128i rounded = _mm256_cvtps_ph(_mm256_loadu_ps(value), _MM_FROUND_TO_NEAREST_INT);
            _mm_storeu_si128((__m128i *)half, rounded);
            memcpy(target + i, half, few * sizeof *half);
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
    const float one = 1;
    if (found_inf && any_non_finite(from, dtype, at, n))
        __atomic_store(found_inf, &one, __ATOMIC_RELAXED);
}

struct sum {
    const void *const *inputs;
    void *out;
    int64_t count, numel;
    int dtype, out_dtype;
    real scale;
    float *found_inf;
};

static void sum_share(const void *task, struct share mine)
{
    const struct sum *t = task;
    int64_t first, last;
    divide((t->numel + TILE - 1) / TILE, mine, &first, &last);
    for (int64_t low = first * TILE; low < last * TILE; low += TILE) {
        real left[TILE], right[TILE], tile[TILE];
        int64_t n = least(TILE, t->numel - low);
        /* A third input may be the output. */
        real *total = t->count > 2 ? tile : place_for(t->out, t->out_dtype, low, tile);
        const real *x = read(t->inputs[0], t->dtype, low, n, left);
        if (t->count > 1) {
            const real *y = read(t->inputs[1], t->dtype, low, n, right);
            ELEMENTWISE
            for (int64_t i = 0; i < n; i++)
                total[i] = x[i] + y[i];
            x = total;
        }
        for (int64_t k = 2; k < t->count; k++) {
            const real *y = read(t->inputs[k], t->dtype, low, n, right);
            for (int64_t i = 0; i < n; i++)
                total[i] += y[i];
        }
        if (t->scale != 1) {
            ELEMENTWISE
            for (int64_t i = 0; i < n; i++)
                total[i] = x[i] * t->scale;
            x = total;
        }
        write(t->out, t->out_dtype, low, n, x);
        note_non_finite(t->found_inf, t->out, t->out_dtype, low, n);
    }
}

/* out = scale * (inputs[0] + inputs[1] + ...), added in order. found_inf: set to 1 where out holds
 * an Inf or NaN, else left; or NULL. */
void sum_n(const void *const *inputs, int64_t count, int dtype, void *out, int out_dtype,
           int64_t numel, double scale, float *found_inf, int threads)
{
    struct sum task = {inputs, out, count, numel, dtype, out_dtype, (real)scale, found_inf};
    in_parallel(sum_share, &task, numel, threads);
}

/* Blocks of segments: each segment is cut for itself, from its own start. */
struct block {
    int64_t segment, low, high;
};

static int64_t blocks_of(const int64_t *bounds, int64_t segment)
{
    return (bounds[segment + 1] - bounds[segment] + BLOCK - 1) / BLOCK;
}

static int64_t count_blocks(const int64_t *bounds, int64_t segments)
{
    int64_t count = 0;
    for (int64_t segment = 0; segment < segments; segment++)
        count += blocks_of(bounds, segment);
    return count;
}

/* The block of number `k`, of all segments' blocks. */
static struct block find(const int64_t *bounds, int64_t k)
{
    int64_t segment = 0;
    for (; k >= blocks_of(bounds, segment); segment++)
        k -= blocks_of(bounds, segment);
    int64_t low = bounds[segment] + k * BLOCK;
    return (struct block){segment, low, least(low + BLOCK, bounds[segment + 1])};
}

/* The one after `block`, which is not the last. */
static struct block after(const int64_t *bounds, struct block block)
{
    if (block.high < bounds[block.segment + 1])
        return (struct block){block.segment, block.high,
                              least(block.high + BLOCK, bounds[block.segment + 1])};
    do
        block.segment++;
    while (blocks_of(bounds, block.segment) == 0);
    block.low = bounds[block.segment];
    block.high = least(block.low + BLOCK, bounds[block.segment + 1]);
    return block;
}

struct list {
    void *const *tensors;
    const int64_t *numels, *bounds;
    int64_t count;
    int dtype, buffer_dtype, packing;
    void *buffer;
    real scale;
    float *found_inf;
};

static void *place(void *from, int dtype, int64_t at)
{
    static const int sizes[] = {2, 2, 4, 8};
    return (char *)from + at * sizes[dtype];
}

/* `n` elements to `to`, times the scale. */
static void copy_run(const struct list *t, const void *from, int dtype, void *to, int to_dtype,
                     int64_t n)
{
    if (dtype == to_dtype && t->scale == 1) {
        memcpy(to, from, (char *)place(to, dtype, n) - (char *)to);
        note_non_finite(t->found_inf, to, dtype, 0, n);
        return;
    }
    for (int64_t low = 0; low < n; low += TILE) {
        real tile[TILE];
        int64_t few = least(TILE, n - low);
        real *product = place_for(to, to_dtype, low, tile);
        const real *x = read(from, dtype, low, few, product);
        if (t->scale != 1) {
            ELEMENTWISE
            for (int64_t i = 0; i < few; i++)
                product[i] = x[i] * t->scale;
            x = product;
        }
        write(to, to_dtype, low, few, x);
        note_non_finite(t->found_inf, to, to_dtype, low, few);
    }
}

static void copy_share(const void *task, struct share mine)
{
    const struct list *t = task;
    int64_t first, last;
    divide(count_blocks(t->bounds, t->count), mine, &first, &last);
    if (first == last)
        return;
    struct block block = find(t->bounds, first);
    for (int64_t k = first;;) {
        int64_t at = block.low - t->bounds[block.segment], room = block.high - block.low;
        int64_t n = least(room, t->numels[block.segment] - at);
        void *slot = place(t->buffer, t->buffer_dtype, block.low);
        if (n > 0) {
            void *part = place(t->tensors[block.segment], t->dtype, at);
            if (t->packing)
                copy_run(t, part, t->dtype, slot, t->buffer_dtype, n);
            else
                copy_run(t, slot, t->buffer_dtype, part, t->dtype, n);
        }
        if (t->packing && n < room) {
            char *padding = place(slot, t->buffer_dtype, n > 0 ? n : 0);
            memset(padding, 0, (char *)place(slot, t->buffer_dtype, room) - padding);
        }
        if (++k == last)
            return;
        block = after(t->bounds, block);
    }
}

/* Between a buffer and `count` tensors, of numels elements, whose slots in it start, and end, at
 * bounds. packing: into the buffer, with zeros into what a slot has beyond its tensor; else out of
 * it. found_inf as for sum_n. */
void copy(void *const *tensors, int dtype, const int64_t *numels, const int64_t *bounds,
          int64_t count, void *buffer, int buffer_dtype, int packing, double scale,
          float *found_inf, int threads)
{
    struct list task = {tensors, numels, bounds, count, dtype, buffer_dtype, packing, buffer,
                        (real)scale, found_inf};
    in_parallel(copy_share, &task, bounds[count] - bounds[0], threads);
}

struct pair {
    const void *a, *b;
    int a_dtype, b_dtype;
    const int64_t *bounds;
    int64_t segments;
    /* blend */
    void *out;
    int out_dtype;
    const double *coefficients;
    float *found_inf;
    /* dot_and_norms */
    double *partials;
};

static void blend_share(const void *task, struct share mine)
{
    const struct pair *t = task;
    int64_t first, last;
    divide(count_blocks(t->bounds, t->segments), mine, &first, &last);
    if (first == last)
        return;
    struct block block = find(t->bounds, first);
    for (int64_t k = first;;) {
        real alpha = (real)t->coefficients[2 * block.segment];
        real beta = (real)t->coefficients[2 * block.segment + 1];
        for (int64_t low = block.low; low < block.high; low += TILE) {
            real left[TILE], right[TILE], tile[TILE];
            int64_t n = least(TILE, block.high - low);
            const real *x = read(t->a, t->a_dtype, low, n, left);
            const real *y = read(t->b, t->b_dtype, low, n, right);
            real *total = place_for(t->out, t->out_dtype, low, tile);
            ELEMENTWISE
            for (int64_t i = 0; i < n; i++)
                total[i] = (sizeof(real) == 4 ? __builtin_fmaf(beta, y[i], alpha * x[i])
                                              : __builtin_fma(beta, y[i], alpha * x[i]));
            write(t->out, t->out_dtype, low, n, total);
            note_non_finite(t->found_inf, t->out, t->out_dtype, low, n);
        }
        if (++k == last)
            return;
        block = after(t->bounds, block);
    }
}

/* out = alpha * a + beta * b, by segment: coefficients are its rows (alpha, beta), bounds the
 * elements where segments start, and end. found_inf as for sum_n. */
void blend(const void *a, int a_dtype, const void *b, int b_dtype, void *out, int out_dtype,
           const int64_t *bounds, int64_t segments, const double *coefficients, float *found_inf,
           int threads)
{
    struct pair task = {a, b, a_dtype, b_dtype, bounds, segments, .out = out,
                        .out_dtype = out_dtype, .coefficients = coefficients,
                        .found_inf = found_inf};
    in_parallel(blend_share, &task, bounds[segments] - bounds[0], threads);
}

/* Sums of products in double, where those of two floats are exact. An element's place in its block
 * says in which of the lanes it is added. */
struct dots {
    double dot[LANES], a[LANES], b[LANES];
};

/* Four elements. */
static __m256d widen(const real *from)
{
    return sizeof(real) == 4 ? _mm256_cvtps_pd(_mm_loadu_ps((const float *)from))
                             : _mm256_loadu_pd((const double *)from);
}

static void add_dots(const real *x, const real *y, int64_t n, struct dots *sums)
{
    __m256d dot[LANES / 4], a[LANES / 4], b[LANES / 4];
    memcpy(dot, sums->dot, sizeof dot);
    memcpy(a, sums->a, sizeof a);
    memcpy(b, sums->b, sizeof b);
    int64_t whole = n - n % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES / 4; j++) {
            __m256d u = widen(x + i + 4 * j), v = widen(y + i + 4 * j);
            dot[j] = _mm256_fmadd_pd(u, v, dot[j]);
            a[j] = _mm256_fmadd_pd(u, u, a[j]);
            b[j] = _mm256_fmadd_pd(v, v, b[j]);
        }
    memcpy(sums->dot, dot, sizeof dot);
    memcpy(sums->a, a, sizeof a);
    memcpy(sums->b, b, sizeof b);
    for (int64_t i = whole; i < n; i++) {
        double u = x[i], v = y[i];
        sums->dot[i - whole] = __builtin_fma(u, v, sums->dot[i - whole]);
        sums->a[i - whole] = __builtin_fma(u, u, sums->a[i - whole]);
        sums->b[i - whole] = __builtin_fma(v, v, sums->b[i - whole]);
    }
}

static void dots_share(const void *task, struct share mine)
{
    const struct pair *t = task;
    int64_t first, last;
    divide(count_blocks(t->bounds, t->segments), mine, &first, &last);
    if (first == last)
        return;
    struct block block = find(t->bounds, first);
    for (int64_t k = first;;) {
        struct dots sums = {{0}, {0}, {0}};
        double row[3] = {0};
        for (int64_t low = block.low; low < block.high; low += TILE) {
            real left[TILE], right[TILE];
            int64_t n = least(TILE, block.high - low);
            const real *x = read(t->a, t->a_dtype, low, n, left);
            const real *y = read(t->b, t->b_dtype, low, n, right);
            add_dots(x, y, n, &sums);
        }
        for (int i = 0; i < LANES; i++) {
            row[0] += sums.dot[i];
            row[1] += sums.a[i];
            row[2] += sums.b[i];
        }
        memcpy(t->partials + 3 * k, row, sizeof row);
        if (++k == last)
            return;
        block = after(t->bounds, block);
    }
}

/* rows: (a.b, |a|^2, |b|^2) of each segment. partials: room for three doubles a block. */
void dot_and_norms(const void *a, int a_dtype, const void *b, int b_dtype, const int64_t *bounds,
                   int64_t segments, double *partials, double *rows, int threads)
{
    struct pair task = {a, b, a_dtype, b_dtype, bounds, segments, .partials = partials};
    in_parallel(dots_share, &task, bounds[segments] - bounds[0], threads);
    for (int64_t segment = 0; segment < segments; segment++, rows += 3) {
        rows[0] = rows[1] = rows[2] = 0;
        for (int64_t k = 0; k < blocks_of(bounds, segment); k++, partials += 3)
            for (int i = 0; i < 3; i++)
                rows[i] += partials[i];
    }
}
