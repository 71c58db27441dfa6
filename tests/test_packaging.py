"""What is built and installed."""

import email
import importlib.metadata
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("mla_jax", "pallas_kernels")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    (file,) = built.glob("*.whl")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", str(folder), str(file)], check=True, capture_output=True)
    return folder


def metadata(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert found == wanted
    assert {f"{package}/py.typed" for package in PACKAGES} <= found


def test_wheel_metadata(wheel):
    found = metadata(wheel)
    assert found["Name"] == "mla-jax"
    assert found["Version"] == PROJECT["version"]
    assert found["Requires-Python"] == ">=3.12"
    assert found["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert found.get_payload().startswith("# mla-jax")
    extras = {"aot", "bench", "cuda12", "cuda13", "test", "triton"}
    assert set(found.get_all("Provides-Extra", [])) == extras
    jax = [line for line in found.get_all("Requires-Dist", []) if line.startswith("jax<")]
    assert jax == ["jax<0.12,>=0.11.2"]
    licences = [name for name in wheel.namelist() if name.endswith("/licenses/LICENSE")]
    assert len(licences) == 1


def test_wheel_has_the_command(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert (
        wheel.read(name).decode().split() == "[console_scripts] mla-jax = mla_jax.cli:main".split()
    )


def test_source_archive_can_be_tested(built):
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", "README.md", "LICENSE", "pyproject.toml", "tools/venv.sh"}
    assert needed | {"tests/test_packaging.py"} <= names
    assert not any(name.startswith(".venv") for name in names)


def test_version_is_that_of_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{PROJECT['version']}]" in changelog


def python(code: str, cwd: Path, *path: Path) -> str:
    environment = {
        "PYTHONPATH": ":".join(map(str, path)),
        "JAX_PLATFORMS": "cpu",
        "PATH": "/usr/bin",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_directory_of_the_same_name_does_not_hide_the_package(installed, tmp_path):
    """A clone in a folder called `mla_jax`, and a run from beside it."""
    (tmp_path / "mla_jax" / "mla_jax").mkdir(parents=True)
    (tmp_path / "mla_jax" / "pyproject.toml").touch()
    (tmp_path / "pallas_kernels").mkdir()
    code = "import mla_jax, pallas_kernels; print(mla_jax.__file__, pallas_kernels.__file__)"
    files = python(code, tmp_path, installed).split()
    assert [Path(file).parents[1] for file in files] == [installed, installed]


def test_doctor_names_a_source_that_hides_the_installed_package(installed, tmp_path):
    code = "from mla_jax.cli import doctor; print(doctor._origin())"
    assert python(code, tmp_path, installed) == str(installed / "mla_jax")
    hidden = python(code, tmp_path, ROOT, installed)
    assert hidden == f"{ROOT / 'mla_jax'} (it hides the installed one, {installed / 'mla_jax'})"


def test_installed_jax_is_one_that_is_supported():
    major, minor, patch = map(int, importlib.metadata.version("jax").split(".")[:3])
    assert (0, 11, 2) <= (major, minor, patch) < (0, 12)
