/* From fp32 logits to a token and its log-prob, in one pass of exponentials.

   Logits are summed in blocks of 256, each about its own maximum: the pass needs no maximum of the
   row beforehand, and sampling looks through the blocks, then inside one. */
#pragma once
#include <math.h>
#include <stdlib.h>

#define BLOCK 256

struct block {
    float largest, sum;
};

/* The difference first: no temperature, tiny or huge, can overflow what has any weight. */
static inline vec weights_of(vec logits, vec about, vec temperature) {
    return v_exp(v_div(v_sub(logits, about), temperature));
}

static struct block sum_block(const float *logits, int64_t n, vec temperature) {
    vec all[BLOCK / LANES], largest = v_set(-INFINITY), sum = v_zero();
    int64_t count = (n + LANES - 1) / LANES;
    for (int64_t i = 0; i < count; i++) {
        int64_t left = n - i * LANES;
        all[i] = left >= LANES ? v_load(logits + i * LANES)
                               : v_load_n(logits + i * LANES, left, -INFINITY);
        largest = v_max(largest, all[i]);
    }
    struct block found = {v_largest(largest), 0.0f};
    /* Minus infinity about itself would be NaN. */
    vec about = v_set(found.largest == -INFINITY ? 0.0f : found.largest);
    for (int64_t i = 0; i < count; i++) sum = v_add(sum, weights_of(all[i], about, temperature));
    found.sum = v_sum(sum);
    return found;
}

struct row {
    const float *logits;
    int64_t width;
    float temperature;
    struct block *blocks;
    double *shares; /* of the blocks, about the row's maximum */
    float largest;
    double total;
};

static double block_scale(const struct row *r, int64_t b) {
    return exp(((double)r->blocks[b].largest - r->largest) / r->temperature);
}

static void sum_row(struct row *r) {
    int64_t count = (r->width + BLOCK - 1) / BLOCK;
    vec temperature = v_set(r->temperature);
    r->largest = -INFINITY;
    for (int64_t b = 0; b < count; b++) {
        int64_t left = r->width - b * BLOCK;
        r->blocks[b] = sum_block(r->logits + b * BLOCK, left < BLOCK ? left : BLOCK, temperature);
        if (r->blocks[b].largest > r->largest) r->largest = r->blocks[b].largest;
    }
    r->total = 0.0;
    for (int64_t b = 0; b < count; b++) {
        r->shares[b] = r->blocks[b].sum * block_scale(r, b);
        r->total += r->shares[b];
    }
}

static double logprob_of(const struct row *r, int64_t token) {
    return ((double)r->logits[token] - r->largest) / r->temperature - log(r->total);
}

static int64_t first_largest(const struct row *r) {
    for (int64_t b = 0;; b++) {
        if (r->blocks[b].largest != r->largest) continue;
        for (int64_t i = b * BLOCK;; i++)
            if (r->logits[i] == r->largest) return i;
    }
}

/* The token where the cumulative weight first exceeds uniform * total; never one of weight zero. */
static int64_t find(const struct row *r, double uniform) {
    int64_t count = (r->width + BLOCK - 1) / BLOCK, at = 0;
    double target = uniform * r->total, before = 0.0, seen = 0.0;
    for (int64_t b = 0; b < count; b++) {
        if (r->shares[b] == 0.0) continue;
        at = b;
        before = seen;
        seen += r->shares[b];
        if (seen > target) break;
    }
    int64_t start = at * BLOCK, end = start + BLOCK < r->width ? start + BLOCK : r->width;
    float weights[BLOCK];
    vec about = v_set(r->blocks[at].largest), temperature = v_set(r->temperature);
    for (int64_t i = start; i < end; i += LANES) {
        int64_t n = end - i < LANES ? end - i : LANES;
        vec logits = v_load_n(r->logits + i, n, -INFINITY);
        v_store(weights + (i - start), weights_of(logits, about, temperature));
    }
    double scale = block_scale(r, at), sum = before;
    int64_t token = start;
    for (int64_t i = start; i < end; i++) {
        if (weights[i - start] == 0.0f) continue;
        token = i;
        sum += weights[i - start] * scale;
        if (sum > target) break;
    }
    return token;
}

/* For each row: a token drawn with `uniforms`, or the most likely one where that is negative, and
   its log-prob. Or, with `given`, the log-prob of that token. NaN where the logits allow none. */
int FOR_ISA(draw)(const float *logits, int64_t rows, int64_t width, int64_t stride,
                  const float *temperatures, const double *uniforms, const int64_t *given,
                  int64_t *tokens, double *logprobs, int num_threads) {
    int64_t count = (width + BLOCK - 1) / BLOCK;
    int failed = 0;
#pragma omp parallel num_threads(num_threads) if (rows > 1)
    {
        struct block *blocks = malloc((size_t)count * sizeof *blocks);
        double *shares = malloc((size_t)count * sizeof *shares);
        if (!blocks || !shares) {
#pragma omp atomic write
            failed = 1;
        } else {
#pragma omp for
            for (int64_t i = 0; i < rows; i++) {
                struct row r = {logits + i * stride, width, temperatures[i], blocks, shares, 0, 0};
                sum_row(&r);
                if (!isfinite(r.largest) || !isfinite(r.total)) {
                    logprobs[i] = NAN;
                    continue;
                }
                int64_t token;
                if (given) token = given[i];
                else if (uniforms[i] < 0.0) token = first_largest(&r);
                else token = find(&r, uniforms[i]);
                if (tokens) tokens[i] = token;
                logprobs[i] = logprob_of(&r, token);
            }
        }
        free(blocks);
        free(shares);
    }
    return failed;
}
