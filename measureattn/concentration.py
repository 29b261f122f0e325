"""How far a finite prompt is from its law: exact, to first order, by exponent, and measured.

    exact        Gaussian tokens, any length from 1 to 10^1000: `gaussian_error`, and averaged over
                 Gaussian queries `gaussian_mean_error`
    first order  any law, the constant of the 1/L law at a query: `delta_method`
    exponents    Gaussian queries, where 1/L fails: `exponent`
    measured     any law with a sampler: `mean_squared_error`, slopes by `fit_slope`

What follows for a user, how long a prompt has to be, is `required_length`. Lengths may be numbers
beyond the floats: give them as Python integers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from measureattn import _gaussian_law
from measureattn._checks import values_visible
from measureattn._monte_carlo import (
    Estimate,
    Slope,
    fit_slope,
    log_lengths,
    mean_squared_error,
    prompt_errors,
    require_setting,
)
from measureattn._typing import Float
from measureattn.attention import attend
from measureattn.measures import Gaussian, Measure

__all__ = [
    "Estimate",
    "RequiredLength",
    "Slope",
    "delta_method",
    "exponent",
    "fit_slope",
    "gaussian_error",
    "gaussian_mean_error",
    "mean_squared_error",
    "prompt_errors",
    "required_length",
]

REACH = 2**13  # tokens of the longest prompt that required_length samples
PROMPTS, QUERIES, DRAWS = 200, 32, 4096
WIDEST = 10_000  # score variance up to which the exact law is tabulated
ASTRONOMICAL = 10**9  # tokens, beyond which the answer is also said in words


@dataclass(frozen=True)
class RequiredLength:
    """How long a prompt must be; `str` says it in a sentence.

    length    tokens
    method    what the number rests on
    sure      how sure it is, in words
    interval  (low, high) in tokens; equal to the length where the method is exact

    Source: ours. See: chapter 6.

    >>> print(RequiredLength(1889, "the exact law", "right to 1e-6", (1889, 1889)))
    1,889 tokens, by the exact law: right to 1e-6.
    """

    length: int
    method: str
    sure: str
    interval: tuple[int, int]

    def __str__(self) -> str:
        far = "" if self.length < ASTRONOMICAL else ", astronomically long"
        return f"{_digits(self.length)} tokens{far}, by {self.method}: {self.sure}."


def gaussian_error(
    s: Tensor | float, length: Tensor | float | Sequence
) -> tuple[Tensor, Tensor, Tensor]:
    """The exact (F, F2, bias) of softmax attention over L Gaussian tokens, at one query.

    s       score variance a'Ga of the query, 0 or more; a tensor is broadcast against the lengths
    length  L, 1 or more: one or several, floats or integers of any size

    F = E (T - sqrt s)^2, F2 = E sum p_i^2, bias = E (T - sqrt s) = -sqrt(s) F2, for standard scores
    xi_i, p = softmax(sqrt(s) xi), T = sum p_i xi_i; dimensionless, float64, right to 1e-12. In any
    dimension E |m_a(prompt) - m_a|^2 = |Ga|^2/s F + (tr G - |Ga|^2/s) F2.
    Raises ValueError if s is negative or above 10,000, or a length below 1.
    Source: ours, by Stein's lemma and a one-dimensional integral. See: chapter 4.

    >>> gaussian_error(1.0, 64)[0]
    tensor(0.0686, dtype=torch.float64)
    """
    scores = np.asarray(s, dtype=np.float64)
    if not (scores >= 0).all():
        raise ValueError(f"s must be score variances, 0 or more, got {scores.min()}. Square it?")
    if not (scores <= WIDEST).all():
        raise ValueError(
            f"s must be at most {WIDEST:,}, got {scores.max():.4g}: beyond, a prompt answers with "
            f"its largest token and the tables outgrow any use. Is a temperature missing?"
        )
    scores, logs = np.broadcast_arrays(scores, log_lengths(length))
    pairs = [
        _gaussian_law.log_errors(float(x), float(y))
        for x, y in zip(scores.flat, logs.flat, strict=True)
    ]
    f, f2 = torch.tensor(pairs, dtype=torch.float64).reshape(*scores.shape, 2).exp().unbind(-1)
    return f, f2, -torch.tensor(scores).sqrt() * f2


def gaussian_mean_error(
    measure: Gaussian, query_law: Gaussian, U: Tensor, V: Tensor, length: float
) -> Estimate:
    """E |T[prompt](z) - T[measure](z)|^2 over prompts of L tokens and queries z, both Gaussian.

    measure, query_law  Gaussian laws on R^D and R^E, not batched; U (D, E), V (M, D)
    length              L, 1 or more, of any size

    In squared units of the outputs. By quadrature to 1e-8 (std_error 0) if the score covariance
    has rank one or equal eigenvalues and the query is centred; else directions are averaged over
    256 scrambled Sobol frames, whose standard error is returned. Raises ValueError if the laws
    are not Gaussian or do not fit. Source: ours, `gaussian_error` averaged. See: chapter 5.

    >>> law, one = Gaussian(torch.zeros(1), torch.eye(1)), torch.eye(1)
    >>> round(gaussian_mean_error(law, law, one, one, 64).value, 6)
    0.087185
    """
    require_setting(measure, query_law, U, V)
    for name, law in (("measure", measure), ("query_law", query_law)):
        if not isinstance(law, Gaussian):
            raise ValueError(
                f"{name} must be Gaussian, got {type(law).__name__}. Use mean_squared_error."
            )
    centre, root, form, top = _gaussian_setting(measure, query_law, U, V)
    (log_length,) = log_lengths([length])
    value, error = _gaussian_law.mean_error(centre, root, form, float(log_length), exponent(top))
    return Estimate(value, error, 0)


def delta_method(
    measure: Measure, a: Float[Tensor, "*query D"]
) -> tuple[Float[Tensor, "*shape D D"], Float[Tensor, "*shape D"]]:
    """L times the covariance and the bias of a prompt's tilted mean at a, to first order in 1/L.

    a  (*query, *batch, D) -> (*query, *batch, D, D) in squared units of the tokens and
       (*query, *batch, D) in units of the tokens. With w = exp(kappa(2a) - 2 kappa(a)) and
       d = m_2a - m_a they are w (C_2a + d d') and -w d.

    The first is the covariance of the influence function exp(a.x - kappa(a)) (x - m_a).
    Raises ValueError where kappa(2a) is not finite: there the 1/L law does not hold.
    Source: ours, the delta method. See: chapter 4.

    >>> delta_method(Gaussian(torch.zeros(1), torch.eye(1)), torch.tensor([1.0]))
    (tensor([[5.4366]]), tensor([-2.7183]))
    """
    log_weight = measure.log_mgf(2 * a) - 2 * measure.log_mgf(a)
    if values_visible(log_weight) and not torch.isfinite(log_weight).all():
        where = tuple((~torch.isfinite(log_weight)).nonzero()[0].tolist())
        raise ValueError(
            f"the 1/L law needs kappa finite at a and at 2a; it is not at query {where}. "
            f"Use shorter queries, or mean_squared_error."
        )
    weight = log_weight.exp()
    step = measure.tilted_mean(2 * a) - measure.tilted_mean(a)
    second = measure.tilted_cov(2 * a) + step[..., :, None] * step[..., None, :]
    return weight[..., None, None] * second, -weight[..., None] * step


def exponent(s: float, typical: bool = False) -> float:
    """The alpha of error^2 = L^-alpha for Gaussian tokens and random Gaussian queries.

    s        top eigenvalue of the score covariance Sigma_q^(1/2) U'GU Sigma_q^(1/2)
    typical  False: mean over prompts, sqrt(1/4 + 1/s) - 1/2; True: a typical prompt, 2/(1 + 2s);
             both from s = 1/2 on, 1 below

    A conjecture with evidence (slopes to L = 10^60); the 1/L law at a fixed query is proved. The
    limit is far: slopes seen at usual lengths differ. Raises ValueError if s is negative.
    Source: ours, a conjecture. See: chapter 5.

    >>> round(exponent(1.0), 4), round(exponent(1.0, typical=True), 4)
    (0.618, 0.6667)
    """
    if not s >= 0:
        raise ValueError(f"s must be a score variance, 0 or more, got {s}. Square it?")
    if s <= 0.5:
        return 1.0
    return 2 / (1 + 2 * s) if typical else math.sqrt(0.25 + 1 / s) - 0.5


def required_length(
    measure: Measure,
    query_law: Measure | Tensor,
    U: Tensor,
    V: Tensor,
    tolerance: float,
    typical: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> RequiredLength:
    """The smallest L at which the error of a prompt is `tolerance` relative to its signal.

    query_law  a law of queries, or a tensor (Q, E) of fixed ones
    tolerance  sqrt(E|T[prompt] - T|^2) <= tolerance sqrt(E|T - V mean|^2), above 0
    typical    the median over prompts in the place of the mean
    generator  for what is sampled: other laws at random queries, and all medians

    Gaussian laws: the exact law, any length, averaged over the queries as `gaussian_mean_error`.
    Other laws at fixed queries: the 1/L law, with the size of what it leaves out. All else: Monte
    Carlo up to 8,192 tokens with a 95% interval, and beyond an extrapolation that says so: by the
    conjectured exponent for Gaussian laws, by the last measured slope, at most 1, for others; only
    the sampling error of its start is in the interval then.

    Raises ValueError if the arguments do not fit, if there is no signal, or if a generator is
    needed and missing. Source: ours. See: How long must my prompt be?

    >>> law, one = Gaussian(torch.zeros(1), torch.eye(1)), torch.eye(1)
    >>> print(required_length(law, law, one, one, 0.1))
    1,889 tokens, by the exact law: right to 1e-6.
    """
    require_setting(measure, query_law, U, V)
    if not tolerance > 0:
        raise ValueError(f"tolerance must be a relative error above 0, got {tolerance}.")
    exact = isinstance(measure, Gaussian) and isinstance(query_law, Gaussian | Tensor)
    if generator is None and (typical or not (exact or isinstance(query_law, Tensor))):
        raise ValueError(
            "this answer needs sampling: pass generator=torch.Generator().manual_seed(...)."
        )
    target = tolerance**2 * _signal(measure, query_law, U, V, generator)
    if not target > 0:
        raise ValueError(
            "the output does not depend on the query (E|T - V mean|^2 is 0), so no relative error "
            "can be asked for. Check U and V, or use mean_squared_error."
        )
    if exact and not typical:
        return _exact_length(measure, query_law, U, V, target)
    if isinstance(query_law, Tensor) and not typical:
        return _first_order_length(measure, query_law, U, V, target)
    return _sampled_length(measure, query_law, U, V, target, typical, generator)


def _signal(measure, queries, U, V, generator) -> float:
    """E |T(z) - V mean|^2."""
    if isinstance(measure, Gaussian) and isinstance(queries, Gaussian):
        reader = V @ measure.cov @ U
        second = queries.cov + queries.mean[:, None] * queries.mean
        return float((reader @ second @ reader.mT).trace())
    z = queries if isinstance(queries, Tensor) else queries.sample(DRAWS, generator=generator)
    zero = torch.zeros_like(z[:1])
    gap = attend(measure, z, U=U, V=V) - attend(measure, zero, U=U, V=V)
    return float(gap.square().sum(-1).mean())


def _exact_length(measure, queries, U, V, target) -> RequiredLength:
    """By root-finding on log L, in the one block of lengths whose tables it needs."""
    law = queries
    if isinstance(queries, Tensor):  # each a law of its own: a point mass
        law = Gaussian(torch.zeros_like(queries[0]), torch.zeros_like(U.mT @ U))
    centre, root, form, top = _gaussian_setting(measure, law, U, V)
    rate, centres = exponent(top), [centre]
    if isinstance(queries, Tensor):
        centres = (queries.double() @ (measure.root.double() @ U.double()).mT).numpy(force=True)

    def error(log_length):
        pairs = [_gaussian_law.mean_error(c, root, form, log_length, rate) for c in centres]
        return np.mean(pairs, axis=0)

    def excess(log_length):
        return math.log(error(log_length)[0] / target)

    x = _root(excess, guess=-math.log(target / np.trace(form)) / rate)
    length = max(1, math.ceil(Decimal(x).exp()))
    if 1 < length < 10**9:  # rounding of the root, mended
        length -= excess(math.log(length - 1)) <= 0
        length += excess(math.log(length)) > 0
    value, spread = error(x)
    if spread == 0:
        return RequiredLength(length, "the exact law", "right to 1e-6", (length, length))
    slack = Decimal(2 * spread / value / rate)
    interval = tuple(math.ceil(length * (1 + sign * slack)) for sign in (-1, 1))
    sure = f"directions of queries sampled, so right to {100 * float(slack):.2g}%"
    return RequiredLength(length, "the exact law", sure, interval)


def _root(excess, guess: float) -> float:
    """The log length at which a falling function changes sign, sought block by block."""
    width = _gaussian_law.BLOCK
    block = max(0, int(guess // width))
    while excess(math.nextafter((block + 1) * width, 0.0)) > 0:
        block += 1
    while excess(block * width) <= 0:
        if block == 0:
            return 0.0
        block -= 1
    ends = block * width, math.nextafter((block + 1) * width, 0.0)
    return ends[1] if excess(ends[1]) > 0 else brentq(excess, *ends, xtol=1e-13)


def _first_order_length(measure, queries, U, V, target) -> RequiredLength:
    a = queries @ U.mT
    covariance, _ = delta_method(measure, a)
    constant = (V @ covariance @ V.mT).diagonal(dim1=-2, dim2=-1).sum(-1).mean()
    one, two, three = (measure.log_mgf(k * a) for k in (1, 2, 3))
    return first_order_length(float(constant) / target, float((three - two - one).exp().max()))


def first_order_length(value: float, heaviest: float) -> RequiredLength:
    """What the 1/L law at given queries says, with how sure it is.

    value     constant / target, tokens;  heaviest  largest exp(kappa(3a) - kappa(2a) - kappa(a))
    Source: ours. See: the page *How long must my prompt be?*.

    >>> first_order_length(99.5, 1.0).interval
    (97, 103)
    """
    length = max(1, math.ceil(value))
    # (1 + s) exp(2 s)/L for Gaussian tokens, whose next order is known; three for 1 + s
    share = min(1.0, 3 * heaviest / length)
    sure = f"the next order changes it by {100 * share:.2g}% or so"
    if share > 0.2:
        sure = f"rough, {sure}: compare with mean_squared_error"
    interval = math.floor(length * (1 - share)), math.ceil(length * (1 + share))
    return RequiredLength(length, "the 1/L law at the given queries", sure, interval)


def _sampled_length(measure, queries, U, V, target, typical, generator) -> RequiredLength:
    """Where the measured curve crosses the target; beyond the last length, an extrapolation."""
    logs = np.log(2.0) * np.arange(1, int(math.log2(REACH)) + 1)
    errors = prompt_errors(
        measure, queries, U, V, np.exp(logs).round().astype(int).tolist(), PROMPTS,
        n_queries=QUERIES, generator=generator, control_variate=not typical,
    ).numpy(force=True)  # fmt: skip
    middle, name = (np.median, "median") if typical else (np.mean, "mean")
    known = None
    if isinstance(measure, Gaussian) and isinstance(queries, Gaussian):
        known = exponent(_gaussian_setting(measure, queries, U, V)[-1], typical)

    def crossing(rows):
        curve = np.log(np.maximum(middle(rows, axis=0), 1e-300) / target)
        below = np.flatnonzero(curve <= 0)
        if below.size and below[0] == 0:
            return logs[0]
        if below.size:
            i = below[0]
            return np.interp(0.0, curve[[i, i - 1]], logs[[i, i - 1]])
        slope = known or float(np.clip((curve[-4] - curve[-1]) / (logs[-1] - logs[-4]), 0.05, 1))
        return logs[-1] + curve[-1] / slope

    rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    resampled = [crossing(errors[rng.integers(PROMPTS, size=PROMPTS)]) for _ in range(400)]
    x, low, high = crossing(errors), *np.quantile(resampled, [0.025, 0.975])
    length, *interval = (math.ceil(Decimal(float(y)).exp()) for y in (x, low, high))
    sure = f"95% interval {_digits(interval[0])} to {_digits(interval[1])}"
    method = f"the {name} of {PROMPTS} sampled prompts"
    if x > logs[-1]:
        law = "the conjectured exponent" if known else "the last measured slope"
        sure = f"an order of magnitude, extrapolated from {REACH:,} tokens by {law}; {sure}"
    return RequiredLength(length, method, sure, tuple(interval))


def _digits(length: int) -> str:
    if length < ASTRONOMICAL:
        return f"{length:,}"
    return f"about 10^{float(Decimal(length).log10()):.1f}"


def _gaussian_setting(measure: Gaussian, query_law: Gaussian, U: Tensor, V: Tensor):
    """centre, root, form of `_gaussian_law.mean_error` and the top eigenvalue, as NumPy."""
    half, query_half, U, V = (x.double() for x in (measure.root, query_law.root, U, V))
    reader, spread = half @ V.mT, half @ U @ query_half
    values, vectors = torch.linalg.eigh(spread @ spread.mT)
    kept = values > max(float(values[-1]), 0.0) * 1e-12
    root = vectors[:, kept] * values[kept].sqrt()
    centre = half @ U @ query_law.mean.double()
    top = float(values[-1].clamp(min=0))
    centre, root, form = (x.numpy(force=True) for x in (centre, root, reader @ reader.mT))
    return centre, root, form, top
