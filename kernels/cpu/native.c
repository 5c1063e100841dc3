/* The CPU path's arithmetic, each function one pass over memory. kernels/cpu/native.py compiles this
 * file twice: with REAL=float for float16, bfloat16 and float32, with REAL=double for float64, or
 * where coefficients would leave float's range.
 *
 * Tensors are cut into blocks, and blocks into tiles that stay in a core's first cache: a tile is
 * read from any dtype into REAL, computed on and rounded once where it is written. Its bits depend
 * on neither the number of threads, nor the place in memory, nor the compiler or, but for doubles
 * that become float16, the processor; only which NaN comes of one does.
 *
 * Every `out` may be one of the inputs: a tile is read before it is written.
 *
 * A function takes one argument, a struct of kernels/cpu/tasks.h: to pass nine by ctypes takes four times
 * as long.
 */
#include "native.h"
#include "tasks.h"

/* Elements; BLOCK comes from kernels/cpu/native.py, too. */
enum { TILE = 1024, LANES = 8 };

/* What is written to may be what is read, element by element; nothing else overlaps. */
#ifdef __clang__
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

/* Blocks of segments: each segment is cut for itself, from its own start. */
struct block {
    int64_t segment, low, high;
};

static int64_t blocks_of(const int64_t *bounds, int64_t segment)
{
    return (bounds[segment + 1] - bounds[segment] + BLOCK - 1) / BLOCK;
}

/* Threads: those of torch's own OpenMP, which is in the process where torch uses one. Linking a
 * second one would put two pools of threads on the same cores. */
static struct team {
    void (*parallel)(void (*start)(void *), void *task, unsigned threads, unsigned flags);
    int (*thread_num)(void), (*num_threads)(void);
} team;

/* GOMP_parallel, omp_get_thread_num and omp_get_num_threads; before any other call. */
void use_team(const struct team *found)
{
    team = *found;
}

/* What is done with each block; `number` counts those of all segments. */
typedef void visitor(const void *task, struct block block, int64_t number);

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
            struct block block = {segment, low, least(low + BLOCK, bounds[segment + 1])};
            walk->visit(walk->task, block, number);
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

static void sum_block(const void *task, struct block block, int64_t number)
{
    (void)number;
    const struct sum *t = task;
    real scale = (real)t->scale;
    for (int64_t low = block.low; low < block.high; low += TILE) {
        real left[TILE], right[TILE], tile[TILE];
        int64_t n = least(TILE, block.high - low);
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
        if (scale != 1) {
            ELEMENTWISE
            for (int64_t i = 0; i < n; i++)
                total[i] = x[i] * scale;
            x = total;
        }
        write(t->out, t->out_dtype, low, n, x);
        note_non_finite(t->found_inf, t->out, t->out_dtype, low, n);
    }
}

/* out = scale * (inputs[0] + inputs[1] + ...), added in order. */
void sum_n(const struct sum *task)
{
    const int64_t bounds[] = {0, task->numel};
    walk_blocks(sum_block, task, bounds, 1, task->threads);
}

/* `n` elements to `to`, times the scale. */
static void copy_run(const struct list *t, const void *from, int dtype, void *to, int to_dtype,
                     int64_t n)
{
    real scale = (real)t->scale;
    if (dtype == to_dtype && scale == 1) {
        memcpy(to, from, (char *)place(to, dtype, n) - (char *)to);
        note_non_finite(t->found_inf, to, dtype, 0, n);
        return;
    }
    for (int64_t low = 0; low < n; low += TILE) {
        real tile[TILE];
        int64_t few = least(TILE, n - low);
        real *product = place_for(to, to_dtype, low, tile);
        const real *x = read(from, dtype, low, few, product);
        if (scale != 1) {
            ELEMENTWISE
            for (int64_t i = 0; i < few; i++)
                product[i] = x[i] * scale;
            x = product;
        }
        write(to, to_dtype, low, few, x);
        note_non_finite(t->found_inf, to, to_dtype, low, few);
    }
}

static void copy_block(const void *task, struct block block, int64_t number)
{
    (void)number;
    const struct list *t = task;
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
}

/* Between a buffer and `count` tensors, of numels elements, whose slots in it start, and end, at
 * bounds. packing: into the buffer, with zeros into what a slot has beyond its tensor; else out of
 * it. */
void copy(const struct list *task)
{
    walk_blocks(copy_block, task, task->bounds, task->count, task->threads);
}

static void blend_block(const void *task, struct block block, int64_t number)
{
    (void)number;
    const struct blend *t = task;
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
}

/* out = alpha * a + beta * b, by segment: coefficients are its rows (alpha, beta), bounds the
 * elements where segments start, and end. */
void blend(const struct blend *task)
{
    walk_blocks(blend_block, task, task->bounds, task->segments, task->threads);
}

/* Sums of products in double, where those of two floats are exact. An element's place in its block
 * says in which of the lanes it is added. */
struct dots {
    double dot[LANES], a[LANES], b[LANES];
};

/* Four elements. */
static quad widen(const real *from)
{
    return sizeof(real) == 4 ? quad_of_floats((const float *)from)
                             : quad_of_doubles((const double *)from);
}

static void add_dots(const real *x, const real *y, int64_t n, struct dots *sums)
{
    quad dot[LANES / 4], a[LANES / 4], b[LANES / 4];
    memcpy(dot, sums->dot, sizeof dot);
    memcpy(a, sums->a, sizeof a);
    memcpy(b, sums->b, sizeof b);
    int64_t whole = n - n % LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int j = 0; j < LANES / 4; j++) {
            quad u = widen(x + i + 4 * j), v = widen(y + i + 4 * j);
            dot[j] = add_product(dot[j], u, v);
            a[j] = add_product(a[j], u, u);
            b[j] = add_product(b[j], v, v);
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

static void dots_block(const void *task, struct block block, int64_t number)
{
    const struct pair *t = task;
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
    memcpy(t->partials + 3 * number, row, sizeof row);
}

/* rows: (a.b, |a|^2, |b|^2) of each segment. partials: room for three doubles a block. */
void dot_and_norms(const struct pair *task)
{
    walk_blocks(dots_block, task, task->bounds, task->segments, task->threads);
    double *partials = task->partials, *rows = task->rows;
    for (int64_t segment = 0; segment < task->segments; segment++, rows += 3) {
        rows[0] = rows[1] = rows[2] = 0;
        for (int64_t k = 0; k < blocks_of(task->bounds, segment); k++, partials += 3)
            for (int i = 0; i < 3; i++)
                rows[i] += partials[i];
    }
}
