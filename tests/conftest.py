"""What holds for every test."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.certificates import Authority

# The same examples every time: a suite that fails now and then tells nothing about the change at hand. To look further,
# run with --hypothesis-profile=default and more examples.
settings.register_profile(
    "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("steady")


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one more than there are cores, as many tests wait; above eight the longest test sets the time."""
    return min(os.cpu_count() or 1, 7) + 1


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no collection of the tests need look at it, nor those of the gateways."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"), "ca")


@pytest.fixture(scope="session")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other-ca"), "other-ca")
