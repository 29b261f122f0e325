"""Token laws: one a file; `base` has what they share, `algebra` combines them."""

from measureattn.measures.algebra import Convolution, Mixture, Product, PushForward
from measureattn.measures.base import Measure
from measureattn.measures.empirical import Discrete, Empirical
from measureattn.measures.gaussian import Gaussian
from measureattn.measures.rademacher import Rademacher
from measureattn.measures.uniform import UniformBox, UniformSphere

__all__ = [
    "Convolution",
    "Discrete",
    "Empirical",
    "Gaussian",
    "Measure",
    "Mixture",
    "Product",
    "PushForward",
    "Rademacher",
    "UniformBox",
    "UniformSphere",
]
