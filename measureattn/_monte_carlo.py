"""Errors of sampled prompts: one pass over nested prefixes, many queries, a control variate.

Public names live in `measureattn.concentration`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.stats import bootstrap
from torch import Tensor

from measureattn._checks import require_same, require_tensor
from measureattn._typing import Float
from measureattn.measures import Measure
from measureattn.streaming import TiltedSums

KINDS = ("output", "V", "U")
WORKING_SET = 2**18  # scores held at once: what a processor's cache holds


@dataclass(frozen=True)
class Estimate:
    """A number, or one a length, with its standard error and the number of prompts behind it.

    A deterministic result has std_error 0 and n = 0. Source: ours. See: chapter 5.

    >>> Estimate(2.0, 0.1, 100).value
    2.0
    """

    value: Tensor | float
    std_error: Tensor | float
    n: int


@dataclass(frozen=True)
class Slope:
    """A log-log slope with its bootstrap interval, and the confidence of the interval.

    Source: ours. See: chapter 5.

    >>> Slope(-1.0, -1.1, -0.9, 0.95).high
    -0.9
    """

    value: float
    low: float
    high: float
    confidence: float


def prompt_errors(
    measure: Measure,
    queries: Measure | Tensor,
    U: Tensor,
    V: Tensor,
    lengths: Sequence[int],
    n_prompts: int,
    *,
    n_queries: int = 64,
    generator: torch.Generator,
    of: str = "output",
    control_variate: bool = False,
) -> Float[Tensor, "prompts lengths"]:
    """Squared errors of single prompts, averaged over queries: (n_prompts, len(lengths)), float64.

    measure    the tokens' law, not batched, with a sampler;  U (D, E), V (M, D)
    queries    a law on R^E, of which every prompt sees n_queries draws of its own, or a tensor
               (Q, E) of fixed queries that all prompts see
    lengths    increasing; a prompt's lengths are its nested prefixes, so compare them in pairs
    of         "output" |T[prompt] - T|^2, "V" |m_a(prompt) - m_a|^2 (operator norm of the
               V-derivative), "U" |V (C_a(prompt) - C_a)|_F^2 |z|^2 (Hilbert-Schmidt norm)

    control_variate subtracts a multiple of the first-order error minus its exact mean. That keeps
    means and changes single values, so leave it off for medians; see `mean_squared_error`.
    Raises ValueError or TypeError if the arguments do not fit.
    Source: Propositions 3.1 and 3.4, arXiv 2512.11784 (what they bound). See: chapters 5 and 6.

    >>> g, one = torch.Generator().manual_seed(0), torch.eye(1, dtype=torch.float64)
    >>> prompt_errors(Rademacher(1), one, one, one, [1, 10], 5, generator=g).shape
    torch.Size([5, 2])
    """
    require_setting(measure, queries, U, V)
    lengths = _require_lengths(lengths)
    if of not in KINDS:
        raise ValueError(f"of must be one of {KINDS}, got {of!r}.")
    if control_variate and (of == "U" or n_prompts < 4):
        raise ValueError(
            "the control variate serves outputs and V-derivatives and needs 4 prompts or more, "
            f"got of={of!r} and n_prompts={n_prompts}. Pass control_variate=False."
        )
    if of == "V":
        V = torch.eye(measure.dim, dtype=V.dtype, device=V.device)
    many = len(queries) if isinstance(queries, Tensor) else n_queries
    size = max(1, min(n_prompts, WORKING_SET // (512 * many)))
    plain, first = [], []
    for start in range(0, n_prompts, size):
        z = _queries(queries, many, min(size, n_prompts - start), generator)
        errors, controls = _batch_errors(measure, z, U, V, lengths, generator, of, control_variate)
        plain.append(errors)
        first.append(controls)
    errors = torch.cat(plain)
    return _without_first_order(errors, torch.cat(first)) if control_variate else errors


def mean_squared_error(
    measure: Measure,
    queries: Measure | Tensor,
    U: Tensor,
    V: Tensor,
    lengths: Sequence[int],
    n_prompts: int,
    *,
    n_queries: int = 64,
    generator: torch.Generator,
    of: str = "output",
    control_variate: bool = True,
) -> Estimate:
    """The mean of `prompt_errors`, one value a length, with standard errors over prompts.

    Arguments as there. The control variate is the first-order error |V h|^2 at each query, h the
    prompt's mean of the influence function exp(a.x - kappa(a)) (x - m_a), minus its exact mean
    tr(V S V')/L from `delta_method`; queries too heavily tilted for L (w = exp(a.x - kappa) has
    E w^4 / (E w^2)^2 above L) are faded out before. Its coefficient is fitted on the other half of
    the prompts: the estimate is unbiased at every length and tilt, and gains a factor of about L
    in variance where the 1/L law holds. For of="U" the estimate is plain. Where plain sampling
    cannot see the mean (long prompts, score variance above 1/2) the standard error cannot either:
    use `gaussian_mean_error` or `measureattn.extremes`.

    Raises ValueError or TypeError if the arguments do not fit.
    Source: Propositions 3.1 and 3.4, arXiv 2512.11784 (what they bound). See: chapters 5 and 6.

    >>> g, one = torch.Generator().manual_seed(0), torch.eye(1, dtype=torch.float64)
    >>> found = mean_squared_error(Rademacher(1), one, one, one, [1000], 400, generator=g)
    >>> (found.value * 1000 - 0.1764).abs() < 0.01  # the 1/L law, by delta_method
    tensor([True])
    """
    values = prompt_errors(
        measure, queries, U, V, lengths, n_prompts, n_queries=n_queries, generator=generator,
        of=of, control_variate=control_variate and of != "U",
    )  # fmt: skip
    return Estimate(values.mean(0), values.std(0) / math.sqrt(n_prompts), n_prompts)


def fit_slope(
    lengths: Sequence,
    errors: Float[Tensor, "prompts lengths"],
    *,
    typical: bool = False,
    confidence: float = 0.95,
    generator: torch.Generator,
) -> Slope:
    """The least-squares slope of log error against log L, with a bootstrap interval over prompts.

    errors   (n_prompts, n_lengths), the same prompts at all lengths, as from `prompt_errors`
    typical  False: slope of the mean over prompts; True: of the median

    The interval is the percentile one of scipy.stats.bootstrap, prompts resampled in pairs with
    their lengths. A slope at finite lengths is no exponent. Raises ValueError if shapes do not fit.
    Source: ours. See: chapter 5.

    >>> lengths, g = torch.tensor([10.0, 100.0]), torch.Generator().manual_seed(0)
    >>> round(fit_slope([10, 100], (1 / lengths).expand(8, 2), generator=g).value, 6)
    -1.0
    """
    logs = log_lengths(lengths)
    if errors.ndim != 2 or errors.shape[1] != logs.size or logs.size < 2:
        raise ValueError(
            f"errors must have shape (n_prompts, {logs.size}), one column a length and two or more "
            f"of them, got shape {tuple(errors.shape)}. Transpose it?"
        )
    table, centred = errors.double().numpy(force=True), logs - logs.mean()
    middle = np.median if typical else np.mean

    def slope(prompts, axis=-1):
        return np.log(middle(table[prompts], axis=axis - 1)) @ centred / (centred @ centred)

    prompts = (np.arange(len(table)),)
    rng = np.random.default_rng(seed_from(generator))
    value = float(slope(prompts[0]))
    interval = bootstrap(
        prompts, slope, confidence_level=confidence, method="percentile", rng=rng, batch=100,
        vectorized=True, n_resamples=999,
    ).confidence_interval  # fmt: skip
    return Slope(value, float(interval.low), float(interval.high), confidence)


def _batch_errors(measure, z, U, V, lengths, generator, of, control_variate):
    """(errors, controls), each (prompts, lengths), of one batch of prompts; z (Q, prompts, E)."""
    a = z @ U.mT
    law = measure.expand((z.shape[1],))
    truth = law.tilted_cov(a) if of == "U" else law.tilted_mean(a)
    control = _Control(law, a, V) if control_variate else None
    state, seen, errors, controls = TiltedSums.empty(a, with_cov=of == "U"), 0, [], []
    step = max(1, WORKING_SET // a[..., 0].numel())
    for length in lengths:
        for start in range(seen, length, step):
            n = min(step, length - start)
            tokens = law.sample(n, generator=generator, dtype=z.dtype, device=z.device)
            state = state.update(tokens)
        seen = length
        if of == "U":
            gap = V.double() @ (state.cov - truth)
            error = gap.square().sum((-2, -1)) * z.double().square().sum(-1)
        else:
            error = ((state.mean - truth) @ V.double().mT).square().sum(-1)
        errors.append(error.mean(0))
        controls.append(
            control.at(length, error, state.log_mgf).mean(0) if control else error[0] * 0
        )
    return torch.stack(errors, -1), torch.stack(controls, -1)


class _Control:
    """The first-order error of prompts at their queries, minus its mean, faded out for heavy tilts.

    The prompt's mean of the influence function is exp(kappa_L - kappa) (m_L - m): the state that
    gives the error gives its first-order part as well.
    """

    def __init__(self, law: Measure, a: Tensor, V: Tensor):
        self.log_mgf, two, four = (law.log_mgf(k * a).double() for k in (1, 2, 4))
        step = (law.tilted_mean(2 * a) - law.tilted_mean(a)) @ V.mT
        second = (V @ law.tilted_cov(2 * a) @ V.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
        self.constant = (two - 2 * self.log_mgf).exp() * (second + step.square().sum(-1))
        self.log_kurtosis = four - 2 * two

    def at(self, length: int, error: Tensor, log_mgf: Tensor) -> Tensor:
        fade = 1 / (1 + (2 * (self.log_kurtosis - math.log(length))).exp())
        control = fade * ((2 * (log_mgf - self.log_mgf)).exp() * error - self.constant / length)
        return torch.where(fade > 0, control, 0.0)


def _without_first_order(errors: Tensor, controls: Tensor) -> Tensor:
    """errors - beta controls, with each half's beta fitted on the other half: so no bias."""
    adjusted = errors.clone()
    for mine, other in ((0, 1), (1, 0)):
        x, y = controls[other::2], errors[other::2]
        centred = x - x.mean(0)
        spread = centred.square().sum(0)
        beta = (centred * y).sum(0) / torch.where(spread > 0, spread, 1.0)
        adjusted[mine::2] -= beta * controls[mine::2]
    return adjusted


def _queries(queries, many: int, prompts: int, generator) -> Tensor:
    """(many, prompts, E)."""
    if isinstance(queries, Tensor):
        return queries[:, None, :].expand(many, prompts, -1)
    return queries.sample(many * prompts, generator=generator).reshape(many, prompts, -1)


def log_lengths(lengths) -> np.ndarray:
    """log L as float64, also of integers beyond the floats; 0-dimensional for a single number."""
    lengths = lengths.tolist() if isinstance(lengths, Tensor | np.ndarray) else lengths
    array = np.array(lengths, dtype=object)
    if array.size == 0 or not all(x >= 1 for x in array.flat):
        raise ValueError(f"lengths must be 1 token or more, got {lengths}.")
    return np.array([math.log(x) for x in array.flat]).reshape(array.shape)


def _require_lengths(lengths: Sequence[int]) -> list[int]:
    lengths = [int(x) for x in lengths]
    if not lengths or lengths[0] < 1 or any(b <= a for a, b in pairwise(lengths)):
        raise ValueError(
            f"lengths must be increasing whole numbers from 1 on, got {lengths}. "
            f"Sort them: a prompt's lengths are its prefixes."
        )
    return lengths


def require_setting(measure: Measure, queries: Measure | Tensor, U: Tensor, V: Tensor) -> None:
    """Laws that are not batched, and matrices that fit them and the queries."""
    for name, tensor in (("U", U), ("V", V)):
        require_tensor(name, tensor)
    require_same("V", V, "U", U)
    for name, law in (("measure", measure), ("queries", queries)):
        if isinstance(law, Measure) and law.batch_shape:
            raise ValueError(
                f"{name} must be a single law, got batch_shape {tuple(law.batch_shape)}. "
                f"Ask its members one by one."
            )
    if isinstance(queries, Tensor):
        require_tensor("queries", queries)
        require_same("queries", queries, "U", U)
    dims = (measure.dim, queries.shape[-1] if isinstance(queries, Tensor) else queries.dim)
    if isinstance(queries, Tensor) and queries.ndim != 2:
        raise ValueError(f"fixed queries must have shape (Q, E), got {tuple(queries.shape)}.")
    if tuple(U.shape) != dims or V.ndim != 2 or V.shape[1] != measure.dim:
        raise ValueError(
            f"U must have shape {dims} and V shape (M, {dims[0]}) for tokens of dimension "
            f"{dims[0]} and queries of dimension {dims[1]}; got {tuple(U.shape)} and "
            f"{tuple(V.shape)}. Transpose one?"
        )


def seed_from(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))
