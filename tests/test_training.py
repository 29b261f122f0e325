"""SGD of the paper's experiment: its steps, its mean steps against the exact risks, its restarts.

Monte Carlo is judged in its own standard errors, four of them, each at most a fifth of the error
that the test is to find.
"""

import errno
import itertools
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from measure_case import assert_refused
from numpy.polynomial.hermite_e import hermegauss

from measureattn.regression import LinearRisk, QueryRisk, Task, checkpoint, gradient_flow
from measureattn.regression.evaluation import mse_linear, mse_softmax, product
from measureattn.regression.experiment import TOGETHER, cells, run_cell, setting
from measureattn.regression.samplers import push
from measureattn.regression.task import blocks
from measureattn.regression.training import RECORDED, Training

P = setting()
KILLS = int(os.environ.get("MEASUREATTN_KILLS", 5))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def small(**options):
    return Training(P, **{"lengths": [10, 40], "seed": 2, "batch": 16} | options)


def same(one, other):
    """Bit for bit: weights, history and what is to come."""
    assert one.steps == other.steps
    for mine, theirs in (
        (one.weights, other.weights),
        (vars(one.history), vars(other.history)),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine)


# -- a step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["full", "block"])
def test_a_step_is_what_autograd_takes(model):
    """On the very tokens of the plain sampler, through four matrices written out."""
    options = {"model": model, "sampler": "plain", "replicates": 3}
    ours, twin = small(**options), small(**options)
    ours.run(1), twin.run(1)
    now, generators = twin.drawn[-1], twin.now
    before = {k: x.clone() for k, x in ours.weights.items()}
    leaves = {k: x.clone().requires_grad_() for k, x in before.items()}
    if model == "full":
        U = leaves["K"].mT @ leaves["Q"] / math.sqrt(6)
        v = (leaves["O"] @ leaves["V"])[:, 0]
    else:
        U = torch.nn.functional.pad(leaves["A"], (0, 1, 0, 1))
        v = torch.nn.functional.pad(leaves["b"][:, 0], (5, 0))
    U, v = U.unflatten(0, (2, 2, 3)), v.unflatten(0, (2, 2, 3))
    total = 0.0
    for i, (length, g) in enumerate(zip(twin.lengths, generators, strict=True)):
        runs = slice(3 * i, 3 * i + 3)
        w, z, label = (now[name][runs].clone() for name in ("w", "z", "label"))
        tokens = push(P, w[:, None], torch.randn(3, length, 6, 16, generator=g).double())
        for k, activation in enumerate(("softmax", "linear")):
            s = torch.einsum("rldb,rde,reb->rlb", tokens, U[k, i], z)
            p = torch.softmax(s, 1) if activation == "softmax" else s / length
            prediction = torch.einsum("rlb,rldb,rd->rb", p, tokens, v[k, i])
            total = total + (prediction - label).square().mean(-1).sum()
    expected = torch.autograd.grad(total, leaves.values())
    ours.run(2)
    for (name, old), slope in zip(before.items(), expected, strict=True):
        moved = (old - ours.weights[name]) / ours.rate
        assert slope.abs().max() > 1e-2
        torch.testing.assert_close(moved, slope, rtol=0, atol=1e-9)


@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize("sampler", ["exact", "plain"])
def test_the_mean_step_is_the_gradient_of_the_exact_risk(activation, sampler):
    """Of the block model, from the start, averaged over 40 batches of 512 prompts."""
    run = Training(
        P, [30], seed=5, batch=512, model="block", activations=[activation], sampler=sampler
    )  # fmt: skip
    A, b = run.weights["A"][0], float(run.weights["b"])
    if activation == "linear":
        in_A, in_b = LinearRisk(P, 30).gradient(A, b)
    else:
        queries = QueryRisk.draw(P, 30, 2**14, generator=seeded(1))
        in_A, in_b = queries.gradient(A, torch.tensor(b).double())
    slopes = []
    for _ in range(40):
        U, v = run.model.effective(run.weights)
        _, dU, dv = run._gradient(
            run.drawn[-1] if run.drawn else run.sampler.ahead(1, run.ahead)[0], U, v
        )
        slopes.append(torch.cat([dU[0, :5, :5].flatten(), dv[0, 5]]))
    slopes = torch.stack(slopes) / 2  # the risk has a factor 1/2
    std_error = slopes.std(0) / math.sqrt(len(slopes))
    expected = torch.cat([in_A.flatten(), in_b.reshape(1)])
    assert std_error.max() < expected.abs().max() / 20
    assert torch.all((slopes.mean(0) - expected).abs() < 4.5 * std_error)


def test_lengths_in_one_program_are_the_same_runs():
    """One run does not depend on those beside it, but for the rounding of sums."""
    together, alone = small(replicates=2), small(lengths=[40], replicates=2)
    together.run(40), alone.run(40)
    for mine, theirs in zip(together.effective(), alone.effective(), strict=True):
        torch.testing.assert_close(mine[:, 1:], theirs, rtol=1e-9, atol=1e-12)


def test_softmax_and_linear_share_start_and_data_unless_as_published():
    shared, published = small(), small(shared_start=False)
    assert torch.equal(*shared.effective()[0])
    assert torch.equal(shared.effective()[0][0, 0], shared.effective()[0][0, 1])
    starts = published.effective()[0].flatten(0, 2)
    assert all(not torch.equal(x, y) for x, y in itertools.combinations(starts, 2))
    assert torch.equal(shared.weights["K"][0], small(lengths=[10]).weights["K"][0])
    assert shared.weights["K"].abs().max() < 6**-0.5  # torch.nn.Linear's interval
    assert shared.weights["K"].abs().max() > 0.9 * 6**-0.5


def test_loss_is_the_mean_since_the_last_record():
    run, every = small(), small()
    run.run(10)
    losses = []
    for _ in range(10):
        every.window = every._window()
        every._step()
        losses.append(every.window[1].clone())
    assert run.history.steps.tolist() == [1, 2, 3, 4, 6, 7, 8, 10]
    torch.testing.assert_close(run.history.loss[-2].flatten(), losses[7])
    torch.testing.assert_close(run.history.loss[-1].flatten(), (losses[8] + losses[9]) / 2)
    gap = (losses[8] - losses[9]).abs() / 2  # the standard error of a mean of two
    torch.testing.assert_close(run.history.std_error[-1].flatten(), gap, rtol=1e-6, atol=0)


def test_training_comes_down_to_the_theory():
    """Linear attention in blocks reaches the best that linear attention can do."""
    task = Task(torch.eye(2).double(), task_var=0.5, noise_var=0.1)
    run = Training(
        task, [50], seed=1, model="block", activations=["linear"], rate=0.02, batch=256
    )  # fmt: skip
    run.run(6000)
    U, v = (part[0, 0, 0] for part in run.effective())
    floor = 2 * task.risk_one_step(50) + 0.1
    start = mse_linear(task, run.history.U[0, 0, 0, 0], run.history.v[0, 0, 0, 0], 50)
    reached = mse_linear(task, U, v, 50)
    assert start > 2 * floor
    assert floor <= reached < 1.01 * floor


# -- test errors -------------------------------------------------------------------------------


def some_parameters(seed, d=5, scale=0.4):
    g = seeded(seed)
    U = scale * torch.randn(d + 1, d + 1, generator=g).double()
    return U, torch.randn(1, d + 1, generator=g).double()


@pytest.mark.parametrize("published", [False, True])
def test_linear_error_of_blocks_is_the_closed_form(published):
    task = setting("published" if published else "intended")
    A = torch.randn(5, 5, generator=seeded(1)).double()
    expected = 2 * task.risk_linear(A, 0.7, 30) + 0.1
    torch.testing.assert_close(mse_linear(task, *blocks(A, 0.7), 30), expected, rtol=1e-12, atol=0)


def test_linear_error_by_a_product_rule():
    """Cubature of degree 5 against Gauss-Hermite with three nodes an axis, d = 3, any (U, v)."""
    task = Task(torch.diag(torch.tensor([1.0, 0.5, 2.0]).double()), task_var=0.7, noise_var=0.2)
    U, v = some_parameters(3, d=3)
    x, share = hermegauss(3)
    share = share / share.sum()
    total = 0.0
    for nodes in itertools.product(range(3), repeat=3):
        w = math.sqrt(0.7) * torch.tensor([x[k] for k in nodes])
        law = task.token_law(w[None]).cov[0]
        spread = U[:, :-1] @ task.query_cov @ U[:, :-1].mT
        first = law @ spread @ law + (law @ spread @ law + (law * spread).sum() * law) / 12
        cross = v @ law @ U[:, :-1] @ task.query_cov @ w
        error = (v @ first @ v.mT).squeeze() - 2 * cross.squeeze() + w @ task.query_cov @ w
        total += np.prod([share[k] for k in nodes]) * error
    torch.testing.assert_close(mse_linear(task, U, v, 12), total + 0.2, rtol=1e-12, atol=0)


def test_linear_error_of_many_runs_at_once():
    pairs = [some_parameters(k) for k in range(4)]
    U, v = (torch.stack(column).unflatten(0, (2, 2)) for column in zip(*pairs, strict=True))
    each = torch.stack([mse_linear(P, *pair, 50) for pair in pairs]).reshape(2, 2)
    torch.testing.assert_close(mse_linear(P, U, v, 50), each, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("a", "b", "length"), [(0.3, 2.0, 100), (0.5, 1.0, 20)])
def test_softmax_error_of_blocks_is_the_exact_law(a, b, length):
    expected = 2 * float(P.risk_softmax_exact(a, b, length)) + 0.1
    U, v = blocks(a * torch.linalg.inv(P.prompt_cov), b)
    found = mse_softmax(P, U, v, length, 100_000, generator=seeded(3))
    assert found.n == 100_000 and found.std_error < expected / 100
    assert abs(found.value - expected) < 4 * found.std_error


def test_softmax_error_of_any_matrices_by_tokens():
    U, v = some_parameters(4)
    g, n, length = seeded(5), 40_000, 15
    w = P.parameter_law.sample(n, generator=g)
    tokens = P.prompts(w, length, generator=g)
    x = P.query_inputs(n, generator=g)
    p = torch.softmax((tokens @ (x @ U[:, :-1].mT)[:, :, None])[..., 0], -1)
    losses = ((p * (tokens @ v[0])).sum(-1) - (w * x).sum(-1)).square() + 0.1
    found = mse_softmax(P, U, v, length, n, generator=g)
    spread = math.hypot(float(found.std_error), float(losses.std()) / math.sqrt(n))
    assert spread < losses.mean() / 20
    assert abs(float(found.value - losses.mean())) < 4 * spread


def test_the_product_sees_no_sign():
    U, v = some_parameters(6)
    assert torch.equal(product(U, v), product(-U, -v))
    torch.testing.assert_close(
        product(*blocks(torch.eye(5).double(), 2.0)), 2 * torch.eye(5).double()
    )


# -- restarts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["exact", "plain"])
@pytest.mark.parametrize("stop", [1, 5, 16, 17, 32, 40])
def test_resumed_at_any_step_it_ends_with_the_same_bits(tmp_path, stop, sampler):
    straight, first, second = (small(sampler=sampler) for _ in range(3))
    straight.run(60)
    file = tmp_path / "run.npz"
    while first.steps < stop:  # without the record that run makes at its end
        first._step()
        if first.steps in RECORDED:
            first._record()
    first._save(file)
    second.run(60, checkpoint=file)
    same(straight, second)


PROGRAM = """
import sys
from pathlib import Path
import torch
from measureattn.regression.experiment import setting
from measureattn.regression.training import Training
torch.set_num_threads(1)
run = Training(setting(), [10, 40], seed=2, batch=16)
print("ready", flush=True)
run.run(3000, checkpoint=Path(sys.argv[1]), every=0.02)
"""


def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path):
    """kill -9, as often as MEASUREATTN_KILLS says; every restart goes on from a whole file."""
    file, delays, steps = tmp_path / "run.npz", np.random.default_rng(1), [0]
    for _ in range(KILLS):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, file], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(delays.uniform(0.02, 0.4))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if file.exists():
            steps.append(checkpoint.load(file)[1]["steps"])
    assert steps == sorted(steps) and steps[-1] > 0
    subprocess.run([sys.executable, "-c", PROGRAM, file], check=True, capture_output=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    straight, resumed = small(), small()
    straight.run(3000)
    resumed._resume(file)
    torch.set_num_threads(threads)
    same(straight, resumed)


def test_a_cut_checkpoint_is_refused_and_kept(tmp_path):
    file = tmp_path / "run.npz"
    run = small()
    run.run(10, checkpoint=file)
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", whole[:-1], b"\0" * 100):
        file.write_bytes(content)
        assert_refused(lambda: small().run(20, checkpoint=file), ValueError, "run.npz", "Delete it")
        assert file.read_bytes() == content
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    file.write_bytes(flipped)
    assert_refused(lambda: small().run(20, checkpoint=file), ValueError, "run.npz", "Delete it")


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    file = tmp_path / "run.npz"
    small().run(10, checkpoint=file)
    assert_refused(
        lambda: small(rate=0.1).run(20, checkpoint=file), ValueError, "rate", "same arguments"
    )
    assert_refused(lambda: small().run(5, checkpoint=file), ValueError, "until", "10")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_or_a_read_only_folder_loses_nothing(tmp_path, monkeypatch, code):
    file = tmp_path / "run.npz"
    small().run(10, checkpoint=file)
    whole = file.read_bytes()

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match="untouched") as caught:
            small().run(20, checkpoint=file)
    assert caught.value.errno == code and "\n" not in str(caught.value)
    assert file.read_bytes() == whole and list(tmp_path.iterdir()) == [file]
    straight, resumed = small(), small()
    resumed.run(20, checkpoint=file)
    straight.run(10), straight.run(20)
    same(straight, resumed)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OSError, match=r"run\.npz"):
        small().run(10, checkpoint=tmp_path / "nowhere" / "run.npz")


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "big"}, ("model", "full, block", "'big'")),
        ({"sampler": "fast"}, ("sampler", "exact, plain")),
        ({"activations": ["relu"]}, ("activations", "softmax, linear")),
        ({"activations": ["softmax", "softmax"]}, ("activations", "once")),
        ({"lengths": []}, ("lengths", "one or more")),
        ({"lengths": [0]}, ("length", "1 token or more")),
    ],
)
def test_arguments_that_do_not_fit(options, words):
    assert_refused(lambda: small(**options), ValueError, *words)


def test_divergence_is_named():
    assert_refused(lambda: small(rate=1e6).run(100), ArithmeticError, "diverged", "Lower the rate")


def test_a_law_that_is_unknown():
    assert_refused(lambda: setting("improved"), ValueError, "intended, published")


# -- the paper's grid --------------------------------------------------------------------------


def lengths_of(cell):
    return [int(x) for x in cell["lengths"].split("+")]


def test_the_grid_is_the_papers():
    grid = cells()
    assert sorted(x for cell in grid for x in lengths_of(cell)) == sorted(
        [*range(10, 100, 10), *range(100, 1001, 100)]
    )
    assert {cell["steps"] for cell in grid} == {300_000}
    assert all(sum(lengths_of(cell)) <= TOGETHER for cell in grid)


def test_a_cell_gives_the_same_rows_again_and_they_are_of_its_models(monkeypatch):
    cell = {"law": "published", "seed": 1, "steps": 30, "lengths": "20+10"}
    monkeypatch.setattr("measureattn.regression.experiment.TESTED", 200)
    straight = run_cell(cell)
    rows = straight["rows"]
    assert [row["length"] for row in rows if row["step"] == 30] == [20, 20, 10, 10]
    assert all(row["mse"] > 0.1 and row["loss"] > 0 for row in rows)
    again = run_cell(cell)
    assert again["rows"] == rows and again["models"] == straight["models"]
    U = torch.tensor(straight["models"][1]["U"], dtype=torch.float64)
    v = torch.tensor(straight["models"][1]["v"], dtype=torch.float64)
    (last,) = [r for r in rows if (r["step"], r["length"], r["activation"]) == (30, 20, "linear")]
    assert last["mse"] == float(mse_linear(setting("published"), U, v, 20))


# -- four matrices -----------------------------------------------------------------------------


class FourMatrices:
    """The infinite-prompt risk in K, Q (d, d) and the numbers nu, o; A = K'Q / sqrt(6)."""

    def gradient(self, K, Q, nu, o):
        in_A, in_b = LinearRisk(P).gradient(K.mT @ Q / math.sqrt(6), o * nu)
        in_A = in_A / math.sqrt(6)
        return Q @ in_A.mT, K @ in_A, in_b * o, in_b * nu


def test_four_matrices_conserve_three_differences():
    g = seeded(4)
    start = tuple(torch.randn(5, 5, generator=g).double() / 4 for _ in range(2))
    start += tuple(torch.randn((), generator=g).double() for _ in range(2))
    flow = gradient_flow(FourMatrices(), start, time=3.0)

    def differences(K, Q, nu, o):
        return torch.cat(
            [(K @ K.mT - Q @ Q.mT).flatten(), torch.stack([o**2 - nu**2, Q.square().sum() - o**2])]
        )

    before, after = differences(*flow(0.0)), differences(*flow.end)
    assert (flow.end[0] - flow(0.0)[0]).norm() > 0.1
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_balanced_four_matrices_end_at_the_nuclear_norm(size):
    root = size * torch.randn(5, 5, generator=seeded(6)).double()
    norm = root.norm()
    K, Q, nu, o = gradient_flow(FourMatrices(), (root, root, norm, norm), rest=1e-9).end
    inverse = torch.linalg.inv(P.prompt_cov)
    torch.testing.assert_close(o * nu * K.mT @ Q / math.sqrt(6), inverse, rtol=0, atol=1e-6)
    expected = math.sqrt(6) * inverse.trace()
    torch.testing.assert_close((o * nu) ** 2, expected, rtol=1e-6, atol=0)
