"""What the GPU of this process is."""

import jax

from pallas_kernels.hopper.limits import NUM_SMS


def num_sms() -> int:
    """SMs of this process's first GPU; an H200's where there is none, as when compiling for it."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else NUM_SMS
