/* Attention over a cache of slots in float32, for decoding and for prompts. native_kernels.py compiles and calls it.

   No OpenMP runtime is linked: `parallel` is the GOMP_parallel of the one that torch uses, so that both share their
   threads. A work item is one key head of one span of tokens; its result does not depend on other items. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 4 /* with ROWS: the tile of a matrix product that fits into the registers */
#elif defined(__AVX__)
#define LANES 8
#define VECTORS 2
#else
#define LANES 4
#define VECTORS 4
#endif
#define ROWS 6
#define KEYS 64 /* of a block: all their scores, then their part of the softmax, then their values */
#define TILE 4 /* query heads of a single token that are computed in one pass over the keys */
#define MAX_ROWS 512 /* query heads times tokens in one pass over the keys; MAX_TOKENS and MAX_WIDTH: also in Python */
#define MAX_TOKENS 128
#define MAX_WIDTH 256
#define MASKED -1e38f

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Quarter __attribute__((vector_size(16))); /* of AVX-512's vectors, half of AVX's */

typedef struct {
    const float *queries; /* [token, query head, width], with the strides below */
    const float *keys, *values; /* [slot, key head, width] */
    float *out; /* [token, query head, width] */
    const int64_t *rows, *tokens; /* [span]: its first token, and how many it has */
    const int64_t *pasts; /* [span]: tokens of its sequence before it */
    const int64_t *starts; /* [span]: the first slot of its sequence, where slots are adjacent */
    const int64_t *const *slots; /* [span]: all slots of its sequence where they are not adjacent, else NULL */
    int64_t spans, heads, key_heads, width, window;
    int64_t row_stride, head_stride; /* of queries, in floats */
    float scaling;
    int64_t next; /* the first item that no thread has taken */
} Attention;

static inline __attribute__((always_inline)) float sum_lanes(Lanes lanes) {
    union {
        Lanes all;
        Quarter part[LANES / 4];
    } x = {lanes};
    for (int half = LANES / 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.part[i] += x.part[i + half];
    return (x.part[0][0] + x.part[0][2]) + (x.part[0][1] + x.part[0][3]);
}

/* e^x for x <= 0, never below e^-87; NaN stays NaN. Cephes' polynomial, of which compilers make vector code. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the low bits are x / ln 2, rounded */
    float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23; /* 2^n */
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* Online softmax: turns the scores of a block into weights relative to the highest score so far. Returns the factor by
   which the sums of earlier blocks shrink. `scores` has room for whole vectors. */
static __attribute__((noinline)) float weigh(float *scores, int count, float *highest, float *total) {
    float tops[LANES];
    Lanes top = *highest - (Lanes){0}, sum = {0};
    for (; count % LANES; count++) scores[count] = -INFINITY; /* lanes beyond the last key get no weight */
    for (int k = 0; k < count; k += LANES) {
        const Lanes x = *(Lanes *)(scores + k);
        const Bits higher = (Bits)(x > top);
        top = (Lanes)(((Bits)x & higher) | ((Bits)top & ~higher));
    }
    memcpy(tops, &top, sizeof tops);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) tops[i] = tops[i + half] > tops[i] ? tops[i + half] : tops[i];
    for (int k = 0; k < count; k += LANES) {
        for (int i = 0; i < LANES; i++) scores[k + i] = exponential(scores[k + i] - tops[0]);
        sum += *(Lanes *)(scores + k);
    }
    const float factor = exponential(*highest - tops[0]);
    *total = *total * factor + sum_lanes(sum);
    *highest = tops[0];
    return factor;
}

/* Offsets of keys and values of a block of keys. */
static inline void locate(const Attention *a, int64_t span, int64_t key_head, int64_t begin, int keys, int64_t *at) {
    const int64_t *slots = a->slots[span], start = a->starts[span];
    for (int k = 0; k < keys; k++)
        at[k] = ((slots ? slots[begin + k] : start + begin + k) * a->key_heads + key_head) * a->width;
}

/* Index of the first key that a token sees; `last`: its own. */
static inline int64_t first_key(const Attention *a, int64_t last) {
    return last >= a->window ? last - a->window + 1 : 0;
}

/* A single token: `queries` query heads, at most TILE, that share a key head. Inlined into calls with constants, so
   that the compiler unrolls the loops. */
static inline __attribute__((always_inline)) void attend_tile(const Attention *a, int64_t span, int64_t key_head,
                                                              int64_t head, const int queries, const int64_t width) {
    const int64_t whole = width - width % LANES, end = a->pasts[span] + 1, stride = a->head_stride;
    const float *query = a->queries + a->rows[span] * a->row_stride + head * a->head_stride;
    float *out = a->out + (a->rows[span] * a->heads + head) * width;
    float scores[TILE][KEYS] __attribute__((aligned(64))), highest[TILE], total[TILE] = {0};
    int64_t at[KEYS];
    for (int q = 0; q < queries; q++) highest[q] = -INFINITY;
    memset(out, 0, queries * width * sizeof(float));
    for (int64_t begin = first_key(a, end - 1); begin < end; begin += KEYS) {
        const int keys = end - begin < KEYS ? end - begin : KEYS;
        locate(a, span, key_head, begin, keys, at);
        for (int k = 0; k < keys; k++) {
            const float *key = a->keys + at[k];
            Lanes dot[TILE] = {{0}};
            /* Values are read column by column, which hardware prefetchers do not predict. */
            for (int64_t w = 0; w < width; w += 16) __builtin_prefetch(a->values + at[k] + w);
            for (int64_t w = 0; w < whole; w += LANES)
                for (int q = 0; q < queries; q++)
                    dot[q] += *(const Lanes *)(key + w) * *(const Lanes *)(query + q * stride + w);
            for (int q = 0; q < queries; q++) {
                float sum = sum_lanes(dot[q]);
                for (int64_t w = whole; w < width; w++) sum += key[w] * query[q * stride + w];
                scores[q][k] = sum * a->scaling;
            }
        }
        for (int q = 0; q < queries; q++) {
            const float factor = weigh(scores[q], keys, &highest[q], &total[q]);
            for (int64_t w = 0; w < width; w++) out[q * width + w] *= factor;
        }
        for (int64_t w = 0; w < whole; w += LANES) {
            Lanes sum[TILE];
            for (int q = 0; q < queries; q++) sum[q] = *(Lanes *)(out + q * width + w);
            for (int k = 0; k < keys; k++)
                for (int q = 0; q < queries; q++) sum[q] += *(const Lanes *)(a->values + at[k] + w) * scores[q][k];
            for (int q = 0; q < queries; q++) *(Lanes *)(out + q * width + w) = sum[q];
        }
        for (int q = 0; q < queries; q++)
            for (int64_t w = whole; w < width; w++)
                for (int k = 0; k < keys; k++) out[q * width + w] += a->values[at[k] + w] * scores[q][k];
    }
    for (int q = 0; q < queries; q++)
        for (int64_t w = 0; w < width; w++) out[q * width + w] /= total[q];
}

static inline __attribute__((always_inline)) void attend_token(const Attention *a, int64_t span, int64_t key_head,
                                                               const int64_t width) {
    const int64_t group = a->heads / a->key_heads, end = (key_head + 1) * group;
    int64_t head = key_head * group;
    for (; head + TILE <= end; head += TILE) attend_tile(a, span, key_head, head, TILE, width);
    if (end - head == 3) attend_tile(a, span, key_head, head, 3, width);
    if (end - head == 2) attend_tile(a, span, key_head, head, 2, width);
    if (end - head == 1) attend_tile(a, span, key_head, head, 1, width);
}

/* out[r][:] = out[r][:] * factor[r] + sum over i < count of left[r][i] * right[i][:], for some vectors of the rows. */
static inline __attribute__((always_inline)) void multiply(const float *const *left, const float *right, int64_t stride,
                                                           int64_t count, float *const *out, const float *factor,
                                                           int64_t column, const int rows, const int vectors) {
    Lanes sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = *(Lanes *)(out[r] + column + v * LANES) * factor[r];
    for (int64_t i = 0; i < count; i++) {
        Lanes x[VECTORS];
        for (int v = 0; v < vectors; v++) x[v] = *(const Lanes *)(right + i * stride + column + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] += x[v] * left[r][i];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) *(Lanes *)(out[r] + column + v * LANES) = sum[r][v];
}

/* What the queries of a pass have summed up so far, and the block of keys that they attend to. */
typedef struct {
    const float *query[MAX_ROWS];
    float *sum[MAX_ROWS];
    float highest[MAX_ROWS], total[MAX_ROWS];
    int64_t last[MAX_ROWS]; /* the last key that each sees */
    float sums[MAX_ROWS * MAX_WIDTH] __attribute__((aligned(64)));
    float keys[MAX_WIDTH * KEYS] __attribute__((aligned(64))); /* [width, key]: transposed */
    float values[KEYS * MAX_WIDTH] __attribute__((aligned(64))); /* [key, width], padded to whole vectors */
} Pass;

static inline __attribute__((always_inline)) void attend_rows(const Attention *a, Pass *pass, int64_t r, int64_t begin,
                                                              int keys, int64_t padded, const int rows) {
    static const float zeros[ROWS];
    float scores[ROWS][KEYS] __attribute__((aligned(64))), factor[ROWS], *score[ROWS];
    int64_t column = 0;
    memset(scores, 0, sizeof scores);
    for (int i = 0; i < rows; i++) score[i] = scores[i];
    for (; column < KEYS; column += VECTORS * LANES)
        multiply(pass->query + r, pass->keys, KEYS, a->width, score, zeros, column, rows, VECTORS);
    for (int i = 0; i < rows; i++) {
        const int64_t last = pass->last[r + i], first = first_key(a, last);
        for (int k = 0; k < KEYS; k++) scores[i][k] *= a->scaling;
        if (last < begin + keys - 1 || first > begin)
            for (int k = 0; k < keys; k++)
                /* A finite number: where all keys of a block are masked, -INFINITY minus itself would be NaN. */
                if (begin + k > last || begin + k < first) scores[i][k] = MASKED;
        factor[i] = weigh(scores[i], keys, &pass->highest[r + i], &pass->total[r + i]);
    }
    for (column = 0; column + VECTORS * LANES <= padded; column += VECTORS * LANES)
        multiply((const float *const *)score, pass->values, padded, keys, pass->sum + r, factor, column, rows, VECTORS);
    for (; column < padded; column += LANES)
        multiply((const float *const *)score, pass->values, padded, keys, pass->sum + r, factor, column, rows, 1);
}

/* Several tokens: `heads` query heads from `head` on that share a key head. */
static void attend_tokens(const Attention *a, int64_t span, int64_t key_head, int64_t head, int64_t heads) {
    static __thread Pass pass; /* 700 kB: too large for the stack of an OpenMP thread */
    const int64_t width = a->width, padded = (width + LANES - 1) / LANES * LANES, count = a->tokens[span] * heads;
    const int64_t end = a->pasts[span] + a->tokens[span];
    int64_t at[KEYS];
    memset(pass.sums, 0, count * padded * sizeof(float));
    for (int64_t r = 0; r < count; r++) {
        const int64_t token = r / heads;
        pass.query[r] = a->queries + (a->rows[span] + token) * a->row_stride + (head + r % heads) * a->head_stride;
        pass.sum[r] = pass.sums + r * padded;
        pass.last[r] = a->pasts[span] + token;
        pass.highest[r] = -INFINITY;
        pass.total[r] = 0;
    }
    for (int64_t begin = first_key(a, a->pasts[span]) / KEYS * KEYS; begin < end; begin += KEYS) {
        const int keys = end - begin < KEYS ? end - begin : KEYS;
        int64_t r = 0;
        locate(a, span, key_head, begin, keys, at);
        for (int k = 0; k < keys; k++) {
            for (int64_t w = 0; w < width; w++) pass.keys[w * KEYS + k] = a->keys[at[k] + w];
            memcpy(pass.values + k * padded, a->values + at[k], width * sizeof(float));
        }
        while (pass.last[r] < begin) r++; /* tokens before the block */
        for (; r + ROWS <= count; r += ROWS) attend_rows(a, &pass, r, begin, keys, padded, ROWS);
        for (; r < count; r++) attend_rows(a, &pass, r, begin, keys, padded, 1);
    }
    for (int64_t r = 0; r < count; r++) {
        float *out = a->out + ((a->rows[span] + r / heads) * a->heads + head + r % heads) * width;
        for (int64_t w = 0; w < width; w++) out[w] = pass.sum[r][w] / pass.total[r];
    }
}

static void take_items(void *data) {
    Attention *a = data;
    const int64_t group = a->heads / a->key_heads, pass_heads = MAX_ROWS / MAX_TOKENS; /* that fit into one pass */
    for (;;) {
        /* Items differ in length by as much as the contexts of the sequences: threads take the next one when they are
           done, since with equal shares one thread would get the longest and all others would wait for it. */
        const int64_t item = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED);
        const int64_t span = item / a->key_heads, key_head = item % a->key_heads;
        if (span >= a->spans) return;
        if (a->tokens[span] > 1)
            for (int64_t head = 0; head < group; head += pass_heads)
                attend_tokens(a, span, key_head, key_head * group + head,
                              group - head < pass_heads ? group - head : pass_heads);
        else if (a->width == 64) /* the most common width */
            attend_token(a, span, key_head, 64);
        else
            attend_token(a, span, key_head, a->width);
    }
}

/* Attend from all tokens on `threads` threads. */
void attend(Attention *attention, unsigned threads, void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    attention->next = 0;
    if (threads > 1)
        parallel(take_items, attention, threads, 0);
    else
        take_items(attention);
}
