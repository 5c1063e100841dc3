/* What kernels/cpu/native.c does with a processor's own instructions: x86-64's with AVX2, FMA and F16C,
 * and aarch64's, of which all have these. Each rounds once, to nearest.
 */
#include <stdint.h>
#include <string.h>

#ifdef __aarch64__
#include <arm_neon.h>

/* Four doubles, of four of either kind. */
typedef struct {
    float64x2_t low, high;
} quad;

static inline quad quad_of_float(const float *from)
{
    float32x4_t four = vld1q_f32(from);
    return (quad){vcvt_f64_f32(vget_low_f32(four)), vcvt_high_f64_f32(four)};
}

static inline quad quad_of_double(const double *from)
{
    return (quad){vld1q_f64(from), vld1q_f64(from + 2)};
}

/* sum + u * v */
static inline quad add_product(quad sum, quad u, quad v)
{
    return (quad){vfmaq_f64(sum.low, u.low, v.low), vfmaq_f64(sum.high, u.high, v.high)};
}

/* Eight of each. */
static inline void floats_of_halves(float *to, const uint16_t *from)
{
    float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(from));
    vst1q_f32(to, vcvt_f32_f16(vget_low_f16(halves)));
    vst1q_f32(to + 4, vcvt_high_f32_f16(halves));
}

static inline void halves_of_floats(uint16_t *to, const float *from)
{
    float16x4_t low = vcvt_f16_f32(vld1q_f32(from));
    vst1q_u16(to, vreinterpretq_u16_f16(vcvt_high_f16_f32(low, vld1q_f32(from + 4))));
}

static inline uint16_t half_of_double(double from)
{
    __fp16 half = from;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

#else
#include <immintrin.h>

typedef __m256d quad;

static inline quad quad_of_float(const float *from)
{
    return _mm256_cvtps_pd(_mm_loadu_ps(from));
}

static inline quad quad_of_double(const double *from)
{
    return _mm256_loadu_pd(from);
}

static inline quad add_product(quad sum, quad u, quad v)
{
    return _mm256_fmadd_pd(u, v, sum);
}

static inline void floats_of_halves(float *to, const uint16_t *from)
{
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)));
}

static inline void halves_of_floats(uint16_t *to, const float *from)
{
    __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)to, halves);
}
#endif
