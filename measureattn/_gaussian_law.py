"""The exact law of softmax attention on L Gaussian tokens, by deterministic quadrature.

One query of score variance s sees standard scores r xi_i, r = sqrt(s), and the softmax average
T = sum p_i xi_i, whose limit is r. With w = exp(r xi - s/2), psi(u) = E exp(-u w) and v = log u,

    F  = E (T - r)^2   = int [L a psi^(L-1) + L (L-1) s b^2 psi^(L-2)] dv,   a = E (xi-r)^2 g(v),
    F2 = E sum p_i^2   = int  L b psi^(L-1) dv,                              b = E g(v),
                                                           log g = 2 (v + r xi - s/2) - exp(...),

since N^2/D^2 = int u N^2 exp(-uD) du and tokens are independent; E (xi-r) w exp(-uw) has become
-u r E w^2 exp(-uw) by parts, which removes a cancellation and shows that E(T - r) = -r F2.

All integrands are analytic in a strip of half-width pi/2 in v and in r xi, so the trapezoid rule
with step h errs by exp(-pi^2/h) times a modest factor: 1e-13 at h = 0.28. All of them are
log-concave in xi, with curvature 1 or more: nine steps of 1 around the peak hold all but 1e-17.
Everything is kept in logarithms, so L is as large as you like.
"""

import functools
import math

import numpy as np
from numpy.polynomial import Chebyshev
from numpy.polynomial.legendre import leggauss
from scipy.special import gammaln, logsumexp, ndtri_exp, wrightomega
from scipy.stats import norm, qmc

STEP = 0.28  # of the trapezoid rule in v
REACH = 9.0  # exp(-REACH^2/2) is below rounding
BLOCK = 30.0  # tables serve all lengths from e^30k to e^30(k+1) and are kept for the next one
NODES = 64  # of the interpolation in r: 1e-8 up to L = 1e60
FAR = 25.0  # queries of weight exp(-FAR) relative to the error no longer matter
REPLICATES, FRAMES = 8, 32  # independent sets of orthonormal frames, frames a set
ROOM = 2**22  # numbers held at once while a table is made
TINY = 1e-16  # at smaller s nothing differs from s = 0 by more than rounding


def log_errors(s: float, log_length: float) -> tuple[float, float]:
    """(log F, log F2) for one score variance and one log length, 0 or more."""
    s = max(s, TINY)
    log_psi, log_a, log_b = _table(s, int(log_length // BLOCK), STEP)
    others = log_length + math.log1p(-math.exp(-log_length)) if log_length else -math.inf
    # exp(others + log(-log psi)) = -(L-1) log psi, for L beyond the floats too
    decay = -np.exp(np.minimum(others + log_psi, 700.0))
    one = log_length + log_a + decay
    two = math.log(s) + log_length + others + 2 * log_b + decay + np.exp(log_psi)
    log_step = math.log(STEP)
    return (
        float(logsumexp(np.logaddexp(one, two)) + log_step),
        float(logsumexp(log_length + log_b + decay) + log_step),
    )


@functools.lru_cache(maxsize=1024)
def _table(s: float, block: int, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log(-log psi), log a and log b on the nodes v that the lengths of one block need.

    To the right psi^L vanishes: 80 of L tokens have u w > 1, or L u > 400 while u w < 1 for half
    of the tilted law. To the left g falls at least like u^(1/2).
    """
    r = math.sqrt(s)
    short, long = block * BLOCK, (block + 1) * BLOCK
    right = s / 2 + r * ndtri_exp(min(math.log(80) - short, -1e-18)) + 4
    if 6 - short < -s / 2:
        right = min(right, 6 - short)
    v = np.arange(-long - 45, right + step, step)
    spacing = min(1.25 * step, 0.9 * step / r)  # a little less: the Gaussian grows off the axis
    mean = functools.partial(_log_means, v=v, r=r, spacing=spacing)
    # where Gaussian and exp(-exp(t)) balance, the peak is Wright's omega function, exactly
    log_b, log_a = mean(_log_g, 2 * r - wrightomega(math.log(s) + v + 1.5 * s) / r)
    log_miss, _ = mean(_log_miss, np.clip((s / 2 - v) / r, 0, r))
    log_psi, _ = mean(_log_hit, -wrightomega(math.log(s) + v - s / 2) / r)
    return _log_minus_log(log_miss, log_psi), log_a, log_b


def _log_means(log_f, peak, *, v, r, spacing):
    """log E f(v + r xi - s/2) and log E (xi - r)^2 f(...), by the trapezoid rule around `peak`."""
    count = math.ceil(REACH / spacing)
    offsets = spacing * np.arange(-count, count + 1)
    rows = max(1, ROOM // len(offsets))
    parts = [
        _log_means_of_rows(log_f, peak[i : i + rows, None] + offsets, v[i : i + rows], r, spacing)
        for i in range(0, len(v), rows)
    ]
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def _log_means_of_rows(log_f, xi, v, r, spacing):
    terms = log_f((v - r * r / 2)[:, None] + r * xi) - xi**2 / 2
    top = terms[:, terms.shape[1] // 2]
    weights = np.exp(terms - top[:, None])
    scale = top + math.log(spacing / math.sqrt(2 * math.pi))
    second = np.einsum("vx,vx,vx->v", weights, xi - r, xi - r)
    return scale + np.log(weights.sum(1)), scale + np.log(second)


def _exp(t):
    return np.exp(np.minimum(t, 700.0))


def _log_g(t):
    """log of exp(2t - exp(t))."""
    return 2 * t - _exp(t)


def _log_hit(t):
    """log of exp(-exp(t)): a token that leaves no trace in psi."""
    return -_exp(t)


def _log_miss(t):
    """log of 1 - exp(-exp(t))."""
    return np.where(t < -40, t, np.log(-np.expm1(-_exp(np.maximum(t, -40)))))


def _log_minus_log(log_miss, log_psi):
    """log(-log psi) from log(1 - psi) where psi is near 1, from log psi elsewhere."""
    near = np.log(-np.log1p(-np.exp(np.clip(log_miss, -30, -0.5))))
    far = np.log(-np.minimum(log_psi, -0.5))
    return np.where(log_miss < -30, log_miss, np.where(log_miss < -0.7, near, far))


def mean_error(centre, root, form, log_length: float, rate: float) -> tuple[float, float]:
    """E |V (m_a(prompt) - m_a)|^2 over prompts and random queries, and its standard error.

    centre, root  the query seen from the tokens, q = G^(1/2) a = centre + root g, g ~ N(0, I_k)
    form          G^(1/2) V'V G^(1/2): one query costs q'form q/|q|^2 (F - F2) + tr(form) F2
    rate          the error falls no faster than L^-rate: this says how far out queries matter

    The size of g by Gauss-Legendre, its direction by orthonormal frames and their opposites (exact
    for k = 1 and for equal eigenvalues, else scrambled Sobol frames: then with an error).
    """
    k = root.shape[1]
    block_end = BLOCK * (log_length // BLOCK + 1)  # so that a block shares its nodes
    reach = math.sqrt(2 * (rate * block_end + FAR)) + math.sqrt(k)
    radius = np.linalg.norm(centre) + (np.linalg.norm(root, 2) if k else 0.0) * reach
    log_f, log_f2 = _interpolants(radius, log_length)
    sizes, weights = _chi_rule(k, reach)

    def over(directions):
        q = centre + sizes[:, None] * (directions @ root.T)[:, None, :]
        square = np.maximum((q**2).sum(-1), 1e-300)
        r = np.sqrt(square)
        one, two = np.exp(log_f(r)), np.exp(log_f2(r))
        along = ((q @ form) * q).sum(-1) / square
        return np.mean((along * (one - two) + np.trace(form) * two) @ weights)

    values = [over(directions) for directions in _directions(k)]
    spread = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    value = np.mean(values)
    return float(value), float(spread if spread > 1e-12 * value else 0.0)


def _interpolants(radius: float, log_length: float) -> tuple[Chebyshev, Chebyshev]:
    """log F and log F2 as functions of r = sqrt(s) on [0, radius]; both are analytic in r."""
    def values(r, which):
        return np.array([log_errors(x * x, log_length)[which] for x in r])

    f, f2 = (Chebyshev.interpolate(values, NODES - 1, [0, radius], args=(i,)) for i in (0, 1))
    return f, f2


def _chi_rule(k: int, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of E f(|g|), g ~ N(0, I_k)."""
    if k == 0:
        return np.zeros(1), np.ones(1)
    x, w = leggauss(2 * NODES)
    size = reach * (1 + x) / 2
    log_density = (k - 1) * np.log(size) - size**2 / 2 - gammaln(k / 2) - (k / 2 - 1) * math.log(2)
    return size, reach / 2 * w * np.exp(log_density)


def _directions(k: int) -> list[np.ndarray]:
    """Sets of unit vectors (n, k), each set uniform on the sphere: frames and their opposites."""
    if k == 0:
        return [np.ones((1, 0))]
    if k == 1:
        return [np.array([[1.0], [-1.0]])]
    sets = []
    for seed in range(REPLICATES):
        uniforms = qmc.Sobol(k * k, rng=seed).random(FRAMES)
        frames, _ = np.linalg.qr(norm.ppf(uniforms).reshape(FRAMES, k, k))
        rows = frames.mT.reshape(-1, k)
        sets.append(np.vstack([rows, -rows]))
    return sets
