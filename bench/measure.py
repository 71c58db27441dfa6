"""Times of kernels (CUPTI), from Python to the result (host clock), and the GPU's ceilings."""

import ctypes
import functools
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

from mla_jax import dispatch
from mla_jax.cli import console
from pallas_kernels.hopper.gpus import Gpu

CLEAR_BYTES = 256 << 20
"""Read before each measured call: several times the L2 of any Hopper GPU (60 MB at most)."""

L2_POLICY = f"{CLEAR_BYTES >> 20} MiB read before each call"

Call = Callable[[], Any]


NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
"""Compiler options of programs that are traced: XLA puts longer rows of kernels into CUDA graphs,
and what was captured before the profiler came may be hidden from it."""


class MeasurementError(Exception):
    """The profiler's answer makes no sense."""


class Spread(NamedTuple):
    """Median and quartiles, microseconds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


class KernelTimes(NamedTuple):
    """Time of all kernels of a call together, and the median of each, by name, in order."""

    total: Spread
    kernels: dict[str, float]


def require_gpu() -> None:
    """Refuse to go on without a Hopper GPU.

    Raises:
        console.UserError: saying what there is instead.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        # JAX's CUDA plugin would log at length that there is no driver.
        jax.config.update("jax_platforms", "cpu")
    try:
        answers = {answer.name: answer for answer in dispatch.explain("mla_decode")}
    except RuntimeError as error:
        console.fail(f"JAX finds no device: {error}")
    if not answers["mosaic"].available:
        console.fail(f"this measurement {answers['mosaic'].reason}")
    if not jax.config.jax_compilation_cache_dir:
        # References, inputs and baselines need not be compiled in every run.
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "mla-jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def trace(run: Call) -> list[tuple[str, float]]:
    """The kernels that `run` launches, in order, with their microseconds."""
    # `profiler.measure` makes one program of what it is given; here two take turns, unchanged.
    cupti: Any = getattr(profiler, "mosaic_gpu_lib", None)
    if cupti is None:
        raise MeasurementError("this build of JAX has no CUPTI interface")
    extension = cupti._mosaic_gpu_ext
    jax.effects_barrier()
    extension._cupti_init()
    try:
        jax.block_until_ready(run())
    finally:
        timings = extension._cupti_get_timings(True)
    return [(name, milliseconds * 1e3) for name, milliseconds in timings]


@functools.cache
def _clear() -> Call:
    """A call that leaves nothing in L2 but clean lines of an array that no one else uses.

    Writing would leave dirty ones, whose way to memory the measured call would pay for.
    """
    other = jnp.zeros(CLEAR_BYTES // 4, jnp.uint32)
    read = jax.jit(jnp.sum)
    return lambda: read(other)


def kernel_times(call: Call, *, iterations: int, cold: bool = True) -> KernelTimes:
    """Time all kernels of `call`, each time with a cleared L2 if `cold`, else back to back.

    The L2 is cleared by reading a large array on the device, between the calls and not part of
    them. Copies and fills that XLA gives to the driver are no kernels and are not counted.
    """
    clear = _clear()
    jax.block_until_ready((clear(), call()))

    def run():
        result = None
        for _ in range(iterations):
            cleared = clear() if cold else None
            result = (cleared, call())
            del cleared
        return result

    prefix = [name for name, _ in trace(clear)] if cold else []
    return _split(trace(run), prefix, iterations)


def _split(timings: list[tuple[str, float]], prefix: list[str], iterations: int) -> KernelTimes:
    """The kernels of each iteration, less those in front that clear the L2."""
    per_iteration, rest = divmod(len(timings), iterations)
    if rest or per_iteration <= len(prefix):
        raise MeasurementError(
            f"{len(timings)} kernels in {iterations} calls: cannot tell them apart"
        )
    runs = []
    for i in range(iterations):
        run = timings[i * per_iteration : (i + 1) * per_iteration]
        front = [name for name, _ in run[: len(prefix)]]
        run = run[len(prefix) :]
        if front != prefix or (runs and [n for n, _ in run] != [n for n, _ in runs[0]]):
            raise MeasurementError(f"kernels of call {i} are not those of the first")
        runs.append(run)
    kernels: dict[str, float] = {}
    for i, (name, _) in enumerate(runs[0]):
        median = statistics.median(run[i][1] for run in runs)
        kernels[name] = kernels.get(name, 0.0) + median
    return KernelTimes(Spread.of([sum(us for _, us in run) for run in runs]), kernels)


def traceable(function: Callable) -> Callable:
    """`function` as a program whose kernels the profiler sees one by one."""
    return jax.jit(lambda *args: function(*args), compiler_options=NO_GRAPHS)


def end_to_end(call: Call, *, iterations: int) -> Spread:
    """Time `call` from Python until its result is there, by the host's clock, L2 as it comes."""
    for _ in range(3):
        jax.block_until_ready(call())
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e6 * (time.perf_counter() - start))
    return Spread.of(times)


def temp_bytes(compiled: Any) -> int:
    """Memory that a compiled function takes besides its arguments and its result."""
    return compiled.memory_analysis().temp_size_in_bytes


def ceilings(iterations: int = 10) -> Gpu:
    """What the GPU reaches now: a matrix product of 8192^3 and traffic of several GiB.

    The e4m3 rate is taken as twice that of 16 bits, as on the data sheet.
    """
    n = 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    matmul_us = kernel_times(lambda: product(a, b), iterations=iterations).total.median
    tflops = 2 * n**3 / matmul_us / 1e6

    x = jnp.ones((1 << 14, 1 << 16), jnp.float32)  # 4 GiB
    read = jax.jit(lambda x: x.sum(axis=1))
    copy = jax.jit(lambda x: x + 1)
    read_us = kernel_times(lambda: read(x), iterations=iterations).total.median
    copy_us = kernel_times(lambda: copy(x), iterations=iterations).total.median
    tbs = max(x.nbytes / read_us, 2 * x.nbytes / copy_us) / 1e6
    return Gpu("measured in this run", tflops_16=tflops, tflops_8=2 * tflops, tbs=tbs)


def about() -> dict[str, Any]:
    """Device and versions, for the head of a results file."""
    return {
        "device": jax.devices()[0].device_kind,
        "driver": _driver(),
        "jax": jax.__version__,
        "runtime": " ".join(jax.devices()[0].client.platform_version.split()),
    }


def _driver() -> str:
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"
