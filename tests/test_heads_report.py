"""Reports on arrays: against the package's own operators, closed forms and brute force.

Statements about laws average over many independent heads, each with a pool of its own, and are
judged in the standard errors of that average, four of them.
"""

import math

import pytest
import torch

from measureattn import Empirical, Gaussian, Mixture, Rademacher, UniformSphere, attend
from measureattn.attention import first_order_attend
from measureattn.concentration import delta_method, mean_squared_error, required_length
from measureattn.heads import HeadReport, measure_heads
from measureattn.heads.sinks import SINK_ATTENTION

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def skewed_heads(dtype, n=3_000, heads=2):
    """Queries, keys and values of which nothing is centred or Gaussian."""
    g = generator(3)
    keys = torch.randn(heads, n, 3, generator=g, dtype=F64) + 0.5
    other = torch.rand(heads, n, 2, generator=g, dtype=F64) ** 3
    values = keys[..., :2].square() / 2 + other
    queries = 0.6 * torch.randn(heads, 40, 3, generator=g, dtype=F64) + 0.2
    return tuple(x.to(dtype) for x in (queries, keys, values))


def joint(keys, values):
    """(law of (k, v), U that puts a query on k, V that reads v) of one head, float64."""
    dim, size = keys.shape[-1], values.shape[-1]
    eye = torch.eye(dim + size, dtype=F64)
    return Empirical(torch.cat([keys, values], -1).double()), eye[:, :dim], eye[dim:]


# -- one number after the other against the operators of the package ----------------------------


@pytest.mark.parametrize("n", [700, 20_000])
def test_it_is_what_the_operators_say(dtype, n):
    """20,000 tokens take three chunks. Order of queries: sampling them all still permutes them."""
    queries, keys, values = skewed_heads(dtype, n)
    report = measure_heads(queries, keys, values, generator=generator(), n_queries=None)
    within = 1e-10 if dtype == F64 else 2e-5
    order = torch.randperm(40, generator=generator())
    for h in range(2):
        law, U, V = joint(keys[h], values[h])
        z = queries[h, order].double()
        a, centre = z @ U.mT, V @ law.mean
        softmax, linear = attend(law, z, U=U, V=V), first_order_attend(law, z, U=U, V=V)
        cov = law.cov[:3, :3]
        covariance, _ = delta_method(law, a)
        expected = {
            "signal": (softmax - centre).square().sum(-1),
            "unexplained": (softmax - linear).square().sum(-1),
            "score_variance": ((z @ cov) * z).sum(-1),
            "excess": law.log_mgf(a) - a @ law.mean - ((z @ cov) * z).sum(-1) / 2,
            "spread": (law.log_mgf(2 * a) - 2 * law.log_mgf(a)).exp(),
            "constant": (V @ covariance @ V.mT).diagonal(dim1=-2, dim2=-1).sum(-1),
        }
        for name, value in expected.items():
            found = getattr(report, name)[h]
            # kappa's excess is a difference of numbers as large as the score variance
            size = expected["score_variance"] if name == "excess" else value.abs()
            assert (found - value).abs().max() < within * size.max(), name
        share = expected["unexplained"].sum() / expected["signal"].sum()
        assert abs(report.share.value[h] - share) < within
        predicted = report.offset[h] + z @ report.matrix[h].mT
        assert (predicted - linear).abs().max() < within * linear.abs().max()
    assert report.share.std_error.tolist() == [0, 0]


def test_the_required_length_is_that_of_the_package():
    queries, keys, values = skewed_heads(F64)
    for tolerance in (0.3, 0.01):
        report = measure_heads(
            queries, keys, values, generator=generator(), n_queries=None, tolerance=tolerance
        )
        for h in range(2):
            law, U, V = joint(keys[h], values[h])
            assert report.lengths[h] == required_length(law, queries[h], U, V, tolerance)


def test_many_queries_in_blocks_are_the_same():
    g = generator(1)
    queries, keys = torch.randn(2, 1, 5_000, 2, generator=g, dtype=F64)
    report = measure_heads(queries, keys, keys, generator=generator(), n_queries=None)
    law, U, V = joint(keys[0], keys[0])
    gap = attend(law, queries[0], U=U, V=V) - V @ law.mean
    assert abs(report.signal.sum() / gap.square().sum() - 1) < 1e-10


# -- known laws ---------------------------------------------------------------------------------


def pools(law, heads, n, seed=0):
    return law.sample(heads * n, generator=generator(seed), dtype=F64).reshape(heads, n, -1)


def assert_within_errors(values, expected, detects):
    """The mean over independent heads, four standard errors, each a fifth of what is detected."""
    error = values.std() / math.sqrt(len(values))
    assert error < detects / 5
    assert abs(values.mean() - expected) < 4 * error


def test_gaussian_keys_leave_nothing_but_the_size_of_the_pool():
    """First order in 1/N: ((e^s - 1 - s) tr Cov(v) + (e^s - 1)|g|^2)/(N |g|^2), by hand.

    That is also what the report's own Gaussian pool leaves, so the difference has mean zero. Half
    of the floor would be seen, and the floor is a thousandth of the signal.
    """
    heads, n, d = 256, 2_000, 3
    g = generator(1)
    root = torch.randn(d, d, generator=g, dtype=F64) / d**0.5
    read = torch.randn(d, d, generator=g, dtype=F64)
    mean = torch.ones(d, dtype=F64)
    keys = pools(Gaussian(mean, root @ root.mT), heads, n)
    values = keys @ read.mT + 0.5 * torch.randn(heads, n, d, generator=g, dtype=F64)
    cov = read @ root @ root.mT
    variance = (cov @ read.mT).trace() + 0.25 * d
    queries = 0.3 * torch.randn(10, d, generator=g, dtype=F64)
    s, slope = (queries @ root).square().sum(-1), (queries @ cov.mT).square().sum(-1)
    floor = ((s.expm1() - s) * variance + s.expm1() * slope).mean() / slope.mean() / n
    report = measure_heads(queries.expand(heads, -1, -1), keys, values, generator=g, n_queries=None)
    assert floor < 2e-3
    assert_within_errors(report.share.value, floor, floor / 2)
    assert_within_errors(report.gaussian, floor, floor / 2)
    assert_within_errors(report.share.value - report.gaussian, 0, floor / 2)


def two_bumps():
    means = torch.tensor([[-1.0, 0.5], [1.5, 0.0]], dtype=F64)
    covs = torch.stack([torch.eye(2, dtype=F64) / 4, torch.eye(2, dtype=F64)])
    return Mixture(
        [Gaussian(m, c) for m, c in zip(means, covs, strict=True)],
        torch.tensor([0.4, 0.6], dtype=F64),
    )


LAWS = {
    "rademacher": (lambda: Rademacher(2), 0.7),
    "sphere": (lambda: UniformSphere(2.0, 3), 1.0),
    "mixture": (two_bumps, 0.7),
}


@pytest.mark.parametrize("name", LAWS)
def test_known_laws_give_their_closed_forms(name):
    """The share and kappa's excess, by the law's own kappa; 5% of each would be seen."""
    make, scale = LAWS[name]
    law, heads, n = make(), 64, 5_000
    queries = scale * torch.randn(16, law.dim, generator=generator(5), dtype=F64)
    zero = torch.zeros_like(queries)
    mean, cov = law.tilted_mean(zero)[0], law.tilted_cov(zero)[0]
    softmax, linear = law.tilted_mean(queries), mean + queries @ cov
    share = (softmax - linear).square().sum() / (softmax - mean).square().sum()
    excess = law.log_mgf(queries) - queries @ mean - ((queries @ cov) * queries).sum(-1) / 2
    keys = pools(law, heads, n)
    report = measure_heads(
        queries.expand(heads, -1, -1), keys, keys, generator=generator(), n_queries=None
    )
    assert share > 0.01
    assert_within_errors(report.share.value, share, 0.05 * share)
    assert_within_errors(report.excess.mean(1), excess.mean(), 0.05 * excess.mean().abs())
    assert report.share.value.mean() > 5 * report.gaussian.mean()  # not the size of the pool


def test_rademacher_by_hand():
    """T = tanh a, linear = a: two queries, a pool of both signs in equal parts."""
    keys = torch.tensor([-1.0, 1.0], dtype=F64).repeat(50)[None, :, None]
    queries = torch.tensor([[[2.0], [0.5]]], dtype=F64)
    report = measure_heads(queries, keys, keys, generator=generator(), n_queries=None)
    t = [math.tanh(2.0), math.tanh(0.5)]
    expected = ((t[0] - 2) ** 2 + (t[1] - 0.5) ** 2) / (t[0] ** 2 + t[1] ** 2)
    assert abs(report.share.value[0] - expected) < 1e-12
    assert report.verdict(0) == "not linear"
    far = measure_heads(queries[:, :1] * 3, keys, keys, generator=generator())
    assert far.verdict(0).startswith("worse than its mean")


# -- standard errors ----------------------------------------------------------------------------


def test_fewer_queries_carry_an_honest_standard_error():
    """500 samples of 100 out of 300 queries, one a head: their spread, within 30% of its square."""
    g, heads = generator(7), 500
    keys = torch.rand(1, 100, 2, generator=g, dtype=F64).expand(heads, -1, -1)
    queries = torch.randn(300, 2, generator=g, dtype=F64)
    shuffled = torch.stack([queries[torch.randperm(300, generator=g)] for _ in range(heads)])
    whole = measure_heads(queries[None], keys[:1], keys[:1], generator=g, n_queries=None)
    part = measure_heads(shuffled, keys, keys, generator=g, n_queries=100)
    squares = (part.share.value - whole.share.value).square()
    claimed = part.share.std_error.square().mean()
    assert squares.std() / math.sqrt(heads) < 0.3 * claimed / 4
    assert abs(squares.mean() / claimed - 1) < 0.3


# -- the decay with L ---------------------------------------------------------------------------


def test_the_decay_is_the_mean_squared_error_of_prompts():
    """Against plain sampling by the package's own estimator: no control variate, other prompts."""
    queries, keys, values = skewed_heads(F64, n=500)
    queries = queries[:, :8]
    lengths = [16, 200]
    report = measure_heads(
        queries, keys, values, generator=generator(), n_queries=None, lengths=lengths,
        n_prompts=400,
    )  # fmt: skip
    for h in range(2):
        law, U, V = joint(keys[h], values[h])
        plain = mean_squared_error(
            law, queries[h], U, V, lengths, 2_000, generator=generator(2), control_variate=False
        )
        ours, error = report.decay.measured.value[h], report.decay.measured.std_error[h]
        scale = torch.tensor(lengths, dtype=F64)
        spread = (error.square() + (scale * plain.std_error).square()).sqrt()
        assert (spread < 0.08 * ours).all()
        assert ((ours - scale * plain.value).abs() < 4 * spread).all()
        assert abs(report.decay.predicted[h] - report.constant[h].mean()) < 1e-12


def test_at_long_prompts_the_decay_is_the_delta_method():
    """4% would be seen at 20,000 tokens; 16 are too few for the 1/L law, and that is seen."""
    queries, keys, values = skewed_heads(F64)
    report = measure_heads(
        queries / 2, keys, values, generator=generator(), lengths=[16, 20_000], n_prompts=64
    )
    ratio = report.decay.measured.value / report.decay.predicted[:, None]
    error = report.decay.measured.std_error / report.decay.predicted[:, None]
    assert (error[:, 1] < 0.04 / 5).all()
    assert ((ratio[:, 1] - 1).abs() < 4 * error[:, 1]).all()
    assert (ratio[:, 0] < 1 - 4 * error[:, 0]).all()


# -- sinks and words ----------------------------------------------------------------------------


def test_a_sink_is_found_and_named():
    """One token in 100 has a key that all queries like: its attention is known."""
    n = 2_000
    keys = torch.zeros(2, n, 2, dtype=F64)
    keys[0, ::100, 0] = 4.0
    queries = torch.tensor([1.0, 0.0], dtype=F64).expand(2, 10, -1)
    values = torch.randn(2, n, 2, generator=generator(), dtype=F64)
    labels = ["sink" if i % 100 == 0 else f"word {i % 7}" for i in range(n)]
    report = measure_heads(queries, keys, values, generator=generator(), labels=labels)
    (sink,), none = report.sinks
    expected = math.exp(4) / (math.exp(4) + 99)
    assert none == ()
    assert (sink.label, sink.frequency) == ("sink", 0.01)
    assert abs(sink.attention - expected) < 1e-12 and expected > SINK_ATTENTION
    assert "; sink takes 36% of the attention" in report.verdict(0)


def test_without_labels_a_token_goes_by_its_place():
    keys = torch.zeros(1, 500, 1, dtype=F64)
    keys[0, 123] = 8.0
    queries = torch.ones(1, 5, 1, dtype=F64)
    report = measure_heads(queries, keys, keys, generator=generator())
    assert report.sinks[0][0].label == "token 123"


def test_a_head_that_ignores_its_query_is_called_constant():
    queries, keys, _ = skewed_heads(torch.float32)
    values = torch.ones(2, keys.shape[1], 2)
    report = measure_heads(queries, keys, values, generator=generator())
    assert report.share.value.isnan().all()
    assert report.verdict(0) == "constant"
    assert report.lengths[0].length == 1
    assert "nan" in str(report)


def test_heavy_tilts_and_small_pools_are_named():
    keys = torch.randn(1, 1_000, 4, generator=generator())
    queries = 3 * torch.randn(1, 50, 4, generator=generator(1))
    verdict = measure_heads(queries, keys, keys, generator=generator()).verdict(0)
    assert "heavy tilts" in verdict
    assert "so few Gaussian tokens would leave" in verdict


def test_reports_are_joined_head_by_head():
    queries, keys, values = skewed_heads(F64)
    options = dict(generator=generator(), n_queries=None, lengths=[4, 8], n_prompts=4)
    both = measure_heads(queries, keys, values, names=["0.0", "0.1"], **options)
    parts = [
        measure_heads(
            queries[h : h + 1], keys[h : h + 1], values[h : h + 1], names=[f"0.{h}"], **options
        )
        for h in range(2)
    ]
    joined = HeadReport.join(parts)
    assert joined.names == both.names
    assert torch.allclose(joined.share.value, both.share.value)
    assert torch.equal(joined.decay.predicted, torch.cat([x.decay.predicted for x in parts]))
    assert joined.decay.measured.value.shape == (2, 2)
    assert [row["head"] for row in joined.rows()] == ["0.0", "0.1"]
    assert {"decay_4", "decay_8_std_error"} <= set(joined.rows()[0])
    shorter = measure_heads(queries, keys[:, :99], values[:, :99], **options)
    with pytest.raises(ValueError, match="one pool size"):
        HeadReport.join([both, shorter])


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q, k.numpy(), v), TypeError, "keys must be a torch.Tensor"),
        (lambda q, k, v: (q.float(), k, v), TypeError, "queries must have the dtype of keys"),
        (lambda q, k, v: (q[..., :2], k, v), ValueError, "must have shapes"),
        (lambda q, k, v: (q, k[:1], v), ValueError, "repeat_interleave"),
        (lambda q, k, v: (q, k[0], v), ValueError, "keys must have shape"),
        (lambda q, k, v: (q, k, v / 0), ValueError, "values must be finite"),
    ],
)
def test_bad_arrays_are_named(change, error, message):
    with pytest.raises(error, match=message):
        measure_heads(*change(*skewed_heads(F64)), generator=generator())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(names=["one"]), "names must have 2 entries, got 1"),
        (dict(labels=["a", "b"]), "labels must have 3000 entries"),
        (dict(lengths=[10, 5]), "increasing"),
        (dict(lengths=[10], n_prompts=3), "4 or more"),
        (dict(tolerance=0.0), "tolerance"),
        (dict(n_queries=0), "n_queries"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        measure_heads(*skewed_heads(F64), generator=generator(), **options)
