"""Particle methods: the memory that a running law takes, against particles that all interact.

Run alone on the machine: make bench.
"""

import pytest
from paired import peak_growth

pytest.importorskip("zuko")

SETUP = (
    "import torch; torch.set_num_threads(1)\n"
    "from measureattn.meanfield import interacting, sequential\n"
    "from measureattn.particle_study import setting\n"
    "from measureattn.running_laws import FlowLaw\n"
    "rng = torch.Generator().manual_seed(0); system, start = setting(10)\n"
    "def flow(n):\n"
    "    law = FlowLaw(10, 10, hidden=(32, 32), fits=1, generator=rng)\n"
    "    return sequential(system, start, law, n, batch=200, dt=0.1, steps=10, generator=rng)\n"
    "def together(n):\n"
    "    x = start.sample(n, generator=rng)\n"
    "    for x in interacting(system, x, 0.1, 1, generator=rng): pass\n"
    "flow(200); together(1_000)\n"  # code and kernels are loaded
)


def test_memory_in_dimension_ten(benchmark):
    """Peak growth of 60,000 particles in one step, all at once (they hold only the present), of
    2,000 particles through a flow, and of 4,000 more: the flow's peak does not move again."""
    n = 60_000
    grown = {
        "interacting": peak_growth(SETUP, f"together({n})"),
        "flow": peak_growth(SETUP, "flow(2_000)"),
        "flow_more": peak_growth(SETUP + "flow(2_000)", "flow(6_000)"),
    }
    benchmark.extra_info.update({name: value / 1e6 for name, value in grown.items()})
    benchmark.pedantic(lambda: None, rounds=1)
    assert grown["flow_more"] < 5e6
    assert grown["flow"] < grown["interacting"] / 2
