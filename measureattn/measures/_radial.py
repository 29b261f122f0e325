"""The log-MGF of one coordinate of the unit sphere, for every dimension and every tilt.

A law that is uniform on the unit sphere of R^d has kappa(a) = k_d(t), t = |a|, with

    k_d(t)  = log 0F1(d/2; t^2/4)                 log-MGF
    k_d'(t) = A_d(t) = I_{d/2}(t) / I_{d/2-1}(t)  mean along the tilt (d = 3: Langevin)

and the box rides along: by Archimedes' hat-box theorem a uniform number on [-1, 1] is one
coordinate of the sphere in R^3. Bessel functions themselves over- and underflow, so nothing here
computes one. With q = t^2 and g_d = A_d / t the recurrence of Bessel functions reads

    g_d = 1 / (d + q g_{d+2}),        k_d = k_{d+2} + log1p(q g_{d+2} / d),

both stable downwards and free of cancellation. The start, at an order of 30 or more, comes from
Debye's expansion, uniform in t (DLMF 10.41). Everything is evaluated in float64.
"""

import math
from itertools import zip_longest

import torch
from numpy.polynomial import Polynomial
from torch import Tensor

TOP_ORDER = 30  # Debye's series to 10 terms is exact to rounding from here on
DEBYE_TERMS = 10
TAIL_TERMS = 16


def _debye_polynomials() -> list[tuple[Polynomial, Polynomial]]:
    """(U_k, V_k) of Debye's expansions (DLMF 10.41.9-11)."""
    p = Polynomial([0.0, 1.0])
    bend = p * (1 - p**2)
    u, found = Polynomial([1.0]), [(Polynomial([1.0]), Polynomial([1.0]))]
    for _ in range(DEBYE_TERMS):
        v = -0.5 * bend * u - p * bend * u.deriv()
        u = 0.5 * p * bend * u.deriv() + (0.125 * (1 - 5 * p**2) * u).integ()
        found.append((u, u + v))
    return found


# of U and of V: [j][k] is the coefficient of p^j in the k-th polynomial
_DEBYE = [
    list(zip_longest(*(term.coef.tolist() for term in series), fillvalue=0.0))
    for series in zip(*_debye_polynomials(), strict=True)
]
_KNOWN: dict[float, list] = {}  # by order; torch.compile reads a dict, and warns of functools.cache


def log_mgf(q: Tensor, dim: int) -> Tensor:
    """k_d(t) at q = t^2."""
    slopes = _slopes(q, dim)
    total = _top_log_mgf(q, dim + 2 * (len(slopes) - 1))
    for step, higher in enumerate(slopes[1:]):
        total = total + torch.log1p(q * higher / (dim + 2 * step))
    return total


def slope(q: Tensor, dim: int) -> Tensor:
    """A_d(t) / t at q = t^2: also the tilted variance across the tilt; 1/d at 0."""
    return _slopes(q, dim)[0]


def curvature(q: Tensor, dim: int) -> Tensor:
    """A_d'(t) at q = t^2: the tilted variance along the tilt; 1/d at 0."""
    if dim == 1:  # a coin: 1/cosh^2, which no difference of slopes resolves far out
        decay = torch.exp(-2 * q.clamp(min=torch.finfo(q.dtype).tiny).sqrt())
        return 4 * decay / (1 + decay).square()
    here, higher = _slopes(q, dim)[:2]
    near = here * (1 + q * (higher - here))
    # far out that difference cancels; there A' comes term by term from the expansion in 1/t
    start = 40 + dim**2 / 4
    far = q > start**2
    t = torch.where(far, q, torch.full_like(q, start**2)).sqrt()
    tail = torch.zeros_like(t)
    for k, coefficient in reversed(list(enumerate(_tail_coefficients(dim)))[1:]):
        tail = (tail - k * coefficient) / t
    return torch.where(far, tail / t, near)


def _slopes(q: Tensor, dim: int) -> list[Tensor]:
    """[g_d, g_{d+2}, ..., g_top] by the downward recurrence; at least one step of it."""
    steps = max(1, math.ceil(TOP_ORDER + 1 - dim / 2))
    slopes = [_top_slope(q, dim + 2 * steps)]
    for lower in range(dim + 2 * (steps - 1), dim - 1, -2):
        slopes.append(1 / (lower + q * slopes[-1]))
    return slopes[::-1]


def _top_slope(q: Tensor, dim: int) -> Tensor:
    """g_d for large d: the recurrence from far above where q is small, else from I_v'/I_v."""
    order = dim / 2 - 1
    root = (order**2 + q).sqrt()
    u, v = (_horner(series, order / root) for series in _debye(order))
    small = q < order
    debye = (root * v / u - order) / torch.where(small, torch.ones_like(q), q)
    x = q.clamp(max=order)
    near = torch.full_like(x, 1 / (dim + 20))
    for lower in range(dim + 18, dim - 1, -2):
        near = 1 / (lower + x * near)
    return torch.where(small, near, debye)


def _top_log_mgf(q: Tensor, dim: int) -> Tensor:
    """k_d for large d: the power series where q is small, Debye's expansion elsewhere."""
    order = dim / 2 - 1
    x = q.clamp(max=order) / 4
    term, series = torch.ones_like(x), torch.zeros_like(x)
    for k in range(1, 13):
        term = term * x / (k * (order + k))
        series = series + term
    root = (1 + q / order**2).sqrt()
    rise = q / order**2 / (1 + root)  # root - 1 without cancellation
    coefficients, _ = _debye(order)
    u = _horner(coefficients, 1 / root) / sum(coefficients)  # so that k_d(0) = 0
    debye = order * (rise - torch.log1p(rise / 2)) - root.log() / 2 + u.log()
    return torch.where(q < order, series.log1p(), debye)


def _debye(order: float) -> list[list[float]]:
    """Coefficients in p of sum_k U_k(p)/order^k and sum_k V_k(p)/order^k."""
    if order not in _KNOWN:
        powers = [order**-k for k in range(DEBYE_TERMS + 1)]
        _KNOWN[order] = [
            [sum(c * x for c, x in zip(row, powers, strict=True)) for row in table]
            for table in _DEBYE
        ]
    return _KNOWN[order]


def _tail_coefficients(dim: int) -> list[float]:
    """A_d(t) = sum_k c_k t^-k for large t, from the Riccati equation A' = 1 - A^2 - (d-1) A/t."""
    c = [1.0]
    for k in range(1, TAIL_TERMS):
        c.append(-(sum(c[i] * c[k - i] for i in range(1, k)) + (dim - k) * c[k - 1]) / 2)
    return c


def _horner(coefficients: list[float], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total
