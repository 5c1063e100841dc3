/* Double-double arithmetic (Dekker, Knuth), four numbers at a time; precise Gram matrices where
 * float64 is not enough; and the replay of an Adasum tree on Gram matrices.
 */

/* Unevaluated sums high + low; low is at most half a unit in the last place of high. */
struct wide {
    lanes high, low;
};

static inline lanes all(double value)
{
    return (lanes){value, value, value, value};
}

/* The sum of two numbers, either of which may be the larger one. */
static inline struct wide two_sum(lanes a, lanes b)
{
    lanes sum = a + b, other = sum - a;
    return (struct wide){sum, (a - (sum - other)) + (b - other)};
}

static inline struct wide normal(lanes high, lanes low)
{
    lanes sum = high + low;
    return (struct wide){sum, low - (sum - high)};
}

/* The error is 2^-105 of the summands, which is accurate enough for sums of dot products. */
static inline struct wide plus(struct wide a, struct wide b)
{
    struct wide sum = two_sum(a.high, b.high);
    return normal(sum.high, sum.low + (a.low + b.low));
}

static inline struct wide times(struct wide a, struct wide b)
{
    lanes high = a.high * b.high, low = fused(a.high, b.high, -high);
    return normal(high, low + (a.high * b.low + a.low * b.high));
}

static inline struct wide negative(struct wide a)
{
    return (struct wide){-a.high, -a.low};
}

static inline struct wide over(struct wide a, struct wide b)
{
    lanes first = a.high / b.high;
    struct wide rest = plus(a, negative(times((struct wide){first, all(0)}, b)));
    lanes second = rest.high / b.high;
    rest = plus(rest, negative(times((struct wide){second, all(0)}, b)));
    struct wide both = normal(first, second);
    return plus(both, (struct wide){rest.high / b.high, all(0)});
}

static inline lanes choose(masks where, lanes one, lanes other)
{
    return (lanes)((where & (masks)one) | (~where & (masks)other));
}

static inline struct wide choose_wide(masks where, struct wide one, struct wide other)
{
    return (struct wide){choose(where, one.high, other.high), choose(where, one.low, other.low)};
}

static inline lanes magnitude(lanes a)
{
    return choose(a < 0, -a, a);
}

/* Whether vectors of a segment may cancel beyond SPREAD_LIMIT, according to its matrix of float64
 * sums, whose low parts are overwritten. They cannot if the matrix of their directions has no
 * eigenvalue below n / SPREAD_LIMIT: if the matrix still has a Cholesky factor when that fraction
 * is subtracted from its diagonal. For a matrix that is not finite the answer has no meaning. */
static int may_cancel(const struct task *t, double *matrix)
{
    int64_t size = t->count;
    for (int64_t i = 0; i < size; i++) {
        double norm = matrix[(i * size + i) * 2];
        for (int64_t j = i; j < size; j++)
            matrix[(i * size + j) * 2 + 1] = matrix[(i * size + j) * 2];
        matrix[(i * size + i) * 2 + 1] = norm == 0 ? 1 : norm * (1 - size / SPREAD_LIMIT);
    }
    for (int64_t k = 0; k < size; k++) {
        const double *row = matrix + k * size * 2 + 1;
        if (row[k * 2] <= 0)
            return 1;
        for (int64_t i = k + 1; i < size; i++)
            for (int64_t j = i; j < size; j++)
                matrix[(i * size + j) * 2 + 1] -= row[i * 2] / row[k * 2] * row[j * 2];
    }
    return 0;
}

/* Whether `gram` has found that a segment's matrix needs double-double. */
static int is_chosen(const struct task *t, int64_t segment)
{
    return t->coefficients[segment] != 0;
}

/* Add the products of n elements of x and y to the sums; n is a multiple of STEP. */
static void add_precisely(struct wide *sums, const double *x, const double *y, int64_t n)
{
    for (int64_t at = 0; at < n; at += 8)
        for (int k = 0; k < 2; k++) {
            lanes u = *(const lanes *)(x + at + 4 * k), v = *(const lanes *)(y + at + 4 * k);
            lanes product = u * v;
            struct wide sum = two_sum(sums[k].high, product);
            sums[k].high = sum.high;
            sums[k].low += sum.low + fused(u, v, -product);
        }
}

/* The first tensor that has the same bits as `tensor` in a block. */
static int64_t first_alike(const struct task *t, struct block block, int64_t tensor)
{
    int dtype = t->dtypes[tensor];
    const char *mine = element(t->tensors[tensor], dtype, block.low);
    int64_t bytes = (const char *)element(t->tensors[tensor], dtype, block.high) - mine;
    for (int64_t i = 0; i < tensor; i++)
        if (memcmp(element(t->tensors[i], dtype, block.low), mine, bytes) == 0)
            return i;
    return tensor;
}

/* Compute the pairs of a block one after the other. Vectors that need precision are often equal:
 * equal ones share the products of the first of them. */
static void precise_block(const struct task *t, struct block block)
{
    double left[STRIP], right[STRIP];
    int64_t alike[t->count];
    if (!is_chosen(t, block.segment))
        return;
    for (int64_t i = 0; i < t->count; i++)
        alike[i] = first_alike(t, block, i);
    for (int64_t i = 0; i < t->count; i++)
        for (int64_t j = i; j < t->count; j++) {
            double *pair = entry(t, block.number, i, j);
            if (alike[i] < i || alike[j] < j) {
                int64_t a = least(alike[i], alike[j]), b = alike[i] + alike[j] - a;
                memcpy(pair, entry(t, block.number, a, b), 2 * sizeof *pair);
                continue;
            }
            struct wide sums[2] = {{all(0), all(0)}, {all(0), all(0)}};
            for (int64_t low = block.low; low < block.high; low += STRIP) {
                int64_t n = least(STRIP, block.high - low);
                const double *x = read_whole_double(t, i, low, n, left);
                const double *y = i == j ? x : read_whole_double(t, j, low, n, right);
                add_precisely(sums, x, y, n + (-n & (STEP - 1)));
            }
            struct wide sum = plus(sums[0], sums[1]), whole = {all(0), all(0)};
            for (int k = 0; k < 4; k++)
                whole = plus(whole, (struct wide){all(sum.high[k]), all(sum.low[k])});
            pair[0] = whole.high[0];
            pair[1] = whole.low[0];
        }
}

/* Add a block's entry to an entry of a matrix. */
static void add_entry(double *to, const double *from, int precise)
{
    if (!precise) {
        *to += *from;
        return;
    }
    struct wide sum = plus((struct wide){all(to[0]), all(to[1])},
                           (struct wide){all(from[0]), all(from[1])});
    to[0] = sum.high[0];
    to[1] = sum.low[0];
}

/* The state of four segments while their tree is replayed: the matrix of the remaining vectors'
 * dot products, their sums of |c_i| |g_i| (lengths), and for each leaf its factor and the place of
 * the vector that contains it. */
struct replay {
    struct wide *matrix, *factors;
    lanes *lengths;
    int64_t *places;
    lanes widest;
};

/* Add up all tables' matrices of four segments; beyond the last segment, repeat the last one. */
static void add_tables(const struct task *t, int64_t segment, struct wide *matrix)
{
    int64_t size = t->count, step = t->precise ? 2 : 1, entries = size * size * step;
    int64_t last = t->segments - 1 - segment, b = least(1, last) * entries;
    int64_t c = least(2, last) * entries, d = least(3, last) * entries;
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = i; j < size; j++) {
            struct wide sum = {all(0), all(0)};
            const double *from = (const double *)t->tensors[0] + segment * entries;
            from += (i * size + j) * step;
            for (int64_t k = 0; k < t->tables; k++, from += t->segments * entries) {
                struct wide part = {{from[0], from[b], from[c], from[d]}, all(0)};
                if (t->precise)
                    part.low = (lanes){from[1], from[b + 1], from[c + 1], from[d + 1]};
                sum = plus(sum, part);
            }
            matrix[i * size + j] = matrix[j * size + i] = sum;
        }
}

/* Whether the vector at a place is no longer than the rounding errors of its matrix. */
static inline masks is_lost(const struct task *t, const struct replay *r, int64_t place)
{
    lanes length = r->lengths[place], norm = r->matrix[place * t->count + place].high;
    return norm < length * length * all(t->precise ? 0x1p-92 : 0x1p-46);
}

/* The factors of the vectors at `left` and `right` in their sum: 1 - share d / A, or 1 for a
 * vector without a direction, whose squared norm A is tiny or within its matrix's rounding errors.
 * Parallel vectors, such as vectors of one element, get their weighted mean: their d / A may be
 * arbitrarily large, and a small result would be the sum of large terms. Only a precise matrix
 * tells parallel vectors from nearly parallel ones. */
static void weigh(const struct task *t, const struct replay *r, const double *joined,
                  struct wide *factors)
{
    int64_t left = joined[0], right = joined[1], ends[] = {left, right};
    struct wide one = {all(1), all(0)}, shares[2], norms[2];
    struct wide dot = r->matrix[left * t->count + right];
    struct wide p = {all(joined[2]), all(0)}, q = {all(joined[3]), all(0)};
    masks zeros[2];
    for (int i = 0; i < 2; i++) {
        shares[i] = over(i ? q : p, two_sum(p.high, q.high));
        norms[i] = r->matrix[ends[i] * t->count + ends[i]];
        zeros[i] = (norms[i].high < TINY) | is_lost(t, r, ends[i]);
        factors[i] = plus(one, negative(times(shares[i], over(dot, norms[i]))));
        factors[i] = choose_wide(zeros[i], one, factors[i]);
    }
    if (t->precise) {
        lanes a = r->lengths[left], b = r->lengths[right];
        struct wide apart = plus(times(norms[0], norms[1]), negative(times(dot, dot)));
        lanes lost = all(0x1p-100) * (a * a * norms[1].high + b * b * norms[0].high);
        masks parallel = (magnitude(apart.high) <= lost) & ~(zeros[0] | zeros[1]);
        for (int i = 0; i < 2; i++)
            factors[i] = choose_wide(parallel, shares[i], factors[i]);
    }
}

/* Replace the vector at `left` by alpha times itself plus beta times the vector at `right`. */
static void join(struct replay *r, int64_t size, int64_t left, int64_t right, struct wide alpha,
                 struct wide beta)
{
    struct wide *row = r->matrix + left * size, *other = r->matrix + right * size;
    struct wide dot = row[right], two = {all(2), all(0)};
    struct wide norm = plus(times(times(alpha, alpha), row[left]),
                            times(times(beta, beta), other[right]));
    norm = plus(norm, times(two, times(times(alpha, beta), dot)));
    for (int64_t j = 0; j < size; j++)
        if (r->places[j] == j && j != left && j != right)
            row[j] = r->matrix[j * size + left] =
                plus(times(alpha, row[j]), times(beta, other[j]));
    row[left] = norm;
    for (int64_t i = 0; i < size; i++) {
        if (r->places[i] == left)
            r->factors[i] = times(alpha, r->factors[i]);
        if (r->places[i] == right) {
            r->factors[i] = times(beta, r->factors[i]);
            r->places[i] = left;
        }
    }
    lanes length = magnitude(alpha.high) * r->lengths[left] +
                   magnitude(beta.high) * r->lengths[right];
    r->lengths[left] = length;
    lanes reach = length * length;
    lanes spread = choose(norm.high > 0, reach / norm.high, all(INFINITY));
    spread = choose(reach < TINY, all(1), spread);
    r->widest = choose(spread > r->widest, spread, r->widest);
}

static void replay_segments(const struct task *t, int64_t segment, struct replay *r)
{
    int64_t size = t->count;
    int64_t last = 0;
    lanes finite = all(0);
    r->widest = all(1);
    add_tables(t, segment, r->matrix);
    for (int64_t i = 0; i < size; i++) {
        r->places[i] = i;
        r->factors[i] = (struct wide){all(1), all(0)};
        lanes norm = r->matrix[i * size + i].high;
        r->lengths[i] = root(choose(norm > 0, norm, all(0)));
        for (int64_t j = i; j < size; j++)
            /* 0 for finite numbers, NaN for NaN and Inf. */
            finite += r->matrix[i * size + j].high * 0;
    }
    for (const double *joined = t->tree; joined < t->tree + 4 * (size - 1); joined += 4) {
        struct wide factors[2];
        weigh(t, r, joined, factors);
        join(r, size, joined[0], joined[1], factors[0], factors[1]);
        last = joined[0];
    }
    /* If the result is zero, rounded coefficients would give it a direction. */
    masks nothing = is_lost(t, r, last);
    for (int64_t i = 0; t->precise && i < size; i++)
        r->factors[i].high = choose(nothing, all(0), r->factors[i].high);
    for (int k = 0; k < 4 && segment + k < t->segments; k++) {
        for (int64_t i = 0; i < size; i++)
            ((double *)t->out)[(segment + k) * size + i] = r->factors[i].high[k] + finite[k];
        if (t->spread)
            t->spread[segment + k] = r->widest[k] + finite[k];
    }
}
