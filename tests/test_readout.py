"""Read-outs of laws and what they give back: closed forms, optimality, atoms, reference values.

Optimality over all measures on the box is checked by the certificate of the dual problem, not by
comparison with another solver. Seeds of the reference table are NumPy's 0 to 19.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.special import ive

from measureattn import Discrete, Empirical, Gaussian, Mixture, UniformBox
from measureattn.readout import (
    Atoms,
    least_variation,
    nonnegative,
    normalisers,
    numerators,
    power_norm,
    ratios,
    ridge,
    slide,
    wasserstein,
)

F64 = torch.float64
GRID = torch.linspace(-2, 2, 801, dtype=F64)[:, None]
LAW = Discrete(
    torch.tensor([[-1.0], [0.5], [1.5]], dtype=F64), torch.tensor([0.3, 0.5, 0.2]).double()
)
OFF_GRID = Discrete(LAW.tokens + torch.tensor([[-0.0023], [0.0017], [-0.0019]]).double(),
                    LAW.log_weights.exp())  # fmt: skip
NAN = torch.full((1,), torch.nan, dtype=F64)
RULE = Empirical(torch.linspace(-2, 2, 201, dtype=F64)[:, None])


def tilts(n, reach=4.0):
    return torch.linspace(-reach, reach, n, dtype=F64)[:, None]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def noisy(values, noise, seed):
    return values + noise * torch.from_numpy(
        np.random.default_rng(seed).standard_normal(len(values))
    )


def families(n, dim=1, half_width=2.0, law=LAW):
    a = 3 * torch.randn(n, dim, generator=generator(n), dtype=F64)
    return {
        "normalisers": normalisers(a, half_width),
        "numerators": numerators(a, half_width),
        "ratios": ratios(a, law.tilted_mean(a), half_width),
    }


def random_law(dim, count=4, seed=0):
    points = 4 * torch.rand(count, dim, generator=generator(seed), dtype=F64) - 2
    return Discrete(points, torch.rand(count, generator=generator(seed + 1), dtype=F64) + 0.1)


def gap(functionals, atoms, values):
    return values - functionals.at(atoms.points) @ atoms.weights


# -- functionals -------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("kind", ["normalisers", "numerators", "ratios"])
def test_values_by_the_log_mgf_equal_sums_over_atoms(dim, kind):
    law = random_law(dim)
    functionals = families(6, dim, law=law)[kind]
    by_atoms = functionals.at(law.tokens) @ law.log_weights.exp()
    assert len(functionals) == (6 if kind == "normalisers" else 6 * dim)
    assert (functionals(law) - by_atoms).abs().max() < 1e-14
    if kind == "ratios":
        assert by_atoms.abs().max() < 1e-14


def test_values_on_a_law_without_atoms():
    a = tilts(9)
    scale = (-2 * a.abs())[:, 0].exp()
    both = (normalisers(a, 2.0) + numerators(a, 2.0))(
        Gaussian(torch.ones(1, dtype=F64), torch.eye(1, dtype=F64))
    )
    kappa = (a + a**2 / 2)[:, 0].exp()
    assert (both[:9] / (kappa * scale) - 1).abs().max() < 1e-13
    ends = (numerators(a, 2.0).log_scales).exp()
    assert (both[9:] * ends / ((1 + a[:, 0]) * kappa) - 1)[a[:, 0] != -1].abs().max() < 1e-12


@pytest.mark.parametrize("half_width", [2.0, torch.tensor([0.5, 3.0], dtype=F64)])
@pytest.mark.parametrize("kind", ["normalisers", "numerators", "ratios"])
def test_the_sup_norm_on_the_box_is_one(kind, half_width):
    sides = torch.as_tensor(half_width, dtype=F64).expand(2)
    axes = [torch.linspace(-float(h), float(h), 401, dtype=F64) for h in sides]
    functionals = families(12, 2, half_width, law=random_law(2, seed=3))[kind]
    largest = functionals.at(torch.cartesian_prod(*axes)).abs().amax(1)
    assert (largest <= 1 + 1e-12).all() and (largest > 0.999).all()


def test_the_gradient_is_the_derivative():
    law = random_law(2)
    functionals = normalisers(law.tokens, 2.0) + families(4, 2, law=law)["ratios"]
    expected = torch.autograd.functional.jacobian(lambda x: functionals.at(x).sum(1), law.tokens)
    assert (functionals.gradient(law.tokens) - expected).abs().max() < 1e-12


def test_gram_matrices_have_the_closed_forms():
    """L2 of N(0, 1): exp(ab) after scaling; Lebesgue measure on [-2, 2]: 2 sinh(2(a+b))/(a+b)."""
    a = tilts(9)
    functionals = replace(normalisers(a, 2.0), log_scales=a[:, 0] ** 2 / 2)
    normal = Gaussian(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))
    assert (functionals.gram(normal) / (a * a.mT).exp() - 1).abs().max() < 1e-12
    plain = replace(functionals, log_scales=torch.zeros(9, dtype=F64))
    both = a + a.mT
    expected = torch.where(both == 0, 4.0, 2 * torch.sinh(2 * both) / both)
    assert (4 * plain.gram(UniformBox(2.0)) / expected - 1).abs().max() < 1e-12


@pytest.mark.parametrize("dim", [1, 2])
def test_gram_matrices_are_sums_over_a_quadrature_rule(dim):
    rule = random_law(dim, 30)
    parts = list(families(5, dim, law=random_law(dim)).values())
    functionals = parts[0] + parts[1] + parts[2]
    matrix = functionals.at(rule.tokens)
    expected = (matrix * rule.log_weights.exp()) @ matrix.mT
    assert (functionals.gram(rule) - expected).abs().max() < 1e-13


def test_prompts_read_out_with_the_covariance_of_the_gram_matrix():
    """Covariance of a prompt's values: (G - y y')/L with G the Gram matrix in L2(law)."""
    functionals, length, n = normalisers(tilts(4), 2.0), 50, 60_000
    tokens = LAW.sample(n * length, generator=generator()).reshape(n, length)
    values = functionals.at(tokens.reshape(-1, 1)).reshape(4, n, length).mean(-1)
    truth = functionals(LAW)
    expected = (functionals.gram(LAW) - truth[:, None] * truth) / length
    products = (values - truth[:, None])[:, None] * (values - truth[:, None])
    std_error = products.std(-1) / math.sqrt(n)
    assert (std_error.diagonal() < 0.1 * expected.diagonal() / 5).all()
    assert ((products.mean(-1) - expected).abs() < 4.5 * std_error).all()


# -- what they cannot see ----------------------------------------------------------------------


def test_numerators_do_not_see_mass_at_zero_and_ratios_no_scale():
    parts = families(8)
    zero = torch.zeros(1, 1, dtype=F64)
    assert (parts["numerators"].at(zero) == 0).all()
    more = Mixture([LAW, Empirical(zero)], torch.tensor([0.2, 0.8], dtype=F64))
    assert (5 * parts["numerators"](more) - parts["numerators"](LAW)).abs().max() < 1e-14
    assert (
        wasserstein(
            nonnegative(parts["ratios"], torch.zeros(8, dtype=F64), GRID, mass=7.0).law, LAW
        )
        < 0.01
    )


@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize("reach", [0.1, 0.5, 2.0])
def test_the_pair_that_a_short_range_cannot_tell_apart(order, reach):
    """Equal moments up to `order`; the gap is 4 (I_k + I_3k + ...)(2a) e^(-2a), k = order + 1."""
    k = order + 1
    nodes = 2 * torch.cos(torch.arange(k + 1, dtype=F64) * math.pi / k)
    weights = torch.ones(k + 1, dtype=F64)
    weights[0] = weights[-1] = 0.5
    one, two = (Discrete(nodes[i::2, None], weights[i::2]) for i in (0, 1))
    powers = nodes[:, None] ** torch.arange(k, dtype=F64)
    signed = weights * (-1.0) ** torch.arange(k + 1)
    assert (signed @ powers).abs().max() < 1e-12
    a = torch.linspace(0, reach, 9, dtype=F64)
    functionals = normalisers(a[:, None], 2.0)
    expected = 4 * sum(ive(k * j, 2 * a.numpy()) for j in (1, 3, 5, 7))
    assert np.abs((functionals(one) - functionals(two)).numpy() - expected).max() < 1e-14
    assert abs(wasserstein(one, two) - 4 / k) < 1e-12


# -- Hilbert and L^p ---------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1e-2, 1e-4])
def test_kernel_ridge_is_the_minimiser_over_all_densities(penalty):
    """201 unknowns on a quadrature rule, by least squares, against n coefficients."""
    functionals = normalisers(tilts(9), 2.0) + numerators(tilts(9), 2.0)
    values = noisy(functionals(LAW), 1e-3, 0)
    closed = ridge(functionals, values, RULE, penalty=penalty).at(RULE.tokens)
    rows = torch.cat([functionals.at(RULE.tokens) / 201**0.5,
                      penalty**0.5 * torch.eye(201, dtype=F64)])  # fmt: skip
    target = torch.cat([values, torch.zeros(201, dtype=F64)])
    found = torch.linalg.lstsq(rows, target, driver="gelsd").solution * 201**0.5
    assert (closed - found).abs().max() < 1e-10 * closed.abs().max()
    dual = power_norm(functionals, values, RULE, penalty=penalty, p=2.0).at(RULE.tokens)
    assert (closed - dual).abs().max() < 1e-10 * closed.abs().max()


def test_kernel_ridge_in_a_space_with_a_log_mgf_alone():
    """UniformBox in closed form against Gauss-Legendre nodes."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    rule = Discrete(torch.from_numpy(2 * nodes)[:, None], torch.from_numpy(weights))
    functionals = normalisers(tilts(9), 2.0) + numerators(tilts(9), 2.0)
    one, two = (
        ridge(functionals, functionals(LAW), s, penalty=1e-4) for s in (UniformBox(2.0), rule)
    )
    assert (one.at(GRID) - two.at(GRID)).abs().max() < 1e-10 * one.at(GRID).abs().max()


@pytest.mark.parametrize("p", [1.1, 1.5, 2.0, 3.0])
def test_the_power_norm_solution_is_a_minimum(p):
    """J(f) = sign f |f|^(p-1) equals sum_k (y_k - <xi_k, f>) xi_k / penalty: n numbers make f."""
    functionals, penalty = normalisers(tilts(9), 2.0), 1e-4
    values = noisy(functionals(LAW), 1e-3, 1)
    density = power_norm(functionals, values, RULE, penalty=penalty, p=p)
    f, xi = density.at(RULE.tokens), functionals.at(RULE.tokens)
    duality = f.sign() * f.abs() ** (p - 1)
    pull = (values - xi @ f / 201) @ xi / penalty
    assert (duality - pull).abs().max() < 1e-6 * duality.abs().max()

    def objective(f):
        return (values - xi @ f / 201).square().sum() / 2 + penalty * (f.abs() ** p).mean() / p

    for seed in range(20):
        step = torch.randn(201, generator=generator(seed), dtype=F64) * f.abs().max() / 100
        assert objective(f + step) > objective(f)
    assert (density.on(RULE).weights - f[f != 0] / 201).abs().max() < 1e-14


def test_power_norm_refuses_p_1():
    functionals = normalisers(tilts(3), 2.0)
    with pytest.raises(ValueError, match="use least_variation"):
        power_norm(functionals, functionals(LAW), RULE, penalty=1.0, p=1.0)


# -- total variation and positivity ------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 9, 17])
@pytest.mark.parametrize("seed", range(3))
def test_least_variation_has_at_most_n_atoms_and_is_least(n, seed):
    functionals = normalisers(tilts(n), 2.0)
    values = noisy(functionals(LAW), 1e-3, seed)
    found = least_variation(functionals, values, GRID, slack=5e-3)
    assert 0 < len(found) <= n
    assert gap(functionals, found, values).abs().max() < 5e-3 * (1 + 1e-6)
    xi = functionals.at(GRID).mT.numpy()
    dual = linprog(  # max y.c - slack |c|_1 over |sum c_k xi_k| <= 1
        np.concatenate([5e-3 - values, 5e-3 + values]),
        A_ub=np.block([[xi, -xi], [-xi, xi]]), b_ub=np.ones(1602),
    )  # fmt: skip
    assert abs(found.weights.abs().sum() + dual.fun) < 1e-6


@pytest.mark.parametrize("n", [2, 5, 9])
def test_imposed_mass_costs_at_most_one_atom_more(n):
    """A slack of 0 is an equality; others take the read-outs within a band."""
    mass = normalisers(torch.zeros(1, 1, dtype=F64), 2.0)
    a = tilts(2 * n)[::2]
    functionals = normalisers(a, 2.0) + mass
    values = noisy(functionals(LAW), 1e-4, n)
    values[-1] = 1.0
    slack = torch.full((n + 1,), 1e-3, dtype=F64)
    slack[-1] = 0.0
    found = least_variation(functionals, values, GRID, slack=slack)
    assert len(found) <= n + 1 and abs(found.mass - 1) < 1e-9
    assert (gap(functionals, found, values).abs() <= slack + 1e-8).all()
    positive = nonnegative(normalisers(a, 2.0), values[:-1], GRID, mass=2.0)
    assert len(positive) <= n + 1 and abs(positive.mass - 2) < 1e-12


def test_least_variation_says_when_nothing_fits():
    functionals = normalisers(torch.zeros(2, 1, dtype=F64), 2.0)
    with pytest.raises(ValueError, match="Give more slack"):
        least_variation(functionals, torch.tensor([0.0, 1.0]).double(), GRID, slack=0.1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mass", [None, 1.0])
def test_nonnegative_meets_its_optimality_conditions(seed, mass):
    functionals = normalisers(tilts(9), 2.0) + numerators(tilts(9), 2.0)
    values = noisy(functionals(LAW), 1e-3, seed)
    found = nonnegative(functionals, values, GRID, mass=mass)
    residual = gap(functionals, found, values)
    slope = functionals.at(GRID).mT @ residual
    level = functionals.at(found.points).mT @ residual
    top = 0.0 if mass is None else float(level @ found.weights)
    assert (level - top).abs().max() < 1e-9 * residual.norm()
    assert (slope - top).max() < 1e-9 * residual.norm()
    assert (found.weights > 0).all() and len(found) <= len(functionals) + (mass is not None)


REFERENCE = {  # n = 9, 17, 33, 65: medians over the seeds 0 to 19, to the digits given
    ("normalisers", 1e-3): (0.154, 0.120, 0.092, 0.048),
    ("normalisers", 1e-5): (0.0017, 0.0014, 0.0011, 0.0005),
    ("both", 1e-3): (0.080, 0.073, 0.032, 0.034),
    ("both", 1e-5): (0.0009, 0.0008, 0.0003, 0.0004),
}
SPREADS = {("normalisers", 1e-3, 9): (0.026, 0.47), ("normalisers", 1e-3, 65): (0.007, 0.27)}


def errors(kind, noise, n, **options):
    """Wasserstein errors of 20 seeds, and the largest number of atoms."""
    a = tilts(n)
    functionals = {
        "normalisers": normalisers(a, 2.0),
        "numerators": numerators(a, 2.0),
        "both": normalisers(a, 2.0) + numerators(a, 2.0),
    }[kind]
    found = [nonnegative(functionals, noisy(functionals(LAW), noise, s), GRID, **options)
             for s in range(20)]  # fmt: skip
    assert max(len(x) for x in found) <= min(9, len(functionals))
    return np.array([wasserstein(x.law, LAW) for x in found])


@pytest.mark.parametrize(("kind", "noise"), REFERENCE)
def test_the_reference_medians_are_reproduced(kind, noise):
    unit = 1e-3 if noise == 1e-3 else 1e-4
    for n, expected in zip((9, 17, 33, 65), REFERENCE[kind, noise], strict=True):
        found = errors(kind, noise, n)
        assert abs(np.median(found) - expected) < 0.51 * unit
        if (kind, noise, n) in SPREADS:
            low, high = SPREADS[kind, noise, n]
            assert abs(found.min() - low) < 6e-4 and abs(found.max() - high) < 6e-3


def test_the_numerator_alone_fails_and_a_mass_repairs_it():
    assert abs(np.median(errors("numerators", 1e-3, 17)) - 0.83) < 0.01
    repaired = errors("numerators", 1e-3, 17, mass=1.0)
    assert np.median(repaired) < 0.2


def test_errors_fall_at_constant_noise():
    """Weak* convergence in n: medians over 20 seeds fall below half on the way from 9 to 513."""
    assert (
        np.median(errors("normalisers", 1e-3, 513)) < np.median(errors("normalisers", 1e-3, 9)) / 2
    )


def test_answers_alone_give_the_law_back():
    a = tilts(9)
    for noise, bound in ((1e-3, 0.05), (1e-5, 5e-4)):
        found = []
        for seed in range(20):
            answers = noisy(LAW.tilted_mean(a)[:, 0], noise, seed)[:, None]
            functionals = ratios(a, answers, 2.0)
            law = nonnegative(functionals, torch.zeros(9, dtype=F64), GRID, mass=1.0).law
            found.append(wasserstein(law, LAW))
        assert np.median(found) < bound


@pytest.mark.parametrize("k", [1, 2, 3])
def test_2k_plus_1_read_outs_fix_k_atoms_and_2k_do_not(k):
    """Range of <exp(x), nu> over all nu >= 0 on a grid with the law's exact read-outs."""
    law = Discrete(LAW.tokens[:k], LAW.log_weights[:k].exp())
    # steps of 1/10 hold the law's atoms, and leave the programme well conditioned
    grid = torch.linspace(-2, 2, 41, dtype=F64)[:, None]
    target = normalisers(torch.tensor([[2.6]]).double(), 2.0).at(grid)[0].numpy()
    ranges = []
    for n in (2 * k + 1, 2 * k):
        functionals = normalisers(tilts(n, 2.0), 2.0)
        equal = dict(A_eq=functionals.at(grid).numpy(), b_eq=functionals(law).numpy())
        ends = [linprog(sign * target, **equal, options={"primal_feasibility_tolerance": 1e-10}).fun
                for sign in (1, -1)]  # fmt: skip
        ranges.append(-ends[1] - ends[0])
    assert ranges[0] < 1e-6 and ranges[1] > 1e-4


# -- off the grid ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [9, 33])
@pytest.mark.parametrize("noise", [1e-3, 1e-5])
def test_slid_atoms_are_the_best_of_all_measures_on_the_box(n, noise):
    """eta = sum_k residual_k xi_k is at most 0 everywhere: no atom anywhere would help."""
    functionals = normalisers(tilts(n), 2.0)
    fine = torch.linspace(-2, 2, 20_001, dtype=F64)[:, None]
    for seed in range(5):
        values = noisy(functionals(OFF_GRID), noise, seed)
        found = slide(functionals, values, GRID, 2.0, radius=0.0075)
        residual = gap(functionals, found, values)
        # the share of |residual|^2 that any other measure of mass 1 can save is at most twice this
        assert (residual @ functionals.at(fine)).max() < 1e-4 * residual.square().sum()
        assert len(found) <= (n + 1) // 2
        assert (found.weights > 0).all() and found.points.abs().max() <= 2


def test_sliding_goes_below_the_step_of_the_grid():
    functionals, on_grid, slid = normalisers(tilts(33), 2.0), [], []
    for seed in range(20):
        values = noisy(functionals(OFF_GRID), 1e-6, seed)
        on_grid.append(wasserstein(nonnegative(functionals, values, GRID).law, OFF_GRID))
        found = slide(functionals, values, GRID, 2.0, radius=0.0075)
        slid.append(wasserstein(found.law, OFF_GRID))
    assert np.median(slid) < np.median(on_grid) / 5


def test_slid_atoms_of_a_given_mass_are_the_best_of_that_mass():
    """As above, with the certificate measured from its level at the atoms."""
    functionals = normalisers(tilts(9), 2.0) + numerators(tilts(9), 2.0)
    fine = torch.linspace(-2, 2, 20_001, dtype=F64)[:, None]
    for seed in range(5):
        values = noisy(3 * functionals(OFF_GRID), 1e-3, seed)
        found = slide(functionals, values, GRID, 2.0, radius=0.0075, mass=3.0)
        residual = gap(functionals, found, values)
        level = residual @ functionals.at(found.points)
        rise = (residual @ functionals.at(fine)).max() - level @ found.weights / 3
        assert abs(found.mass - 3) < 1e-12 and rise < 1e-4 * residual.square().sum()


def test_sliding_keeps_an_imposed_mass():
    a = tilts(9)
    functionals = ratios(a, OFF_GRID.tilted_mean(a), 2.0)
    values = torch.zeros(9, dtype=F64)
    found = slide(functionals, values, GRID, 2.0, radius=0.0075, mass=3.0)
    assert abs(found.mass - 3) < 1e-12
    assert wasserstein(found.law, OFF_GRID) < 1e-4


def test_two_dimensions():
    law = random_law(2, 4, seed=5)
    axis, side = torch.linspace(-3, 3, 5, dtype=F64), torch.linspace(-2, 2, 41, dtype=F64)
    a, grid = torch.cartesian_prod(axis, axis), torch.cartesian_prod(side, side)
    functionals = normalisers(a, 2.0) + numerators(a, 2.0)
    for noise, bound in ((1e-4, 0.1), (1e-6, 1e-3)):
        found = []
        for seed in range(3):
            values = noisy(functionals(law), noise, seed)
            start = nonnegative(functionals, values, grid, mass=1.0)
            assert len(start) <= len(functionals) + 1
            end = slide(functionals, values, grid, 2.0, radius=0.15, mass=1.0)
            found.append(wasserstein(end.law, law))
        assert np.median(found) < bound


# -- small things ------------------------------------------------------------------------------


def test_signed_atoms_become_a_law():
    signed = Atoms(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0.5, -1.0, 1.5]))
    assert signed.mass == 1.0 and len(signed) == 3
    assert (signed.law.log_weights.exp() - torch.tensor([0.25, 0.0, 0.75])).abs().max() < 1e-7


def test_distances_in_one_and_two_dimensions_agree_on_a_line():
    lifted = [Empirical(torch.cat([law.tokens, 0 * law.tokens], 1), law.log_weights)
              for law in (LAW, OFF_GRID)]  # fmt: skip
    assert abs(wasserstein(LAW, OFF_GRID) - wasserstein(*lifted)) < 1e-12
    assert abs(wasserstein(LAW, OFF_GRID) - (0.3 * 23 + 0.5 * 17 + 0.2 * 19) * 1e-4) < 1e-9


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: normalisers(torch.zeros(3, 1), 2.0), "float64"),
        (lambda: normalisers(torch.zeros(3).double(), 2.0), "shape"),
        (lambda: normalisers(torch.zeros(3, 1).double(), 0.0), "above 0"),
        (lambda: normalisers(torch.full((1, 1), torch.nan).double(), 2.0), "finite"),
        (lambda: nonnegative(normalisers(GRID, 2.0), NAN[:0], GRID), "one a functional"),
        (lambda: ridge(normalisers(tilts(1), 2.0), NAN, RULE, penalty=1.0), "finite"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
