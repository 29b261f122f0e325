"""Long prompts: the chunks of `TiltedSums` against torch's own fused attention.

Run alone on the machine: make bench. Nothing here is asserted but accuracy and memory; times and
ratios go to the report, since a shared machine would make them lie.
"""

import pytest
import torch
from paired import paired, peak_growth

from measureattn import Empirical
from measureattn.streaming import TiltedSums

LENGTH, DIM = 10_000_000, 6


@pytest.fixture(scope="module")
def tokens():
    return torch.randn(LENGTH, DIM, generator=torch.Generator().manual_seed(1))


def tilts(n):
    a = torch.randn(n, DIM, generator=torch.Generator().manual_seed(2))
    return a / a.norm(dim=-1, keepdim=True)  # scores of standard deviation 1


def one_fused_call(a, tokens):
    keys = tokens[None, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(a[None, None], keys, keys, scale=1.0)[0, 0]


@pytest.mark.parametrize("queries", [1, 8, 64])
def test_ten_million_tokens(benchmark, tokens, queries):
    """Ours against one fused call, with the error of each against a float64 loop."""
    a, prompt = tilts(queries), Empirical(tokens, validate_args=False)
    paired(benchmark, lambda: prompt.tilted_mean(a), lambda: one_fused_call(a, tokens))
    exact = TiltedSums.empty(a.double())
    for part in tokens.split(1_000_000):
        exact = exact.update_plainly(part.double())
    for name, value in (
        ("error_ours", TiltedSums.empty(a).update(tokens).mean),
        ("error_theirs", one_fused_call(a, tokens)),
    ):
        benchmark.extra_info[name] = float((value - exact.mean).abs().max())
    assert benchmark.extra_info["error_ours"] < 1e-6


def test_extra_memory(benchmark):
    """Peak memory beyond the tokens themselves, 8 queries."""
    setup = (
        "import torch; from measureattn.streaming import TiltedSums\n"
        f"tokens = torch.randn({LENGTH}, {DIM}); a = torch.randn(8, {DIM})\n"
        "TiltedSums.empty(a).update(tokens[:100_000])"
    )
    grown = benchmark.pedantic(
        peak_growth, (setup, "TiltedSums.empty(a).update(tokens)"), rounds=1, iterations=1
    )
    benchmark.extra_info["megabytes"] = grown / 1e6
    assert grown < 50e6


@pytest.mark.parametrize("queries", [1, 8])
def test_folding_a_hundred_million_tokens(benchmark, queries):
    """Generating 1e8 tokens (d = 8) and folding them, against generating them alone."""
    chunk, a = 2**20, torch.randn(queries, 8, generator=torch.Generator().manual_seed(3))

    def chunks():
        generator = torch.Generator().manual_seed(4)
        for _ in range(100_000_000 // chunk):
            yield torch.randn(chunk, 8, generator=generator)

    def fold():
        state = TiltedSums.empty(a)
        for part in chunks():
            state = state.update(part)
        return state

    def generate():
        for _ in chunks():
            pass

    paired(benchmark, fold, generate, rounds=3)


def test_memory_of_folding(benchmark):
    """Peak memory above the import while 1e8 tokens are folded."""
    setup = "import torch; from measureattn.streaming import TiltedSums"
    work = (
        "state = TiltedSums.empty(torch.ones(8, 8))\n"
        "for _ in range(95): state = state.update(torch.randn(2**20, 8))"
    )
    grown = benchmark.pedantic(peak_growth, (setup, work), rounds=1, iterations=1)
    benchmark.extra_info["megabytes"] = grown / 1e6
    assert grown < 500e6
