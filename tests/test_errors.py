"""Bad input is refused with what was expected, what came and how to repair it.

Each case names essential words of all three parts. The shape checks that the tests switch on for
the package (see conftest.py) would answer first, so they are off here, as for a user.
"""

import jaxtyping
import pytest
import torch

from measureattn import (
    Discrete,
    Empirical,
    Gaussian,
    Rademacher,
    attend,
    attend_jvp,
    attend_vjp,
    first_order_attend,
    linear_attend,
)
from measureattn.streaming import TiltedSums

pytestmark = pytest.mark.usefixtures("no_shape_hook")

EYE, ZERO = torch.eye(2), torch.zeros(2)
TOKENS = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]])
NAN, INF = torch.nan, torch.inf
GAUSSIAN, PROMPT, COIN = Gaussian(ZERO, EYE), Empirical(TOKENS), Rademacher(2)
BATCH = Empirical(TOKENS.expand(4, 3, 2))
RNG = torch.Generator()
OK = dict(U=EYE, V=EYE)


def with_entry(tensor, index, value):
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def meta(tensor):
    """On another device, as far as any check can see, without needing a second one."""
    return tensor.to("meta")


CASES = {
    # Gaussian
    "mean is a list": (
        lambda: Gaussian([0.0, 0.0], EYE),
        TypeError, "mean must be a torch.Tensor", "list", "torch.as_tensor(mean",
    ),
    "cov is a list": (
        lambda: Gaussian(ZERO, [[1.0, 0.0], [0.0, 1.0]]),
        TypeError, "cov must be a torch.Tensor", "list", "torch.as_tensor(cov",
    ),
    "mean has no axis": (
        lambda: Gaussian(torch.tensor(0.0), EYE),
        ValueError, "mean must have shape (*batch, D)", "()", "unsqueeze",
    ),
    "cov is a vector of variances": (
        lambda: Gaussian(ZERO, torch.ones(2)),
        ValueError, "cov must have shape (*batch, D, D)", "(2,)", "unsqueeze",
    ),
    "cov does not fit the mean": (
        lambda: Gaussian(torch.zeros(3), EYE),
        ValueError, "cov must have shape (*batch, 3, 3)", "(2, 2)", "torch.diag_embed",
    ),
    "batches of mean and cov differ": (
        lambda: Gaussian(torch.zeros(4, 2), EYE.expand(3, 2, 2)),
        ValueError, "must broadcast", "(3,)", "(4,)", "axis of size 1",
    ),
    "mean is nan": (
        lambda: Gaussian(with_entry(ZERO, 1, NAN), EYE),
        ValueError, "mean must be finite", "nan at index (1,)", "Remove it",
    ),
    "cov is infinite": (
        lambda: Gaussian(ZERO, with_entry(EYE, (0, 1), INF)),
        ValueError, "cov must be finite", "inf at index (0, 1)", "Remove it",
    ),
    "cov is not positive": (
        lambda: Gaussian(ZERO, torch.diag(torch.tensor([1.0, -0.25]))),
        ValueError, "symmetric positive semidefinite", "-0.25 (shape (2, 2))", "clip its spectrum",
    ),
    "one cov of a batch is not positive": (
        lambda: Gaussian(ZERO, torch.stack([EYE, EYE, -EYE])),
        ValueError, "symmetric positive semidefinite", "-1 (shape (3, 2, 2))", "clip its spectrum",
    ),
    "cov is not symmetric": (
        lambda: Gaussian(ZERO, with_entry(EYE, (0, 1), 0.5)),
        ValueError, "symmetric positive semidefinite", "by up to 0.5", "(cov + cov.mT) / 2",
    ),
    "mean and cov of two dtypes": (
        lambda: Gaussian(ZERO, EYE.double()),
        TypeError, "cov must have the dtype of mean", "torch.float64", "cov.to(torch.float32)",
    ),
    "mean and cov on two devices": (
        lambda: Gaussian(ZERO, meta(EYE)),
        TypeError, "cov must have the device of mean", "meta", "cov.to(",
    ),
    "half precision mean": (
        lambda: Gaussian(ZERO.half(), EYE.half()),
        TypeError, "mean must be float32 or float64", "torch.float16", "mean.float()",
    ),
    "bfloat16 cov": (
        lambda: Gaussian(ZERO, EYE.bfloat16()),
        TypeError, "cov must be float32 or float64", "torch.bfloat16", "cov.float()",
    ),
    "integer mean": (
        lambda: Gaussian(ZERO.long(), EYE),
        TypeError, "mean must be float32 or float64", "torch.int64", "mean.to(torch.float64)",
    ),
    "dimension 0": (
        lambda: Gaussian(torch.zeros(0), torch.zeros(0, 0)),
        ValueError, "dimension 1 or more", "got 0", "Check axis -1",
    ),
    # Empirical
    "tokens are a list": (
        lambda: Empirical([[0.0], [1.0]]),
        TypeError, "tokens must be a torch.Tensor", "list", "torch.as_tensor(tokens",
    ),
    "tokens have one axis": (
        lambda: Empirical(torch.zeros(3)),
        ValueError, "tokens must have shape (*batch, L, D)", "(3,)", "unsqueeze",
    ),
    "tokens of dimension 0": (
        lambda: Empirical(torch.zeros(3, 0)),
        ValueError, "dimension 1 or more", "got 0", "Check axis -1",
    ),
    "empty prompt": (
        lambda: Empirical(torch.zeros(4, 0, 2)),
        ValueError, "at least one token", "(4, 0, 2)", "Drop the empty prompt", "-inf",
    ),
    "nan token": (
        lambda: Empirical(with_entry(TOKENS, (2, 1), NAN)),
        ValueError, "tokens must be finite", "nan at index (2, 1)", "Drop the token", "-inf",
    ),
    "infinite token": (
        lambda: Empirical(with_entry(TOKENS, (0, 0), -INF)),
        ValueError, "tokens must be finite", "-inf at index (0, 0)", "Drop the token",
    ),
    "half precision tokens": (
        lambda: Empirical(TOKENS.half()),
        TypeError, "tokens must be float32 or float64", "torch.float16", "tokens.float()",
    ),
    "integer tokens": (
        lambda: Empirical(TOKENS.int()),
        TypeError, "tokens must be float32 or float64", "torch.int32", "tokens.to(torch.float64)",
    ),
    "log weights are a list": (
        lambda: Empirical(TOKENS, [0.0, 0.0, 0.0]),
        TypeError, "log_weights must be a torch.Tensor", "list", "torch.as_tensor(log_weights",
    ),
    "log weights of another length": (
        lambda: Empirical(TOKENS, torch.zeros(2)),
        ValueError, "one entry a token, shape (3,)", "(2,)", "Expand",
    ),
    "log weights of another dtype": (
        lambda: Empirical(TOKENS, torch.zeros(3).double()),
        TypeError, "log_weights must have the dtype of tokens", "torch.float64", "log_weights.to(",
    ),
    "log weights on another device": (
        lambda: Empirical(TOKENS, meta(torch.zeros(3))),
        TypeError, "log_weights must have the device of tokens", "meta", "log_weights.to(",
    ),
    "nan log weight": (
        lambda: Empirical(TOKENS, torch.tensor([0.0, NAN, 0.0])),
        ValueError, "log_weights must be finite or -inf", "nan at index (1,)", "Use -inf",
    ),
    "infinite log weight": (
        lambda: Empirical(TOKENS, torch.tensor([0.0, 0.0, INF])),
        ValueError, "log_weights must be finite or -inf", "inf at index (2,)", "Use -inf",
    ),
    "all padding": (
        lambda: Empirical(TOKENS, torch.full((3,), -INF)),
        ValueError, "at least one token of positive weight", "prompt ()", "Drop it",
    ),
    "one prompt of a batch all padding": (
        lambda: Empirical(TOKENS.expand(2, 3, 2), with_entry(torch.zeros(2, 3), 1, -INF)),
        ValueError, "at least one token of positive weight", "prompt (1,)", "Drop it",
    ),
    # Discrete
    "negative weight": (
        lambda: Discrete(TOKENS, torch.tensor([1.0, -0.5, 1.0])),
        ValueError, "weights must be 0 or more", "-0.5 at index (1,)", "not a token law",
    ),
    "nan weight": (
        lambda: Discrete(TOKENS, torch.tensor([1.0, 1.0, NAN])),
        ValueError, "weights must be finite", "nan at index (2,)", "Remove it",
    ),
    "infinite weight": (
        lambda: Discrete(TOKENS, torch.tensor([INF, 1.0, 1.0])),
        ValueError, "weights must be finite", "inf at index (0,)", "Remove it",
    ),
    "all weights zero": (
        lambda: Discrete(TOKENS, torch.zeros(3)),
        ValueError, "at least one token of positive weight", "prompt ()", "Drop it",
    ),
    "integer weights": (
        lambda: Discrete(TOKENS, torch.tensor([1, 2, 3])),
        TypeError, "weights must be float32 or float64", "torch.int64", "weights.to(torch.float64)",
    ),
    "weights are a list": (
        lambda: Discrete(TOKENS, [1.0, 2.0, 3.0]),
        TypeError, "weights must be a torch.Tensor", "list", "torch.as_tensor(weights",
    ),
    "points are a list": (
        lambda: Discrete([[0.0]], torch.ones(1)),
        TypeError, "must be a torch.Tensor", "list", "torch.as_tensor(",
    ),
    # Rademacher
    "signs of dimension 0": (
        lambda: Rademacher(0),
        ValueError, "dimension 1 or more", "got 0", "Check axis -1",
    ),
    # queries
    "query is a list": (
        lambda: PROMPT.tilted_mean([0.0, 0.0]),
        TypeError, "a must be a torch.Tensor", "list", "torch.as_tensor(a",
    ),
    "query has no axis": (
        lambda: COIN.log_mgf(torch.tensor(1.0)),
        ValueError, "a must have shape (*query, *batch, D)", "()", "unsqueeze",
    ),
    "query of another dimension": (
        lambda: GAUSSIAN.tilted_mean(torch.zeros(3)),
        ValueError, "dimension of the tokens, 2", "(3,)", "a = U z",
    ),
    "query of another dtype": (
        lambda: GAUSSIAN.tilted_cov(ZERO.double()),
        TypeError, "dtype of the Gaussian measure", "torch.float64", "a.to(torch.float32)",
    ),
    "query on another device": (
        lambda: PROMPT.log_mgf(meta(ZERO)),
        TypeError, "device of the Empirical measure", "meta", "a.to(",
    ),
    "nan query": (
        lambda: COIN.tilted_mean(torch.tensor([[0.0, 0.0], [0.0, NAN]])),
        ValueError, "a must be finite", "nan at index (1, 1)", "Look for the query",
    ),
    "infinite query": (
        lambda: PROMPT.tilted_cov(torch.tensor([INF, 0.0])),
        ValueError, "a must be finite", "inf at index (0,)", "Look for the query",
    ),
    "half precision query": (
        lambda: COIN.tilted_mean(ZERO.half()),
        TypeError, "a must be float32 or float64", "torch.float16", "a.float()",
    ),
    "query that does not broadcast": (
        lambda: BATCH.tilted_mean(torch.zeros(5, 2)),
        ValueError, "must broadcast", "(5,)", "(4,)", "a[:, None, :]",
    ),
    "direction that does not broadcast": (
        lambda: PROMPT.tilted_cov_product(torch.zeros(5, 2), torch.zeros(3, 2)),
        ValueError, "w, (3,), must broadcast", "(5,) of a", "w[:, None, :]",
    ),
    "direction of another dtype": (
        lambda: COIN.tilted_cov_product(ZERO, ZERO.double()),
        TypeError, "w must have the dtype of a", "torch.float64", "w.to(torch.float32)",
    ),
    "nan direction": (
        lambda: GAUSSIAN.tilted_cov_product(ZERO, with_entry(ZERO, 0, NAN)),
        ValueError, "w must be finite", "nan at index (0,)",
    ),
    # samples
    "a seed in place of a generator": (
        lambda: GAUSSIAN.sample(3, generator=0),
        TypeError, "generator must be a torch.Generator", "int", "torch.Generator().manual_seed(0)",
    ),
    "no generator": (
        lambda: COIN.sample(3, generator=None),
        TypeError, "generator must be a torch.Generator", "NoneType", "manual_seed",
    ),
    "a generator of another library": (
        lambda: PROMPT.sample(3, generator=__import__("random").Random(0)),
        TypeError, "generator must be a torch.Generator", "Random", "manual_seed",
    ),
    "a negative number of tokens": (
        lambda: PROMPT.sample(-1, generator=RNG),
        ValueError, "whole number of tokens, 0 or more", "-1",
    ),
    "half a token": (
        lambda: GAUSSIAN.sample(2.5, generator=RNG),
        ValueError, "whole number of tokens, 0 or more", "2.5",
    ),
    # attend and its relatives
    "z is a list": (
        lambda: attend(PROMPT, [0.0, 0.0], **OK),
        TypeError, "z must be a torch.Tensor", "list", "torch.as_tensor(z",
    ),
    "z has no axis": (
        lambda: attend(PROMPT, torch.tensor(0.0), **OK),
        ValueError, "U must map queries to tokens", "z of shape ()",
    ),
    "U transposed": (
        lambda: attend(PROMPT, torch.zeros(3), U=torch.zeros(3, 2), V=EYE),
        ValueError, "shape (2, E)", "U of shape (3, 2)", "Transpose U?",
    ),
    "V of another dimension": (
        lambda: linear_attend(PROMPT, ZERO, U=EYE, V=torch.zeros(2, 3)),
        ValueError, "V must read tokens, shape (M, 2)", "(2, 3)", "Transpose it?",
    ),
    "V is a vector": (
        lambda: attend(PROMPT, ZERO, U=EYE, V=torch.zeros(2)),
        ValueError, "V must read tokens, shape (M, 2)", "(2,)", "Transpose it?",
    ),
    "U of another dtype": (
        lambda: first_order_attend(PROMPT, ZERO, U=EYE.double(), V=EYE),
        TypeError, "U must have the dtype of z", "torch.float64", "U.to(torch.float32)",
    ),
    "V on another device": (
        lambda: attend(PROMPT, ZERO, U=EYE, V=meta(EYE)),
        TypeError, "V must have the device of z", "meta", "V.to(",
    ),
    "head of another dtype than the law": (
        lambda: attend(PROMPT, ZERO.double(), U=EYE.double(), V=EYE.double()),
        TypeError, "dtype of the Empirical measure", "torch.float64", ".to(torch.float32)",
    ),
    "nan in U": (
        lambda: attend(PROMPT, ZERO, U=with_entry(EYE, (1, 0), NAN), V=EYE),
        ValueError, "U must be finite", "nan at index (1, 0)", "Remove it",
    ),
    "infinity in z": (
        lambda: attend(PROMPT, with_entry(ZERO, 1, INF), **OK),
        ValueError, "z must be finite", "inf at index (1,)", "Remove it",
    ),
    "queries that do not broadcast": (
        lambda: attend(BATCH, torch.zeros(5, 2), **OK),
        ValueError, "must broadcast", "(5,)", "(4,)", "[:, None, :]",
    ),
    "dU of another shape": (
        lambda: attend_jvp(PROMPT, ZERO, **OK, dU=torch.zeros(2, 1), dV=EYE),
        ValueError, "dU must have the shape of U, (2, 2)", "(2, 1)", "direction in parameter space",
    ),
    "dV of another dtype": (
        lambda: attend_jvp(PROMPT, ZERO, **OK, dU=EYE, dV=EYE.double()),
        TypeError, "dV must have the dtype of V", "torch.float64", "dV.to(torch.float32)",
    ),
    "cotangent of another size": (
        lambda: attend_vjp(PROMPT, ZERO, torch.zeros(3), **OK),
        ValueError, "cotangent must have the outputs' last axis, 2", "(3,)", "one weight an output",
    ),
    "cotangent of another dtype": (
        lambda: attend_vjp(PROMPT, ZERO, ZERO.double(), **OK),
        TypeError, "cotangent must have the dtype of z", "torch.float64", "cotangent.to(",
    ),
    # streaming
    "half precision accumulation": (
        lambda: TiltedSums.empty(ZERO, accumulate=torch.float16),
        TypeError, "torch.float32 or torch.float64", "torch.float16", "65,504", "Use torch.float64",
    ),
    "tilts that do not fit the tokens": (
        lambda: TiltedSums.empty(torch.zeros(1, 2)).update(TOKENS.expand(4, 3, 2)),
        ValueError, "already be broadcast", "(1, 2)", "(4, 3, 2)", "Expand them first",
    ),
    "states at different tilts": (
        lambda: TiltedSums.empty(torch.zeros(1, 2)).merge(TiltedSums.empty(torch.zeros(3, 2))),
        ValueError, "merged at the same tilts", "(1, 2)", "(3, 2)", "Build both from one tensor",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input_is_refused(case):
    call, kind, *words = case
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind  # not a subclass that some library raised
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


def test_the_checks_accept_good_input():
    """The calls above fail for their one fault only: without it they pass."""
    assert attend(BATCH, torch.zeros(5, 1, 2), **OK).shape == (5, 4, 2)
    assert attend_jvp(PROMPT, ZERO, **OK, dU=EYE, dV=EYE).shape == (2,)
    assert attend_vjp(PROMPT, ZERO, ZERO, **OK)[0].shape == (2, 2)
    for law in (GAUSSIAN, PROMPT, COIN):
        assert law.sample(3, generator=RNG).shape == (3, 2)
        assert law.tilted_cov_product(torch.zeros(5, 2), ZERO).shape == (5, 2)


def test_value_checks_can_be_skipped_and_shape_checks_cannot():
    unchecked = dict(validate_args=False)
    assert Gaussian(ZERO, -EYE, **unchecked).dim == 2
    assert Empirical(with_entry(TOKENS, 0, NAN), **unchecked).dim == 2
    assert Discrete(TOKENS, torch.tensor([1.0, -1.0, 1.0]), **unchecked).dim == 2
    with pytest.raises(ValueError, match="cov must have shape"):
        Gaussian(torch.zeros(3), EYE, **unchecked)
    with pytest.raises(TypeError, match="half precision"):
        Empirical(TOKENS.half(), **unchecked)


def test_the_shape_checks_of_the_tests_are_on():
    """A wrong annotation in the package cannot hide: with the hook on, shapes are compared."""
    jaxtyping.config.update("jaxtyping_disable", False)
    with pytest.raises(jaxtyping.TypeCheckError):
        attend(PROMPT, torch.zeros(3), U=torch.zeros(2, 4), V=EYE)
