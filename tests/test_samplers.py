"""The exact samplers against plain tokens: means, covariances and projections of all they return.

What is compared, prompt by prompt: the two averages of softmax and of linear attention on one
prompt, and the gradient of each one's squared error in U and v. Two-sample tests, z for means and
covariances, Kolmogorov-Smirnov for 60 random projections, at a family-wise level of 1e-3 over all
cases (Bonferroni). With 20,000 prompts a side they find, with probability 0.9, a mean that is off
by 0.066 standard deviations and a distribution function that is off by 0.04.
"""

import itertools

import pytest
import torch
from scipy.stats import ks_2samp, norm

from measureattn.regression import Task, samplers
from measureattn.regression.samplers import ExactSampler, PlainSampler

PROMPTS, PROJECTIONS = 20_000, 60
LENGTHS, NOISES = (3, 30, 1000), (0.0, 0.1)
COV = torch.tensor([[1.0, 0.5, 0.0], [0.5, 1.5, -0.3], [0.0, -0.3, 0.7]]).double()
CASES = list(itertools.product(LENGTHS, NOISES))
WIDTH = 48  # numbers a prompt
TESTS = len(CASES) * (WIDTH + WIDTH * (WIDTH + 1) // 2 + PROJECTIONS)
LEVEL = 1e-3 / TESTS


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def parameters(seed, scale=0.6):
    """U (D, D) and v (D, 1) with score variances around 1."""
    g = seeded(seed)
    return (scale * torch.randn(4, k, generator=g).double() for k in (4, 1))


def answers(sampler, generator, **chosen):
    """Averages and gradients (n, width), activation after activation, of one draw."""
    now = sampler.ahead(1, [generator])[0]
    directions = {k: (U @ now["z"], v[None]) for k, (U, v) in chosen.items()}
    averages = sampler.averages(now, directions, [generator])
    columns = []
    for k, (_, v) in directions.items():
        first, second = averages[k]
        prediction = (v * first).sum(1, keepdim=True)
        miss = prediction - now["label"][:, None]
        outer = (miss * second)[:, :, None] * now["z"][:, None, :-1]
        columns += [first, second, miss * first, outer.flatten(1, 2)]
    return torch.cat(columns, 1)[0].T


def draw(kind, length, noise, seed, n=PROMPTS, activations=("softmax", "linear"), cov=COV):
    """n prompts' answers; softmax and linear attention have parameters of their own."""
    task = Task(cov, task_var=0.5, noise_var=noise)
    batch = min(n, 2000 if kind is ExactSampler else max(1, 200_000 // length))
    sampler = kind(task, [length], list(activations), batch=batch)
    chosen = {k: tuple(parameters(i)) for i, k in enumerate(activations)}
    g = seeded(seed)
    return torch.cat([answers(sampler, g, **chosen) for _ in range(n // batch)])


def smallest_p(ours, theirs):
    """The least p-value of all two-sample tests, and how many there were."""
    n = len(ours)
    pairs = torch.triu_indices(ours.shape[1], ours.shape[1])

    def spread(x):
        centred = x - x.mean(0)
        return centred[:, pairs[0]] * centred[:, pairs[1]]

    p_values = []
    for mine, other in ((ours, theirs), (spread(ours), spread(theirs))):
        z = (mine.mean(0) - other.mean(0)) / ((mine.var(0) + other.var(0)) / n).sqrt()
        p_values += (2 * norm.sf(z.abs().numpy())).tolist()
    scale = theirs.std(0)
    g = seeded(7)
    for _ in range(PROJECTIONS):
        along = torch.randn(ours.shape[1], generator=g).double() / scale
        p_values.append(ks_2samp((ours @ along).numpy(), (theirs @ along).numpy()).pvalue)
    return min(p_values), len(p_values)


@pytest.fixture(scope="module")
def plain():
    """The plain draw of a case, made once."""
    drawn = {}

    def of(length, noise):
        if (length, noise) not in drawn:
            drawn[length, noise] = draw(PlainSampler, length, noise, seed=1)
        return drawn[length, noise]

    return of


@pytest.mark.parametrize(("length", "noise"), CASES)
def test_exact_in_law_on_one_prompt(plain, length, noise):
    ours = draw(ExactSampler, length, noise, seed=2)
    least, count = smallest_p(ours, plain(length, noise))
    assert count * len(CASES) == TESTS and ours.shape == (PROMPTS, WIDTH)
    assert least > LEVEL


@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize(("length", "noise"), CASES)
def test_exact_in_law_alone(plain, length, noise, activation):
    """An activation that has the prompts for itself takes a shorter way."""
    half = WIDTH // 2
    part = slice(0, half) if activation == "softmax" else slice(half, None)
    task = Task(COV, task_var=0.5, noise_var=noise)
    sampler = ExactSampler(task, [length], [activation], batch=PROMPTS)
    chosen = {activation: tuple(parameters(0 if activation == "softmax" else 1))}
    ours = answers(sampler, seeded(3), **chosen)
    assert smallest_p(ours, plain(length, noise)[:, part])[0] > LEVEL / 2


def no_projection(x, basis):
    return x


def no_third_pivot(gram):
    root = CHOLESKY(gram)
    root[:, 2, 2] = 0
    return root


def all_degrees_of_freedom(self, lengths):
    return EACH_RUN(self, [length + 4 for length in lengths])


CHOLESKY, EACH_RUN = samplers._cholesky, ExactSampler._each_run


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (samplers, "_off", no_projection),
        (samplers, "_cholesky", no_third_pivot),
        (ExactSampler, "_each_run", all_degrees_of_freedom),
    ],
)
def test_a_wrong_law_is_found(plain, monkeypatch, where, name, wrong):
    monkeypatch.setattr(where, name, wrong)
    ours = draw(ExactSampler, 6, 0.1, seed=2)
    assert smallest_p(ours, plain(6, 0.1))[0] < LEVEL


def test_the_triangle_is_a_root():
    """Also where a vector lies in the span of those before it."""
    vectors = torch.randn(3, 5, 4, 9, generator=seeded(1)).double()
    vectors[1, :, 3] = vectors[1, :, 2] - 2 * vectors[1, :, 0]
    vectors[2, :, 1] = 0
    gram = (vectors @ vectors.mT).movedim(1, -1)
    root = samplers._cholesky(gram)
    torch.testing.assert_close(
        root.movedim(-1, 1).triu(1), 0 * vectors[..., :4], rtol=0, atol=1e-12
    )
    rebuilt = (root[:, :, None] * root[:, None]).sum(3)
    torch.testing.assert_close(rebuilt, gram, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_few_tokens(length):
    """Fewer tokens than softmax's four vectors, or than dimensions."""
    ours, theirs = (draw(kind, length, 0.1, seed=s) for s, kind in enumerate(KINDS, 4))
    keep = theirs.std(0) > 1e-9  # one token leaves no gradient in the scores
    assert torch.all(ours[:, ~keep].abs() < 1e-6)
    assert smallest_p(ours[:, keep], theirs[:, keep])[0] > LEVEL


KINDS = (PlainSampler, ExactSampler)


@pytest.mark.parametrize("tilt", [0.0, 1e-3])
@pytest.mark.parametrize("values", ["parallel", "none"])
def test_directions_that_coincide_or_vanish(tilt, values):
    """Scores and values in one direction or none: the basis has fewer vectors."""
    task = Task(COV, task_var=0.5, noise_var=0.1)
    found = []
    for seed, kind in enumerate(KINDS, 8):
        sampler = kind(task, [6], ["softmax", "linear"], batch=PROMPTS)
        g = seeded(seed)
        now = sampler.ahead(1, [g])[0]
        v = torch.tensor([1.0, -1.0, 0.5, 2.0]).double()[None, :, None]
        a = tilt * v.expand(1, 4, PROMPTS)
        pair = (a, v if values == "parallel" else 0 * v)
        averages = sampler.averages(now, {"softmax": pair, "linear": (v + 0 * a, v)}, [g])
        found.append(torch.cat([x for pair in averages.values() for x in pair], 1)[0].T)
    ours, theirs = found
    keep = theirs.std(0) > 1e-9
    assert torch.all(ours[:, ~keep].abs() < 1e-6)
    assert smallest_p(ours[:, keep], theirs[:, keep])[0] > LEVEL


def test_a_length_draws_alone():
    """What a length sees does not depend on which others share its program."""
    task = Task(COV, task_var=0.5, noise_var=0.1)
    U, v = parameters(0)
    for kind in KINDS:
        alone = kind(task, [20], ["softmax"], batch=5)
        both = kind(task, [7, 20], ["softmax"], batch=5)
        first, (now,) = seeded(1), alone.ahead(1, [g := seeded(2)])
        (many,) = both.ahead(1, [first, h := seeded(2)])
        mine = alone.averages(now, {"softmax": (U @ now["z"], v[None])}, [g])["softmax"]
        directions = {"softmax": (U @ many["z"], v[None].expand(2, 4, 1))}
        theirs = both.averages(many, directions, [first, h])["softmax"]
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x[0], y[1], rtol=1e-12, atol=0)
