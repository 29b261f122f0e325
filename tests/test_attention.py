"""Attention on laws: Lemma 2.1, the derivatives in U and V, and the linear relatives."""

import math

import pytest
import torch
from measure_case import F64, assert_within_standard_errors, generator
from test_gaussian import hermite
from torch.func import jacrev, jvp, vjp

from measureattn import (
    AttentionHead,
    Discrete,
    Empirical,
    Gaussian,
    Mixture,
    Product,
    Rademacher,
    attend,
    attend_jvp,
    attend_vjp,
    first_order_attend,
    linear_attend,
)

D, E, M = 3, 4, 2


def randn(*shape, seed, device="cpu"):
    return torch.randn(*shape, generator=generator(seed), dtype=F64).to(device)


def head(device, d=D, e=E, m=M, size=0.4):
    """(U, V); scores of size about one, so that no method is at its limits."""
    return size * randn(d, e, seed=1, device=device), randn(m, d, seed=2, device=device)


def laws(device):
    mean, factor = randn(D, seed=3, device=device), randn(D, 2, seed=4, device=device)
    tokens, log_weights = randn(9, D, seed=5, device=device), randn(9, seed=6, device=device)
    return {
        "gaussian": Gaussian(mean, factor @ factor.mT),  # rank 2 of 3
        "empirical": Empirical(tokens, log_weights),
        "rademacher": Rademacher(D),
    }


LAWS = pytest.mark.parametrize("name", ["gaussian", "empirical", "rademacher"])


def assert_relative(value, expected, relative):
    assert value.shape == expected.shape
    assert (value - expected).abs().max() <= relative * expected.abs().max()


# -- Lemma 2.1 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3])
def test_lemma_by_gauss_hermite_quadrature(device, dim):
    """Softmax attention on N(m, G), integrated node by node, is V m + V G U z."""
    factor = torch.tril(randn(dim, dim, seed=1)) * 0.7
    mean, z = randn(dim, seed=2), randn(5, E, seed=3)
    U, V = head("cpu", d=dim, size=0.3)
    nodes, weights = hermite(40)
    grid = torch.cartesian_prod(*[nodes] * dim).reshape(-1, dim)
    log_mass = torch.cartesian_prod(*[weights.log()] * dim).reshape(-1, dim).sum(-1)
    tokens = mean + grid @ factor.mT
    integral = torch.softmax(z @ U.mT @ tokens.mT + log_mass, -1) @ tokens @ V.mT
    law = Gaussian(mean.to(device), (factor @ factor.mT).to(device))
    got = attend(law, z.to(device), U=U.to(device), V=V.to(device)).cpu()
    assert_relative(got, integral, 1e-12)
    assert_relative(got, V @ mean + z @ (V @ factor @ factor.mT @ U).mT, 1e-12)


def test_lemma_through_a_root_of_a_singular_covariance(device):
    """d = 16, rank 5: X = m + B t with t ~ N(0, I_5), whose axes are integrated one by one."""
    root, mean = randn(16, 5, seed=1) / 4, randn(16, seed=2)
    U, V = head("cpu", d=16, size=0.25)
    z = randn(6, E, seed=3)
    tilt = z @ U.mT @ root  # of t: a.X = a.m + (B'a).t
    nodes, weights = hermite(60)
    axes = torch.softmax(tilt[..., None] * nodes + weights.log(), -1) @ nodes
    expected = (mean + axes @ root.mT) @ V.mT
    law = Gaussian(mean.to(device), (root @ root.mT).to(device))
    got = attend(law, z.to(device), U=U.to(device), V=V.to(device)).cpu()
    assert_relative(got, expected, 1e-12)
    flat = Gaussian(torch.zeros(5, dtype=F64), torch.eye(5, dtype=F64))
    assert_relative(axes, flat.tilted_mean(tilt), 1e-12)


def test_self_attention_of_gaussian_tokens_is_gaussian_again(device):
    """Queries drawn from the law: outputs are N(Vm + VGUm, (VGU) G (VGU)').

    Mean, covariance and fourth moments (3 s^2 for a Gaussian) in standard errors; errors of 0.1
    standard deviations in the mean and of 0.1 and 1 in the second and fourth moments are seen.
    """
    factor = randn(D, D, seed=1) + torch.eye(D, dtype=F64)
    mean, cov = randn(D, seed=2), factor @ factor.mT
    U, V = head("cpu", e=D)
    law = Gaussian(mean.to(device), cov.to(device))
    n = 40_000
    z = law.sample(n, generator=generator())
    out = attend(law, z, U=U.to(device), V=V.to(device)).cpu()
    gain = V @ cov @ U
    out_mean, out_cov = V @ mean + gain @ mean, gain @ cov @ gain.mT
    standard = torch.linalg.solve_triangular(
        torch.linalg.cholesky(out_cov), (out - out_mean).mT, upper=False
    ).mT
    for power, expected, detectable in (
        (standard, 0.0, 0.1),
        (standard[:, :, None] * standard[:, None, :], torch.eye(M, dtype=F64), 0.1),
        (standard**4, 3.0, 1.0),
    ):
        std_error = power.std(0) / math.sqrt(n)
        assert_within_standard_errors(power.mean(0) - expected, std_error, detectable, 1e-12)


def second_differences(law, V):
    """T(z + h) - 2 T(z) + T(z - h) in both directions h: 0 for all z iff T is affine."""
    z, eye = randn(5, 2, seed=1, device=V.device), torch.eye(2, dtype=F64, device=V.device)
    values = [attend(law, z + s * h, U=eye, V=V) for h in eye for s in (1, 0, -1)]
    return torch.stack([values[i] - 2 * values[i + 1] + values[i + 2] for i in (0, 3)])


def test_the_converse_needs_an_injective_V(device):
    """Attention can be linear on a law that is not Gaussian, as long as V does not see why.

    T is affine iff VX is Gaussian and X minus its regression on VX is independent of VX.
    """
    eye = torch.eye(2, dtype=F64, device=device)
    first, second = eye[:1], eye[1:]
    normal = Gaussian(torch.zeros(1, dtype=F64, device=device), eye[:1, :1])
    law, z = Product([normal, Rademacher(1)]), randn(5, 2, seed=1, device=device)
    projection = first.mT @ first
    assert torch.equal(attend(law, z, U=eye, V=projection), z @ projection)  # T(z) = z_1 e_1
    assert second_differences(law, eye).abs().max() > 0.1
    # X = (g, g + coin): VX = g passes both halves, VX = g + coin is not Gaussian
    law = law.pushforward(first.mT @ first + second.mT @ (first + second))
    assert second_differences(law, first).abs().max() <= 1e-14
    assert second_differences(law, second).abs().max() > 0.1
    # X = (g, coin g): VX = g is Gaussian, and coin g is not correlated with it, but depends on it
    signs = [torch.outer(v, v) for v in (eye.sum(0), eye[0] - eye[1])]
    law = Mixture([Gaussian(torch.zeros(2, dtype=F64, device=device), cov) for cov in signs])
    assert torch.equal(law.cov, eye)
    assert second_differences(law, first).abs().max() > 0.1


# -- derivatives in the parameters ----------------------------------------------------------------


@LAWS
def test_jvp_is_the_derivative(device, name):
    law, z = laws(device)[name], randn(5, E, seed=7, device=device)
    U, V = head(device)
    dU, dV = randn(D, E, seed=8, device=device), randn(M, D, seed=9, device=device)
    _, expected = jvp(lambda u, v: attend(law, z, U=u, V=v), (U, V), (dU, dV))
    assert_relative(attend_jvp(law, z, U=U, V=V, dU=dU, dV=dV), expected, 1e-10)
    # each parameter by itself, from the full Jacobian
    in_U, in_V = jacrev(lambda u, v: attend(law, z, U=u, V=v), argnums=(0, 1))(U, V)
    only_U = attend_jvp(law, z, U=U, V=V, dU=dU, dV=torch.zeros_like(V))
    only_V = attend_jvp(law, z, U=U, V=V, dU=torch.zeros_like(U), dV=dV)
    assert_relative(only_U, (in_U * dU).sum((-2, -1)), 1e-10)
    assert_relative(only_V, (in_V * dV).sum((-2, -1)), 1e-10)


@LAWS
def test_vjp_is_the_gradient(device, name):
    law, z = laws(device)[name], randn(5, E, seed=7, device=device)
    U, V = head(device)
    cotangent = randn(5, M, seed=8, device=device)
    in_U, in_V = jacrev(lambda u, v: attend(law, z, U=u, V=v), argnums=(0, 1))(U, V)
    grad_U, grad_V = attend_vjp(law, z, cotangent, U=U, V=V)
    assert_relative(grad_U, torch.einsum("qm,qmde->qde", cotangent, in_U), 1e-10)
    assert_relative(grad_V, torch.einsum("qm,qmnd->qnd", cotangent, in_V), 1e-10)
    _, pull = vjp(lambda u, v: attend(law, z, U=u, V=v), U, V)
    total_U, total_V = pull(cotangent)
    assert_relative(grad_U.sum(0), total_U, 1e-10)
    assert_relative(grad_V.sum(0), total_V, 1e-10)


@LAWS
def test_jvp_and_vjp_are_adjoint(device, name):
    law, z = laws(device)[name], randn(E, seed=7, device=device)
    U, V = head(device)
    dU, dV = randn(D, E, seed=8, device=device), randn(M, D, seed=9, device=device)
    g = randn(M, seed=10, device=device)
    forward = g @ attend_jvp(law, z, U=U, V=V, dU=dU, dV=dV)
    grad_U, grad_V = attend_vjp(law, z, g, U=U, V=V)
    backward = (grad_U * dU).sum() + (grad_V * dV).sum()
    assert abs(forward - backward) <= 1e-12 * (g.norm() * (dU.norm() + dV.norm()) * V.norm() * 9)


def test_batched_derivatives_are_those_of_the_members(device):
    """A batch of prompts, five queries each: (*query, *batch) comes out, member by member."""
    tokens = randn(3, 6, D, seed=1, device=device)
    z, cotangent = randn(5, 1, E, seed=2, device=device), randn(5, 3, M, seed=3, device=device)
    U, V = head(device)
    law = Empirical(tokens)
    out = attend(law, z, U=U, V=V)
    grad_U, grad_V = attend_vjp(law, z, cotangent, U=U, V=V)
    assert out.shape == (5, 3, M)
    assert grad_U.shape == (5, 3, D, E)
    assert grad_V.shape == (5, 3, M, D)
    for i in range(3):
        alone = Empirical(tokens[i])
        assert_relative(out[:, i], attend(alone, z[:, 0], U=U, V=V), 1e-12)
        one_U, one_V = attend_vjp(alone, z[:, 0], cotangent[:, i], U=U, V=V)
        assert_relative(grad_U[:, i], one_U, 1e-12)
        assert_relative(grad_V[:, i], one_V, 1e-12)


# -- the linear relatives -------------------------------------------------------------------------


def test_linear_attention_on_a_prompt_is_the_mean_of_raw_scores(device):
    tokens = randn(50, D, seed=1, device=device) + 0.5
    z = randn(7, E, seed=2, device=device)
    U, V = head(device)
    scores = z @ U.mT @ tokens.mT
    expected = scores @ (tokens @ V.mT) / 50
    assert_relative(linear_attend(Empirical(tokens), z, U=U, V=V), expected, 1e-12)


def test_linear_attention_is_attention_on_centred_gaussians_only(device):
    U, V = head(device)
    z = randn(7, E, seed=2, device=device)
    factor = randn(D, D, seed=3, device=device)
    centred = Gaussian(torch.zeros(D, dtype=F64, device=device), factor @ factor.mT)
    softmax, linear = (f(centred, z, U=U, V=V) for f in (attend, linear_attend))
    assert_relative(linear, softmax, 1e-12)
    signs = Rademacher(D)
    softmax, linear = (f(signs, z, U=U, V=V) for f in (attend, linear_attend))
    assert (linear - softmax).abs().max() > 0.01 * softmax.abs().max()
    shifted = Gaussian(torch.ones(D, dtype=F64, device=device), factor @ factor.mT)
    softmax, linear = (f(shifted, z, U=U, V=V) for f in (attend, linear_attend))
    assert (linear - softmax).abs().max() > 0.01 * softmax.abs().max()


def test_first_order_attention_is_mean_plus_covariance(device):
    tokens = randn(50, D, seed=1, device=device) + 0.5
    z = randn(7, E, seed=2, device=device)
    U, V = head(device)
    mean = tokens.mean(0)
    cov = (tokens - mean).mT @ (tokens - mean) / 50
    expected = V @ mean + z @ (V @ cov @ U).mT
    assert_relative(first_order_attend(Empirical(tokens), z, U=U, V=V), expected, 1e-12)


@LAWS
def test_first_order_attention_is_the_tangent_at_zero(device, name):
    law, z = laws(device)[name], randn(4, E, seed=2, device=device)
    U, V = head(device)
    zero, one = torch.tensor([0.0, 1.0], dtype=F64, device=device)
    _, slope = jvp(lambda t: attend(law, t * z, U=U, V=V), (zero,), (one,))
    value = attend(law, 0 * z, U=U, V=V)
    assert_relative(first_order_attend(law, z, U=U, V=V), value + slope, 1e-12)


@pytest.mark.parametrize(("skewed", "order"), [(True, 2), (False, 3)])
def test_the_error_of_first_order_attention_has_the_order_of_the_law(device, skewed, order):
    """Halving the scores divides the error by 4 for a skewed law, by 8 for a symmetric one.

    The next term of the series is smaller by the score, at most 0.02, so the slope is within 0.05.
    """
    weights = torch.tensor([0.25, 0.75] if skewed else [0.5, 0.5], dtype=F64, device=device)
    points = torch.tensor([[-1.0], [1.0]], dtype=F64, device=device)
    law, one = Discrete(points, weights), torch.ones(1, 1, dtype=F64, device=device)
    errors = []
    for size in (0.02, 0.01):
        z = torch.tensor([size], dtype=F64, device=device)
        first = first_order_attend(law, z, U=one, V=one)
        errors.append((attend(law, z, U=one, V=one) - first).abs().item())
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.05)


def test_first_order_attention_is_exact_for_gaussians(device):
    law = laws(device)["gaussian"]
    z = 50 * randn(4, E, seed=2, device=device)
    U, V = head(device)
    softmax = attend(law, z, U=U, V=V)
    assert_relative(first_order_attend(law, z, U=U, V=V), softmax, 1e-13)


# -- dtypes and no hidden scale -------------------------------------------------------------------


@LAWS
def test_dtype_and_device_are_kept(device, dtype, name):
    law = {
        "gaussian": Gaussian(*(x.to(device, dtype) for x in (torch.zeros(D), torch.eye(D)))),
        "empirical": Empirical(torch.eye(D, dtype=dtype, device=device)),
        "rademacher": Rademacher(D),
    }[name]
    U, V = (x.to(dtype) for x in head(device))
    z = randn(5, E, seed=2, device=device).to(dtype)
    for function in (attend, linear_attend, first_order_attend):
        out = function(law, z, U=U, V=V)
        assert (out.dtype, out.device.type, out.shape) == (dtype, device.type, (5, M))


def test_no_hidden_temperature(device):
    """Scaling U scales the scores: U z is the tilt, not U z / sqrt(d)."""
    law, z = laws(device)["empirical"], randn(E, seed=2, device=device)
    U, V = head(device)
    assert_relative(attend(law, z, U=U, V=V), V @ law.tilted_mean(U @ z), 1e-14)


# -- a head of a network -----------------------------------------------------------------------


@pytest.mark.parametrize("linear", [False, True])
def test_a_head_is_four_linear_layers(linear):
    head = AttentionHead(4, 2, linear=linear, dtype=torch.float64)
    g = torch.Generator().manual_seed(1)
    tokens = torch.randn(9, 4, generator=g, dtype=torch.float64)
    z = torch.randn(5, 4, generator=g, dtype=torch.float64)
    scores = head.query(z) @ head.key(tokens).mT / 2.0
    weights = scores / 9 if linear else torch.softmax(scores, -1)
    expected = head.output(weights @ head.value(tokens))
    found = head(Empirical(tokens), z)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    wanted = torch.autograd.grad(expected.square().sum(), list(head.parameters()))
    got = torch.autograd.grad(found.square().sum(), list(head.parameters()))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_head_on_an_infinite_prompt_is_linear_and_trains():
    head = AttentionHead(3, dtype=torch.float64)
    cov = torch.diag(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))
    law = Gaussian(torch.zeros(3, dtype=torch.float64), cov)
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    U, V = head.effective()
    torch.testing.assert_close(head(law, z), z @ U.mT @ cov @ V.mT, rtol=1e-12, atol=1e-14)
    head(law, z).sum().backward()
    assert all(x.grad.abs().max() > 0 for x in head.parameters())
