"""Prompts as laws: softmax averages, weights, padding, and the numbers that break naive code."""

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure_case import (
    F32,
    F64,
    BatchedCase,
    OracleCase,
    assert_close,
    assert_close_log_mgf,
    atoms_oracle,
    generator,
)

from measureattn import Discrete, Empirical, attend
from measureattn.streaming import CHUNK


def prompt(length, dim, seed=0):
    """Tokens around a mean that is not 0, so that no tilt in use makes kappa cancel."""
    tokens = torch.randn(length, dim, generator=generator(seed), dtype=F64)
    return (tokens + 0.5).float().double()  # exact in float32 too


class TestEmpirical(OracleCase, BatchedCase):
    dim = 3
    length = 7
    scale = 4.0
    direction = (1.0, 0.5, 0.75)

    def tokens(self, i):
        return prompt(self.length, self.dim, seed=i)

    def log_weights(self, i):
        return None

    def member(self, i, dtype, device, **options):
        log_weights = self.log_weights(i)
        if log_weights is not None:
            log_weights = log_weights.to(device, dtype)
        return Empirical(self.tokens(i).to(device, dtype), log_weights, **options)

    def make(self, dtype, device, batched=False, **options):
        if not batched:
            return self.member(0, dtype, device, **options)
        members = [self.member(i, dtype, device) for i in range(self.batch)]
        tokens = torch.stack([m.tokens for m in members])
        if members[0].log_weights is None:
            return Empirical(tokens, **options)
        return Empirical(tokens, torch.stack([m.log_weights for m in members]), **options)

    def oracle(self, a):
        log_weights = self.log_weights(0)
        if log_weights is None:
            log_weights = torch.zeros(self.length)
        weights = [mpmath.exp(mpmath.mpf(w)) for w in log_weights.tolist()]
        return atoms_oracle(self.tokens(0).tolist(), weights, a)

    def test_the_scale_covers_the_tokens(self):
        assert max(self.tokens(i).norm(dim=-1).max() for i in range(self.batch)) <= self.scale


class TestWeightedEmpirical(TestEmpirical):
    """Weights that do not add up to one, and padding at a place that differs by member."""

    def log_weights(self, i):
        log_weights = torch.randn(self.length, generator=generator(100 + i), dtype=F64) + 3
        log_weights[i : i + 2] = -torch.inf
        return log_weights


class TestEmpiricalOfOneToken(TestEmpirical):
    """L = 1: a point mass, with the tokens of a batch apart from each other."""

    length = 1

    def test_sampling_is_repeatable_and_private(self, device, batched):
        law = self.make(F64, device, batched)
        before = torch.get_rng_state()
        tokens = law.sample(5, generator=generator())
        assert torch.equal(tokens, law.tokens.expand(*law.batch_shape, 5, self.dim))
        assert torch.equal(torch.get_rng_state(), before)

    def test_members_are_sampled_independently(self, device):
        tokens = self.make(F64, device, batched=True).sample(2, generator=generator())
        assert not torch.equal(tokens[0], tokens[1])


class TestDiscrete(OracleCase, BatchedCase):
    """Given by points and weights; one weight is 0 and must not give NaN."""

    dim = 2
    scale = 2.5
    direction = (1.0, -0.5)
    points = ((1.0, 0.5), (-1.0, 1.0), (2.0, -1.0), (0.0, 0.25))

    def member(self, i, dtype, device, **options):
        points = torch.tensor(self.points, dtype=F64) * (1 - i / 4)
        weights = torch.tensor([0.5, 0.0, 1.5, 2.0], dtype=F64).roll(i)
        return Discrete(points.to(device, dtype), weights.to(device, dtype), **options)

    def make(self, dtype, device, batched=False, **options):
        if not batched:
            return self.member(0, dtype, device, **options)
        members = [self.member(i, dtype, device) for i in range(self.batch)]
        points = torch.stack([m.tokens for m in members])
        weights = torch.stack([m.log_weights.exp() for m in members])
        return Discrete(points, weights, **options)

    def oracle(self, a):
        return atoms_oracle(self.points, [0.5, 0.0, 1.5, 2.0], a)


class TestFairCoin(OracleCase, BatchedCase):
    """A centred law: the scores cancel in kappa, and what is left has to keep its digits."""

    dim = 1
    scale = 1.0
    direction = (1.0,)

    def member(self, i, dtype, device, **options):
        points = torch.tensor([[-1.0], [1.0], [0.0], [0.0]], dtype=dtype, device=device)
        weights = torch.tensor([2.0, 2.0, i, i], dtype=dtype, device=device)
        return Discrete(points, weights, **options)

    def make(self, dtype, device, batched=False, **options):
        if not batched:
            return self.member(0, dtype, device, **options)
        members = [self.member(i, dtype, device) for i in range(self.batch)]
        weights = torch.stack([m.log_weights.exp() for m in members])
        return Discrete(torch.stack([m.tokens for m in members]), weights, **options)

    def oracle(self, a):
        return mpmath.log(mpmath.cosh(a[0])), [mpmath.tanh(a[0])], [[mpmath.sech(a[0]) ** 2]]

    def test_members_differ(self, device):
        covs = self.make(F64, device, batched=True).cov
        assert not torch.equal(covs[0], covs[1])


@pytest.mark.parametrize("size", [1e-12, 1e-6, 2**-8, 0.01, 0.3, 1.0, 1.5, 700.0])
@pytest.mark.parametrize("sign", [-1, 1])
def test_log_mgf_keeps_its_relative_accuracy_near_zero(device, size, sign):
    """log cosh on both sides of every place where the formula changes."""
    coin = TestFairCoin().make(F64, device)
    for near in (1 - 1e-9, 1, 1 + 1e-9):
        a = sign * size * near
        with mpmath.workdps(60):
            exact = mpmath.log(mpmath.cosh(mpmath.mpf(a)))
            got = mpmath.mpf(coin.log_mgf(torch.tensor([a], dtype=F64, device=device)).item())
            assert abs(got / exact - 1) <= 1e-12


def softmax_average(tokens, a, log_weights=None):
    """Attention as everybody writes it, in float64."""
    scores = (a[..., None, :] * tokens).sum(-1)
    if log_weights is not None:
        scores = scores + log_weights
    return (torch.softmax(scores, -1)[..., None] * tokens).sum(-2)


@pytest.mark.parametrize("length", [1, 2, 97, 1025])
def test_equals_the_softmax_average(device, length):
    tokens = prompt(length, 4).to(device)
    a = torch.randn(5, 4, generator=generator(1), dtype=F64).to(device)
    scale = tokens.norm(dim=-1).max().item()
    law = Empirical(tokens)
    assert_close(law.tilted_mean(a), softmax_average(tokens, a), a, scale, 1)
    log_weights = torch.randn(length, generator=generator(2), dtype=F64).to(device)
    weighted = Empirical(tokens, log_weights)
    expected = softmax_average(tokens, a, log_weights)
    assert_close(weighted.tilted_mean(a), expected, a, scale, 1)
    kappa = torch.logsumexp(a @ tokens.mT + log_weights.log_softmax(-1), -1)
    assert_close_log_mgf(weighted.log_mgf(a), kappa, a, scale)


def test_weights_are_normalised_inside(device):
    tokens = prompt(9, 2).to(device)
    log_weights = torch.linspace(-2, 2, 9, dtype=F64, device=device)
    a = torch.tensor([0.5, 1.0], dtype=F64, device=device)
    one, other = (Empirical(tokens, log_weights + c) for c in (0.0, 500.0))
    # adding 500 rounds each log weight by 500 eps
    assert abs(one.log_mgf(a) - other.log_mgf(a)) <= 1e-12
    assert_close(one.tilted_mean(a), other.tilted_mean(a), 1e3 * a, 4.0, 1)
    assert abs(one.log_weights.exp().sum() - 1) <= 1e-14


def test_a_ragged_batch_is_its_prompts(dtype, device):
    """Padding of log weight -inf equals dropping the tokens, whatever the padding holds."""
    lengths = (1, 4, 7)
    tokens = torch.full((3, 7, 2), 1e6, dtype=dtype, device=device)
    log_weights = torch.full((3, 7), -torch.inf, dtype=dtype, device=device)
    prompts = [prompt(n, 2, seed=n).to(device, dtype) for n in lengths]
    for i, (n, x) in enumerate(zip(lengths, prompts, strict=True)):
        tokens[i, :n], log_weights[i, :n] = x, 0.0
    law = Empirical(tokens, log_weights)
    a = torch.tensor([[0.3, -0.2], [2.0, 1.0]], dtype=dtype, device=device)
    for i, x in enumerate(prompts):
        alone = Empirical(x)
        assert_close_log_mgf(law.log_mgf(a[:, None])[:, i], alone.log_mgf(a), a, 4.0)
        assert_close(law.tilted_mean(a[:, None])[:, i], alone.tilted_mean(a), a, 4.0, 1)
        assert_close(law.tilted_cov(a[:, None])[:, i], alone.tilted_cov(a), a, 4.0, 2)
        drawn = law.sample(200, generator=generator())[i]
        assert (drawn[:, None] == x).all(-1).any(-1).all(), "a padding token was drawn"


def test_a_whole_chunk_of_padding(device):
    """More padding than one chunk holds, in front of the only real tokens and behind them."""
    tokens = torch.zeros(2 * CHUNK + 60, 2, dtype=F64, device=device)
    log_weights = torch.full(tokens.shape[:1], -torch.inf, dtype=F64, device=device)
    real = slice(CHUNK + 20, CHUNK + 23)
    tokens[real] = prompt(3, 2).to(device)
    log_weights[real] = torch.tensor([0.0, 1.0, -1.0], dtype=F64, device=device)
    law, alone = Empirical(tokens, log_weights), Empirical(tokens[real], log_weights[real])
    a = torch.tensor([[0.3, -0.2], [2.0, 1.0]], dtype=F64, device=device)
    assert_close_log_mgf(law.log_mgf(a), alone.log_mgf(a), a, 4.0)
    assert_close(law.tilted_mean(a), alone.tilted_mean(a), a, 4.0, 1)
    assert_close(law.tilted_cov(a), alone.tilted_cov(a), a, 4.0, 2)
    expected = alone.tilted_cov(a)[..., 0]
    e = torch.tensor([1.0, 0.0], dtype=F64, device=device)
    assert_close(law.tilted_cov_product(a, e), expected, a, 16.0, 1)


def test_duplicates_are_weights(device):
    tokens = prompt(4, 3).to(device)
    counts = torch.tensor([1, 3, 2, 5], device=device)
    repeated = Empirical(tokens.repeat_interleave(counts, 0))
    weighted = Discrete(tokens, counts.to(F64))
    a = TestEmpirical().queries(F64, device, batched=False)
    assert_close_log_mgf(weighted.log_mgf(a), repeated.log_mgf(a), a, 4.0)
    assert_close(weighted.tilted_mean(a), repeated.tilted_mean(a), a, 4.0, 1)
    assert_close(weighted.tilted_cov(a), repeated.tilted_cov(a), a, 4.0, 2)


@given(st.permutations(range(12)))
def test_the_order_of_the_tokens_does_not_matter(order):
    tokens = prompt(12, 2)
    a = torch.tensor([1.5, -0.5], dtype=F64)
    one, other = Empirical(tokens), Empirical(tokens[list(order)])
    assert_close_log_mgf(one.log_mgf(a), other.log_mgf(a), a, 4.0)
    assert_close(one.tilted_mean(a), other.tilted_mean(a), a, 4.0, 1)
    assert_close(one.tilted_cov(a), other.tilted_cov(a), a, 4.0, 2)


@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_scores_of_ten_thousand(dtype, device, size):
    """Without a shift by the largest score exp overflows at 89 (float32) or 710 (float64)."""
    law = Empirical(torch.tensor([[-1.0], [0.5], [1.0]], dtype=dtype, device=device))
    a = torch.tensor([size], dtype=dtype, device=device)
    winner = 1.0 if size > 0 else -1.0
    assert law.tilted_mean(a).item() == winner
    assert law.tilted_cov(a).item() == 0.0
    exact = abs(size) - torch.tensor(3.0, dtype=F64).log().item()
    assert law.log_mgf(a).item() == pytest.approx(exact, rel=torch.finfo(dtype).eps)


def test_a_tiny_weight_against_a_huge_score(device):
    """Log weight -1e3 and score 1e4: the rare token wins; at score 1e3 it ties."""
    tokens = torch.tensor([[0.0], [1.0]], dtype=F64, device=device)
    log_weights = torch.tensor([0.0, -1e3], dtype=F64, device=device)
    law = Empirical(tokens, log_weights)
    for score, mean, kappa in ((1e4, 1.0, 9e3), (1e3, 0.5, 0.6931471805599453), (100, 0.0, 0.0)):
        a = torch.tensor([score], dtype=F64, device=device)
        assert law.tilted_mean(a).item() == pytest.approx(mean, abs=8e-16 * score)
        assert law.log_mgf(a).item() == pytest.approx(kappa, rel=1e-12, abs=1e-300)


def test_gradients_flow_into_tokens_and_weights(device):
    """Training a prompt: d mean / d x_i and d kappa / d log w_i against finite differences."""
    tokens = prompt(5, 2).to(device).requires_grad_()
    log_weights = torch.linspace(-1, 1, 5, dtype=F64, device=device).requires_grad_()
    a = torch.tensor([0.7, -0.4], dtype=F64, device=device)

    def both(x, w):
        law = Empirical(x, w)
        return law.log_mgf(a), law.tilted_mean(a)

    assert torch.autograd.gradcheck(both, (tokens, log_weights))


def test_float32_over_many_tokens_is_as_good_as_over_few(device):
    """One running float32 sum over 50,000 tokens would be off by far more than one chunk's."""
    tokens = torch.randn(50_000, 3, generator=generator(), dtype=F32).to(device) + 10
    a = torch.tensor([[0.0, 0.0, 0.0], [0.5, -0.5, 0.25]], dtype=F32, device=device)
    scale = tokens.norm(dim=-1).max().item()
    expected = softmax_average(tokens.double(), a.double())
    assert_close(Empirical(tokens).tilted_mean(a), expected, a, scale, 1)


def test_samples_follow_the_weights(device):
    """Counts of a weighted draw within 4.5 standard errors; a weight of 0 is never drawn."""
    weights = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=F64, device=device)
    points = torch.arange(4.0, dtype=F64, device=device)[:, None]
    n = 40_000
    drawn = Discrete(points, weights).sample(n, generator=generator())
    share = (drawn == points[:, 0]).double().mean(0)
    std_error = (weights * (1 - weights) / n).sqrt()
    assert 5 * std_error.max() <= 0.02  # an error of 0.02 in a share is seen
    assert ((share - weights).abs() <= 4.5 * std_error).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_no_uniform_number_draws_padding(device, monkeypatch, uniform):
    """The ends of [0, 1), and 1 itself, which a product with the total weight can round to."""
    monkeypatch.setattr(
        "measureattn.measures.empirical.draw",
        lambda kind, shape, **like: torch.full(shape, uniform, dtype=F64, device=device),
    )
    points = torch.arange(5.0, dtype=F64, device=device)[:, None]
    weights = torch.tensor([0.0, 0.1, 0.2, 0.7, 0.0], dtype=F64, device=device)
    drawn = Discrete(points, weights).sample(1, generator=generator())
    assert drawn.item() == (1.0 if uniform == 0 else 3.0)
    drawn = Empirical(points).sample(1, generator=generator())
    assert drawn.item() == (0.0 if uniform == 0 else 4.0)


def test_the_covariance_far_from_the_origin(device):
    """Spread 1 at a distance r = 2^20: E xx' - mm' errs by eps r^2, centred sums by eps r."""
    tokens = (prompt(40, 2) * 2**10).round().to(device) / 2**10  # exact also after the shift
    far = 2.0**20
    a = torch.tensor([0.5, -0.25], dtype=F64, device=device)
    w = torch.tensor([1.0, 1.0], dtype=F64, device=device)
    near, shifted = Empirical(tokens), Empirical(tokens + far)
    spread = 2 * tokens.norm(dim=-1).max()
    allowed = 16 * torch.finfo(F64).eps * far * spread * (1 + a.norm() * spread)
    for result in (lambda law: law.tilted_cov(a), lambda law: law.tilted_cov_product(a, w)):
        assert (result(near) - result(shifted)).abs().max() <= allowed


def test_it_is_attention(device):
    """attend on a prompt is softmax attention with keys U'x, values Vx, scores not rescaled."""
    tokens = prompt(30, 4).to(device)
    U, V, z = (
        torch.randn(*shape, generator=generator(i), dtype=F64).to(device)
        for i, shape in enumerate([(4, 3), (2, 4), (6, 3)])
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        z, tokens @ U, tokens @ V.mT, scale=1.0
    )
    got = attend(Empirical(tokens), z, U=U, V=V)
    allowed = 1e-13 * tokens.norm(dim=-1).max() * V.norm() * (1 + (z @ U.mT).norm(dim=-1).max())
    assert (got - expected).abs().max() <= allowed
