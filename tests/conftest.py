import os

# The simulated GPU's threads wait for each other in callbacks that hold a thread of XLA's pool; as
# many as there are cores may be too few for the one that could go on.
os.environ.setdefault("NPROC", "16")

import hypothesis
import jax
import pytest

# Two CPU devices, for the tests under shard_map.
jax.config.update("jax_num_cpu_devices", 2)

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("tests")


def pytest_configure(config):
    # Workers have the cores between them, but each would multiply with as many threads as there
    # are cores. They inherit this; by the time one reads this file, a plugin may have loaded numpy.
    if config.getoption("numprocesses", None):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--require-hopper", action="store_true", help="fail without a Hopper GPU")
    parser.addoption("--slow", action="store_true", help="run the full products too")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        skip = pytest.mark.skip(reason="a full product: run with --slow")
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(skip)


def pytest_runtest_setup(item):
    if "hopper" not in item.keywords:
        return
    device = jax.devices()[0]
    found = getattr(device, "compute_capability", device.platform)
    if found != "9.0":
        reason = f"needs a Hopper GPU (compute capability 9.0), found {found}"
        if item.config.getoption("--require-hopper"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
