"""Merging is what makes long prompts possible: it must not matter how a prompt was cut."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure_case import F32, F64, assert_close, assert_close_log_mgf, generator

from measureattn.streaming import (
    CHUNK,
    TiltedSums,
    can_fuse,
    fold_queries,
    normalise,
    unfold_queries,
)

SCALE = 6.0  # no token of these prompts is longer


def prompt(length, dim=2, seed=0):
    tokens = torch.randn(length, dim, generator=generator(seed), dtype=F64)
    return tokens.clamp(-SCALE / dim, SCALE / dim)


def tilts(size=1.0):
    a = torch.tensor([[0.0, 0.0], [0.3, -0.1], [1.0, 2.0], [-0.5, 0.25]], dtype=F64)
    return a * size


def state_of(a, tokens, log_weights=None, **options):
    return TiltedSums.empty(a, with_cov=True, **options).update(tokens, log_weights)


def assert_same(one, other, scale=SCALE):
    """Two states agree to the rounding of their scores."""
    a = one.a.double()
    assert_close_log_mgf(one.log_mgf, other.log_mgf, a, scale)
    assert_close(one.mean, other.mean, a, scale, 1)
    assert_close(one.cov, other.cov, a, scale, 2)
    torch.testing.assert_close(one.log_total, other.log_total, rtol=1e-13, atol=1e-13)


def one_shot(a, tokens, log_weights=None):
    """All tokens at once, from the definition: the oracle of every way to cut."""
    if log_weights is None:
        log_weights = tokens.new_zeros(len(tokens))
    scores, plain = a @ tokens.mT, log_weights.softmax(-1)
    shares = torch.softmax(scores + log_weights, -1)
    mean = shares @ tokens
    centred = tokens - mean[:, None, :]
    cov = (shares[..., None] * centred).mT @ centred
    log_total = log_weights.logsumexp(0).expand(len(a))
    # a difference of two logarithms has no digits where kappa is small
    near = (plain * scores.clamp(-1, 1).expm1()).sum(-1).log1p()
    far = (scores + log_weights).logsumexp(-1) - log_total
    kappa = torch.where(scores.abs().amax(-1) <= 1, near, far)
    return TiltedSums(a, log_total, kappa, mean, cov)


@pytest.mark.parametrize("size", [1, 97, 4096])
@pytest.mark.parametrize("weighted", [False, True])
def test_chunks_of_any_size_give_the_whole(device, size, weighted):
    length = 5_000 if size > 1 else 300
    a, tokens = tilts().to(device), prompt(length).to(device)
    log_weights = prompt(length, 1, seed=1)[:, 0].to(device) if weighted else None
    state = TiltedSums.empty(a, with_cov=True)
    for start in range(0, length, size):
        part = slice(start, start + size)
        state = state.update(tokens[part], None if log_weights is None else log_weights[part])
    assert_same(state, one_shot(a, tokens, log_weights))
    assert_same(state_of(a, tokens, log_weights), one_shot(a, tokens, log_weights))


@pytest.mark.parametrize("with_cov", [False, True])
def test_more_tokens_than_one_chunk(dtype, device, with_cov):
    """25,000 tokens: float32 chunks merged in float64 err like one chunk, not like 25,000 sums."""
    a, tokens = tilts().to(device, dtype), prompt(2 * CHUNK + 5_000).to(device, dtype)
    state = TiltedSums.empty(a, with_cov=with_cov).update(tokens)
    expected = one_shot(a.double(), tokens.double())
    assert state.mean.dtype == F64
    assert_close(state.mean, expected.mean, a, SCALE, 1)
    if with_cov:  # without, the fused kernel may be at work, see below
        assert_close_log_mgf(state.log_mgf, expected.log_mgf, a, SCALE)
        assert_close(state.cov, expected.cov, a, SCALE, 2)
    else:
        assert state.cov is None


pieces = st.lists(
    st.lists(
        st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(-30, 30) | st.just(-torch.inf)),
        max_size=5,
    ),
    min_size=3,
    max_size=6,
)


def pieces_as_states(a, drawn):
    """One state a piece; a piece may be empty or all padding."""
    parts = [torch.tensor(p, dtype=F64).reshape(-1, 3) for p in drawn]
    return [state_of(a, p[:, :2], p[:, 2]) for p in parts], torch.cat(parts)


@given(pieces, st.sampled_from([1e-6, 1.0, 1e4 / SCALE]))
def test_merging_is_associative_and_equals_one_shot(drawn, size):
    a = tilts(size)
    states, whole = pieces_as_states(a, drawn)
    left = functools.reduce(TiltedSums.merge, states)
    right = functools.reduce(lambda late, early: early.merge(late), reversed(states))
    assert_same(left, right)
    if (whole[:, 2] > -torch.inf).any():
        assert_same(left, one_shot(a, whole[:, :2], whole[:, 2]))
    else:
        assert_same(left, TiltedSums.empty(a, with_cov=True))


@given(pieces, st.randoms(use_true_random=False))
def test_merging_is_free_of_order(drawn, random):
    states, _ = pieces_as_states(tilts(), drawn)
    shuffled = random.sample(states, len(states))
    merged = (functools.reduce(TiltedSums.merge, order) for order in (states, shuffled))
    assert_same(*merged)


@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_huge_scores_merge(device, size):
    """Scores of +-1e4: one part carries all the weight, and its state comes out whole."""
    a = torch.tensor([[size]], dtype=F64, device=device)
    low, high = (torch.tensor([[x], [x / 2]], dtype=F64, device=device) for x in (-1.0, 1.0))
    for order in ((low, high), (high, low)):
        state = functools.reduce(TiltedSums.merge, (state_of(a, part) for part in order))
        assert state.mean.item() == (1.0 if size > 0 else -1.0)
        assert state.cov.item() == 0.0
        assert state.log_mgf.item() == pytest.approx(1e4 - 2 * 0.6931471805599453, rel=1e-15)


def test_the_covariance_of_two_points_is_between_them(device):
    """Each part is a single token: all of the covariance comes from the merge."""
    a = torch.zeros(1, 1, dtype=F64, device=device)
    parts = (torch.tensor([[x]], dtype=F64, device=device) for x in (1.0, 4.0))
    weights = (torch.tensor([w], dtype=F64, device=device).log() for w in (1.0, 2.0))
    states = [state_of(a, x, w) for x, w in zip(parts, weights, strict=True)]
    merged = states[0].merge(states[1])
    assert merged.mean.item() == pytest.approx(3.0, rel=1e-15)
    assert merged.cov.item() == pytest.approx(2.0, rel=1e-15)
    assert merged.log_total.exp().item() == pytest.approx(3.0, rel=1e-15)


def test_a_small_part_weighs_little(device):
    """The shares follow the tokens' number: 1 token of 9 moves the mean by a ninth."""
    a = torch.zeros(1, 1, dtype=F64, device=device)
    many = state_of(a, torch.zeros(8, 1, dtype=F64, device=device))
    one = state_of(a, torch.full((1, 1), 9.0, dtype=F64, device=device))
    assert many.merge(one).mean.item() == pytest.approx(1.0, rel=1e-14)
    assert one.merge(many).mean.item() == pytest.approx(1.0, rel=1e-14)


def test_empty_parts_change_nothing(device):
    a = tilts().to(device)
    state, nothing = state_of(a, prompt(50).to(device)), TiltedSums.empty(a, with_cov=True)
    for merged in (state.merge(nothing), nothing.merge(state), state.update(prompt(0).to(device))):
        assert_same(merged, state)
    twice = nothing.merge(nothing)
    assert (twice.log_total == -torch.inf).all()
    assert (twice.mean == 0).all()


def test_queries_and_batches_are_kept_apart(device):
    """(*query, *batch): every entry equals the one computed by itself."""
    tokens = torch.stack([prompt(40, seed=i) for i in range(3)]).to(device)
    a = torch.randn(5, 4, 3, 2, generator=generator(9), dtype=F64).to(device)
    state = state_of(a, tokens)
    assert state.mean.shape == (5, 4, 3, 2)
    assert state.cov.shape == (5, 4, 3, 2, 2)
    for q, r, i in ((0, 0, 0), (4, 1, 2), (2, 3, 1)):
        alone = state_of(a[q, r, i][None], tokens[i])
        where = a[q, r, i][None]
        assert_close(state.mean[q, r, i][None], alone.mean, where, SCALE, 1)
        assert_close(state.cov[q, r, i][None], alone.cov, where, SCALE, 2)


@pytest.mark.parametrize("query", [(), (5,), (2, 3)])
@pytest.mark.parametrize("batch", [(), (4,), (4, 2)])
def test_folding_queries_is_undone_by_unfolding(query, batch):
    a = torch.randn(*query, *batch, 3, generator=generator())
    folded, shape = fold_queries(a, torch.Size(batch))
    assert folded.shape == (*batch, torch.Size(query).numel(), 3)
    assert torch.equal(unfold_queries(folded, shape, len(batch)), a)


def test_normalise(device):
    log_weights = torch.tensor([[0.0, 0.0], [-torch.inf, 5.0]], dtype=F64, device=device)
    log_total, log_shares = normalise(log_weights)
    torch.testing.assert_close(log_shares.exp().sum(-1), torch.ones_like(log_total))
    expected = log_weights.logsumexp(-1)
    torch.testing.assert_close(log_total, expected, rtol=1e-15, atol=0)
    log_total, log_shares = normalise(torch.full((2,), -torch.inf, dtype=F64))
    assert log_total == -torch.inf
    assert (log_shares == -torch.inf).all()


def test_accumulating_in_float32_is_possible_and_worse(device):
    """The dtype of the merge is the caller's choice: 400 float32 merges lose digits."""
    a, tokens = tilts().to(device, F32), (prompt(40_000) + 3).to(device, F32)
    exact = one_shot(a.double(), tokens.double())
    errors = {}
    for accumulate in (F32, F64):
        state = TiltedSums.empty(a, accumulate=accumulate)
        for part in tokens.split(100):
            state = state.update(part)
        assert state.mean.dtype == accumulate
        errors[accumulate] = (state.mean - exact.mean).abs().max()
    assert errors[F64] < errors[F32]


# -- the fast path and its twin --------------------------------------------------------------------


def fast_case(dtype, batch, length, weighted, device):
    """(tilts, tokens, log weights) for the fast path; some chunks are padding from end to end."""
    g = generator(length)
    tokens = torch.randn(*batch, length, 4, generator=g, dtype=F64).to(device, dtype)
    a = torch.randn(40, *batch, 4, generator=g, dtype=F64).to(device, dtype) / 2
    log_weights = None
    if weighted:
        log_weights = torch.randn(*batch, length, generator=g, dtype=F64).to(device, dtype)
        log_weights[..., : max(1, length - 5_000)] = -torch.inf
    return a, tokens, log_weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("length", [2_000, CHUNK, 2 * CHUNK + 97])
def test_the_fast_path_is_its_plain_twin(dtype, device, length, batch, weighted):
    """Values, and gradients in tilts, tokens and weights, equal those of the plain way."""
    inputs = [x for x in fast_case(dtype, batch, length, weighted, device) if x is not None]
    results = []
    for way in ("update", "update_plainly"):
        leaves = [x.clone().requires_grad_() for x in inputs]
        state = getattr(TiltedSums.empty(leaves[0]), way)(*leaves[1:])
        score = (state.mean * torch.arange(1, 5, device=device)).sum() + state.log_mgf.sum()
        results.append([state.mean, state.log_mgf, *torch.autograd.grad(score, leaves)])
    assert can_fuse(*inputs[:2]) == (device.type == "cpu")
    # scores of size up to about 10 carry 10 eps; the sums of 40 queries add up in the gradients
    tolerance = 1e-12 if dtype == F64 else 2e-5
    for fast, plain in zip(*results, strict=True):
        size = plain.detach().abs().amax()
        assert (fast - plain).detach().abs().amax() <= tolerance * size


def test_second_derivatives_of_the_fast_path(device):
    """Its backward pass is made of torch's own operations, so it can be differentiated again."""
    a, tokens, _ = fast_case(F64, (), 2_000, False, device)
    results = []
    for way in ("update", "update_plainly"):
        leaf = a.clone().requires_grad_()
        state = getattr(TiltedSums.empty(leaf), way)(tokens)
        (first,) = torch.autograd.grad(state.mean[:, 0].sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_the_fast_path_steps_aside_inside_transforms(device):
    a, tokens, _ = fast_case(F64, (), 2_000, False, device)
    mapped = torch.func.vmap(lambda q: TiltedSums.empty(q).update(tokens).mean)(a)
    torch.testing.assert_close(mapped, TiltedSums.empty(a).update_plainly(tokens).mean)


@functools.cache
def ten_million_tokens():
    """(tokens, tilts with scores of standard deviation 1, exact tilted mean by a float64 loop)."""
    tokens = torch.randn(10_000_000, 6, generator=generator(7))
    a = torch.randn(2, 6, generator=generator(8))
    a = a / a.norm(dim=-1, keepdim=True)
    total, moment = 0.0, 0.0
    for part in tokens.split(1_000_000):
        weights = torch.exp(a.double() @ part.double().mT)
        total = total + weights.sum(-1, keepdim=True)
        moment = moment + weights @ part.double()
    return tokens, a, moment / total


def law_of_ten_million(value):
    """1e-6 + 2 eps max|a.x|: the rounding of one float32 score, whatever the length."""
    tokens, a, exact = ten_million_tokens()
    allowed = 1e-6 + 2 * torch.finfo(F32).eps * (a @ tokens.mT).abs().max()
    return (value.double() - exact).abs().max() <= allowed


def test_float32_over_ten_million_tokens():
    tokens, a, _ = ten_million_tokens()
    assert law_of_ten_million(TiltedSums.empty(a).update(tokens).mean)


def test_a_running_float32_sum_breaks_that_law():
    """The reason for chunks. Whether one fused call does so depends on the processor."""
    tokens, a, _ = ten_million_tokens()
    means = []
    for weights in torch.exp(a @ tokens.mT):
        moment = np.cumsum((weights[:, None] * tokens).numpy(), axis=0, dtype=np.float32)[-1]
        means.append(moment / np.cumsum(weights.numpy(), dtype=np.float32)[-1])
    assert not law_of_ten_million(torch.from_numpy(np.stack(means)))
