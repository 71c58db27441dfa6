"""Pallas' simulated GPU, made to report every fault and to leave out one synchronisation at will.

What is added to the simulator:

- Operands of a wgmma are read through the asynchronous proxy, as on the GPU. The kernels read them
  with ordinary loads when interpreted (`hopper.mma._plain`). Taken as such, those are reads through
  the generic proxy, which a TMA copy into the same buffer would have to be fenced from
  (`commit_smem`): a false alarm. And a store that no fence makes visible to the tensor cores
  would pass.
- A deadlock is an error at once, instead of a hang.
- `Simulation.run(mutant=...)` leaves out calls of `barrier_wait`, `barrier_arrive` or
  `commit_smem`, named by their places in the source, or makes the barriers there count without
  ordering anything. The program is compiled once for all mutants.

Where it stays blind: clusters run one after the other, their accesses to global memory are not
compared; a multicast copy is taken for a copy to the CTA that issues it; a barrier keeps the clock
of all arrivals so far, so that a wait may order more than its own phase does; a warpgroup is one
thread, so that what its warps do to each other is not seen.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import mma

# Copies in flight must not share a clock position: their order would be made up.
PARAMS = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=256)

ON_BOTH = pytest.mark.parametrize(
    "interpret",
    [
        pytest.param(None, marks=pytest.mark.hopper, id="gpu"),
        pytest.param(
            PARAMS, marks=[pytest.mark.interpret, pytest.mark.timeout(60)], id="simulated"
        ),
    ],
)
"""Runs a test on a GPU and on the simulated one."""

SYNCHRONISATIONS = ("barrier_wait", "barrier_arrive", "commit_smem", "wait_smem_to_gmem")
CALLBACKS = ("_barrier_wait", "_barrier_arrive", "commit_smem", "wait_smem_to_gmem")
"""What runs them in the simulator."""


@dataclasses.dataclass(frozen=True)
class Site:
    """A call of a synchronisation in a kernel's source."""

    kind: str
    argument: str
    function: str
    """The function of the module that the call stands in."""
    file: str
    first_line: int
    last_line: int

    @property
    def is_of_barrier(self) -> bool:
        """It is at a barrier, which is its argument."""
        return self.kind.startswith("barrier")

    def __str__(self):
        return f"{self.kind}({self.argument}) line {self.first_line}"


def sites(module: ModuleType) -> list[Site]:
    """Every synchronisation in the source of a module."""
    found, file = [], inspect.getfile(module)
    for function in ast.parse(inspect.getsource(module)).body:
        for node in ast.walk(function):
            name = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
            if name in SYNCHRONISATIONS:
                argument = ", ".join(map(ast.unparse, node.args))
                lines = node.lineno, node.end_lineno
                found.append(Site(name, argument, getattr(function, "name", ""), file, *lines))
    return found


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A kernel in which the calls at `sites` (of one warpgroup, if named) are faulty.

    They are skipped; or, `unordered`, waits return when they should, but what they waited for may
    come after, and arrivals count, but what was before them may come after.
    """

    sites: tuple[Site, ...]
    unordered: bool = False
    warpgroup: int | None = None

    def __str__(self):
        where = "" if self.warpgroup is None else f" of warpgroup {self.warpgroup}"
        what = "unordered" if self.unordered else "no"
        return f"{what} {', '.join(map(str, self.sites))}{where}"

    def hits(self, source_info, thread) -> bool:
        if self.warpgroup not in (None, thread.warpgroup_id):
            return False
        return any(
            frame.file_name == site.file and site.first_line <= frame.start_line <= site.last_line
            for frame in _frames(source_info.traceback)
            for site in self.sites
        )


class Fault(Exception):
    """The simulated GPU found a race, or failed."""


class _State:
    """Of the one simulation that runs."""

    def __init__(self, mutant: Mutant | None):
        self.mutant, self.hits = mutant, 0
        self.races = []
        """What was found in each kernel."""
        self.blocked = {}
        """Threads that wait, with barrier and phase; those that have ended wait for none."""
        self.lock = threading.Lock()

    def block(self, thread, barrier=None) -> None:
        """Raise if now every thread of the cluster waits or has ended, but not all have ended."""
        with self.lock:
            phase = barrier and barrier.last_observed_phase_by_thread.get(thread, 0)
            self.blocked[thread] = barrier, phase
            memory = gpu_callbacks._get_shared_memory()
            threads = memory.num_pallas_threads_per_block * memory.num_blocks_per_cluster
            if len(self.blocked) < threads:
                return
            live = [(b, p) for b, p in self.blocked.values() if b is not None]
            if live and all(b.phase <= p for b, p in live):
                raise RuntimeError("deadlock")
            if not live:
                self.blocked = {}  # the next cluster begins

    def unblock(self, thread) -> None:
        with self.lock:
            self.blocked.pop(thread, None)


_state = _State(None)


@functools.cache
def _frames(traceback):
    return tuple(source_info_util.user_frames(traceback))


def _is_operand(source_info) -> bool:
    name = mma._plain.__name__
    frames = _frames(source_info.traceback)
    return any(f.file_name == mma.__file__ and f.function_name == name for f in frames)


def _patches() -> dict[Any, dict[str, Callable[..., Any]]]:
    get = gpu_callbacks._get
    finished = gpu_callbacks.kernel_thread_finished
    initialize = gpu_callbacks._initialize_shared_memory
    cluster_finished = gpu_callbacks.cluster_finished
    wait = shared_memory.Barrier.wait
    arrive = gpu_callbacks._barrier_arrive

    @gpu_callbacks.fail_on_exception
    def read(token, mesh_location, thread, key, transforms, *args, source_info=None, **kwargs):
        if thread is None or source_info is None or not _is_operand(source_info):
            args = (mesh_location, thread, key, transforms, *args)
            return get(token, *args, source_info=source_info, **kwargs)
        args = (mesh_location, None, key, transforms, *args)
        result = get(token, *args, source_info=source_info, **kwargs)
        memory = gpu_callbacks._get_shared_memory()
        key = shared_memory.HostAllocationKey.from_array(key)
        transforms = gpu_callbacks._remove_noop_transforms(transforms)
        access = memory.access(key, jax.tree.map(int, transforms))
        position = memory.get_next_tma_thread_id()
        with memory.lock:
            memory.clocks[thread].inc(position)
            clock = memory.clocks[thread].async_smem_clock.copy()
        gpu_callbacks.get_races().check_read(thread, clock, key, access, source_info=source_info)
        return result

    def synchronisation(callback):
        signature = inspect.signature(callback)

        @functools.wraps(callback)
        def run(*args, source_info, **kwargs):
            arguments = signature.bind(*args, **kwargs).arguments
            mutant, thread = _state.mutant, arguments["thread"]
            if mutant is None or not mutant.hits(source_info, thread):
                return callback(*args, source_info=source_info, **kwargs)
            _state.hits += 1
            if not mutant.unordered:
                return arguments["token"]
            memory = gpu_callbacks._get_shared_memory()
            clock = memory.clocks[thread]
            if callback is arrive:
                memory.clocks[thread] = memory.VectorClock(memory.vector_clock_size)
            else:
                memory.clocks[thread] = clock.copy()
            token = callback(*args, source_info=source_info, **kwargs)
            memory.clocks[thread] = clock
            return token

        return run

    def begin(**kwargs):
        token = initialize(**kwargs)
        _state.races.append(gpu_callbacks.get_races())
        return token

    def wait_or_fail(barrier, thread, logging_info=None):
        _state.block(thread, barrier)
        wait(barrier, thread, logging_info)
        _state.unblock(thread)

    @gpu_callbacks.fail_on_exception
    def end(*, token, mesh_location, thread):
        token = finished(token=token, mesh_location=mesh_location, thread=thread)
        _state.block(thread)
        return token

    @gpu_callbacks.fail_on_exception
    def end_cluster(*, token):
        # The clocks begin anew: what they say of the next cluster's accesses means nothing.
        races = gpu_callbacks.get_races()
        races.reads.clear()
        races.writes.clear()
        return cluster_finished(token=token)

    callbacks = {name: synchronisation(getattr(gpu_callbacks, name)) for name in CALLBACKS}
    return {
        gpu_callbacks: {
            "_get": read,
            "_initialize_shared_memory": begin,
            "kernel_thread_finished": end,
            "cluster_finished": end_cluster,
            **callbacks,
        },
        shared_memory.Barrier: {"wait": wait_or_fail},
    }


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, functions in _patches().items():
            for name, function in functions.items():
                patch.setattr(owner, name, function)
        yield


class Simulation:
    """A function that launches interpreted kernels (with `interpret=PARAMS`)."""

    def __init__(self, function: Callable[..., Any]):
        self._function = jax.jit(function)
        self._compiled = {}

    def run(self, *args: Any, mutant: Mutant | None = None) -> Any:
        """The results, as numpy arrays.

        Raises:
            Fault: a race, a deadlock or an error of the simulator.
        """
        global _state
        _state = _State(mutant)
        leaves, tree = jax.tree.flatten(args)
        shapes = tree, tuple((x.shape, str(x.dtype)) for x in leaves)
        with _patched():
            if shapes not in self._compiled:
                self._compiled[shapes] = self._function.lower(*args).compile()
            try:
                results = jax.tree.map(np.asarray, self._compiled[shapes](*args))
            except jax.errors.JaxRuntimeError as error:
                raise Fault(_reason(str(error))) from None
            finally:
                gpu_callbacks.reset_gpu_interpret_mode_state()
        assert mutant is None or _state.hits, f"never reached: {mutant}"
        if any(races.races_found for races in _state.races):
            raise Fault("race")
        return results


def _reason(message: str) -> str:
    """The line of a failed callback's message that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if "Error: " in line]
    return lines[-1] if lines else message
