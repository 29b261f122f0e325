"""Softmax attention as an operator on token laws, its derivatives, and its linear relatives.

The query z is mapped to the tilt a = U z (U = K'Q), the law answers with its tilted mean, and V
reads the output off: T[mu](z) = V grad kappa(U z). A finite prompt is the law `Empirical(tokens)`,
an infinite one is the law itself; no function here knows which it was given. There is no hidden
1/sqrt(d): a temperature is part of U.

    z  (*query, *batch, E)    queries
    U  (D, E)                 key-query matrix
    V  (M, D)                 value (or value-output) matrix
"""

import torch
from torch import Tensor

from measureattn._checks import require_finite, require_same, require_tensor
from measureattn._typing import Float
from measureattn.measures import Measure


def attend(
    measure: Measure,
    z: Float[Tensor, "*query E"],
    *,
    U: Float[Tensor, "D E"],
    V: Float[Tensor, "M D"],
) -> Float[Tensor, "*shape M"]:
    """Softmax attention on a law: V grad kappa(U z), shape (*query, *batch, M).

    Raises ValueError or TypeError if shapes, dtypes or devices do not fit together.
    Source: section 2, arXiv 2512.11784. See: chapter 1.

    >>> prompt = Empirical(torch.tensor([[-1.0], [1.0]]))
    >>> attend(prompt, torch.tensor([2.0]), U=torch.eye(1), V=torch.eye(1))
    tensor([0.9640])
    """
    a = _tilt(measure, z, U, V)
    return measure.tilted_mean(a) @ V.mT


def attend_jvp(
    measure: Measure,
    z: Float[Tensor, "*query E"],
    *,
    U: Float[Tensor, "D E"],
    V: Float[Tensor, "M D"],
    dU: Float[Tensor, "D E"],
    dV: Float[Tensor, "M D"],
) -> Float[Tensor, "*shape M"]:
    """How the output moves when the parameters move by (dU, dV): V C_a dU z + dV m_a.

    m_a and C_a are the law's mean and covariance tilted by a = U z; no autograd is needed.
    Shape (*query, *batch, M). Raises as `attend`.
    Source: section 3, arXiv 2512.11784, in terms of kappa. See: chapter 1.

    >>> coin, one = Rademacher(1), torch.eye(1)
    >>> attend_jvp(coin, torch.tensor([0.0]), U=one, V=one, dU=one, dV=one)
    tensor([0.])
    """
    a = _tilt(measure, z, U, V)
    _require_shape("dU", dU, U)
    _require_shape("dV", dV, V)
    moved = measure.tilted_cov_product(a, z @ dU.mT)
    return moved @ V.mT + measure.tilted_mean(a) @ dV.mT


def attend_vjp(
    measure: Measure,
    z: Float[Tensor, "*query E"],
    cotangent: Float[Tensor, "*shape M"],
    *,
    U: Float[Tensor, "D E"],
    V: Float[Tensor, "M D"],
) -> tuple[Float[Tensor, "*shape D E"], Float[Tensor, "*shape M D"]]:
    """The gradients in U and V of cotangent . T[mu](z), one pair a query.

    (C_a V'g z', g m_a') with g = cotangent, shape (*query, *batch, M): what back-propagation would
    return, in closed form. Shapes (*query, *batch, D, E) and (*query, *batch, M, D). Raises as
    `attend`. Source: section 3, arXiv 2512.11784, in terms of kappa. See: chapter 1.

    >>> coin, one = Rademacher(1), torch.eye(1)
    >>> attend_vjp(coin, torch.tensor([2.0]), torch.tensor([1.0]), U=one, V=one)
    (tensor([[0.1413]]), tensor([[0.9640]]))
    """
    a = _tilt(measure, z, U, V)
    require_tensor("cotangent", cotangent)
    require_same("cotangent", cotangent, "z", z)
    if cotangent.shape[-1] != V.shape[0]:
        raise ValueError(
            f"cotangent must have the outputs' last axis, {V.shape[0]}, got shape "
            f"{tuple(cotangent.shape)}. It is one weight an output coordinate."
        )
    mean = measure.tilted_mean(a)
    moved = measure.tilted_cov_product(a, cotangent @ V)
    return moved[..., :, None] * z[..., None, :], cotangent[..., :, None] * mean[..., None, :]


def linear_attend(
    measure: Measure,
    z: Float[Tensor, "*query E"],
    *,
    U: Float[Tensor, "D E"],
    V: Float[Tensor, "M D"],
) -> Float[Tensor, "*shape M"]:
    """Linear attention on a law: V E[x x'] U z, shape (*query, *batch, M).

    On a prompt that is the mean of x_i (x_i . U z): raw scores, divided by L, in place of softmax
    weights. On a centred Gaussian law it equals `attend`. Raises as `attend`.
    Source: Lemma 2.1, arXiv 2512.11784. See: chapter 2.

    >>> linear_attend(Rademacher(1), torch.tensor([2.0]), U=torch.eye(1), V=torch.eye(1))
    tensor([2.])
    """
    a = _tilt(measure, z, U, V)
    zero = torch.zeros_like(a)
    mean = measure.tilted_mean(zero)
    raw = measure.tilted_cov_product(zero, a) + mean * (mean * a).sum(-1, keepdim=True)
    return raw @ V.mT


def first_order_attend(
    measure: Measure,
    z: Float[Tensor, "*query E"],
    *,
    U: Float[Tensor, "D E"],
    V: Float[Tensor, "M D"],
) -> Float[Tensor, "*shape M"]:
    """Softmax attention to first order in the scores: V (mean + cov U z), for any law.

    Shape (*query, *batch, M). Equal to `attend` at every z exactly when the law is Gaussian (for
    injective V). Raises as `attend`. Source: ours, from kappa's Taylor series. See: chapter 3.

    >>> first_order_attend(Rademacher(1), torch.tensor([2.0]), U=torch.eye(1), V=torch.eye(1))
    tensor([2.])
    """
    a = _tilt(measure, z, U, V)
    zero = torch.zeros_like(a)
    return (measure.tilted_mean(zero) + measure.tilted_cov_product(zero, a)) @ V.mT


class AttentionHead(torch.nn.Module):
    """One head with the matrices of a network, K, Q, V (D, D) and O (M, D), on any law.

    It acts through U = K'Q / sqrt(D) and O V alone. `linear` takes `linear_attend` for `attend`.
    Weights start as those of `torch.nn.Linear` without bias; autograd trains them on finite and
    infinite prompts alike. Raises as `attend`.
    Source: section 6, arXiv 2512.11784. See: chapter 10.

    >>> head = AttentionHead(3)
    >>> head(Empirical(torch.ones(5, 3)), torch.zeros(7, 3)).shape
    torch.Size([7, 1])
    """

    def __init__(self, dim: int, outputs: int = 1, *, linear: bool = False, dtype=None):
        super().__init__()
        self.key, self.query, self.value = (
            torch.nn.Linear(dim, dim, bias=False, dtype=dtype) for _ in range(3)
        )
        self.output = torch.nn.Linear(dim, outputs, bias=False, dtype=dtype)
        self.linear = linear

    def effective(self) -> tuple[Float[Tensor, "D D"], Float[Tensor, "M D"]]:
        """(U, O V)."""
        U = self.key.weight.mT @ self.query.weight / self.key.in_features**0.5
        return U, self.output.weight @ self.value.weight

    def forward(self, measure: Measure, z: Float[Tensor, "*query D"]) -> Float[Tensor, "*shape M"]:
        U, V = self.effective()
        return (linear_attend if self.linear else attend)(measure, z, U=U, V=V)


def _tilt(measure: Measure, z: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """a = U z, after everything that goes into it has been checked."""
    for name, tensor in (("z", z), ("U", U), ("V", V)):
        require_tensor(name, tensor)
    require_same("U", U, "z", z)
    require_same("V", V, "z", z)
    if z.ndim == 0 or U.ndim != 2 or U.shape != (measure.dim, z.shape[-1]):
        raise ValueError(
            f"U must map queries to tokens, shape ({measure.dim}, E) for z of shape (*query, E); "
            f"got U of shape {tuple(U.shape)} and z of shape {tuple(z.shape)}. Transpose U?"
        )
    if V.ndim != 2 or V.shape[1] != measure.dim:
        raise ValueError(
            f"V must read tokens, shape (M, {measure.dim}), got shape {tuple(V.shape)}. "
            f"Transpose it?"
        )
    if measure.validate_args:
        for name, tensor in (("z", z), ("U", U), ("V", V)):
            require_finite(name, tensor, "Remove it first.")
    return z @ U.mT


def _require_shape(name: str, tensor: Tensor, like: Tensor) -> None:
    require_tensor(name, tensor)
    require_same(name, tensor, name[1:], like)
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} must have the shape of {name[1:]}, {tuple(like.shape)}, got shape "
            f"{tuple(tensor.shape)}. It is a direction in parameter space."
        )
