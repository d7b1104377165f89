// Float32 kernels for training a small gated-delta-net hybrid on a CPU. Called through ctypes from kernels.py.
//
// All arrays are dense and row-major; B = batch, T = tokens, and the last axis is contiguous.
//
//   attention_*      causal softmax attention with grouped heads
//   delta_rule_*     gated delta rule, forward and backward
//   conv_silu_*      depthwise causal convolution followed by SiLU
//   rms_norm_*       y = x / rms(x) * (offset + w)
//   gated_norm_*     y = x / rms(x) * w * silu(z)
//   swiglu_*         y = silu(gate) * up
//
// Gradients of weights come back as partial sums, one row per block of work; the caller adds the rows. The result
// therefore does not depend on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <omp.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace {

// A matrix product keeps the sums of ROWS rows of two vectors in registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8;
#else
constexpr int LANES = 8, ROWS = 4;
#endif
constexpr int CHUNK = 32;  // tokens between two stored states

typedef float Vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec splat(float x) { return x - Vec{}; }

// Products of many decays run through denormal numbers on their way to zero; those cost a hundred times more than
// zeros on some CPUs. The caller's rounding mode is put back at the end of the scope.
struct FlushDenormals {
#if defined(__SSE__)
    unsigned saved = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(saved | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(saved); }
#endif
};

// One zeroed block of memory per thread, cut into 64-byte aligned pieces.
class Scratch {
  public:
    explicit Scratch(size_t floats) : base_(static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64))) {
        std::memset(base_, 0, (floats * 4 + 63) / 64 * 64);
    }
    ~Scratch() { std::free(base_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    float* take(size_t floats) {
        float* piece = base_ + used_;
        used_ += (floats + 15) / 16 * 16;
        return piece;
    }

  private:
    float* base_;
    size_t used_ = 0;
};

// Which part of the square left factor A[m, k] is not zero.
enum class Part { full, lower /* k <= m */, upper /* k >= m */ };

// C[m, n..n+WIDTH*LANES) (+)= sum_k A[m, k] B[k, n..] for ROWS rows from m0. A is addressed by two strides, so a
// transposed left factor costs nothing.
template <int ROWS, int WIDTH>
inline void product_block(float* C, int ldc, const float* A, int stride_m, int stride_k, const float* B, int ldb,
                          int k_begin, int k_end, bool accumulate) {
    Vec sum[ROWS][WIDTH];
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) sum[r][w] = accumulate ? load(C + r * ldc + w * LANES) : Vec{};
    for (int k = k_begin; k < k_end; k++) {
        Vec b[WIDTH];
        for (int w = 0; w < WIDTH; w++) b[w] = load(B + (size_t)k * ldb + w * LANES);
        for (int r = 0; r < ROWS; r++) {
            const Vec a = splat(A[(size_t)r * stride_m + (size_t)k * stride_k]);
            for (int w = 0; w < WIDTH; w++) sum[r][w] += a * b[w];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < WIDTH; w++) store(C + r * ldc + w * LANES, sum[r][w]);
}

// C[M, N] (+)= A[M, K] B[K, N] with A[m, k] at A + m * stride_m + k * stride_k. M is a multiple of ROWS, N of 16.
void product(float* C, int ldc, const float* A, int stride_m, int stride_k, const float* B, int ldb, int M, int N,
             int K, bool accumulate, Part part = Part::full) {
    for (int m = 0; m < M; m += ROWS) {
        const int k_begin = part == Part::upper ? m : 0;
        const int k_end = part == Part::lower ? std::min(K, m + ROWS) : K;
        const float* a = A + (size_t)m * stride_m;
        float* c = C + (size_t)m * ldc;
        int n = 0;
        for (; n + 2 * LANES <= N; n += 2 * LANES)
            product_block<ROWS, 2>(c + n, ldc, a, stride_m, stride_k, B + n, ldb, k_begin, k_end, accumulate);
        for (; n < N; n += LANES)
            product_block<ROWS, 1>(c + n, ldc, a, stride_m, stride_k, B + n, ldb, k_begin, k_end, accumulate);
    }
}

// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2, e^r by its Taylor polynomial: relative error below 1e-6
// for |x| < 40. Inlined into vector loops, where a call of the library's exp would save and restore every register.
inline float fast_exp(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const int n = (int)(x * 1.442695041f + (x < 0 ? -0.5f : 0.5f));
    const float r = x - n * 0.6931471806f;
    const float tail = 0.5f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f))));
    return (1.0f + r * (1.0f + r * tail)) * __builtin_bit_cast(float, (n + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

inline float dot(const float* a, const float* b, int n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// out[c, r] = in[r, c] for a square of LANES: halves, quarters, ... of neighbouring rows change places.
template <int SPAN>
inline void swap_blocks(Vec* v) {
    if constexpr (SPAN > 0) {
        typedef int Index __attribute__((vector_size(LANES * 4)));
        Index low, high;  // of a pair of rows (a, b): blocks a0 b0 a2 b2 ... and a1 b1 a3 b3 ...
        for (int i = 0; i < LANES; i++) {
            low[i] = i & SPAN ? LANES + i - SPAN : i;
            high[i] = i & SPAN ? LANES + i : i + SPAN;
        }
        for (int r = 0; r < LANES; r++)
            if (!(r & SPAN)) {
                const Vec a = v[r], b = v[r + SPAN];
                v[r] = __builtin_shuffle(a, b, low);
                v[r + SPAN] = __builtin_shuffle(a, b, high);
            }
        swap_blocks<SPAN / 2>(v);
    }
}

inline void transpose_square(float* out, int ldo, const float* in, int ldi) {
    Vec v[LANES];
    for (int r = 0; r < LANES; r++) v[r] = load(in + (size_t)r * ldi);
    swap_blocks<LANES / 2>(v);
    for (int r = 0; r < LANES; r++) store(out + (size_t)r * ldo, v[r]);
}

// out[c, r] = in[r, c]; rows and cols are multiples of 16.
void transpose(float* out, const float* in, int rows, int cols) {
    for (int r = 0; r < rows; r += LANES)
        for (int c = 0; c < cols; c += LANES)
            transpose_square(out + (size_t)c * rows + r, rows, in + (size_t)r * cols + c, cols);
}

// out = x * rsqrt(|x|^2 + 1e-6) * scale; returns the rsqrt.
inline float unit(const float* x, float* out, int n, float scale) {
    const float inverse = 1.0f / std::sqrt(dot(x, x, n) + 1e-6f);
    for (int i = 0; i < n; i++) out[i] = x[i] * inverse * scale;
    return inverse;
}

// Gradient of unit(): with y = s r x, dx = s r dy - r^2 x (y . dy).
inline void unit_backward(const float* x, const float* y, float inverse, float scale, const float* dy, float* dx,
                          int n) {
    const float along = inverse * inverse * dot(y, dy, n);
    for (int i = 0; i < n; i++) dx[i] = scale * inverse * dy[i] - along * x[i];
}


// Shapes of one call. qkv rows hold the query heads, then the key heads, then the value heads.
struct Shape {
    int T, key_heads, value_heads, dk, dv, row, chunks;
    int group() const { return value_heads / key_heads; }
    int query_at(int key_head) const { return key_head * dk; }
    int key_at(int key_head) const { return (key_heads + key_head) * dk; }
    int value_at(int value_head) const { return 2 * key_heads * dk + value_head * dv; }
};

// Queries and keys of one chunk of one key head, and their products; shared by the value heads of the group.
// Rows past the end of the sequence are zero, and with decay 1 and beta 0 they change nothing.
struct Keys {
    float *q, *k, *kT;          // [CHUNK, dk] unit vectors (q also times dk^-1/2) and keys [dk, CHUNK]
    float *qk, *kk;             // [CHUNK, CHUNK] q_t . k_s and k_t . k_s
    float q_inverse[CHUNK], k_inverse[CHUNK];

    static size_t floats(int dk) { return 3 * CHUNK * dk + 2 * CHUNK * CHUNK; }
    Keys(Scratch& scratch, int dk)
        : q(scratch.take(CHUNK * dk)), k(scratch.take(CHUNK * dk)), kT(scratch.take(CHUNK * dk)),
          qk(scratch.take(CHUNK * CHUNK)), kk(scratch.take(CHUNK * CHUNK)) {}

    void read(const float* qkv, const Shape& s, int key_head, int n) {
        const float scale = 1.0f / std::sqrt((float)s.dk);
        for (int t = 0; t < n; t++) {
            q_inverse[t] = unit(qkv + (size_t)t * s.row + s.query_at(key_head), q + t * s.dk, s.dk, scale);
            k_inverse[t] = unit(qkv + (size_t)t * s.row + s.key_at(key_head), k + t * s.dk, s.dk, 1.0f);
        }
        std::memset(q + n * s.dk, 0, sizeof(float) * (CHUNK - n) * s.dk);
        std::memset(k + n * s.dk, 0, sizeof(float) * (CHUNK - n) * s.dk);
        transpose(kT, k, CHUNK, s.dk);
        product(qk, CHUNK, q, s.dk, 1, kT, CHUNK, CHUNK, CHUNK, s.dk, false);
        product(kk, CHUNK, k, s.dk, 1, kT, CHUNK, CHUNK, CHUNK, s.dk, false);
    }
};

// Decays of one chunk of one value head. between[t, s] = prod_{s < u <= t} a_u for s <= t, else 0, built by running
// products: a difference of cumulated logarithms would lose digits where a decay is strong.
struct Decays {
    float* between;                      // [CHUNK, CHUNK]
    float from_start[CHUNK];             // prod_{u <= t} a_u
    float to_end[CHUNK];                 // prod_{u > t} a_u
    float beta[CHUNK];
    float whole() const { return from_start[CHUNK - 1]; }

    static size_t floats() { return CHUNK * CHUNK; }
    explicit Decays(Scratch& scratch) : between(scratch.take(CHUNK * CHUNK)) {}

    void read(const float* g, const float* b, int stride, int n) {
        float running = 1.0f;
        for (int t = 0; t < CHUNK; t++) {
            const float a = t < n ? std::exp(g[(size_t)t * stride]) : 1.0f;
            beta[t] = t < n ? b[(size_t)t * stride] : 0.0f;
            from_start[t] = running *= a;
            for (int s = 0; s < CHUNK; s++) between[t * CHUNK + s] = s < t ? between[(t - 1) * CHUNK + s] * a : s == t;
        }
        for (int t = 0; t < CHUNK; t++) to_end[t] = between[(CHUNK - 1) * CHUNK + t];
    }
};

inline void masked(float* out, const float* scores, const float* between) {
    for (int i = 0; i < CHUNK * CHUNK; i++) out[i] = scores[i] * between[i];
}

inline void scaled_rows(float* out, const float* in, const float* factor, int n) {
    for (int t = 0; t < CHUNK; t++)
        for (int i = 0; i < n; i++) out[t * n + i] = factor[t] * in[t * n + i];
}

// out += the t-th row of `weights` (columns from s_begin to s_end) times the rows of `rows`, times sign.
inline void add_rows(float* out, const float* weights, int stride, const float* rows, int s_begin, int s_end, int n,
                     float sign) {
    for (int i = 0; i < n; i += 4 * LANES) {
        const int width = std::min(4, (n - i) / LANES);
        if (width == 4) {
            Vec sum[4] = {};
            for (int s = s_begin; s < s_end; s++) {
                const Vec w = splat(weights[(size_t)s * stride]);
                for (int j = 0; j < 4; j++) sum[j] += w * load(rows + s * n + i + j * LANES);
            }
            for (int j = 0; j < 4; j++) store(out + i + j * LANES, load(out + i + j * LANES) + splat(sign) * sum[j]);
        } else {
            for (int j = 0; j < width; j++) {
                Vec sum{};
                for (int s = s_begin; s < s_end; s++)
                    sum += splat(weights[(size_t)s * stride]) * load(rows + s * n + i + j * LANES);
                store(out + i + j * LANES, load(out + i + j * LANES) + splat(sign) * sum);
            }
        }
    }
}

// Copy n rows of `width` floats that lie `stride` apart, times a factor; zero rows up to a whole tile of CHUNK.
void copy_tile(float* out, const float* in, size_t stride, int n, int width, float factor) {
    for (int t = 0; t < n; t++)
        for (int i = 0; i < width; i++) out[t * width + i] = factor * in[t * stride + i];
    std::memset(out + n * width, 0, sizeof(float) * (CHUNK - n) * width);
}

// Rows and transposed tiles of the keys or values x [T, heads, d] of one head, padded to whole tiles.
struct Tiles {
    float *rows, *columns;  // [tiles, CHUNK, d] and [tiles, d, CHUNK]
    static size_t floats(int tiles, int d) { return 2 * (size_t)tiles * CHUNK * d; }
    Tiles(Scratch& scratch, int tiles, int d)
        : rows(scratch.take((size_t)tiles * CHUNK * d)), columns(scratch.take((size_t)tiles * CHUNK * d)) {}
    void read(const float* x, size_t stride, int T, int d) {
        for (int t0 = 0; t0 < T; t0 += CHUNK) {
            copy_tile(rows + (size_t)t0 * d, x + t0 * stride, stride, std::min(CHUNK, T - t0), d, 1.0f);
            transpose(columns + (size_t)t0 * d, rows + (size_t)t0 * d, CHUNK, d);
        }
    }
};

// Exclude the keys after the query on a tile of scores where both have the same positions.
inline void mask_future(float* scores) {
    for (int t = 0; t < CHUNK; t++)
        for (int s = t + 1; s < CHUNK; s++) scores[t * CHUNK + s] = -1e30f;
}

}  // namespace

extern "C" {

int chunk_tokens() { return CHUNK; }

void set_threads(int n) { omp_set_num_threads(n); }

// Gated delta rule, per value head, state S [dk, dv], S_0 = 0, a_t = exp(g_t), q and k made unit vectors:
//
//     m_t = a_t S_{t-1}^T k_t             what the state already says
//     u_t = v_t - m_t                     the error
//     S_t = a_t S_{t-1} + k_t (beta_t u_t)^T
//     o_t = S_t^T q_t / sqrt(dk)
//
// Computed a chunk at a time. With S the state before the chunk, c_t = prod_{u <= t} a_u, G_ts = prod_{s < u <= t} a_u:
//
//     u_t = v_t - c_t S^T k_t - sum_{s < t} G_ts (k_t . k_s) beta_s u_s          (forward substitution)
//     o_t = c_t S^T q_t + sum_{s <= t} G_ts (q_t . k_s) beta_s u_s
//     S'  = c_C S + sum_s G_Cs k_s (beta_s u_s)^T
//
// qkv [B, T, row], g and beta [B, T, value_heads], out and error (u) [B, T, value_heads, dv],
// states [B, value_heads, chunks, dk, dv]: the state before every chunk.
void delta_rule_forward(const float* qkv, const float* g, const float* beta, float* out, float* error, float* states,
                        int B, int T, int key_heads, int value_heads, int dk, int dv) {
    const int chunks = (T + CHUNK - 1) / CHUNK;
    const Shape s{T, key_heads, value_heads, dk, dv, 2 * key_heads * dk + value_heads * dv, chunks};
    const int width = value_heads * dv;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int kh = 0; kh < key_heads; kh++) {
            const FlushDenormals flush;
            const size_t tile = (size_t)CHUNK * dv;
            Scratch scratch(Keys::floats(dk) + Decays::floats() + CHUNK * CHUNK + (size_t)dk * dv * s.group() +
                            2 * tile + (size_t)CHUNK * dk + 4096);
            Keys keys(scratch, dk);
            Decays decays(scratch);
            float* weights = scratch.take(CHUNK * CHUNK);
            float* all_states = scratch.take((size_t)dk * dv * s.group());
            float* delta = scratch.take(tile);
            float* read = scratch.take(tile);
            float* key_part = scratch.take((size_t)CHUNK * dk);
            for (int c = 0; c < chunks; c++) {
                const int t0 = c * CHUNK, n = std::min(CHUNK, T - t0);
                const float* rows = qkv + ((size_t)b * T + t0) * s.row;
                keys.read(rows, s, kh, n);
                for (int j = 0; j < s.group(); j++) {
                    const int h = kh * s.group() + j;
                    float* state = all_states + (size_t)j * dk * dv;
                    const size_t gate_at = ((size_t)b * T + t0) * value_heads + h;
                    const size_t out_at = ((size_t)b * T + t0) * width + (size_t)h * dv;
                    decays.read(g + gate_at, beta + gate_at, value_heads, n);
                    std::memcpy(states + (((size_t)b * value_heads + h) * chunks + c) * dk * dv, state,
                                sizeof(float) * dk * dv);
                    // u_t and beta_t u_t
                    product(read, dv, keys.k, dk, 1, state, dv, CHUNK, dv, dk, false);
                    masked(weights, keys.kk, decays.between);
                    for (int t = 0; t < CHUNK; t++) {
                        float* d = delta + t * dv;
                        if (t >= n) {
                            std::memset(d, 0, sizeof(float) * dv);
                            continue;
                        }
                        float* u = error + out_at + (size_t)t * width;
                        const float* v = rows + (size_t)t * s.row + s.value_at(h);
                        for (int i = 0; i < dv; i++) u[i] = v[i] - decays.from_start[t] * read[t * dv + i];
                        add_rows(u, weights + t * CHUNK, 1, delta, 0, t, dv, -1.0f);
                        for (int i = 0; i < dv; i++) d[i] = decays.beta[t] * u[i];
                    }
                    // o_t
                    product(read, dv, keys.q, dk, 1, state, dv, CHUNK, dv, dk, false);
                    for (int t = 0; t < CHUNK; t++)
                        for (int i = 0; i < dv; i++) read[t * dv + i] *= decays.from_start[t];
                    masked(weights, keys.qk, decays.between);
                    product(read, dv, weights, CHUNK, 1, delta, dv, CHUNK, dv, CHUNK, true, Part::lower);
                    for (int t = 0; t < n; t++)
                        std::memcpy(out + out_at + (size_t)t * width, read + t * dv, sizeof(float) * dv);
                    // S'
                    scaled_rows(key_part, keys.k, decays.to_end, dk);
                    for (int i = 0; i < dk * dv; i++) state[i] *= decays.whole();
                    product(state, dv, key_part, 1, dk, delta, dv, dk, dv, CHUNK, true);
                }
            }
        }
}

// Backward of the above, chunks last to first. R is the gradient of the state after the chunk, d_t = dL/do_t,
// x_t = beta_t u_t, G and c as above, e_t = dL/dv_t:
//
//     e_t = beta_t y_t,  y_t = G_Ct R^T k_t + sum_{s >= t} G_st (q_s . k_t) d_s - sum_{s > t} G_st (k_s . k_t) e_s
//     dbeta_t = y_t . u_t
//     dq_t = c_t S d_t + sum_{s <= t} G_ts (d_t . x_s) k_s
//     dk_t = G_Ct R x_t + sum_{s >= t} G_st (d_s . x_t) q_s - sum_{s > t} G_st (e_s . x_t) k_s
//            - c_t S e_t - sum_{s < t} G_ts (e_t . x_s) k_s
//     R'   = c_C R + sum_s c_s (q_s d_s^T - k_s e_s^T)
//
// g_u scales every term whose path crosses token u, so dg_u is the sum of these terms:
//
//     dg_u = sum_{s < u <= t} G_ts [(d_t . x_s)(q_t . k_s) - (e_t . x_s)(k_t . k_s)]
//            + sum_{t >= u} c_t (q_t . S d_t - k_t . S e_t) + sum_{s < u} G_Cs (k_s . R x_s) + c_C <S, R>
//
// (cheaper forms of dg exist, but they subtract large numbers, which is noise where the decay is strong.)
// Writes dqkv [B, T, row], dg and dbeta [B, T, value_heads].
void delta_rule_backward(const float* qkv, const float* g, const float* beta, const float* error, const float* states,
                         const float* dout, float* dqkv, float* dg, float* dbeta, int B, int T, int key_heads,
                         int value_heads, int dk, int dv) {
    const int chunks = (T + CHUNK - 1) / CHUNK;
    const Shape s{T, key_heads, value_heads, dk, dv, 2 * key_heads * dk + value_heads * dv, chunks};
    const int width = value_heads * dv;
    const float scale = 1.0f / std::sqrt((float)dk);
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int kh = 0; kh < key_heads; kh++) {
            const FlushDenormals flush;
            const size_t vt = (size_t)CHUNK * dv, kt = (size_t)CHUNK * dk, square = CHUNK * CHUNK;
            const size_t state_size = (size_t)dk * dv;
            Scratch scratch(Keys::floats(dk) + Decays::floats() + 4 * square + (s.group() + 2) * state_size + 5 * vt +
                            6 * kt + 4096);
            Keys keys(scratch, dk);
            Decays decays(scratch);
            float *qkG = scratch.take(square), *kkG = scratch.take(square);
            float *dx = scratch.take(square), *ex = scratch.take(square);  // G_ts (d_t . x_s), G_ts (e_t . x_s), s < t
            float* all_R = scratch.take(state_size * s.group());
            float *stateT = scratch.take(state_size), *RT = scratch.take(state_size);
            float *d = scratch.take(vt), *x = scratch.take(vt), *xT = scratch.take(vt), *y = scratch.take(vt),
                  *e = scratch.take(vt);
            float *dq = scratch.take(kt), *dkey = scratch.take(kt), *Sd = scratch.take(kt), *Se = scratch.take(kt),
                  *Rx = scratch.take(kt), *part = scratch.take(kt);
            for (int c = chunks - 1; c >= 0; c--) {
                const int t0 = c * CHUNK, n = std::min(CHUNK, T - t0);
                const float* rows = qkv + ((size_t)b * T + t0) * s.row;
                float* drows = dqkv + ((size_t)b * T + t0) * s.row;
                keys.read(rows, s, kh, n);
                std::memset(dq, 0, sizeof(float) * kt);
                std::memset(dkey, 0, sizeof(float) * kt);
                for (int j = 0; j < s.group(); j++) {
                    const int h = kh * s.group() + j;
                    float* R = all_R + (size_t)j * state_size;
                    const float* state = states + (((size_t)b * value_heads + h) * chunks + c) * state_size;
                    const size_t gate_at = ((size_t)b * T + t0) * value_heads + h;
                    const size_t out_at = ((size_t)b * T + t0) * width + (size_t)h * dv;
                    decays.read(g + gate_at, beta + gate_at, value_heads, n);
                    transpose(stateT, state, dk, dv);
                    transpose(RT, R, dk, dv);
                    for (int t = 0; t < n; t++) {
                        std::memcpy(d + t * dv, dout + out_at + (size_t)t * width, sizeof(float) * dv);
                        const float* u = error + out_at + (size_t)t * width;
                        for (int i = 0; i < dv; i++) x[t * dv + i] = decays.beta[t] * u[i];
                    }
                    std::memset(d + n * dv, 0, sizeof(float) * (CHUNK - n) * dv);
                    std::memset(x + n * dv, 0, sizeof(float) * (CHUNK - n) * dv);
                    masked(qkG, keys.qk, decays.between);
                    masked(kkG, keys.kk, decays.between);

                    // y_t, e_t, dbeta_t: back substitution
                    product(y, dv, keys.k, dk, 1, R, dv, CHUNK, dv, dk, false);
                    for (int t = 0; t < CHUNK; t++)
                        for (int i = 0; i < dv; i++) y[t * dv + i] *= decays.to_end[t];
                    product(y, dv, qkG, 1, CHUNK, d, dv, CHUNK, dv, CHUNK, true, Part::upper);
                    for (int t = CHUNK - 1; t >= 0; t--) {
                        add_rows(y + t * dv, kkG + t, CHUNK, e, t + 1, CHUNK, dv, -1.0f);
                        for (int i = 0; i < dv; i++) e[t * dv + i] = decays.beta[t] * y[t * dv + i];
                    }
                    for (int t = 0; t < n; t++) {
                        dbeta[gate_at + (size_t)t * value_heads] =
                            dot(y + t * dv, error + out_at + (size_t)t * width, dv);
                        std::memcpy(drows + (size_t)t * s.row + s.value_at(h), e + t * dv, sizeof(float) * dv);
                    }

                    // products with the state, its gradient and the values written
                    product(Sd, dk, d, dv, 1, stateT, dk, CHUNK, dk, dv, false);
                    product(Se, dk, e, dv, 1, stateT, dk, CHUNK, dk, dv, false);
                    product(Rx, dk, x, dv, 1, RT, dk, CHUNK, dk, dv, false);
                    transpose(xT, x, CHUNK, dv);
                    product(dx, CHUNK, d, dv, 1, xT, CHUNK, CHUNK, CHUNK, dv, false);
                    product(ex, CHUNK, e, dv, 1, xT, CHUNK, CHUNK, CHUNK, dv, false);
                    masked(dx, dx, decays.between);
                    masked(ex, ex, decays.between);
                    for (int t = 0; t < CHUNK; t++) ex[t * CHUNK + t] = 0;

                    // dq_t and dk_t
                    for (int t = 0; t < CHUNK; t++)
                        for (int i = 0; i < dk; i++) {
                            const int at = t * dk + i;
                            Sd[at] *= decays.from_start[t];
                            Se[at] *= decays.from_start[t];
                            Rx[at] *= decays.to_end[t];
                            dq[at] += Sd[at];
                            dkey[at] += Rx[at] - Se[at];
                        }
                    product(dq, dk, dx, CHUNK, 1, keys.k, dk, CHUNK, dk, CHUNK, true, Part::lower);
                    product(dkey, dk, dx, 1, CHUNK, keys.q, dk, CHUNK, dk, CHUNK, true, Part::upper);
                    float crossing[CHUNK * CHUNK];  // (ex + ex^T), negated: both key terms in one product
                    for (int t = 0; t < CHUNK; t++)
                        for (int r = 0; r < CHUNK; r++)
                            crossing[t * CHUNK + r] = -(ex[t * CHUNK + r] + ex[r * CHUNK + t]);
                    product(dkey, dk, crossing, CHUNK, 1, keys.k, dk, CHUNK, dk, CHUNK, true);

                    // dg_u
                    float down[CHUNK] = {}, from_state = 0, to_R[CHUNK + 1];
                    const float through = decays.whole() * dot(state, R, (int)state_size);
                    to_R[0] = 0;
                    for (int t = 0; t < CHUNK; t++) to_R[t + 1] = to_R[t] + dot(keys.k + t * dk, Rx + t * dk, dk);
                    for (int t = CHUNK - 1; t >= 0; t--) {  // down[r] = sum over rows >= t of the terms (row, r)
                        from_state += dot(keys.q + t * dk, Sd + t * dk, dk) - dot(keys.k + t * dk, Se + t * dk, dk);
                        float inner = 0;
                        for (int r = 0; r < CHUNK; r++) {
                            const int at = t * CHUNK + r;
                            down[r] += dx[at] * keys.qk[at] - ex[at] * keys.kk[at];
                        }
                        for (int r = 0; r < t; r++) inner += down[r];
                        if (t < n) dg[gate_at + (size_t)t * value_heads] = inner + from_state + to_R[t] + through;
                    }

                    // R'
                    for (size_t i = 0; i < state_size; i++) R[i] *= decays.whole();
                    scaled_rows(part, keys.q, decays.from_start, dk);
                    product(R, dv, part, 1, dk, d, dv, dk, dv, CHUNK, true);
                    for (int t = 0; t < CHUNK; t++)
                        for (int i = 0; i < dk; i++) part[t * dk + i] = -decays.from_start[t] * keys.k[t * dk + i];
                    product(R, dv, part, 1, dk, e, dv, dk, dv, CHUNK, true);
                }
                for (int t = 0; t < n; t++) {
                    const float* row = rows + (size_t)t * s.row;
                    float* drow = drows + (size_t)t * s.row;
                    unit_backward(row + s.query_at(kh), keys.q + t * dk, keys.q_inverse[t], scale, dq + t * dk,
                                  drow + s.query_at(kh), dk);
                    unit_backward(row + s.key_at(kh), keys.k + t * dk, keys.k_inverse[t], 1.0f, dkey + t * dk,
                                  drow + s.key_at(kh), dk);
                }
            }
        }
}

// Causal attention, with scale = d^-1/2; every key head serves heads / key_heads consecutive query heads:
//     lse_t = log sum_{s <= t} exp(scale q_t . k_s),   p_ts = exp(scale q_t . k_s - lse_t),
//     o_t = sum_{s <= t} p_ts v_s
// q and out [B, T, heads, d]; k and v [B, T, key_heads, d]; lse [B, heads, T].
void attention_forward(const float* q, const float* k, const float* v, float* out, float* lse, int B, int T, int heads,
                       int key_heads, int d) {
    const int tiles = (T + CHUNK - 1) / CHUNK, group = heads / key_heads;
    const size_t q_row = (size_t)heads * d, k_row = (size_t)key_heads * d, tile = (size_t)CHUNK * d;
    const float scale = 1.0f / std::sqrt((float)d);
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int kh = 0; kh < key_heads; kh++) {
            const FlushDenormals flush;
            Scratch scratch(2 * Tiles::floats(tiles, d) + (size_t)tiles * CHUNK * CHUNK + 2 * tile + 1024);
            Tiles keys(scratch, tiles, d), values(scratch, tiles, d);
            float* scores = scratch.take((size_t)tiles * CHUNK * CHUNK);
            float *query = scratch.take(tile), *sum = scratch.take(tile);
            keys.read(k + (size_t)b * T * k_row + (size_t)kh * d, k_row, T, d);
            values.read(v + (size_t)b * T * k_row + (size_t)kh * d, k_row, T, d);
            for (int h = kh * group; h < (kh + 1) * group; h++)
                for (int i = 0; i < tiles; i++) {
                    const int t0 = i * CHUNK, n = std::min(CHUNK, T - t0);
                    const size_t at = ((size_t)b * T + t0) * q_row + (size_t)h * d;
                    copy_tile(query, q + at, q_row, n, d, scale);
                    for (int j = 0; j <= i; j++)
                        product(scores + (size_t)j * CHUNK * CHUNK, CHUNK, query, d, 1, keys.columns + j * tile, CHUNK,
                                CHUNK, CHUNK, d, false);
                    mask_future(scores + (size_t)i * CHUNK * CHUNK);
                    float inverse[CHUNK];
                    for (int t = 0; t < CHUNK; t++) {
                        float top = -1e30f, total = 0;
                        for (int j = 0; j <= i; j++)
                            for (int s = 0; s < CHUNK; s++)
                                top = std::max(top, scores[((size_t)j * CHUNK + t) * CHUNK + s]);
                        for (int j = 0; j <= i; j++) {
                            float* row = scores + ((size_t)j * CHUNK + t) * CHUNK;
#pragma omp simd reduction(+ : total)
                            for (int s = 0; s < CHUNK; s++) total += row[s] = fast_exp(row[s] - top);
                        }
                        inverse[t] = 1.0f / total;
                        if (t < n) lse[((size_t)b * heads + h) * T + t0 + t] = top + std::log(total);
                    }
                    for (int j = 0; j <= i; j++)
                        product(sum, d, scores + (size_t)j * CHUNK * CHUNK, CHUNK, 1, values.rows + j * tile, d, CHUNK,
                                d, CHUNK, j > 0);
                    for (int t = 0; t < n; t++)
                        for (int c = 0; c < d; c++) out[at + t * q_row + c] = inverse[t] * sum[t * d + c];
                }
        }
}

// With w_t = dL/do_t and r_ts = p_ts (w_t . v_s - w_t . o_t):
//     dv_s = sum_t p_ts w_t,   dq_t = scale sum_s r_ts k_s,   dk_s = scale sum_t r_ts q_t
void attention_backward(const float* q, const float* k, const float* v, const float* out, const float* lse,
                        const float* dout, float* dq, float* dk, float* dv, int B, int T, int heads, int key_heads,
                        int d) {
    const int tiles = (T + CHUNK - 1) / CHUNK, group = heads / key_heads;
    const size_t q_row = (size_t)heads * d, k_row = (size_t)key_heads * d, tile = (size_t)CHUNK * d;
    const float scale = 1.0f / std::sqrt((float)d);
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int kh = 0; kh < key_heads; kh++) {
            const FlushDenormals flush;
            Scratch scratch(2 * Tiles::floats(tiles, d) + 2 * CHUNK * CHUNK + (2 * tiles + 3) * tile + 1024);
            Tiles keys(scratch, tiles, d), values(scratch, tiles, d);
            float *p = scratch.take(CHUNK * CHUNK), *r = scratch.take(CHUNK * CHUNK);
            float *dkey = scratch.take(tiles * tile), *dvalue = scratch.take(tiles * tile);
            float *query = scratch.take(tile), *w = scratch.take(tile), *dquery = scratch.take(tile);
            const size_t k_at = (size_t)b * T * k_row + (size_t)kh * d;
            keys.read(k + k_at, k_row, T, d);
            values.read(v + k_at, k_row, T, d);
            for (int h = kh * group; h < (kh + 1) * group; h++)
                for (int i = 0; i < tiles; i++) {
                    const int t0 = i * CHUNK, n = std::min(CHUNK, T - t0);
                    const size_t at = ((size_t)b * T + t0) * q_row + (size_t)h * d;
                    copy_tile(query, q + at, q_row, n, d, scale);
                    copy_tile(w, dout + at, q_row, n, d, 1.0f);
                    float along[CHUNK] = {}, norm[CHUNK] = {};  // w_t . o_t and lse_t
                    for (int t = 0; t < n; t++) {
                        along[t] = dot(w + t * d, out + at + t * q_row, d);
                        norm[t] = lse[((size_t)b * heads + h) * T + t0 + t];
                    }
                    for (int j = 0; j <= i; j++) {
                        product(p, CHUNK, query, d, 1, keys.columns + j * tile, CHUNK, CHUNK, CHUNK, d, false);
                        product(r, CHUNK, w, d, 1, values.columns + j * tile, CHUNK, CHUNK, CHUNK, d, false);
                        if (j == i) mask_future(p);
                        for (int t = 0; t < CHUNK; t++)
#pragma omp simd
                            for (int s = 0; s < CHUNK; s++) {
                                p[t * CHUNK + s] = fast_exp(p[t * CHUNK + s] - norm[t]);
                                r[t * CHUNK + s] = p[t * CHUNK + s] * (r[t * CHUNK + s] - along[t]);
                            }
                        product(dvalue + j * tile, d, p, 1, CHUNK, w, d, CHUNK, d, CHUNK, true);
                        product(dkey + j * tile, d, r, 1, CHUNK, query, d, CHUNK, d, CHUNK, true);
                        product(dquery, d, r, CHUNK, 1, keys.rows + j * tile, d, CHUNK, d, CHUNK, j > 0);
                    }
                    for (int t = 0; t < n; t++)
                        for (int c = 0; c < d; c++) dq[at + t * q_row + c] = scale * dquery[t * d + c];
                }
            for (int t = 0; t < T; t++) {
                std::memcpy(dk + k_at + t * k_row, dkey + (size_t)t * d, sizeof(float) * d);
                std::memcpy(dv + k_at + t * k_row, dvalue + (size_t)t * d, sizeof(float) * d);
            }
        }
}

// Depthwise causal convolution over four tokens, then SiLU, per channel:
//     p_t = w_0 x_{t-3} + w_1 x_{t-2} + w_2 x_{t-1} + w_3 x_t,   y_t = p_t sigmoid(p_t)
// x and y [B, T, C] with rows of x `stride` floats apart; w [4, C].
void conv_silu_forward(const float* x, int stride, const float* w, float* y, int B, int T, int C) {
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            const float* now = x + ((size_t)b * T + t) * stride;
            float* out = y + ((size_t)b * T + t) * C;
            if (t >= 3) {
#pragma omp simd
                for (int c = 0; c < C; c++) {
                    const float p = w[c] * now[c - 3 * stride] + w[C + c] * now[c - 2 * stride] +
                                    w[2 * C + c] * now[c - stride] + w[3 * C + c] * now[c];
                    out[c] = p * sigmoid(p);
                }
            } else {
                for (int c = 0; c < C; c++) {
                    float p = 0;
                    for (int lag = 0; lag <= t; lag++) p += w[(3 - lag) * C + c] * now[c - lag * stride];
                    out[c] = p * sigmoid(p);
                }
            }
        }
}

// With s = sigmoid(p), dp = dy s (1 + p (1 - s)):
//     dx_t = sum_lag w_{3-lag} dp_{t+lag},   dw_{3-lag} = sum_t dp_t x_{t-lag}
// dx [B, T, C], dw [B, 4, C] (one partial sum per batch row).
void conv_silu_backward(const float* x, int stride, const float* w, const float* dy, float* dx, float* dw, int B, int T,
                        int C) {
    constexpr int STRIP = 64;
#pragma omp parallel for collapse(2)
    for (int b = 0; b < B; b++)
        for (int c0 = 0; c0 < C; c0 += STRIP) {
            const int width = std::min(STRIP, C - c0);
            alignas(64) float dp[4][STRIP] = {}, sums[4][STRIP] = {};
            const float zeros[STRIP] = {};
            for (int t = 0; t < T + 3; t++) {
                float* now = dp[t & 3];
                if (t < T) {
                    const float* rows[4];  // rows[lag] = x_{t-lag}
                    for (int lag = 0; lag < 4; lag++)
                        rows[lag] = t >= lag ? x + ((size_t)b * T + t - lag) * stride + c0 : zeros;
                    const float *x0 = rows[0], *x1 = rows[1], *x2 = rows[2], *x3 = rows[3], *weight = w + c0;
                    const float* dout = dy + ((size_t)b * T + t) * C + c0;
#pragma omp simd
                    for (int c = 0; c < width; c++) {
                        const float p = weight[c] * x3[c] + weight[C + c] * x2[c] + weight[2 * C + c] * x1[c] +
                                        weight[3 * C + c] * x0[c];
                        const float s = sigmoid(p);
                        const float slope = dout[c] * s * (1.0f + p * (1.0f - s));
                        now[c] = slope;
                        sums[3][c] += slope * x0[c];
                        sums[2][c] += slope * x1[c];
                        sums[1][c] += slope * x2[c];
                        sums[0][c] += slope * x3[c];
                    }
                } else {
                    std::memset(now, 0, sizeof dp[0]);
                }
                if (t >= 3) {
                    const float *d0 = dp[(t - 3) & 3], *d1 = dp[(t - 2) & 3], *d2 = dp[(t - 1) & 3], *weight = w + c0;
                    float* out = dx + ((size_t)b * T + t - 3) * C + c0;
#pragma omp simd
                    for (int c = 0; c < width; c++)
                        out[c] = weight[3 * C + c] * d0[c] + weight[2 * C + c] * d1[c] + weight[C + c] * d2[c] +
                                 weight[c] * now[c];
                }
            }
            for (int i = 0; i < 4; i++)
                std::memcpy(dw + ((size_t)b * 4 + i) * C + c0, sums[i], sizeof(float) * width);
        }
}

// r = 1 / sqrt(mean(x^2) + eps),   y_i = x_i r (offset + w_i).   x [N, C], rows `stride` apart; inverse (r) [N].
void rms_norm_forward(const float* x, int stride, const float* w, float offset, float eps, float* y, float* inverse,
                      int N, int C) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float* in = x + (size_t)n * stride;
        const float r = 1.0f / std::sqrt(dot(in, in, C) / C + eps);
        inverse[n] = r;
        for (int c = 0; c < C; c++) y[(size_t)n * C + c] = in[c] * r * (offset + w[c]);
    }
}

// With h_i = dy_i (offset + w_i):   dx_i = r h_i - r^3 x_i mean(h x),   dw_i = sum_n dy_i x_i r
// dw [parts, C]: the rows are cut into `parts` equal runs.
void rms_norm_backward(const float* x, int stride, const float* w, float offset, const float* inverse, const float* dy,
                       float* dx, float* dw, int N, int C, int parts) {
    const int run = (N + parts - 1) / parts;
#pragma omp parallel for
    for (int part = 0; part < parts; part++) {
        float* sums = dw + (size_t)part * C;
        std::memset(sums, 0, sizeof(float) * C);
        for (int n = part * run; n < std::min(N, (part + 1) * run); n++) {
            const float *in = x + (size_t)n * stride, *slope = dy + (size_t)n * C;
            float* out = dx + (size_t)n * C;
            const float r = inverse[n];
            float along = 0;
#pragma omp simd reduction(+ : along)
            for (int c = 0; c < C; c++) {
                along += slope[c] * (offset + w[c]) * in[c];
                sums[c] += slope[c] * in[c] * r;
            }
            along *= r * r * r / C;
#pragma omp simd
            for (int c = 0; c < C; c++) out[c] = r * slope[c] * (offset + w[c]) - along * in[c];
        }
    }
}

// y_i = x_i r w_i silu(z_i), r as in rms_norm.   x and y [N, heads, C]; z the same, rows (not heads) `stride` apart.
void gated_norm_forward(const float* x, const float* z, int stride, const float* w, float eps, float* y, float* inverse,
                        int N, int heads, int C) {
#pragma omp parallel for
    for (int n = 0; n < N; n++)
        for (int h = 0; h < heads; h++) {
            const size_t at = ((size_t)n * heads + h) * C;
            const float *in = x + at, *gate = z + (size_t)n * stride + h * C;
            const float r = 1.0f / std::sqrt(dot(in, in, C) / C + eps);
            inverse[(size_t)n * heads + h] = r;
#pragma omp simd
            for (int c = 0; c < C; c++) y[at + c] = in[c] * r * w[c] * gate[c] * sigmoid(gate[c]);
        }
}

// With s = sigmoid(z), h = dy silu(z) w:   dx = r h - r^3 x mean(h x),   dw = sum dy silu(z) x r,
// dz = dy w x r s (1 + z (1 - s)).   dx and dz [N, heads, C]; dw [parts, C].
void gated_norm_backward(const float* x, const float* z, int stride, const float* w, const float* inverse,
                         const float* dy, float* dx, float* dz, float* dw, int N, int heads, int C, int parts) {
    const int run = (N + parts - 1) / parts;
#pragma omp parallel for
    for (int part = 0; part < parts; part++) {
        float* sums = dw + (size_t)part * C;
        std::memset(sums, 0, sizeof(float) * C);
        for (int n = part * run; n < std::min(N, (part + 1) * run); n++)
            for (int h = 0; h < heads; h++) {
                const size_t at = ((size_t)n * heads + h) * C;
                const float *in = x + at, *gate = z + (size_t)n * stride + h * C, *slope = dy + at;
                float *out = dx + at, *gate_out = dz + at;
                const float r = inverse[(size_t)n * heads + h];
                float along = 0;
#pragma omp simd reduction(+ : along)
                for (int c = 0; c < C; c++) {
                    const float s = sigmoid(gate[c]), normed = in[c] * r, silu = gate[c] * s;
                    sums[c] += slope[c] * silu * normed;
                    gate_out[c] = slope[c] * w[c] * normed * s * (1.0f + gate[c] * (1.0f - s));
                    out[c] = slope[c] * silu * w[c];
                    along += out[c] * in[c];
                }
                along *= r * r * r / C;
#pragma omp simd
                for (int c = 0; c < C; c++) out[c] = r * out[c] - along * in[c];
            }
    }
}

// y = silu(gate) up.   both [N, 2 C]: gate, then up, side by side; y [N, C].
void swiglu_forward(const float* both, float* y, int N, int C) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *gate = both + (size_t)n * 2 * C, *up = gate + C;
#pragma omp simd
        for (int c = 0; c < C; c++) y[(size_t)n * C + c] = gate[c] * sigmoid(gate[c]) * up[c];
    }
}

// With s = sigmoid(gate):   dup = dy gate s,   dgate = dy up s (1 + gate (1 - s)).
void swiglu_backward(const float* both, const float* dy, float* dboth, int N, int C) {
#pragma omp parallel for
    for (int n = 0; n < N; n++) {
        const float *gate = both + (size_t)n * 2 * C, *up = gate + C, *slope = dy + (size_t)n * C;
        float *dgate = dboth + (size_t)n * 2 * C, *dup = dgate + C;
#pragma omp simd
        for (int c = 0; c < C; c++) {
            const float s = sigmoid(gate[c]);
            dup[c] = slope[c] * gate[c] * s;
            dgate[c] = slope[c] * up[c] * s * (1.0f + gate[c] * (1.0f - s));
        }
    }
}

}  // extern "C"
