"""A CTA of the dense decode kernel."""

import dataclasses

from pallas_kernels.decode_dense.config import Config
from pallas_kernels.hopper.cta import DecodeCta


@dataclasses.dataclass(frozen=True)
class Cta(DecodeCta[Config]):
    """What one CTA works on, and its memory. Rows that two tiles share are alike in both."""

    def p_smem(self, stage):
        """Where P of this stage lies."""
        return self.smem.k_rope.at[stage] if self.config.p_in_rope else self.smem.p.at[stage]
