/* What kernels/cpu/native.py passes to native.c, and the numbers that Python and C share. native.py
 * has the same fields in the same order: tests/kernels/cpu/test_native.py compares them.
 */
#include <stdint.h>

/* Elements whose dot products are one partial result. */
#define BLOCK 8192
/* The square root of the least normal double: a squared norm below it has no direction. */
#define TINY 0x1p-511
/* A blend whose square is below this fraction of |alpha a|^2 + |beta b|^2 is lost in float. */
#define CANCELLED 0x1p-6
/* Where vectors may cancel further, their Gram matrix is to be taken in double-double. */
#define SPREAD_LIMIT 0x1p30
/* Coefficients inside this range times any float32 lose nothing to float32's exponent. */
#define SAFE_LOW 0x1p-60
#define SAFE_HIGH 0x1p60

/* GOMP_parallel; omp_get_thread_num and omp_get_num_threads. */
typedef void run_in_team(void (*start)(void *), void *argument, unsigned threads, unsigned flags);
typedef int count_threads(void);

/* 8 bytes each. */
struct task {
    /* What is read or, by `copy` out of a buffer, written, and how many. */
    void *const *tensors;
    const int64_t *dtypes;
    int64_t count;
    /* What is written: of `copy` the buffer, which it may read. */
    void *out;
    int64_t out_dtype;
    /* The elements of `out`, or of a and b, where segments start, and end. */
    const int64_t *bounds;
    int64_t segments;
    /* Of `copy` alone: the tensors' elements; whether into the buffer. */
    const int64_t *numels;
    int64_t packing;
    /* Of `sum_n` alone: whether as a balanced tree; the dtype to which each sum of two is rounded. */
    int64_t balanced;
    int64_t accumulate;
    /* Of `gram` room: whether each segment's vectors may cancel. */
    double *coefficients;
    /* (a.b, |a|^2, |b|^2) of each block and each segment; of `gram` the pairs of each block, and of
     * `adasum_coefficients` room to work in. */
    double *partials;
    double *dots;
    /* Of `gram` and `adasum_coefficients`: whether matrices are double-double. */
    int64_t precise;
    /* Of `adasum_coefficients`: a number a segment, or none; how many matrices one has, and rows
     * (left, right, p, q). */
    double *spread;
    int64_t tables;
    const double *tree;
    /* What to report of the values written: set to 1, and raised. */
    float *found_inf;
    uint64_t *largest;
    /* The most that may be used, and what runs them. */
    int64_t threads;
    run_in_team *parallel;
    count_threads *thread_num;
    count_threads *num_threads;
};
