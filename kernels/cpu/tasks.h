/* What kernels/cpu/native.c's functions are told to do: structs of 8-byte fields, as kernels/cpu/native.py
 * packs them and kernels/_recall.c fills them in anew.
 *
 * dtypes: as in the enum of native.h. found_inf: set to 1 where the output holds an Inf or NaN, else
 * left; or NULL. threads: at most so many.
 */
#include <stdint.h>

/* Up to so many elements are not worth a second thread. */
enum { ALONE = 32768 };

struct sum {
    const void *const *inputs;
    int64_t count, dtype;
    void *out;
    int64_t out_dtype, numel;
    double scale;
    float *found_inf;
    int64_t threads;
};

struct list {
    void *const *tensors;
    int64_t dtype;
    const int64_t *numels, *bounds;
    int64_t count;
    void *buffer;
    int64_t buffer_dtype, packing;
    double scale;
    float *found_inf;
    int64_t threads;
};

struct blend {
    const void *a;
    int64_t a_dtype;
    const void *b;
    int64_t b_dtype;
    void *out;
    int64_t out_dtype;
    const int64_t *bounds;
    int64_t segments;
    const double *coefficients;
    float *found_inf;
    int64_t threads;
};

struct pair {
    const void *a;
    int64_t a_dtype;
    const void *b;
    int64_t b_dtype;
    const int64_t *bounds;
    int64_t segments;
    double *partials, *rows;
    int64_t threads;
};
