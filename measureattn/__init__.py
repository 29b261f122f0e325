"""Softmax attention on measures: prompts, finite and infinite, as laws of tokens.

Start with `measureattn.measures.base.Measure`, the log-MGF and what follows from it, then
`measureattn.attention.attend`, which is its gradient read through V.
"""

from measureattn.attention import (
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

__all__ = [
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
    "first_order_attend",
    "linear_attend",
]
