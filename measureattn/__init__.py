"""Softmax attention on measures: prompts, finite and infinite, as laws of tokens.

Start with `measureattn.measures.base.Measure`, the log-MGF and what follows from it, then
`measureattn.attention.attend`, which is its gradient read through V.
"""

import importlib

from measureattn.attention import (
    AttentionHead,
    attend,
    attend_jvp,
    attend_vjp,
    first_order_attend,
    linear_attend,
)
from measureattn.measures import (
    Discrete,
    Empirical,
    Gaussian,
    Measure,
    Mixture,
    Product,
    Rademacher,
    UniformBox,
    UniformSphere,
)

__version__ = "0.1.0"

_MODULES = (
    "concentration", "extremes", "heads", "meanfield", "polytopes", "readout", "regression",
    "sweeps", "tasks",
)  # fmt: skip


def __getattr__(name: str):
    """The larger modules are loaded when they are first asked for: scipy.stats takes a second."""
    if name in _MODULES:
        return importlib.import_module(f"measureattn.{name}")
    raise AttributeError(f"module 'measureattn' has no attribute {name!r}")


__all__ = [
    "AttentionHead",
    "Discrete",
    "Empirical",
    "Gaussian",
    "Measure",
    "Mixture",
    "Product",
    "Rademacher",
    "UniformBox",
    "UniformSphere",
    "attend",
    "attend_jvp",
    "attend_vjp",
    "concentration",
    "extremes",
    "first_order_attend",
    "heads",
    "linear_attend",
    "meanfield",
    "polytopes",
    "readout",
    "regression",
    "sweeps",
    "tasks",
]
