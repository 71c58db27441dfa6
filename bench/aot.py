"""Compile for Hopper on a machine without a GPU, and read what ptxas says of it."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from pallas_kernels.hopper.limits import NUM_SMS, SMEM_BYTES

DUMPS = ("MOSAIC_GPU_DUMP_PTX", "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_RESOURCES")

# Standing in for the GPU: what the compiler asks of an H200.
_TARGET = f"""
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info {{ major: 9 minor: 8 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: {NUM_SMS} fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {SMEM_BYTES}
  shared_memory_per_core: 233472
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 150000000000
}}
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as it was compiled."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    smem: int
    """Bytes of shared-memory scratch, each buffer padded, without barriers."""
    barrier_bytes: int
    wgmma: int
    """wgmma instructions in the PTX."""
    warnings: tuple[str, ...]
    """What ptxas complains of, spills apart."""


def lacking() -> str:
    """What this process lacks to compile for Hopper, empty if nothing."""
    if sys.platform != "linux":
        return "compiling for Hopper needs Linux"
    if not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        return "compiling for Hopper needs JAX's CUDA plugin: pip install 'mla-jax[aot]'"
    if not (_packaged("ptxas") or shutil.which("ptxas")):
        return "compiling for Hopper needs ptxas: pip install 'mla-jax[aot]'"
    return ""


def _packaged(program: str) -> bool:
    """Whether one of NVIDIA's packages brings the program."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    return any(any(Path(folder).glob(f"*/bin/{program}")) for folder in folders)


def compiler() -> str:
    """Versions of what compiles."""
    versions = []
    for name in ("jax", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(f"nvidia-cuda-nvcc {importlib.metadata.version('nvidia-cuda-nvcc')}")
    return ", ".join(versions)


def prepare() -> None:
    """Settle the environment; before this process, or those it starts, compile anything."""
    os.environ.update({name: "1" for name in DUMPS})
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")
    # A compiled program taken from a cache would say nothing.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    jax.config.update("jax_enable_compilation_cache", False)


@functools.cache
def _sharding() -> jax.sharding.Sharding:
    topology = topologies.get_topology_desc("h200", "cuda", target_config=_TARGET, topology="1x1x1")
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An argument of a function to compile."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding())


def compile_kernels(function: Callable, *args: Any) -> tuple[list[Kernel], str]:
    """Compile `function` for an H200; its kernels, and all that the compilers printed.

    A compilation that fails raises, or leaves kernels out.
    """
    prepare()
    with _captured() as output:
        jax.jit(function).lower(*args).compile()
    return parse(output[0]), output[0]


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What is written to the file descriptors 1 and 2 meanwhile; the compilers are not Python."""
    output = [""]
    with tempfile.TemporaryFile() as file:
        _flush()
        kept = os.dup(1), os.dup(2)
        try:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            yield output
        finally:
            _flush()
            for i, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, i)
                os.close(descriptor)
            file.seek(0)
            output[0] = file.read().decode(errors="replace")


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def parse(text: str) -> list[Kernel]:
    """The kernels in the dumps of the compilers, in order."""
    # Resources are printed when a kernel is lowered, the rest when it is compiled.
    resources = [
        (
            int(size),
            sum(int(n) * int(k) for n, k in re.findall(r"num_barriers=(\d+)[^:]*: (\d+)", r)),
        )
        for size, r in re.findall(r"Resources\(smem_scratch_bytes=(\d+)(.*)", text)
    ]
    kernels = []
    for i, part in enumerate(text.split("// Generated by LLVM NVPTX Back-End")[1:]):
        name = re.search(r"Compiling entry function '(\w+)'", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        if not (name and spills and registers and i < len(resources)):
            continue
        smem, barriers = resources[i]
        kernels.append(
            Kernel(
                name=name[1].removesuffix("_mosaic_gpu_kernel"),
                registers=int(registers[1]),
                spill_stores=int(spills[1]),
                spill_loads=int(spills[2]),
                smem=smem,
                barrier_bytes=8 * barriers,
                wgmma=part.count("wgmma.mma_async.sync"),
                warnings=_warnings(part),
            )
        )
    return kernels


def _warnings(part: str) -> tuple[str, ...]:
    complaints = []
    for line in part.splitlines():
        is_ptxas = line.startswith("ptxas")
        if re.search(r"\bC75\d\d\b", line) or (
            is_ptxas and re.search(r"warning|serializ|ignored", line)
        ):
            if "Registers are spilled" not in line:
                complaints.append(re.sub(r"^ptxas (info|warning|error)\s*:\s*", "", line.strip()))
    return tuple(dict.fromkeys(complaints))
