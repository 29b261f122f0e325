"""Set-up shared by all tests: shape checks on, one thread, repeatable property tests, the device.

The device is the CPU; MEASUREATTN_TEST_DEVICE=cuda runs the same tests on a GPU.
"""

import os

from jaxtyping import config, install_import_hook

# before measureattn is imported anywhere: every annotated shape is then checked in every call
install_import_hook("measureattn", "typechecker.check")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile(
    "tests", derandomize=True, deadline=None, max_examples=40, database=None
)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device(os.environ.get("MEASUREATTN_TEST_DEVICE", "cpu"))


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def no_shape_hook():
    """Calls as a user makes them: the test-only shape checks must not answer for the package."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def pytest_generate_tests(metafunc):
    """`batched` runs over the variants that a MeasureCase lists."""
    if "batched" in metafunc.fixturenames:
        names = metafunc.cls.variants
        metafunc.parametrize("batched", [name == "batched" for name in names], ids=names)
