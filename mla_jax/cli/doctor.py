"""`mla-jax doctor`: what this machine has and what can run on it."""

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import typer

import mla_jax
from mla_jax import dispatch
from mla_jax.cli import console

_PACKAGES = ("jax", "jaxlib", "flax")
_OPTIONAL_PACKAGES = (
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-runtime",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc",
    "jax-triton",
    "triton",
)


def run() -> None:
    """Print the report; nothing in it depends on a GPU being there."""
    console.say("Software")
    console.pairs(_software())
    console.heading("NVIDIA driver")
    gpus, lines = _driver()
    console.pairs(lines)
    console.heading("JAX")
    has_gpu, lines = _devices()
    console.pairs(lines)
    if gpus and not has_gpu:
        console.say("There is a GPU, and JAX does not use it: pip install 'mla-jax[cuda12]'")
    if lines[0][0] == "error":
        raise typer.Exit(1)
    console.heading("Implementations")
    console.table(
        [("op", "left"), ("implementation", "left"), ("usable", "left"), ("reason", "left")],
        [
            (op, answer.name, "yes" if answer.available else "no", answer.reason)
            for op, answers in dispatch.availability().items()
            for answer in answers
        ],
    )


def _software() -> list[tuple[str, str]]:
    rows = [
        ("mla-jax", f"{installed('mla-jax') or 'not installed'}, {_origin()}"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
    ]
    rows += [(name, installed(name) or "not installed") for name in _PACKAGES]
    rows += [(name, version) for name in _OPTIONAL_PACKAGES if (version := installed(name))]
    return rows


def installed(name: str) -> str | None:
    """Version of an installed distribution, None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _origin() -> str:
    """Where `mla_jax` was imported from, and whether that is what is installed.

    A source directory on the path goes before an installed package of the same name.
    """
    imported = Path(mla_jax.__file__).parent
    try:
        files = importlib.metadata.distribution("mla-jax").files or []
    except importlib.metadata.PackageNotFoundError:
        return f"{imported} (not installed: a source directory on the path)"
    for file in files:
        if file.as_posix() == "mla_jax/__init__.py":
            installed = Path(str(file.locate())).parent.resolve()
            if installed != imported.resolve():
                return f"{imported} (it hides the installed one, {installed})"
    return str(imported)


def _driver() -> tuple[int, list[tuple[str, str]]]:
    """How many GPUs the driver names, and what it says of them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0, [("driver", "none found (there is no nvidia-smi)")]
    fields = "name,compute_cap,memory.total,driver_version"
    try:
        answer = _ask(program, f"--query-gpu={fields}", "--format=csv,noheader")
        summary = " ".join(_ask(program))
    except (OSError, subprocess.SubprocessError) as error:
        return 0, [("driver", f"nvidia-smi fails: {error}")]
    gpus = [line.split(", ") for line in answer if line.count(", ") == 3]
    if not gpus:
        return 0, [("driver", f"nvidia-smi names no GPU: {' '.join(answer)}")]
    rows = [("driver", gpus[0][3])]
    version = re.search(r"CUDA[\w ]* Version: *([\d.]+)", summary)
    rows.append(("CUDA", f"up to {version[1]}" if version else "unknown"))
    for i, (name, capability, memory, _) in enumerate(gpus):
        rows.append((f"GPU {i}", f"{name}, compute capability {capability}, {memory}"))
    return len(gpus), rows


def _ask(*command: str) -> list[str]:
    """The lines that a program prints, on standard error too where it fails.

    Raises:
        OSError, subprocess.SubprocessError: it does not start, or does not end.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    said = done.stdout + done.stderr if done.returncode else done.stdout
    return [line.strip() for line in said.splitlines() if line.strip()]


def _devices() -> tuple[bool, list[tuple[str, str]]]:
    """Whether JAX has a GPU, and its devices; a row `error` where it cannot start."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return False, [("error", " ".join(str(error).split()))]
    rows = [("backend", jax.default_backend())]
    for device in devices:
        capability = getattr(device, "compute_capability", None)
        detail = f", compute capability {capability}" if capability else ""
        rows.append((f"device {device.id}", f"{device.device_kind}{detail}"))
    return any(device.platform == "gpu" for device in devices), rows
