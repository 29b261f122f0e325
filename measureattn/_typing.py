"""Shapes in signatures: jaxtyping where it is installed, the bare annotation elsewhere.

The package itself needs torch, numpy and scipy alone; only the tests check the shapes.
"""

try:
    from jaxtyping import Float
except ImportError:
    from typing import Annotated as Float

__all__ = ["Float"]
