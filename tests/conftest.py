"""Every test runs on eight CPU devices: set before any backend starts, asserted, never skipped over."""

import graphs
import jax
import pytest

from hapsynth.cluster import Cluster

DEVICES = 8

jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="session", autouse=True)
def eight_devices() -> list[jax.Device]:
    """The eight host devices. Fails where there are more or fewer: a test that runs on one proves nothing."""
    devices = jax.devices()
    assert len(devices) == DEVICES, f"{len(devices)} devices; was a backend started before tests/conftest.py?"
    return devices


@pytest.fixture
def unequal() -> Cluster:
    """Four fast devices and four at a third of their speed, joined well."""
    return graphs.cluster([3.0] * 4 + [1.0] * 4)
