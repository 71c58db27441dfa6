"""What the GPU of this process is."""

import jax

from pallas_kernels.hopper.gpus import GPUS, Gpu
from pallas_kernels.hopper.limits import NUM_SMS


def num_sms() -> int:
    """SMs of this process's first GPU; an H200's where there is none, as when compiling for it."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else NUM_SMS


def gpu() -> Gpu:
    """The rates of this process's first GPU; an H200's where it is none that is listed."""
    kind = jax.devices()[0].device_kind
    # The longest name first: an H200 is no H20.
    names = sorted(GPUS, key=len, reverse=True)
    return GPUS[next((name for name in names if name in kind), "H200")]
