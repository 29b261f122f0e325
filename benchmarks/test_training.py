"""A step of training against four Linear layers, autograd and tokens drawn anew, on one thread."""

import pytest
import torch
from paired import paired

from measureattn.regression import Task
from measureattn.regression.training import Training

STEPS = 20  # a round


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Head(torch.nn.Module):
    """What one would write first: one head of softmax or linear attention on a batch of prompts."""

    def __init__(self, dim: int, activation: str):
        super().__init__()
        self.key, self.query, self.value = (torch.nn.Linear(dim, dim, bias=False) for _ in "KQV")
        self.output = torch.nn.Linear(dim, 1, bias=False)
        self.activation = activation

    def forward(self, tokens, query):
        scores = self.query(query)[:, None, :] @ self.key(tokens).mT / tokens.shape[-1] ** 0.5
        if self.activation == "softmax":
            weights = torch.softmax(scores, -1)
        else:
            weights = scores / tokens.shape[1]
        return self.output(weights @ self.value(tokens))[:, 0, 0]


def plainly(task: Task, length: int, activation: str, batch: int = 128):
    """A function that takes one step on fresh prompts, in float32."""
    head, g = Head(task.dim, activation), torch.Generator().manual_seed(0)
    descent = torch.optim.SGD(head.parameters(), lr=1e-3)
    root = task.prompt_factor.float()

    def step():
        w = task.task_var**0.5 * torch.randn(batch, task.dim_x, generator=g)
        inputs = torch.randn(batch, length + 1, task.dim_x, generator=g) @ root.mT
        noise = task.noise_var**0.5 * torch.randn(batch, length + 1, generator=g)
        labels = (inputs @ w[:, :, None])[..., 0] + noise
        tokens = torch.cat([inputs, labels[..., None]], -1)
        query = torch.nn.functional.pad(inputs[:, -1], (0, 1))
        loss = (head(tokens[:, :-1], query) - labels[:, -1]).square().mean()
        descent.zero_grad()
        loss.backward()
        descent.step()

    return step


@pytest.mark.parametrize("model", ["full", "block"])
@pytest.mark.parametrize(
    ("dim", "activation", "aim"), [(5, "linear", 40), (5, "softmax", 5), (64, "softmax", 25)]
)
def test_a_step_against_linear_layers(benchmark, one_thread, dim, activation, aim, model):
    """A thousand tokens, batch 128; `aim` is how many times as fast we mean to be."""
    index = torch.arange(dim, dtype=torch.float64)
    task = Task(0.5 ** (index - index[:, None]).abs(), task_var=1 / dim, noise_var=0.1)
    training = Training(task, [1000], seed=0, activations=[activation], model=model)
    step = plainly(task, 1000, activation)

    def ours():
        training.run(training.steps + STEPS)

    def theirs():
        for _ in range(STEPS):
            step()

    benchmark.extra_info["times_as_fast"] = 1 / paired(benchmark, ours, theirs)
    benchmark.extra_info["aim"] = aim
