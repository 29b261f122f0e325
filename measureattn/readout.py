"""Reading a token law back from what attention says about it: regularised linear inverse problems.

A law mu on the box K = [-h, h]^D is a measure, and a head that is asked with the tilt a answers
with integrals of functions of mu: the normaliser exp(kappa(a)) = <exp(a.x), mu>, and the numerator
m_a exp(kappa(a)) = <x exp(a.x), mu>. From the answer m_a alone one knows <(x - m_a) exp(a.x), mu>
= 0. All of these are integrals of an affine function times an exponential: `Functionals`.

    values of a law        from its log-MGF and its tilted mean
    Gram matrices in L2    from the log-MGF of the reference law at sums of tilts
    regularisers           `ridge` (Hilbert), `power_norm` (L^p), `least_variation` (signed
                           measures), `nonnegative` (laws), all by n numbers for n functionals
    off the grid           `slide`

Everything here runs in float64.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.cluster.hierarchy import fclusterdata
from scipy.optimize import least_squares, linprog, minimize, nnls
from scipy.stats import wasserstein_distance, wasserstein_distance_nd
from torch import Tensor

from measureattn._checks import require_finite, require_tensor
from measureattn._typing import Float
from measureattn.measures import Discrete, Empirical, Measure


@dataclass(frozen=True)
class Functionals:
    """n linear functionals mu -> <(constant + slope.x) exp(tilt.x - log_scale), mu>.

    tilts, slopes (n, D);  constants, log_scales (n);  made by `normalisers`, `numerators`, `ratios`

    Called with a law they give their n values on it. `+` puts two families together.
    Source: ours. See: chapter 14.

    >>> f = normalisers(torch.tensor([[0.0], [1.0]], dtype=torch.float64), 2.0)
    >>> f(Rademacher(1)) * f.log_scales.exp()  # 1 and cosh 1
    tensor([1.0000, 1.5431], dtype=torch.float64)
    """

    tilts: Float[Tensor, "n D"]
    constants: Float[Tensor, " n"]
    slopes: Float[Tensor, "n D"]
    log_scales: Float[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.tilts)

    def __add__(self, other: "Functionals") -> "Functionals":
        parts = zip(vars(self).values(), vars(other).values(), strict=True)
        return Functionals(*(torch.cat(pair) for pair in parts))

    def __call__(self, measure: Measure) -> Float[Tensor, " n"]:
        """Their values on a law, through its log-MGF and tilted mean."""
        affine = self.constants + (self.slopes * measure.tilted_mean(self.tilts)).sum(-1)
        return affine * (measure.log_mgf(self.tilts) - self.log_scales).exp()

    def at(self, points: Float[Tensor, "N D"]) -> Float[Tensor, "n N"]:
        """Their values on the point masses at `points`."""
        affine = self.constants[:, None] + self.slopes @ points.mT
        return affine * (self.tilts @ points.mT - self.log_scales[:, None]).exp()

    def gradient(self, points: Float[Tensor, "N D"]) -> Float[Tensor, "n N D"]:
        """The derivatives of `at` in the points."""
        weights = (self.tilts @ points.mT - self.log_scales[:, None]).exp()
        moving = self.slopes[:, None] * weights[..., None]
        return moving + self.tilts[:, None] * self.at(points)[..., None]

    def gram(self, space: Measure) -> Float[Tensor, "n n"]:
        """Their inner products in L2(space), by the log-MGF of `space` at sums of two tilts."""
        tilts = self.tilts[:, None] + self.tilts
        mean, cov = space.tilted_mean(tilts), space.tilted_cov(tilts)
        left = self.constants[:, None] + (mean * self.slopes[:, None]).sum(-1)
        right = self.constants + (mean * self.slopes).sum(-1)
        together = torch.einsum("ni,nmij,mj->nm", self.slopes, cov, self.slopes)
        scales = self.log_scales[:, None] + self.log_scales
        return (left * right + together) * (space.log_mgf(tilts) - scales).exp()


def normalisers(
    tilts: Float[Tensor, "Q D"], half_width: float | Float[Tensor, " D"]
) -> Functionals:
    """<exp(a.x), mu> at each tilt, divided by its maximum over the box |x_j| <= half_width.

    What a head returns as log-sum-exp, less log L, is its logarithm before the division. Raises
    TypeError or ValueError for bad input. Source: ours. See: chapter 14.

    >>> f = normalisers(torch.tensor([[3.0]], dtype=torch.float64), 2.0)
    >>> f.at(torch.tensor([[-2.0], [2.0]], dtype=torch.float64))
    tensor([[6.1442e-06, 1.0000e+00]], dtype=torch.float64)
    """
    h = _box(tilts, half_width)
    log_scales = (tilts.abs() * h).sum(-1)
    return Functionals(tilts, torch.ones_like(log_scales), torch.zeros_like(tilts), log_scales)


def numerators(tilts: Float[Tensor, "Q D"], half_width: float | Float[Tensor, " D"]) -> Functionals:
    """<x_j exp(a.x), mu> at each tilt, for each coordinate j: D functionals a tilt, sup norm 1.

    They vanish on a point mass at 0. Raises as `normalisers`. Source: ours. See: chapter 14.

    >>> len(numerators(torch.zeros(5, 2, dtype=torch.float64), 2.0))
    10
    """
    return ratios(tilts, torch.zeros_like(tilts), half_width)


def ratios(
    tilts: Float[Tensor, "Q D"],
    answers: Float[Tensor, "Q D"],
    half_width: float | Float[Tensor, " D"],
) -> Functionals:
    """<(x_j - m_j) exp(a.x), mu> for answers m: 0 on a law whose tilted mean at a is m.

    They know a law up to its mass, and serve where a head returns its output alone. D functionals a
    tilt, each divided by its maximum over the box. Raises as `normalisers`.
    Source: ours. See: chapter 14.

    >>> a = torch.tensor([[2.0]], dtype=torch.float64)
    >>> ratios(a, a.tanh(), 1.0)(Rademacher(1)).abs() < 1e-15
    tensor([True])
    """
    h = _box(tilts, half_width)
    require_finite("answers", answers, "Drop that tilt.")
    # |x_j - m_j| exp(a_j x_j) is largest at an end or where its derivative vanishes
    nought = torch.where(tilts == 0, torch.inf, tilts)
    ends = torch.stack([-h.expand_as(tilts), h.expand_as(tilts), answers - 1 / nought])
    ends = torch.minimum(torch.maximum(ends, -h), h)
    largest = ((ends - answers).abs().log() + tilts * ends).amax(0)
    rest = (tilts.abs() * h).sum(-1, keepdim=True) - tilts.abs() * h
    dim = tilts.shape[-1]
    return Functionals(
        tilts.repeat_interleave(dim, 0),
        -answers.flatten(),
        torch.eye(dim, dtype=tilts.dtype).repeat(len(tilts), 1),
        (largest + rest).flatten(),
    )


@dataclass(frozen=True)
class Atoms:
    """A signed measure with finitely many atoms: points (N, D), weights (N) other than 0.

    Source: ours. See: chapter 14.

    >>> Atoms(torch.zeros(1, 1), torch.tensor([0.3])).law
    Empirical(length=1, dim=1, batch_shape=())
    """

    points: Float[Tensor, "N D"]
    weights: Float[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def mass(self) -> float:
        """The sum of the weights."""
        return float(self.weights.sum())

    @property
    def law(self) -> Empirical:
        """The positive part, scaled to mass 1: what a signed answer says about a token law."""
        return Discrete(self.points, self.weights.clamp(min=0))


@dataclass(frozen=True)
class Density:
    """The density sign(g) |g|^(q-1), g = sum_k c_k xi_k: n coefficients c for n functionals.

    q = 2 in a Hilbert space, p/(p-1) in L^p. Source: ours. See: chapter 14.

    >>> f = normalisers(torch.zeros(1, 1, dtype=torch.float64), 2.0)
    >>> Density(f, torch.tensor([3.0], dtype=torch.float64), 2.0).at(torch.zeros(2, 1).double())
    tensor([3., 3.], dtype=torch.float64)
    """

    functionals: Functionals
    coefficients: Float[Tensor, " n"]
    q: float

    def at(self, points: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """Its values at points."""
        g = self.coefficients @ self.functionals.at(points)
        return g.sign() * g.abs() ** (self.q - 1)

    def on(self, space: Empirical) -> Atoms:
        """The measure that has this density with respect to a quadrature rule."""
        return _atoms(space.tokens, _weights(space) * self.at(space.tokens))


def ridge(
    functionals: Functionals, values: Float[Tensor, " n"], space: Measure, *, penalty: float
) -> Density:
    """Kernel ridge: the f in L2(space) with least |<xi, f> - values|^2 + penalty |f|^2.

    f = sum_k c_k xi_k with (G + penalty I) c = values, G the Gram matrix. Any law with a log-MGF
    is a space. Raises ValueError if values do not fit. Source: ours. See: chapter 14.

    >>> f = normalisers(torch.zeros(1, 1, dtype=torch.float64), 2.0)
    >>> ridge(f, torch.ones(1, dtype=torch.float64), UniformBox(2.0), penalty=1.0).coefficients
    tensor([0.5000], dtype=torch.float64)
    """
    _require_values(functionals, values)
    shifted = functionals.gram(space) + penalty * torch.eye(len(values), dtype=values.dtype)
    return Density(functionals, torch.linalg.solve(shifted, values), 2.0)


def power_norm(
    functionals: Functionals, values: Float[Tensor, " n"], space: Empirical, *,
    penalty: float, p: float,
) -> Density:  # fmt: skip
    """The f in L^p(space), p > 1, with least |<xi, f> - values|^2 / 2 + penalty |f|_p^p / p.

    The duality map turns it into n unknowns: c minimises the mean of |sum c_k xi_k|^q / q plus
    penalty |c|^2 / 2 - c.values, and then f = sign(g)|g|^(q-1). `space` is a quadrature rule.
    Raises ValueError if values do not fit. Source: ours. See: chapter 14.

    >>> f = normalisers(torch.zeros(1, 1, dtype=torch.float64), 2.0)
    >>> rule, one = Discrete(torch.zeros(1, 1).double(), torch.ones(1).double()), torch.ones(1)
    >>> power_norm(f, one.double(), rule, penalty=1.0, p=2.0).coefficients
    tensor([0.5000], dtype=torch.float64)
    """
    _require_values(functionals, values)
    if not p > 1:
        raise ValueError(f"p must be above 1, got {p}. For total variation use least_variation.")
    q, rho = p / (p - 1), _weights(space).numpy()
    xi = functionals.at(space.tokens).numpy()
    # in the coordinates that make ridge regression trivial all functionals are of one size
    root = np.linalg.inv(np.linalg.cholesky((xi * rho) @ xi.T + penalty * np.eye(len(xi)))).T
    xi, y, small = root.T @ xi, root.T @ values.numpy(), penalty * root.T @ root

    def objective(c):
        g, pull = c @ xi, small @ c
        power = np.abs(g) ** (q - 2)
        value = rho @ (power * g * g) / q + c @ pull / 2 - c @ y
        return value, xi @ (rho * power * g) + pull - y

    def hessian(c):
        return (xi * (rho * (q - 1) * np.abs(c @ xi) ** (q - 2))) @ xi.T + small

    best = (y @ y / (rho @ np.abs(y @ xi) ** q)) ** (1 / (q - 1))  # on the line through y
    c = minimize(
        objective, best * y, jac=True, hess=hessian, method="trust-exact",
        options={"gtol": 1e-5 * np.linalg.norm(y), "maxiter": 1000,
                 "initial_trust_radius": best * np.linalg.norm(y),
                 "max_trust_radius": 1e3 * best * np.linalg.norm(y)},
    ).x  # fmt: skip
    for _ in range(5):  # the trust region stops at the rounding of the objective, Newton does not
        c = c - np.linalg.solve(hessian(c), objective(c)[1])
    left = np.linalg.norm(objective(c)[1]) / np.linalg.norm(y)
    if not left < 1e-9:
        raise ValueError(
            f"no convergence at penalty {penalty:g} and p = {p:g}: a share {left:.1e} of the "
            f"gradient is left. Raise either, or scale the functionals."
        )
    return Density(functionals, torch.from_numpy(root @ c), q)


def least_variation(
    functionals: Functionals, values: Float[Tensor, " n"], points: Float[Tensor, "N D"], *,
    slack: float | Float[Tensor, " n"],
) -> Atoms:  # fmt: skip
    """The signed measure on `points` of least total variation with |<xi_k, w> - values_k| <= slack.

    A linear programme: its vertices have at most n atoms. A slack of 0 is an equality, such as the
    total mass (a normaliser at tilt 0). Raises ValueError if nothing fits.
    Source: ours. See: chapter 14.

    >>> f, one = normalisers(torch.zeros(1, 1, dtype=torch.float64), 2.0), torch.ones(1).double()
    >>> round(least_variation(f, one, torch.zeros(3, 1).double(), slack=0.25).mass, 6)
    0.75
    """
    _require_values(functionals, values)
    slack = torch.as_tensor(slack, dtype=values.dtype).expand_as(values)
    unit = torch.where(slack > 0, slack, 1.0)  # the solver's tolerances are absolute
    rows = (functionals.at(points) / unit[:, None]).numpy()
    upper, lower = ((values + slack) / unit).numpy(), ((values - slack) / unit).numpy()
    found = linprog(
        np.ones(2 * rows.shape[1]), method="highs-ds",
        A_ub=np.block([[rows, -rows], [-rows, rows]]), b_ub=np.concatenate([upper, -lower]),
    )  # fmt: skip
    if not found.success:
        raise ValueError(f"no measure on these points fits: {found.message} Give more slack.")
    positive, negative = np.split(found.x, 2)
    return _atoms(points, torch.from_numpy(positive - negative))


def nonnegative(
    functionals: Functionals, values: Float[Tensor, " n"], points: Float[Tensor, "N D"], *,
    mass: float | None = None,
) -> Atoms:  # fmt: skip
    """The measure >= 0 on `points` with least |<xi, w> - values|^2, of the given mass if any.

    Positivity is its only regulariser. At most n atoms, n + 1 with a given mass. `ratios` need one.
    Raises ValueError if values do not fit. Source: ours. See: chapter 14.

    >>> x = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    >>> f = normalisers(x, 2.0)
    >>> found = nonnegative(f, f(Rademacher(1)), x)
    >>> found.points[found.weights > 1e-9].squeeze()
    tensor([-1.,  1.], dtype=torch.float64)
    """
    _require_values(functionals, values)
    matrix, target = _system(functionals.at(points), values, mass)
    weights = torch.from_numpy(nnls(matrix.numpy(), target.numpy(), maxiter=100 * len(points))[0])
    return _atoms(points, weights if mass is None else mass * weights / weights.sum())


def slide(
    functionals: Functionals, values: Float[Tensor, " n"], points: Float[Tensor, "N D"],
    half_width: float | Float[Tensor, " D"], *,
    radius: float, mass: float | None = None,
) -> Atoms:  # fmt: skip
    """`nonnegative` off the grid, over all measures >= 0 on the box: a sliding Frank-Wolfe method.

    Atoms found on `points` that lie within `radius` of each other merge (a grid splits an atom over
    its neighbours; 1.5 steps undo that), then all move by least squares over positions and weights;
    the second of the two rounds starts from `points` and these atoms together. Optimal when
    residual.xi(x) is at most 0 on the box. Raises as `nonnegative`. Source: ours. See: chapter 14.

    >>> x = torch.linspace(-2, 2, 8, dtype=torch.float64)[:, None]
    >>> f = normalisers(x, 2.0)
    >>> coin = Empirical(torch.tensor([[-1.0], [1.0]], dtype=torch.float64))
    >>> wasserstein(slide(f, f(coin), x, 2.0, radius=0.9).law, coin) < 1e-6
    True
    """
    h = _box(points, half_width)
    atoms = nonnegative(functionals, values, points, mass=mass)
    atoms = _descend(functionals, values, _merge(atoms, radius), h, mass)
    more = torch.cat([points, atoms.points])
    atoms = nonnegative(functionals, values, more, mass=mass)
    return _descend(functionals, values, _merge(atoms, radius), h, mass)


def wasserstein(first: Empirical, second: Empirical) -> float:
    """The Wasserstein-1 distance of two laws with finitely many atoms, in any dimension.

    Source: ours, by SciPy. See: chapter 14.

    >>> wasserstein(Empirical(torch.zeros(1, 1)), Empirical(torch.tensor([[1.0], [2.0]])))
    1.5
    """
    points = [law.tokens.numpy() for law in (first, second)]
    weights = [_weights(law).numpy() for law in (first, second)]
    if first.dim == 1:
        return float(wasserstein_distance(*(x[:, 0] for x in points), *weights))
    return float(wasserstein_distance_nd(*points, *weights))


def _system(matrix: Tensor, values: Tensor, mass: float | None) -> tuple[Tensor, Tensor]:
    """The least-squares system for the weights of atoms.

    With mass m, <xi, w> - y = sum_i (xi(x_i) - y/m) w_i, which has no constant: its solution is
    that of the least |B w|^2 + (sum w - 1)^2, scaled. For w = t v with sum v = 1 this is
    t^2 |B v|^2 + (t - 1)^2, so the best v is that of |B v|^2 whatever t.
    """
    if mass is None:
        return matrix, values
    rows = torch.cat([mass * matrix - values[:, None], torch.ones_like(matrix[:1])])
    return rows, torch.cat([torch.zeros_like(values), torch.ones_like(values[:1])])


def _descend(functionals, values, atoms: Atoms, h: Tensor, mass: float | None) -> Atoms:
    """Least squares over the positions in the box and the weights >= 0 of the given atoms."""
    count, dim = atoms.points.shape
    h, extra = h.expand(count, dim).flatten().numpy(), int(mass is not None)

    def unpack(state):
        points, weights = torch.from_numpy(state).split([count * dim, count])
        return points.reshape(count, dim), weights

    def residual(state):
        points, weights = unpack(state)
        matrix, target = _system(functionals.at(points), values, mass)
        return (matrix @ weights - target).numpy()

    def jacobian(state):
        points, weights = unpack(state)
        moving = (functionals.gradient(points) * weights[:, None]).flatten(1) * (mass or 1)
        moving = torch.cat([moving, moving.new_zeros(extra, count * dim)])
        return torch.cat([moving, _system(functionals.at(points), values, mass)[0]], 1).numpy()

    inside = np.clip(atoms.points.flatten().numpy(), -h * (1 - 1e-9), h * (1 - 1e-9))
    state = np.concatenate([inside, atoms.weights.numpy() / (mass or 1)])
    bounds = np.concatenate([-h, np.zeros(count)]), np.concatenate([h, np.full(count, np.inf)])
    found = least_squares(
        residual, state, jacobian, bounds, x_scale="jac", max_nfev=200,
        ftol=1e-14, xtol=1e-14, gtol=1e-14,
    )  # fmt: skip
    points, weights = unpack(found.x)
    return _atoms(points, weights if mass is None else mass * weights / weights.sum())


def _merge(atoms: Atoms, radius: float) -> Atoms:
    """Atoms that a chain of steps up to `radius` connects become one, at their barycentre."""
    if len(atoms) < 2:
        return atoms
    labels = fclusterdata(atoms.points.numpy(), radius, "distance", method="single")
    member = torch.from_numpy(labels == np.arange(1, labels.max() + 1)[:, None]).double()
    weights = member @ atoms.weights
    return Atoms(member * atoms.weights @ atoms.points / weights[:, None], weights)


def _atoms(points: Tensor, weights: Tensor) -> Atoms:
    return Atoms(points[weights != 0], weights[weights != 0])


def _weights(law: Empirical) -> Tensor:
    tokens = law.tokens
    if law.log_weights is None:
        return torch.full_like(tokens[:, 0], 1 / len(tokens))
    return law.log_weights.exp()


def _box(points: Tensor, half_width) -> Tensor:
    """Half widths (D), after a check of the float64 points or tilts (n, D)."""
    require_tensor("tilts", points)
    require_finite("tilts", points, "Remove it first.")
    h = torch.as_tensor(half_width, dtype=torch.float64)
    if points.dtype != torch.float64 or points.ndim != 2 or not (h > 0).all():
        raise ValueError(
            f"tilts must be float64 of shape (n, D) and half_width above 0, got {points.dtype} of "
            f"shape {tuple(points.shape)} and {h.tolist()}. Convert: tilts.double()."
        )
    return h


def _require_values(functionals: Functionals, values: Tensor) -> None:
    require_tensor("values", values)
    require_finite("values", values, "Drop that functional.")
    if values.dtype != torch.float64 or values.shape != (len(functionals),):
        raise ValueError(
            f"values must be float64, one a functional, shape ({len(functionals)},), got "
            f"{values.dtype} of shape {tuple(values.shape)}. Is a functional missing its value?"
        )
