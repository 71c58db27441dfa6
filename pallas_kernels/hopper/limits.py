"""Numbers of the Hopper SM that schedules and budgets are made of. Imports nothing from JAX."""

NUM_SMS = 132
"""SMs of an H100 SXM, H200 or H800; the default where no GPU can be asked (`device.num_sms`)."""

SMEM_BYTES = 232_448
"""Shared memory one CTA may use (227 KiB)."""

SMEM_ALIGN = 1024
"""Every shared-memory scratch starts on such a boundary (swizzle atom of 8 rows x 128 bytes)."""

SM_REGISTERS = 65_536
"""Registers of an SM."""

LAUNCH_REGISTERS = 168
"""Registers per thread that a CTA of three warpgroups starts with: 65,536 / 384, rounded down to
8s. `setmaxnreg` moves registers between its warpgroups and cannot exceed three times this."""

BLOCK_M = 64
"""Rows of one wgmma accumulator: folded (query, head) pairs."""

BLOCK_KV = 64
"""Tokens of one key tile."""

TRANSPOSED_ROWS = 32
"""Query rows of a CTA of the transposed decode kernel, at most: its output then takes 128 registers
of each math warpgroup."""
