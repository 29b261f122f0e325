"""Prompts of up to 10^60 Gaussian tokens and beyond, by their extreme tokens.

Under heavy tilts only the largest tokens of a prompt matter one by one. So a prompt of L standard
normal tokens is drawn as its k largest and its k smallest, exactly in law at every L, plus the bulk
between them, whose tilted sums are Gaussian with their exact mean and covariance, jointly over all
queries. Setting: d = 1, tokens sqrt(s) xi, queries z ~ N(0, 1), U = V = 1, so that the score is
r z xi, r = sqrt(s), and a prompt's error is

    err^2 = s E_z (sum_i p_i (xi_i - r z))^2,       p = softmax(r z xi).

The sums are centred before they are taken: by subtraction err^2 would not fall below 1e-32.

Plain sampling shows the typical prompt. The mean over prompts is carried by rare ones, of
probability 1e-10 at s = 1, L = 10^60; `mean_error` draws them by importance sampling.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.polynomial.legendre import leggauss
from scipy.special import log_ndtr, ndtri_exp
from scipy.stats import bootstrap
from torch import Tensor

from measureattn._monte_carlo import Estimate, log_lengths, seed_from
from measureattn._typing import Float
from measureattn.concentration import exponent

LARGEST = 1500  # tokens kept at either end
SLICES = 96  # Legendre nodes that carry the noise of the bulk
BATCH = 100  # prompts at a time


def largest_tokens(
    length: float, n_prompts: int, *, k: int = LARGEST, generator: torch.Generator
) -> Float[Tensor, "prompts k"]:
    """The k largest of L standard normal tokens, largest first: (n_prompts, k), float64.

    length  L, k or more, of any size;  generator  a CPU generator

    Exact in law at every length: the smallest of L uniform numbers come from exponential spacings
    (Renyi), their logarithms go through the inverse normal CDF in log space. Raises ValueError if
    L < k. Source: ours. See: chapter 5.

    >>> g = torch.Generator().manual_seed(0)
    >>> (largest_tokens(1e60, 100, k=3, generator=g) > 16).all()
    tensor(True)
    """
    (log_length,) = log_lengths([length])
    _require_room(log_length, k)
    spacings = _exponentials((n_prompts, k), generator)
    return torch.from_numpy(-ndtri_exp(_log_smallest_uniforms(spacings, log_length)))


def prompt_errors(
    s: float,
    lengths: Sequence,
    n_prompts: int,
    *,
    k: int = LARGEST,
    generator: torch.Generator,
) -> Float[Tensor, "prompts lengths"]:
    """err^2 of single prompts, (n_prompts, n_lengths): what one run shows.

    s        score variance at a unit query, above 0
    lengths  4 or more tokens each, of any size; k is lowered to a quarter of the length. The same
             random numbers serve all lengths: compare them in pairs

    Medians and pictures are right; for means see `mean_error`. Raises ValueError if s or a length
    is too small. Source: ours. See: chapter 5.

    >>> g = torch.Generator().manual_seed(0)
    >>> prompt_errors(1.0, [10**6, 10**60], 3, generator=g).shape
    torch.Size([3, 2])
    """
    return _sample(s, lengths, n_prompts, k, generator, importance=False)[0]


def typical_error(
    s: float,
    lengths: Sequence,
    n_prompts: int,
    *,
    k: int = LARGEST,
    generator: torch.Generator,
) -> Estimate:
    """The median over prompts of err^2, one a length, with its bootstrap standard error.

    Arguments and errors raised as for `prompt_errors`. Source: ours. See: chapter 5.

    >>> g = torch.Generator().manual_seed(0)
    >>> typical_error(1.0, [10**60], 30, generator=g).value < 1e-35
    tensor([True])
    """
    errors = prompt_errors(s, lengths, n_prompts, k=k, generator=generator).numpy()
    spread = bootstrap(
        (errors,), np.median, axis=0, method="percentile", n_resamples=999, batch=50,
        rng=np.random.default_rng(seed_from(generator)),
    ).standard_error  # fmt: skip
    median = torch.from_numpy(np.median(errors, axis=0))
    return Estimate(median, torch.from_numpy(spread), n_prompts)


def mean_error(
    s: float,
    lengths: Sequence,
    n_prompts: int,
    *,
    importance: bool = True,
    k: int = LARGEST,
    generator: torch.Generator,
) -> Estimate:
    """The mean over prompts of err^2, one a length, with its standard error.

    importance  True: half of the prompts get one token drawn beyond the usual maximum, and all are
                weighted by 1 / (1/2 + 1/2 sum_i q(x_i) / (L phi(x_i))) (Mecke's formula), which
                lies between 0 and 2. False: plain, blind to what carries the mean at long lengths
                and s above 1/2, and its standard error with it.

    Other arguments and errors raised as for `prompt_errors`. The exact value is
    `concentration.gaussian_mean_error`. Source: ours. See: chapter 5.

    >>> g = torch.Generator().manual_seed(0)
    >>> mean_error(1.0, [10**6], 100, generator=g).n
    100
    """
    errors, weights = _sample(s, lengths, n_prompts, k, generator, importance=importance)
    values = errors * weights
    return Estimate(values.mean(0), values.std(0) / math.sqrt(n_prompts), n_prompts)


def _sample(s, lengths, n_prompts, k, generator, *, importance) -> tuple[Tensor, Tensor]:
    """(errors, weights), each (n_prompts, n_lengths); half of the prompts get a token if asked."""
    if not s > 0:
        raise ValueError(f"s must be a score variance above 0, got {s}. At 0 the error is s/L.")
    if importance and n_prompts % 2:
        raise ValueError(f"n_prompts must be even, one half a kind of prompt, got {n_prompts}.")
    logs = log_lengths(lengths)
    for log_length in logs:
        _require_room(log_length, 4)
    parts = []
    for added, many in ((False, n_prompts // 2), (importance, n_prompts - n_prompts // 2)):
        for start in range(0, many, BATCH):
            draws = _draw(min(BATCH, many - start), k, generator)
            parts.append([_errors(s, float(x), draws, importance, added) for x in logs])
    errors, weights = (
        np.concatenate([np.stack([pair[i] for pair in part], -1) for part in parts]) for i in (0, 1)
    )
    return torch.from_numpy(errors), torch.from_numpy(weights)


def _draw(n: int, k: int, generator: torch.Generator):
    """The random numbers of n prompts at any length: spacings of both ends, noise, a place."""
    top, bottom = (_exponentials((n, k), generator) for _ in range(2))
    noise = torch.randn(n, SLICES, generator=generator, dtype=torch.float64).numpy()
    place = torch.rand(n, 2, generator=generator, dtype=torch.float64).numpy()
    return top, bottom, noise, place


def _errors(s, log_length, draws, importance, added):
    """(errors, weights) of one batch of prompts at one length."""
    top, bottom, noise, place = draws
    k = min(top.shape[1], int(math.exp(min(log_length, 30.0)) / 4))
    upper, lower, cut = _extremes(log_length, top[:, :k], bottom[:, :k])
    tokens, weights = np.concatenate([upper, -lower], 1), np.ones(len(upper))
    if importance:
        first, last = _rare_range(s, log_length)
        if added:
            token = np.sign(place[:, :1] - 0.5) * (first + (last - first) * place[:, 1:])
            tokens = np.concatenate([tokens, token], 1)
        weights = _mecke_weights(tokens, log_length, first, last)
    log_count = log_length + math.log1p(-2 * k * math.exp(-log_length))
    nodes, log_masses = _slices(cut)
    total = np.zeros(len(tokens))
    for z, dz in zip(*_queries(s, log_length), strict=True):
        theta = math.sqrt(s) * z
        mean = _bulk_mean(theta, cut, log_count)
        total += dz * _ratio(theta, tokens, nodes, log_masses, noise, mean, log_count) ** 2
    return s * total, weights


def _extremes(log_length, top, bottom):
    """The k largest, minus the k smallest, and the cuts -c_2 < bulk < c_1, as (c_1, c_2).

    Given the k largest of L uniforms, the rest is uniform below them: exact in law.
    """
    k = top.shape[1]
    log_upper = _log_smallest_uniforms(top, log_length)
    room = np.log1p(-np.exp(log_upper[:, -1:]))
    rest = log_length + math.log1p(-k * math.exp(-log_length))
    log_lower = _log_smallest_uniforms(bottom, rest) + room
    upper, lower = -ndtri_exp(log_upper), -ndtri_exp(log_lower)
    return upper, lower, (upper[:, -1], lower[:, -1])


def _log_smallest_uniforms(spacings, log_length):
    """log of the k smallest of L uniforms, increasing: 1 - exp(-sum_j spacing_j / (L - j))."""
    index = np.arange(spacings.shape[1])
    log_left = log_length + np.log1p(-index * math.exp(-log_length))
    log_sum = np.log(np.cumsum(spacings * np.exp(log_left[0] - log_left), 1)) - log_left[0]
    return np.where(log_sum < -40, log_sum, np.log(-np.expm1(-np.exp(np.maximum(log_sum, -40)))))


def _slices(cut):
    """Legendre nodes (n, SLICES) on the bulk, and the log probability of each given the bulk.

    A Gaussian count at each node gives the noise of all tilted sums its exact covariance.
    """
    right, left = (np.minimum(c, 39.0)[:, None] for c in cut)
    x, w = leggauss(SLICES)
    nodes = (right - left) / 2 + (right + left) / 2 * x
    log_masses = np.log(w) - nodes**2 / 2
    peak = log_masses.max(1, keepdims=True)
    return nodes, log_masses - peak - np.log(np.exp(log_masses - peak).sum(1, keepdims=True))


def _bulk_mean(theta, cut, log_count):
    """log of the bulk's mean sum of w = exp(theta xi), and its mean of (xi - theta), tilted."""
    right, left = cut
    # the mass between the cuts, from the smaller tail: Phi(right - theta) - Phi(-left - theta)
    log_mass = _log_interval(-left - theta, right - theta)
    log_all = _log_interval(-left, right)
    edge = [-(x**2) / 2 - math.log(math.sqrt(2 * math.pi)) - log_mass for x in
            (-left - theta, right - theta)]
    return log_count + theta**2 / 2 + log_mass - log_all, np.exp(edge[0]) - np.exp(edge[1])


def _log_interval(low, high):
    """log(Phi(high) - Phi(low)), low < high, from the tail in which it lies."""
    flip = low > 0
    low, high = np.where(flip, -high, low), np.where(flip, -low, high)
    far, near = log_ndtr(high), log_ndtr(low)
    return far + np.log1p(-np.exp(near - far))


def _ratio(theta, tokens, nodes, log_masses, noise, mean, log_count):
    """sum w (xi - theta) / sum w over a whole prompt, the extreme tokens and the bulk."""
    log_bulk, shift = mean
    scale = np.maximum((theta * tokens).max(1), log_bulk)[:, None]
    explicit = np.exp(theta * tokens - scale)
    counts = np.exp(log_masses / 2) * noise
    counts -= np.exp(log_masses) * counts.sum(1, keepdims=True)  # their total is fixed
    ripple = counts * np.exp(theta * nodes + log_count / 2 - scale)
    bulk = np.exp(log_bulk - scale[:, 0])
    total = explicit.sum(1) + ripple.sum(1) + bulk
    centred = (explicit * (tokens - theta)).sum(1) + (ripple * (nodes - theta)).sum(1)
    return (centred + bulk * shift) / total


def _rare_range(s: float, log_length: float) -> tuple[float, float]:
    """Sizes of the token that is added: from the usual maximum to beyond the one that matters.

    The exponent comes from x* = (1/t + t/2) sqrt(log L), t^2 = (1/4 + 1/s)^(-1/2).
    """
    t = (0.25 + 1 / max(s, 0.5)) ** -0.25
    usual = float(-ndtri_exp(-log_length))
    return usual, max(usual, (1 / t + t / 2) * math.sqrt(log_length)) + 4


def _mecke_weights(tokens, log_length, first, last):
    """1 / (1/2 + 1/2 sum_i q(x_i) / (L phi(x_i))), q uniform on the sizes and even in the sign.

    A token more in L changes the law by 1/L, which this leaves out.
    """
    size = np.abs(tokens)
    log_q = -math.log(2 * (last - first))
    log_ratio = log_q + size**2 / 2 + math.log(2 * math.pi) / 2 - log_length
    return 1 / (0.5 + 0.5 * np.exp(log_ratio, where=(size >= first) & (size <= last),
                                   out=np.zeros_like(size)).sum(1))  # fmt: skip


@functools.lru_cache(maxsize=64)
def _queries(s: float, log_length: float) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of E_z: the trapezoid rule, out to where queries cost less than e^-20."""
    step = min(0.25, 0.5 / math.sqrt(s))
    reach = math.sqrt(2 * (exponent(s, typical=True) * log_length + 20))
    count = math.ceil(reach / step)
    z = step * np.arange(-count, count + 1)
    return z, step * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def _exponentials(shape: tuple[int, ...], generator: torch.Generator) -> np.ndarray:
    uniforms = torch.rand(shape, generator=generator, dtype=torch.float64).numpy()
    return -np.log1p(-uniforms)


def _require_room(log_length: float, k: int) -> None:
    if not log_length >= math.log(k):
        raise ValueError(
            f"a prompt must have {k} tokens or more, got {math.exp(log_length):.6g}. Lower k, or "
            f"sample short prompts as they are: concentration.prompt_errors."
        )
