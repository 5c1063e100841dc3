/* Operations by a processor's own instructions: on x86-64 with AVX2, FMA and F16C, and on aarch64,
 * on which all processors have them. Each operation rounds once, to nearest.
 */
#include <stdint.h>
#include <string.h>

/* Four doubles for the compiler's vector arithmetic, at any address, and results of comparisons. */
typedef double lanes __attribute__((vector_size(32), aligned(8), may_alias));
typedef int64_t masks __attribute__((vector_size(32)));

#ifdef __aarch64__
#include <arm_neon.h>

/* Four doubles, converted from four floats or loaded from four doubles. */
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

static inline void put_quad(double *to, quad from)
{
    vst1q_f64(to, from.low);
    vst1q_f64(to + 2, from.high);
}

static inline quad quad_of_one(double value)
{
    return (quad){vdupq_n_f64(value), vdupq_n_f64(value)};
}

/* sum + u * v */
static inline quad add_product(quad sum, quad u, quad v)
{
    return (quad){vfmaq_f64(sum.low, u.low, v.low), vfmaq_f64(sum.high, u.high, v.high)};
}

static inline quad root_of(quad u)
{
    return (quad){vsqrtq_f64(u.low), vsqrtq_f64(u.high)};
}

/* These convert eight elements. */
static inline void floats_of_halves(float *to, const uint16_t *from)
{
    float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(from));
    vst1q_f32(to, vcvt_f32_f16(vget_low_f16(halves)));
    vst1q_f32(to + 4, vcvt_high_f32_f16(halves));
}

static inline void floats_of_bfloats(float *to, const uint16_t *from)
{
    uint16x8_t bits = vld1q_u16(from);
    vst1q_f32(to, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)));
    vst1q_f32(to + 4, vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16)));
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

static inline void put_quad(double *to, quad from)
{
    _mm256_storeu_pd(to, from);
}

static inline quad quad_of_one(double value)
{
    return _mm256_set1_pd(value);
}

static inline quad add_product(quad sum, quad u, quad v)
{
    return _mm256_fmadd_pd(u, v, sum);
}

static inline quad root_of(quad u)
{
    return _mm256_sqrt_pd(u);
}

static inline void floats_of_halves(float *to, const uint16_t *from)
{
    _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)));
}

static inline void floats_of_bfloats(float *to, const uint16_t *from)
{
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
}

static inline void halves_of_floats(uint16_t *to, const float *from)
{
    __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)to, halves);
}
#endif

/* u * v + w, elementwise. */
static inline lanes fused(lanes u, lanes v, lanes w)
{
    quad sum = add_product(quad_of_double((double *)&w), quad_of_double((double *)&u),
                           quad_of_double((double *)&v));
    put_quad((double *)&w, sum);
    return w;
}

static inline lanes root(lanes u)
{
    put_quad((double *)&u, root_of(quad_of_double((double *)&u)));
    return u;
}
