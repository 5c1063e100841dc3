/* Arithmetic in one REAL, float or double, of dtype NATIVE; IN adds REAL's name to a function's.
 *
 * Doubles are converted to 16 bits through float, except directly to float16 on aarch64: both as
 * in torch.
 */

/* Return `n` elements from `from + at` on as REAL: in place, or converted in `tile`, which may be
 * the output. */
static const REAL *IN(read)(const void *from, int dtype, int64_t at, int64_t n, REAL *tile)
{
    if (dtype == NATIVE)
        return (const REAL *)from + at;
    if (dtype == FLOAT32) {
        const float *source = (const float *)from + at;
        for (int64_t i = 0; i < n; i++)
            tile[i] = source[i];
    } else {
        const uint16_t *source = (const uint16_t *)from + at;
        int64_t whole = n - n % 8;
        uint16_t last[8] = {0};
        float value[8];
        for (int64_t i = 0; i < whole; i += 8) {
            floats_of_16_bits(value, source + i, dtype);
            for (int j = 0; j < 8; j++)
                tile[i + j] = value[j];
        }
        if (whole < n) {
            memcpy(last, source + whole, (n - whole) * sizeof *last);
            floats_of_16_bits(value, last, dtype);
            for (int64_t i = whole; i < n; i++)
                tile[i] = value[i - whole];
        }
    }
    return tile;
}

/* Return where to compute results for `write`: in the output itself, or in `tile`. */
static REAL *IN(place_for)(void *to, int dtype, int64_t at, REAL *tile)
{
    return dtype == NATIVE ? (REAL *)to + at : tile;
}

static void IN(write)(void *to, int dtype, int64_t at, int64_t n, const REAL *tile)
{
    if (dtype == NATIVE) {
        if ((REAL *)to + at != tile)
            memcpy((REAL *)to + at, tile, n * sizeof *tile);
    } else if (dtype == FLOAT32) {
        float *target = (float *)to + at;
        for (int64_t i = 0; i < n; i++)
            target[i] = (float)tile[i];
    } else if (dtype == BFLOAT16) {
        uint16_t *target = (uint16_t *)to + at;
        for (int64_t i = 0; i < n; i++)
            target[i] = to_bfloat16((float)tile[i]);
#ifdef __aarch64__
    } else if (sizeof(REAL) == 8) {
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

/* total = x + y, rounded to t->accumulate; total may be x. */
static void IN(add)(const struct task *t, REAL *total, const REAL *x, const REAL *y, int64_t n)
{
    if (t->accumulate == BFLOAT16) {
        ELEMENTWISE
        for (int64_t i = 0; i < n; i++)
            total[i] = in_bfloat16((float)(x[i] + y[i]));
        return;
    }
    ELEMENTWISE
    for (int64_t i = 0; i < n; i++)
        total[i] = x[i] + y[i];
    if (t->accumulate != NATIVE) {
        float narrow[TILE];
        IN(write)(narrow, t->accumulate, 0, n, total);
        IN(read)(narrow, t->accumulate, 0, n, total);
    }
}

/* Return the sum of `width` leaves of the balanced tree, from `leaf` on: in `tile`, or in place if
 * it is a single tensor. kernels/arithmetic.py defines the tensors of a leaf. */
static const REAL *IN(branch)(const struct task *t, int64_t leaf, int64_t width, int64_t extra,
                              int64_t low, int64_t n, REAL *tile)
{
    REAL right[TILE];
    int64_t half = width / 2;
    const REAL *x, *y;
    if (width == 4 && leaf >= extra && t->dtypes[0] == NATIVE && t->accumulate == NATIVE) {
        /* Tensors that need no conversion are added in one pass. */
        void *const *from = t->tensors + leaf + extra;
        const REAL *a = (REAL *)from[0] + low, *b = (REAL *)from[1] + low;
        const REAL *c = (REAL *)from[2] + low, *d = (REAL *)from[3] + low;
        ELEMENTWISE
        for (int64_t i = 0; i < n; i++)
            tile[i] = (a[i] + b[i]) + (c[i] + d[i]);
        return tile;
    }
    if (width > 1) {
        x = IN(branch)(t, leaf, half, extra, low, n, tile);
        y = IN(branch)(t, leaf + half, half, extra, low, n, right);
    } else {
        int64_t first = leaf < extra ? 2 * leaf : leaf + extra;
        x = IN(read)(t->tensors[first], t->dtypes[first], low, n, tile);
        if (leaf >= extra)
            return x;
        y = IN(read)(t->tensors[first + 1], t->dtypes[first + 1], low, n, right);
    }
    IN(add)(t, tile, x, y, n);
    return tile;
}

/* total = the sum of `count` tensors of one dtype, from left to right; total may lie in any of
 * them. Callers pass constants as `count` and `dtype`, so that sums stay in registers. */
INLINE void IN(add_side_by_side)(const struct task *t, int64_t low, int64_t n, REAL *total,
                                 int count, int dtype)
{
    const void *in[FEW];
    for (int k = 0; k < count; k++)
        in[k] = element(t->tensors[k], dtype, low);
    if (dtype == NATIVE) {
        ELEMENTWISE
        for (int64_t i = 0; i < n; i++) {
            REAL sum = ((const REAL *)in[0])[i];
            for (int k = 1; k < count; k++)
                sum += ((const REAL *)in[k])[i];
            total[i] = sum;
        }
        return;
    }
    for (int64_t i = 0; i < n; i += 8) {
        float sum[8], next[8];
        floats_of_16_bits(sum, (const uint16_t *)in[0] + i, dtype);
        for (int k = 1; k < count; k++) {
            floats_of_16_bits(next, (const uint16_t *)in[k] + i, dtype);
            for (int j = 0; j < 8; j++)
                sum[j] += next[j];
        }
        for (int j = 0; j < 8; j++)
            total[i + j] = sum[j];
    }
}

/* `add_side_by_side` of 3 to 8 tensors, as many as processors prefetch at once. Return 0 if it
 * does not suit the task or, for 16 bits, n. The bits are the same as of one addition after the
 * other. */
static int IN(sum_few)(const struct task *t, int64_t low, int64_t n, REAL *total)
{
    int64_t dtype = t->dtypes[0];
    if (t->balanced || t->accumulate != NATIVE || t->count < 3 || t->count > FEW)
        return 0;
#define CASES(DTYPE)                                                                              \
    switch (t->count) {                                                                           \
        CASE(3, DTYPE)                                                                            \
        CASE(4, DTYPE)                                                                            \
        CASE(5, DTYPE)                                                                            \
        CASE(6, DTYPE)                                                                            \
        CASE(7, DTYPE)                                                                            \
        CASE(8, DTYPE)                                                                            \
    }
#define CASE(COUNT, DTYPE)                                                                        \
    case COUNT:                                                                                   \
        IN(add_side_by_side)(t, low, n, total, COUNT, DTYPE);                                     \
        return 1;
    if (dtype == NATIVE) {
        CASES(NATIVE)
    } else if (sizeof(REAL) == 4 && n % 8 == 0 && dtype == FLOAT16) {
        CASES(FLOAT16)
    } else if (sizeof(REAL) == 4 && n % 8 == 0 && dtype == BFLOAT16) {
        CASES(BFLOAT16)
    }
#undef CASE
#undef CASES
    return 0;
}

static void IN(sum_block)(const struct task *t, struct block block)
{
    int64_t leaves = largest_power_of_two(t->count), extra = t->count - leaves;
    REAL scale = (REAL)t->coefficients[0];
    for (int64_t low = block.low; low < block.high; low += TILE) {
        REAL left[TILE], right[TILE], tile[TILE];
        int64_t n = least(TILE, block.high - low);
        REAL *place = IN(place_for)(t->out, t->out_dtype, low, tile);
        /* A third input may be the output. */
        REAL *total = t->count > 2 ? tile : place;
        const REAL *x;
        /* Two tensors have the same sum in either order. */
        if (t->balanced && t->count > 2)
            x = IN(branch)(t, 0, leaves, extra, low, n, total);
        else if (IN(sum_few)(t, low, n, place))
            x = total = place;
        else {
            x = IN(read)(t->tensors[0], t->dtypes[0], low, n, left);
            for (int64_t k = 1; k < t->count; k++) {
                const REAL *y = IN(read)(t->tensors[k], t->dtypes[k], low, n, right);
                IN(add)(t, total, x, y, n);
                x = total;
            }
        }
        if (scale != 1) {
            ELEMENTWISE
            for (int64_t i = 0; i < n; i++)
                total[i] = x[i] * scale;
            x = total;
        }
        IN(write)(t->out, t->out_dtype, low, n, x);
        report(t, t->out, t->out_dtype, low, n);
    }
}

/* Copy `n` elements to `to`, times the scale. */
static void IN(copy_run)(const struct task *t, const void *from, int dtype, void *to, int to_dtype,
                         int64_t n)
{
    REAL scale = (REAL)t->coefficients[0];
    if (dtype == to_dtype && scale == 1) {
        memcpy(to, from, (char *)element(to, dtype, n) - (char *)to);
        report(t, to, dtype, 0, n);
        return;
    }
    for (int64_t low = 0; low < n; low += TILE) {
        REAL tile[TILE];
        int64_t few = least(TILE, n - low);
        REAL *product = IN(place_for)(to, to_dtype, low, tile);
        const REAL *x = IN(read)(from, dtype, low, few, product);
        if (scale != 1) {
            ELEMENTWISE
            for (int64_t i = 0; i < few; i++)
                product[i] = x[i] * scale;
            x = product;
        }
        IN(write)(to, to_dtype, low, few, x);
        report(t, to, to_dtype, low, few);
    }
}

static void IN(copy_block)(const struct task *t, struct block block)
{
    int64_t at = block.low - t->bounds[block.segment], room = block.high - block.low;
    int64_t dtype = t->dtypes[block.segment];
    int64_t used = least(room, t->numels[block.segment] - at), n = used > 0 ? used : 0;
    void *part = element(t->tensors[block.segment], dtype, at);
    char *slot = element(t->out, t->out_dtype, block.low);
    if (t->packing) {
        char *padding = element(slot, t->out_dtype, n), *end = element(slot, t->out_dtype, room);
        IN(copy_run)(t, part, dtype, slot, t->out_dtype, n);
        memset(padding, 0, end - padding);
    } else
        IN(copy_run)(t, slot, t->out_dtype, part, dtype, n);
}

/* Opposed vectors of one length have equal factors above 1. Add them before multiplying, since
 * their sum is exact if they nearly cancel: with a fused product, the rounding error of the other
 * product would remain. */
static void IN(blend)(const struct task *t, struct block block, REAL alpha, REAL beta)
{
    int opposed = sizeof(REAL) == 8 && alpha == beta && alpha > 1;
    for (int64_t low = block.low; low < block.high; low += TILE) {
        REAL left[TILE], right[TILE], tile[TILE];
        int64_t n = least(TILE, block.high - low);
        const REAL *x = IN(read)(t->tensors[0], t->dtypes[0], low, n, left);
        const REAL *y = IN(read)(t->tensors[1], t->dtypes[1], low, n, right);
        REAL *total = IN(place_for)(t->out, t->out_dtype, low, tile);
        ELEMENTWISE
        for (int64_t i = 0; i < n; i++)
            total[i] = opposed ? alpha * (x[i] + y[i])
                       : sizeof(REAL) == 4 ? __builtin_fmaf(beta, y[i], alpha * x[i])
                                           : __builtin_fma(beta, y[i], alpha * x[i]);
        IN(write)(t->out, t->out_dtype, low, n, total);
        report(t, t->out, t->out_dtype, low, n);
    }
}
