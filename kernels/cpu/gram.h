/* Dot products of all pairs of n tensors, and their weighted sum. Tensors are read as REAL, which
 * is double only for float64. Products of two floats are exact in double, so the bits do not
 * depend on that.
 */

/* read(), with zeros behind the last element up to a multiple of STEP. */
static const REAL *IN(read_whole)(const struct task *t, int64_t tensor, int64_t at, int64_t n,
                                  REAL *tile)
{
    const REAL *x = IN(read)(t->tensors[tensor], t->dtypes[tensor], at, n, tile);
    int64_t rest = -n & (STEP - 1);
    if (rest == 0)
        return x;
    if (x != tile)
        memcpy(tile, x, n * sizeof *x);
    memset(tile + n, 0, rest * sizeof *tile);
    return tile;
}

/* Adds to sums[i][j] the products of x[i] and y[j], if `own` only for j >= i. Callers pass
 * constants except for the pointers and n, so that the sums stay in registers. An element's place
 * in its block determines the lane that it is added to. */
INLINE void IN(add_products)(const REAL *const *x, const REAL *const *y, int rows, int columns,
                             int own, int quads, int64_t n, double (*sums)[GROUP][LANES])
{
    quad lanes[4][4][2];
    for (int i = 0; i < rows; i++)
        for (int j = own ? i : 0; j < columns; j++)
            for (int k = 0; k < quads; k++)
                lanes[i][j][k] = quad_of_double(sums[i][j] + 4 * k);
    for (int64_t at = 0; at < n; at += 4 * quads)
        for (int k = 0; k < quads; k++) {
            quad u[4], v[4];
            for (int i = 0; i < rows; i++)
                u[i] = IN(quad_of)(x[i] + at + 4 * k);
            for (int j = 0; j < columns; j++)
                v[j] = own ? u[j] : IN(quad_of)(y[j] + at + 4 * k);
            for (int i = 0; i < rows; i++)
                for (int j = own ? i : 0; j < columns; j++)
                    lanes[i][j][k] = add_product(lanes[i][j][k], u[i], v[j]);
        }
    for (int i = 0; i < rows; i++)
        for (int j = own ? i : 0; j < columns; j++)
            for (int k = 0; k < quads; k++)
                put_quad(sums[i][j] + 4 * k, lanes[i][j][k]);
}

/* Add the products of up to four tensors among themselves. With only one or two tensors, each sum
 * would wait for its last addition, so each entry has two sums in turn. */
static void IN(add_own)(const REAL *const *x, int count, int quads, int64_t n,
                        double (*sums)[GROUP][LANES])
{
    if (quads == 2 && count == 1)
        IN(add_products)(x, x, 1, 1, 1, 2, n, sums);
    else if (quads == 2)
        IN(add_products)(x, x, 2, 2, 1, 2, n, sums);
    else if (count == 1)
        IN(add_products)(x, x, 1, 1, 1, 1, n, sums);
    else if (count == 2)
        IN(add_products)(x, x, 2, 2, 1, 1, n, sums);
    else if (count == 3)
        IN(add_products)(x, x, 3, 3, 1, 1, n, sums);
    else
        IN(add_products)(x, x, 4, 4, 1, 1, n, sums);
}

/* Add the products of up to four tensors with up to GROUP others, two of the others at a time. */
static void IN(add_others)(const REAL *const *x, int rows, const REAL *const *y, int columns,
                           int64_t n, double (*sums)[GROUP][LANES])
{
#define CASE(ROWS)                                                                                \
    case ROWS:                                                                                    \
        if (columns - j > 1)                                                                      \
            IN(add_products)(x, y + j, ROWS, 2, 0, 1, n, part);                                   \
        else                                                                                      \
            IN(add_products)(x, y + j, ROWS, 1, 0, 1, n, part);                                   \
        break;
    for (int j = 0; j < columns; j += 2) {
        double(*part)[GROUP][LANES] = (double(*)[GROUP][LANES])(sums[0] + j);
        switch (rows) {
            CASE(1)
            CASE(2)
            CASE(3)
            CASE(4)
        }
    }
#undef CASE
}

/* Compute a block's products of the tensors of two groups, which may be the same group. */
static void IN(gram_groups)(const struct task *t, struct block block, int64_t first, int64_t second)
{
    REAL tiles[2 * GROUP][STRIP];
    const REAL *x[2 * GROUP];
    double sums[GROUP][GROUP][LANES];
    int own = first == second, quads = t->count < 3 ? 2 : 1;
    int rows = least(GROUP, t->count - first), columns = least(GROUP, t->count - second);
    for (int i = 0; i < rows; i++)
        memset(sums[i], 0, columns * sizeof sums[i][0]);
    for (int64_t low = block.low; low < block.high; low += STRIP) {
        int64_t n = least(STRIP, block.high - low);
        for (int i = 0; i < rows; i++)
            x[i] = IN(read_whole)(t, first + i, low, n, tiles[i]);
        for (int j = 0; j < columns && !own; j++)
            x[GROUP + j] = IN(read_whole)(t, second + j, low, n, tiles[GROUP + j]);
        for (int i = 0; i < rows; i += 4) {
            int few = least(4, rows - i), j = own ? i + few : 0;
            if (own)
                IN(add_own)(x + i, few, quads, n, (double(*)[GROUP][LANES])(sums[i] + i));
            IN(add_others)(x + i, few, x + (own ? j : GROUP), columns - j, n,
                           (double(*)[GROUP][LANES])(sums[i] + j));
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = own ? i : 0; j < columns; j++) {
            double *sum = entry(t, block.number, first + i, second + j);
            *sum = 0;
            for (int k = 0; k < 4 * quads; k++)
                *sum += sums[i][j][k];
        }
}

static void IN(gram_block)(const struct task *t, struct block block)
{
    for (int64_t first = 0; first < t->count; first += GROUP)
        for (int64_t second = first; second < t->count; second += GROUP)
            IN(gram_groups)(t, block, first, second);
}

/* Adds to `total` the tensors x times their factors, in order. */
static void IN(add_weighted)(double *total, const REAL *const *x, const double *factors, int count,
                             int64_t n)
{
    for (int64_t at = 0; at < n; at += STEP) {
        quad sums[STEP / 4];
        for (int j = 0; j < STEP / 4; j++)
            sums[j] = quad_of_double(total + at + 4 * j);
        for (int k = 0; k < count; k++) {
            quad factor = quad_of_one(factors[k]);
            /* The next strip, since hardware prefetching falls behind on eight tensors. */
            __builtin_prefetch(x[k] + at + STRIP);
            for (int j = 0; j < STEP / 4; j++)
                sums[j] = add_product(sums[j], factor, IN(quad_of)(x[k] + at + 4 * j));
        }
        for (int j = 0; j < STEP / 4; j++)
            put_quad(total + at + 4 * j, sums[j]);
    }
}

static void IN(weigh_block)(const struct task *t, struct block block)
{
    const double *factors = t->coefficients + t->count * block.segment;
    for (int64_t low = block.low; low < block.high; low += STRIP) {
        double total[STRIP];
        int64_t n = least(STRIP, block.high - low);
        /* Adding the first product to -0 leaves it unchanged, even the sign of a zero. */
        for (int i = 0; i < STRIP; i++)
            total[i] = -0.0;
        for (int64_t first = 0; first < t->count; first += GROUP) {
            REAL tiles[GROUP][STRIP];
            const REAL *x[GROUP];
            int few = least(GROUP, t->count - first);
            for (int k = 0; k < few; k++)
                x[k] = IN(read_whole)(t, first + k, low, n, tiles[k]);
            IN(add_weighted)(total, x, factors + first, few, n);
        }
        write_double(t->out, t->out_dtype, low, n, total);
        report(t, t->out, t->out_dtype, low, n);
    }
}
