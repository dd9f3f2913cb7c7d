/* Functions of vectors. */
#pragma once

/* exp within 2 units of the last place; 0 below -104, NaN stays. Cephes' polynomial for expf. */
static inline vec v_exp(vec x) {
    /* Constants first: the instructions return their second operand where one is NaN. */
    x = v_min(v_set(89.0f), v_max(v_set(-105.0f), x));
    vec n = v_round(v_mul(x, v_set(1.44269504088896341f)));
    vec r = v_fnma(n, v_set(0.693359375f), x);
    r = v_fnma(n, v_set(-2.12194440e-4f), r);
    vec p = v_set(1.9875691500e-4f);
    p = v_fma(p, r, v_set(1.3981999507e-3f));
    p = v_fma(p, r, v_set(8.3334519073e-3f));
    p = v_fma(p, r, v_set(4.1665795894e-2f));
    p = v_fma(p, r, v_set(1.6666665459e-1f));
    p = v_fma(p, r, v_set(5.0000001201e-1f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_set(1.0f)));
    return v_scale2(p, n);
}

static inline vec v_silu(vec x) {
    vec one = v_set(1.0f);
    return v_div(x, v_add(one, v_exp(v_sub(v_zero(), x))));
}
