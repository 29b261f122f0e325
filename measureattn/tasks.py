"""In-context tasks: a parameter draws a token law, prompts of it are read to answer queries.

One episode: theta ~ parameter law; a prompt from mu_theta, L tokens long or infinite (mu_theta
itself); queries z; targets y(theta, z); the prediction V grad kappa(U z). The risk is the mean of
loss(prediction - target). Losses carry the factor 1/2: half the squared error, or Huber's loss,
both with slope at most 1 in size of change (1-smooth) and slope 0 at 0.

    U  (D, E)  key-query matrix      V  (M, D)  value matrix, read out down to the target's M axes

Frozen episodes make every risk here a deterministic function of (U, V) with a closed-form gradient;
episodes of different lengths drawn from equal generators share parameters and queries.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from measureattn._checks import require_ndim, require_tensor
from measureattn._monte_carlo import Estimate
from measureattn._typing import Float
from measureattn.attention import attend, attend_vjp
from measureattn.measures import Discrete, Empirical, Gaussian, Measure, Mixture, UniformSphere


class InContextTask(ABC):
    """The contract: four laws and a loss; risks, gradients and flows follow.

    dim            D, the dimension of a token; queries have the same here
    parameter_law  the law of theta on R^p

    A task of your own gives `parameter_law`, `token_law`, `query_law` and `target`; the loss is
    half the squared error unless it overrides `loss` and `loss_slope` together. A loss must be
    1-smooth with slope 0 at 0.
    Source: section 4, arXiv 2512.11784. See: chapter 7.

    >>> issubclass(BooleanTask, InContextTask)
    True
    """

    dim: int
    parameter_law: Measure

    @abstractmethod
    def token_law(self, theta: Float[Tensor, "n p"]) -> Measure:
        """mu_theta on R^D, batch shape (n,)."""

    @abstractmethod
    def query_law(self, theta: Float[Tensor, "n p"]) -> Measure:
        """The law of queries on R^D, batch shape (n,) or ()."""

    @abstractmethod
    def target(
        self, theta: Float[Tensor, "n p"], z: Float[Tensor, "queries n D"]
    ) -> Float[Tensor, "queries n M"]:
        """What a query should be answered."""

    def loss(self, residual: Float[Tensor, "*shape M"]) -> Float[Tensor, "*shape"]:
        """The loss of prediction - target, summed over the M axes: half its square."""
        return residual.square().sum(-1) / 2

    def loss_slope(self, residual: Float[Tensor, "*shape M"]) -> Float[Tensor, "*shape M"]:
        """The gradient of `loss`."""
        return residual

    def prompts(
        self, theta: Float[Tensor, "n p"], length: int, *, generator: torch.Generator
    ) -> Float[Tensor, "n L D"]:
        """One prompt of `length` tokens for each parameter."""
        return self.token_law(theta).sample(length, generator=generator)

    def episodes(
        self, n: int, length: int | None = None, *, n_queries: int | None = None,
        generator: torch.Generator,
    ) -> "Episodes":  # fmt: skip
        """n frozen prompts with their queries and targets.

        n          prompts; of a finite parameter law each value is used equally often
        length     tokens a prompt; None: the infinite prompt, mu_theta itself
        n_queries  queries a prompt; None: one, or each point of a finite query law

        Raises ValueError if n is not a multiple of the number of values of a finite parameter law.
        Source: ours. See: chapter 7.

        >>> g = torch.Generator().manual_seed(0)
        >>> BooleanTask(parity).episodes(2, generator=g).queries.shape
        torch.Size([8, 2, 4])
        """
        theta = _draws(self.parameter_law, n, generator)
        law = self.query_law(theta)
        if n_queries is None and isinstance(law, Empirical) and not law.batch_shape:
            z = law.tokens[:, None, :].expand(-1, n, -1)
        else:
            z = law.expand((n,)).sample(n_queries or 1, generator=generator).movedim(-2, 0)
        if length is None:
            law = self.token_law(theta)
        else:
            law = Empirical(self.prompts(theta, length, generator=generator))
        return Episodes(self, law, z, self.target(theta, z))


@dataclass(frozen=True)
class Episodes:
    """Frozen prompts, finite or infinite, with queries and targets: a risk in (U, V) to descend.

    prompts  one law a prompt, batch shape (n,)
    queries  (Q, n, D);  targets  (Q, n, M)

    Source: section 4, arXiv 2512.11784. See: chapter 7.

    >>> g = torch.Generator().manual_seed(0)
    >>> U, V = torch.eye(4).double(), torch.eye(4).double()[3:]
    >>> BooleanTask(parity).episodes(2, generator=g).risk(U, V)
    tensor(0.1558, dtype=torch.float64)
    """

    task: InContextTask
    prompts: Measure
    queries: Tensor
    targets: Tensor

    def losses(self, U: Float[Tensor, "D D"], V: Float[Tensor, "M D"]) -> Float[Tensor, "n"]:
        """The loss of each prompt, averaged over its queries."""
        predictions = attend(self.prompts, self.queries, U=U, V=V)
        return self.task.loss(predictions - self.targets).mean(0)

    def risk(self, U: Float[Tensor, "D D"], V: Float[Tensor, "M D"]) -> Float[Tensor, ""]:
        """The mean loss. Raises as `attend`."""
        return self.losses(U, V).mean()

    def gradient(
        self, U: Float[Tensor, "D D"], V: Float[Tensor, "M D"]
    ) -> tuple[Float[Tensor, "D D"], Float[Tensor, "M D"]]:
        """The gradient of `risk`, in closed form through `attend_vjp`."""
        residual = attend(self.prompts, self.queries, U=U, V=V) - self.targets
        slope = self.task.loss_slope(residual)
        in_U, in_V = attend_vjp(self.prompts, self.queries, slope, U=U, V=V)
        return in_U.mean((0, 1)), in_V.mean((0, 1))


def risk(
    task: InContextTask, U: Tensor, V: Tensor, length: int | None = None, *, n_prompts: int,
    n_queries: int | None = None, generator: torch.Generator,
) -> Estimate:  # fmt: skip
    """The risk at a prompt length (None: infinite), over fresh prompts, with its standard error.

    Arguments as in `InContextTask.episodes`; the standard error is over prompts.
    Source: section 4, arXiv 2512.11784. See: chapter 7.

    >>> g = torch.Generator().manual_seed(0)
    >>> U, V = torch.eye(4).double(), torch.eye(4).double()[3:]
    >>> risk(BooleanTask(parity), U, V, n_prompts=2, generator=g).value
    tensor(0.1558, dtype=torch.float64)
    """
    losses = task.episodes(n_prompts, length, n_queries=n_queries, generator=generator).losses(U, V)
    return Estimate(losses.mean(), losses.std() / math.sqrt(n_prompts), n_prompts)


def risk_gradient(
    task: InContextTask, U: Tensor, V: Tensor, length: int | None = None, *, n_prompts: int,
    n_queries: int | None = None, generator: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient in (U, V) of what `risk` estimates, on the same prompts for equal generators.

    Source: section 3, arXiv 2512.11784, in terms of kappa. See: chapter 7.

    >>> g = torch.Generator().manual_seed(0)
    >>> U, V = torch.eye(4).double(), torch.eye(4).double()[3:]
    >>> risk_gradient(BooleanTask(parity), U, V, n_prompts=2, generator=g)[1][0, 3]
    tensor(-0.2466, dtype=torch.float64)
    """
    episodes = task.episodes(n_prompts, length, n_queries=n_queries, generator=generator)
    return episodes.gradient(U, V)


def parity(x: Tensor) -> Tensor:
    """The product of the coordinates: of all functions on {-1, +1}^3 the least linear.

    Source: textbook. See: chapter 7.

    >>> parity(torch.tensor([1.0, -1.0, -1.0]))
    tensor(1.)
    """
    return x.prod(-1)


def majority(x: Tensor) -> Tensor:
    """The sign of the sum of an odd number of coordinates.

    Source: textbook. See: chapter 7.

    >>> majority(torch.tensor([1.0, -1.0, -1.0]))
    tensor(-1.)
    """
    return x.sum(-1).sign()


class BooleanTask(InContextTask):
    """Labels of a rule on {-1, +1}^k up to a sign that only the prompt tells.

    rule  (..., k) -> (...), with values -1 and 1: `parity`, `majority` or your own
    k     coordinates of an input, 3

    Tokens (x, theta rule(x)) with x uniform on the 2^k points and theta = +-1 a fair coin; queries
    (x, 0) uniform; target theta rule(x). The token law is finite, so infinite prompts are exact,
    and with all points as queries so is their risk: 2 episodes hold all of it. With U = c I on x
    parity is read as theta tanh(c)^k rule(x): solved by V = 1/tanh(c)^k at every c, while majority
    is solved in the limit of large c only.
    Source: ours, for section 4, arXiv 2512.11784. See: chapter 7.

    >>> BooleanTask(majority).token_law(torch.tensor([[1.0]]))
    Empirical(length=8, dim=4, batch_shape=(1,))
    """

    def __init__(self, rule: Callable[[Tensor], Tensor], k: int = 3):
        signs = torch.tensor([-1.0, 1.0], dtype=torch.float64)
        self.points = torch.cartesian_prod(*[signs] * k).reshape(-1, k)
        self.labels = rule(self.points)
        if self.labels.shape != (2**k,) or not (self.labels.abs() == 1).all():
            raise ValueError(
                f"rule must map points (..., {k}) to labels -1 or 1 of shape (...), got "
                f"{self.labels.tolist()}. A majority needs an odd number of coordinates."
            )
        self.rule = rule
        self.dim = k + 1
        self.parameter_law = Empirical(signs[:, None])

    def token_law(self, theta: Float[Tensor, "n p"]) -> Measure:
        points, labels = self.points.to(theta), self.labels.to(theta)
        x = points.expand(len(theta), *points.shape)
        tokens = torch.cat([x, (theta * labels)[..., None]], -1)
        return Discrete(tokens, torch.ones_like(tokens[..., 0]))

    def query_law(self, theta: Float[Tensor, "n p"]) -> Measure:
        return Empirical(torch.nn.functional.pad(self.points.to(theta), (0, 1)))

    def target(
        self, theta: Float[Tensor, "n p"], z: Float[Tensor, "queries n D"]
    ) -> Float[Tensor, "queries n M"]:
        return theta * self.rule(z[..., :-1])[..., None]


class MixtureTask(InContextTask):
    """Two Gaussian classes with labels: say the mean label at x, under Huber's loss.

    dim_x   dimension of an input;  radius  length of the class mean theta, uniform on a sphere
    spread  variance of an input in each direction around its class mean, above 0

    Tokens (x, y) with y = +-1 fair and x ~ N(y theta, spread I); queries (x, 0) from the same
    mixture; target E[y | x] = tanh(theta.x/spread). The tilted mean label is tanh(theta.a), so
    softmax attention with U = I/spread on x is exactly Bayes: the infinite prompt reaches risk 0,
    which no linear attention does. Huber's loss is r^2/2 to |r| = 1/2, then |r|/2 - 1/8.
    Source: ours, for section 4, arXiv 2512.11784. See: chapter 7.

    >>> MixtureTask(2, radius=1.5).token_law(torch.zeros(4, 2)).batch_shape
    torch.Size([4])
    """

    HUBER = 0.5

    def __init__(self, dim_x: int, *, radius: float = 1.5, spread: float = 1.0):
        if not spread > 0:
            raise ValueError(f"spread must be a variance above 0, got {spread}. Square it?")
        self.dim = dim_x + 1
        self.spread = spread
        self.parameter_law = UniformSphere(radius, dim_x)

    def token_law(self, theta: Float[Tensor, "n p"]) -> Measure:
        return self._classes(theta, label=1.0)

    def query_law(self, theta: Float[Tensor, "n p"]) -> Measure:
        return self._classes(theta, label=0.0)

    def target(
        self, theta: Float[Tensor, "n p"], z: Float[Tensor, "queries n D"]
    ) -> Float[Tensor, "queries n M"]:
        return torch.tanh((theta * z[..., :-1]).sum(-1, keepdim=True) / self.spread)

    def loss(self, residual: Float[Tensor, "*shape M"]) -> Float[Tensor, "*shape"]:
        zero = torch.zeros_like(residual)
        return huber_loss(residual, zero, reduction="none", delta=self.HUBER).sum(-1)

    def loss_slope(self, residual: Float[Tensor, "*shape M"]) -> Float[Tensor, "*shape M"]:
        return residual.clamp(-self.HUBER, self.HUBER)

    def _classes(self, theta: Tensor, label: float) -> Mixture:
        require_tensor("theta", theta)
        require_ndim("theta", theta, 2, "(n, p)")
        mean = torch.nn.functional.pad(theta, (0, 1), value=label)
        variances = mean.new_full((self.dim,), self.spread)
        variances[-1] = 0.0
        cov = torch.diag(variances)
        return Mixture([Gaussian(mean, cov), Gaussian(-mean, cov)])


def _draws(law: Measure, n: int, generator: torch.Generator) -> Tensor:
    """n draws, (n, p); of a finite law with equal weights each value n/values times."""
    if not (isinstance(law, Empirical) and law.log_weights is None):
        return law.sample(n, generator=generator)
    values = law.tokens
    if n < 1 or n % len(values):
        raise ValueError(
            f"n must be a multiple of the {len(values)} values of the parameter law, so that each "
            f"is used equally often, got {n}. Round it up."
        )
    return values.repeat(n // len(values), 1)
