"""tools/venv.sh: finding a Python, making an environment, making it again. No network is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "venv.sh"
TOOLS = ("bash", "cat", "env", "flock", "ls", "mkdir", "rm", "sed", "sort", "touch")


@pytest.fixture
def clone(tmp_path) -> Path:
    """A directory with a space in its name, as a clone may have, and no Python on its PATH."""
    folder = tmp_path / "my clone"
    (folder / "bin").mkdir(parents=True)
    for name in TOOLS:
        if path := shutil.which(name):
            (folder / "bin" / name).symlink_to(path)
    (folder / "pyproject.toml").write_text('[dependency-groups]\nlint = ["pip"]\n')
    return folder


def add_program(clone: Path, name: str, script: str) -> None:
    file = clone / "bin" / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def add_python(clone: Path) -> None:
    """The Python of these tests, behind a shim that fails as pyenv's do."""
    add_program(clone, "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    (clone / "bin" / "python3").symlink_to(Path(sys.executable).resolve())


def setup(
    clone: Path, *requirements: str, stage: str = "test", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), ".venv", stage, *(requirements or ("pip",))],
        cwd=clone,
        env={
            "PATH": str(clone / "bin"),
            "HOME": str(clone / "home"),
            "PIP_NO_INDEX": "1",
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def fake_python(version: str, answer: str = "") -> str:
    """A program that answers the script's question as a Python of this version would."""
    return f"echo '{answer or version}'; exit 3"


def test_no_python_says_what_to_install(clone):
    done = setup(clone)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Python 3.12 or newer was found.\nInstall one of these")
    assert "apt-get install python3.12 python3.12-venv" in done.stderr
    assert not (clone / ".venv").exists()


def test_python_that_will_not_do_is_named(clone):
    reason = "/usr/bin/python3 (Python 3.9): need at least 3.12 and below 3.15"
    add_program(clone, "python3", fake_python("3.9", reason))
    assert f"Found, and not usable:\n  {reason}\n" in setup(clone).stderr


def test_named_python_is_not_replaced(clone):
    add_python(clone)
    done = setup(clone, PYTHON="python3.11")
    assert done.returncode == 1
    assert "error: no Python 3.12 or newer was found (PYTHON=python3.11)." in done.stderr


def test_environment_is_made_once_and_again_when_it_is_not_usable(clone):
    add_python(clone)
    first = setup(clone)
    assert first.returncode == 0, first.stderr
    assert first.stderr.startswith("Making .venv with /")
    assert (clone / ".venv" / "bin" / "python").exists()

    assert setup(clone).stderr == ""  # nothing to do

    os.utime(clone / "pyproject.toml", (2**32, 2**32))
    assert setup(clone).stderr.startswith("Installing what `make test` needs")
    os.utime(clone / "pyproject.toml", (1, 1))
    done = setup(clone, "--group=lint", stage="lint")
    assert done.stderr.startswith("Installing what `make lint` needs"), done.stderr

    (clone / ".venv" / ".unfinished").touch()
    again = setup(clone)
    assert again.stderr.startswith(".venv is not usable as an earlier run left it")
    assert "Making .venv with /" in again.stderr

    moved = clone.with_name("moved clone")
    clone.rename(moved)
    assert "Making .venv with /" in setup(moved).stderr


def test_failed_install_leaves_a_usable_environment(clone):
    add_python(clone)
    failed = setup(clone, "no-such-package-of-mla-jax")
    assert failed.returncode != 0
    assert "no-such-package-of-mla-jax" in failed.stderr
    done = setup(clone)
    assert done.returncode == 0
    assert "Making" not in done.stderr


def test_foreign_environment_is_used_and_not_deleted(clone):
    """Somebody's own .venv, here without pip, interrupted or not."""
    add_python(clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    (clone / ".venv" / "theirs").touch()
    (clone / ".venv" / ".unfinished").touch()
    done = setup(clone)
    assert done.returncode == 0, done.stderr
    assert "Making" not in done.stderr
    assert (clone / ".venv" / "theirs").exists()


def test_environment_of_an_old_python_is_refused(clone):
    folder = clone / ".venv" / "bin"
    folder.mkdir(parents=True)
    reason = ".venv/bin/python (Python 3.11): need at least 3.12 and below 3.15"
    (folder / "python").write_text(f"#!/bin/sh\n{fake_python('3.11', reason)}\n")
    (folder / "python").chmod(0o755)
    done = setup(clone)
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        "error: .venv exists, but its interpreter cannot be used:",
        f"  {reason}",
    ]
    assert (folder / "python").exists()
