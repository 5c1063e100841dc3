/* The struct that kernels/cpu/native.py passes to native.c, and constants that Python and C share.
 * native.py has the same fields in the same order: tests/kernels/cpu/test_native.py compares them.
 */
#include <stdint.h>

/* Elements per partial result of a dot product. */
#define BLOCK 8192
/* The square root of the least normal double: a vector with a smaller squared norm has no usable
 * direction. */
#define TINY 0x1p-511
/* Float would lose a blend whose square is below this fraction of |alpha a|^2 + |beta b|^2. */
#define CANCELLED 0x1p-6
/* If vectors may cancel further, their Gram matrix must be computed in double-double. */
#define SPREAD_LIMIT 0x1p30
/* Coefficients in this range, times any float32, stay within float32's exponents. */
#define SAFE_LOW 0x1p-60
#define SAFE_HIGH 0x1p60

/* GOMP_parallel; omp_get_thread_num and omp_get_num_threads. */
typedef void run_in_team(void (*start)(void *), void *argument, unsigned threads, unsigned flags);
typedef int count_threads(void);

/* Every field has 8 bytes. */
struct task {
    /* The number of the function in reading.h, and its scalars: a scale, alpha and beta, or the
     * factors of the squared norms. */
    int64_t function;
    double first;
    double second;
    /* The inputs, which `copy` out of a buffer writes; their dtypes; how many there are. */
    void *const *tensors;
    const int64_t *dtypes;
    int64_t count;
    /* The output. In `copy` it is the buffer, which may be read instead. */
    void *out;
    int64_t out_dtype;
    /* The starts of segments in `out`, or in a and b, and the end of the last one. */
    const int64_t *bounds;
    int64_t segments;
    /* Only for `copy`: the tensors' numbers of elements; whether it copies into the buffer. */
    const int64_t *numels;
    int64_t packing;
    /* Only for `sum_n`: whether to add as a balanced tree; the dtype that each sum of two is
     * rounded to. */
    int64_t balanced;
    int64_t accumulate;
    /* The dots of `combine`, the coefficients of `weighted_sum`. */
    double *table;
    /* For `gram` and `adasum_coefficients`: whether matrices are double-double. */
    int64_t precise;
    /* For `adasum_coefficients`: one spread per segment, or NULL; how many matrices each segment
     * has; the tree's rows (left, right, p, q). */
    double *spread;
    int64_t tables;
    const double *tree;
    /* Set to 1 if a value written is not finite, or NULL. */
    float *found_inf;
    /* The maximum number of threads, and the functions that run them. */
    int64_t threads;
    run_in_team *parallel;
    count_threads *thread_num;
    count_threads *num_threads;
    /* Set by `run_task`. Factors of the inputs; `gram` writes here whether each segment's vectors
     * may cancel. */
    double *coefficients;
    /* (a.b, |a|^2, |b|^2) of each block, and of each segment. For `gram`, partials are the pairs
     * of each block; for `adasum_coefficients`, working memory. */
    double *partials;
    double *dots;
};
