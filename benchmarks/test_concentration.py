"""The exact law of Gaussian prompts: milliseconds a value, tables made anew each time."""

import pytest

from measureattn import _gaussian_law
from measureattn.concentration import gaussian_error


@pytest.mark.parametrize("s", [0.25, 1.0, 4.0, 25.0])
def test_one_value_of_the_exact_law(benchmark, s):
    def value():
        _gaussian_law._table.cache_clear()
        return gaussian_error(s, 10**6)

    benchmark(value)
