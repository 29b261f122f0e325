"""What a softmax head does on long prompts, from arrays of its queries, keys and values.

The pool of N tokens plays the law, a prompt is L draws from it. With a the query times the head's
own scale, so that scores are a.k, and T(a) the softmax average of the values over the pool,

    linear prediction   mean(v) + Cov(v, k) a           exact if the pool is Gaussian
    share               sum |T - linear|^2 / sum |T - mean(v)|^2, over the queries
    1/L law             E |T[prompt](a) - T(a)|^2 = constant(a)/L, by the delta method

Everything is batched over the heads H and read in chunks of tokens: once for the moments, once
for the tilted sums, once for who receives the attention. No model is known here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from measureattn._checks import require_finite, require_ndim, require_same, require_tensor
from measureattn._monte_carlo import seed_from
from measureattn._typing import Float
from measureattn.concentration import Estimate, RequiredLength, first_order_length
from measureattn.heads.decay import Decay, measure_decay
from measureattn.heads.pool import Pool, chunks
from measureattn.heads.sinks import Sink, find_sinks

# a share up to which a head is called so; "constant" is one whose output ignores its query
VERDICTS = ((0.1, "linear"), (0.3, "roughly linear"), (1.0, "not linear"))
STILL = 1e-10  # signal, relative to the values' variance, below which it is rounding
WITNESSES = 1_000  # queries at most for the Gaussian share and for who receives the attention
HEAVY = 0.02  # effective share of the pool below which a tilt is called heavy


@dataclass(frozen=True)
class HeadReport:
    """What `measure_heads` found, a row of each tensor a head; `str` gives a table.

    names           (H), e.g. "3.7" for layer 3, head 7
    n_tokens        N, the size of the pool
    share           Estimate (H): the share of the softmax output left unexplained by the linear
                    prediction; the standard error is of the sampling of queries alone
    gaussian        (H): the share that N Gaussian tokens with the same moments leave, one pool
                    drawn; what goes beyond it is owed to the law, the rest to the pool's size
    score_variance  (H, Q): a' Cov(k) a, one a query
    excess          (H, Q): kappa(a) - mean(k).a - a' Cov(k) a / 2, zero for a Gaussian pool
    spread          (H, Q): E w^2 = exp(kappa(2a) - 2 kappa(a)); N / spread tokens are effective
    constant        (H, Q): constant of the 1/L law, squared units of the values
    signal          (H, Q): |T - mean(v)|^2
    unexplained     (H, Q): |T - linear|^2
    lengths         (H): the prompt length at which the error is `tolerance` of the signal
    sinks           (H): tuples of `Sink`, the strongest first
    decay           measured errors of prompts beside the 1/L law, or None
    offset, matrix  (H, M), (H, M, D): the linear prediction is offset + matrix a

    The table gives lengths to three digits.

    Source: ours. See: chapter 11.

    >>> g = torch.Generator().manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 500, 2, generator=g)
    >>> measure_heads(q, k, v, n_queries=50, generator=g).n_tokens
    500
    """

    names: tuple[str, ...]
    n_tokens: int
    share: Estimate
    gaussian: Float[Tensor, "heads"]
    score_variance: Float[Tensor, "heads queries"]
    excess: Float[Tensor, "heads queries"]
    spread: Float[Tensor, "heads queries"]
    constant: Float[Tensor, "heads queries"]
    signal: Float[Tensor, "heads queries"]
    unexplained: Float[Tensor, "heads queries"]
    lengths: tuple[RequiredLength, ...]
    sinks: tuple[tuple[Sink, ...], ...]
    decay: Decay | None
    offset: Float[Tensor, "heads M"]
    matrix: Float[Tensor, "heads M D"]

    def verdict(self, head: int) -> str:
        """In words: how linear the head is, and what stands in the way.

        Source: ours. See: chapter 11.

        >>> g = torch.Generator().manual_seed(0)
        >>> q, k, v = torch.randn(3, 1, 4_000, 2, generator=g)
        >>> measure_heads(q / 4, k, k, n_queries=50, generator=g).verdict(0)
        'linear'
        """
        share, gaussian = float(self.share.value[head]), float(self.gaussian[head])
        if math.isnan(share):
            return "constant"
        words = next((name for limit, name in VERDICTS if share <= limit), "worse than its mean")
        reasons = [str(sink) for sink in self.sinks[head][:1]]
        effective = self.n_tokens / float(self.spread[head].median())
        if effective < HEAVY * self.n_tokens:
            reasons.append(f"heavy tilts, {_rounded(effective, 2):,} effective tokens")
        if VERDICTS[0][0] < share < 2 * gaussian:
            reasons.append(f"but so few Gaussian tokens would leave {gaussian:.2f}")
        return "; ".join([words, *reasons])

    def rows(self) -> list[dict[str, object]]:
        """One dictionary of plain numbers and words a head, for tables and files.

        Source: ours. See: chapter 11.

        >>> g = torch.Generator().manual_seed(0)
        >>> q, k, v = torch.randn(3, 2, 500, 2, generator=g)
        >>> [row["head"] for row in measure_heads(q, k, v, generator=g).rows()]
        ['0', '1']
        """
        return [self._row(head) for head in range(len(self.names))]

    def _row(self, h: int) -> dict[str, object]:
        variance, sinks = self.score_variance[h], self.sinks[h]
        low, middle, high = torch.quantile(variance, variance.new_tensor([0.1, 0.5, 0.9])).tolist()
        row = {
            "head": self.names[h],
            "share": float(self.share.value[h]),
            "share_std_error": float(self.share.std_error[h]),
            "share_gaussian": float(self.gaussian[h]),
            "score_variance_10": low,
            "score_variance_50": middle,
            "score_variance_90": high,
            "excess_50": float(self.excess[h].median()),
            "effective_tokens_50": self.n_tokens / float(self.spread[h].median()),
            "required_length": self.lengths[h].length,
            "required_length_sure": self.lengths[h].sure,
            "sink": sinks[0].label if sinks else "",
            "sink_attention": sinks[0].attention if sinks else 0.0,
        }
        if self.decay is not None:
            row["decay_predicted"] = float(self.decay.predicted[h])
            for i, length in enumerate(self.decay.lengths):
                row[f"decay_{length}"] = float(self.decay.measured.value[h, i])
                row[f"decay_{length}_std_error"] = float(self.decay.measured.std_error[h, i])
        return row | {"verdict": self.verdict(h)}

    def __str__(self) -> str:
        lines = [
            f"{'head':>6} {'share unexplained':>19} {'score variance':>15} {'kappa excess':>13} "
            f"{'length':>12}  verdict"
        ]
        lines += [
            f"{row['head']:>6} {row['share']:>9.4f} ± {row['share_std_error']:<7.4f} "
            f"{row['score_variance_50']:>15.2f} {row['excess_50']:>13.3f} "
            f"{_rounded(row['required_length'], 3):>12,}  {row['verdict']}"
            for row in self.rows()
        ]
        return "\n".join(lines)

    @staticmethod
    def join(reports: Sequence["HeadReport"]) -> "HeadReport":
        """The heads of several reports on one pool size in one report.

        Raises ValueError if the pools or the prompt lengths differ.
        Source: ours. See: chapter 11.

        >>> g = torch.Generator().manual_seed(0)
        >>> q, k, v = torch.randn(3, 2, 500, 2, generator=g)
        >>> one = measure_heads(q, k, v, generator=g)
        >>> len(HeadReport.join([one, one]).names)
        4
        """
        if len({(x.n_tokens, x.decay and x.decay.lengths) for x in reports}) != 1:
            raise ValueError(
                "reports can only be joined if they have one pool size and one set of prompt "
                f"lengths, got pools of {[x.n_tokens for x in reports]} tokens. Report them apart."
            )
        return _join(reports)


def measure_heads(
    queries: Float[Tensor, "heads Nq D"],
    keys: Float[Tensor, "heads N D"],
    values: Float[Tensor, "heads N M"],
    *,
    generator: torch.Generator,
    n_queries: int | None = 200,
    names: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    tolerance: float = 0.1,
    lengths: Sequence[int] = (),
    n_prompts: int = 64,
) -> HeadReport:
    """A `HeadReport` on H heads from their own arrays, float32 or float64.

    queries    (H, Nq, D), already scaled: the score of a key is query.key, so divide by sqrt(d)
               if the head does
    keys       (H, N, D), values (H, N, M): the pool; repeat shared keys for grouped queries
    generator  chooses the queries and the prompts
    n_queries  queries sampled without replacement, the same for all heads; None takes all
    names      (H) how to call the heads; labels (N) what each token of the pool is, to name sinks
    tolerance  relative error that the required length is for
    lengths    increasing prompt lengths at which errors are measured, over `n_prompts` prompts
               drawn from the pool with replacement, four or more; none by default

    Sums over chunks of at most 8,192 tokens are taken in the arrays' dtype and merged in float64.
    Raises ValueError or TypeError if the arguments do not fit together.
    Source: ours. See: chapter 11.

    >>> g = torch.Generator().manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 4_000, 2, generator=g)
    >>> measure_heads(q / 4, k, k, generator=g).share.value < 0.01  # Gaussian keys
    tensor([True])
    """
    _require_heads(queries, keys, values, names, labels)
    if not tolerance > 0 or (n_queries is not None and n_queries < 1):
        raise ValueError(
            f"tolerance must be above 0 and n_queries 1 or more, got {tolerance} and {n_queries}."
        )
    names = tuple(names or (str(h) for h in range(len(keys))))
    many = queries.shape[1] if n_queries is None else min(n_queries, queries.shape[1])
    chosen = torch.randperm(queries.shape[1], generator=generator)[:many].to(queries.device)
    a = queries[:, chosen]
    pool = Pool.read(a, partial(chunks, keys, values))
    few = a[:, :WITNESSES]
    twin = Pool.read(few, partial(pool.gaussian_chunks, keys, seed_from(generator)))
    score_variance = pool.score_variance(a)
    decay = None
    if lengths:
        decay = measure_decay(a, keys, values, pool, lengths, n_prompts, generator)
    return HeadReport(
        names, keys.shape[1], _share(pool, queries.shape[1]), _share(twin, many).value,
        score_variance, pool.kappa[0] - score_variance / 2, pool.spread, pool.constant,
        pool.signal, pool.unexplained, tuple(_lengths(pool, tolerance)),
        find_sinks(few, keys, pool, labels), decay, pool.mean_value, pool.matrix,
    )  # fmt: skip


def _rounded(number: float, digits: int) -> int:
    return int(float(f"{number:.{digits}g}"))


def _mean_signal(pool: Pool) -> Tensor:
    """|T - mean(v)|^2 over the queries, NaN where the output does not move with the query."""
    signal = pool.signal.mean(1)
    return torch.where(signal > STILL * pool.value_variance, signal, torch.nan)


def _share(pool: Pool, population: int) -> Estimate:
    """The ratio of the sums, with the delta-method standard error of a sampled ratio.

    Queries are drawn without replacement, so the error vanishes when all of them are used. NaN
    where the output does not move with the query.
    """
    many = pool.signal.shape[1]
    ratio = pool.unexplained.mean(1) / _mean_signal(pool)
    residual = pool.unexplained - ratio[:, None] * pool.signal
    unseen = 1 - many / population
    variance = residual.square().sum(1) / max(1, many - 1) / many * unseen
    return Estimate(ratio, variance.sqrt() / pool.signal.mean(1), many)


def _lengths(pool: Pool, tolerance: float) -> Iterator[RequiredLength]:
    """As `required_length` at fixed queries, for all heads at once."""
    kappa = pool.kappa
    heaviest = (kappa[2] - kappa[1] - kappa[0]).exp().amax(1)
    values = pool.constant.mean(1) / (tolerance**2 * _mean_signal(pool))
    for value, one in zip(values.tolist(), heaviest.tolist(), strict=True):
        if math.isfinite(value):
            yield first_order_length(value, one)
        else:
            sure = "the output does not depend on the query"
            yield RequiredLength(1, "the 1/L law at the given queries", sure, (1, 1))


def _join(reports: Sequence[HeadReport]) -> HeadReport:
    def joined(parts):
        first = parts[0]
        if isinstance(first, Tensor):
            return torch.cat(parts)
        if isinstance(first, tuple):
            return sum(parts, ())
        if isinstance(first, Estimate):
            values, errors = ([getattr(x, name) for x in parts] for name in ("value", "std_error"))
            return Estimate(torch.cat(values), torch.cat(errors), first.n)
        if isinstance(first, Decay):
            measured = joined([x.measured for x in parts])
            predicted = joined([x.predicted for x in parts])
            return Decay(first.lengths, measured, predicted, first.n_queries)
        return first

    return HeadReport(*(joined([getattr(x, f.name) for x in reports]) for f in fields(HeadReport)))


def _require_heads(queries, keys, values, names, labels) -> None:
    for name, tensor in (("keys", keys), ("queries", queries), ("values", values)):
        require_tensor(name, tensor)
        require_ndim(name, tensor, 3, "(heads, tokens, dim)")
        require_same(name, tensor, "keys", keys)
    heads, n, dim = keys.shape
    if queries.shape[::2] != (heads, dim) or values.shape[:2] != (heads, n) or n < 2:
        raise ValueError(
            f"queries, keys and values must have shapes (H, Nq, D), (H, N, D) and (H, N, M) with "
            f"N of 2 or more, got {tuple(queries.shape)}, {tuple(keys.shape)} and "
            f"{tuple(values.shape)}. Repeat shared keys with repeat_interleave."
        )
    for name, given, wanted in (("names", names, heads), ("labels", labels, n)):
        if given is not None and len(given) != wanted:
            raise ValueError(f"{name} must have {wanted} entries, got {len(given)}.")
    for name, tensor in (("queries", queries), ("keys", keys), ("values", values)):
        require_finite(name, tensor, "Are the weights or the hidden states damaged?")
