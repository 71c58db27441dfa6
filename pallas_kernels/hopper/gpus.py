"""What the Hopper-class GPUs can do, for rooflines. Standard library only."""

import dataclasses
import types
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Rates of dense tensor-core work and of global memory."""

    name: str
    tflops_16: float
    """10^12 floating-point operations per second, operands of 16 bits, sums in float32."""
    tflops_8: float
    """The same for e4m3 operands."""
    tbs: float
    """Global memory, 10^12 bytes per second."""
    smem_tbs: float = 30.9
    """Shared memory of all SMs together: 128 bytes a cycle each."""

    def roofline_us(self, flops: float, bytes_moved: float, *, operand_bytes: int = 2) -> float:
        """Microseconds below which work of this size cannot end."""
        tflops = self.tflops_8 if operand_bytes == 1 else self.tflops_16
        return max(flops / tflops, bytes_moved / self.tbs) / 1e6


GPUS: Mapping[str, Gpu] = types.MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("H200", tflops_16=989.0, tflops_8=1979.0, tbs=4.8),
            Gpu("H100", tflops_16=989.0, tflops_8=1979.0, tbs=3.35),
            Gpu("H20", tflops_16=148.0, tflops_8=296.0, tbs=4.0, smem_tbs=19.8),
        )
    }
)
"""By the data sheets (SXM forms); shared memory by SMs and clock."""
