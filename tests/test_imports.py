"""Imports flow one way (docs/architecture.md), and say openly what they re-export."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_jax import dispatch

ROOT = Path(__file__).parents[1]
PACKAGES = ("mla_jax", "pallas_kernels")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

# An import goes from a line to one further down, or stays within the module or folder named.
LAYERS = [
    ["mla_jax.cli"],
    ["mla_jax"],
    ["mla_jax.models"],
    ["mla_jax.nn", "mla_jax.flash_mla"],
    ["mla_jax.ops"],
    ["mla_jax.dispatch"],
    ["mla_jax.reference"],
    ["mla_jax.cache"],
    ["mla_jax.plan", "mla_jax.quantise", "mla_jax.config"],
    ["mla_jax.checks", "mla_jax.manual_axes"],
    ["pallas_kernels"],
]
RANK = {name: len(LAYERS) - i for i, layer in enumerate(LAYERS) for name in layer}

# Within pallas_kernels, what lies outside the kernels' folders.
SHARED = {"hopper": 2, "formats": 1, "errors": 1}
WITHIN_KERNEL = {"entry": 3, "kernel": 2, "config": 1, "cost": 1}
KERNEL_LIBRARIES = {"jax", "jaxlib", "jaxtyping", "numpy", "ml_dtypes", "jax_triton", "triton"}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(file: Path) -> Iterator[str]:
    """Every module that `file` names in an import, submodules taken with `from` included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                ours = node.module.split(".")[0] in PACKAGES
                yield full if ours and is_module(full) else node.module


def layer(module: str) -> str:
    parts = module.split(".")
    name = ".".join(parts[: 1 if parts[0] == "pallas_kernels" else 2])
    assert name in RANK, f"{name} is in no layer: enter it in LAYERS"
    return name


def by_name(file: Path) -> str:
    return module_name(file)


@pytest.mark.parametrize("file", FILES, ids=by_name)
def test_direction(file):
    importer = layer(module_name(file))
    for imported in imports(file):
        if imported.split(".")[0] in PACKAGES and layer(imported) != importer:
            # The package's own face takes from everywhere but the command line.
            allowed = RANK[layer(imported)] < RANK[importer]
            assert allowed, f"{module_name(file)} imports {imported}"


@pytest.mark.parametrize(
    "file", [file for file in FILES if "pallas_kernels" in file.parts], ids=by_name
)
def test_kernels_import_no_other_kernel(file):
    folder, *rest = module_name(file).split(".")[1:] or [""]
    for imported in imports(file):
        top, *path = imported.split(".")
        if top != "pallas_kernels":
            standard = top in sys.stdlib_module_names
            allowed = set() if folder in ("formats", "errors") else KERNEL_LIBRARIES
            assert standard or top in allowed, f"{module_name(file)} imports {imported}"
        elif folder in SHARED:
            assert path, f"{module_name(file)} imports pallas_kernels itself"
            assert path[0] == folder or SHARED.get(path[0], 9) < SHARED[folder], imported
        elif path[0] not in SHARED:
            assert path[0] == folder, f"{module_name(file)} imports another kernel, {imported}"
            if rest and len(path) > 1:
                mine, theirs = WITHIN_KERNEL.get(rest[0], 9), WITHIN_KERNEL.get(path[1], 0)
                assert theirs < mine, f"{module_name(file)} imports {imported}"


def test_table_names_references_and_entries():
    for op, implementations in dispatch.TABLE.items():
        for name, module in implementations.items():
            entry = module.startswith("pallas_kernels.") and module.endswith(".entry")
            assert entry or (name == "xla" and module.startswith("mla_jax.reference.")), (op, name)


@pytest.mark.parametrize("file", FILES, ids=by_name)
def test_reexports_are_explicit(file):
    """`X as X` stands in `__init__.py` files, and these hold nothing else."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if file.name != "__init__.py":
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    assert alias.asname != alias.name, f"{alias.name} as {alias.asname}"
        return
    assert ast.get_docstring(tree) or not tree.body
    for node in tree.body[1:]:
        assert isinstance(node, ast.ImportFrom), ast.unparse(node)
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name} is not re-exported openly"


@pytest.mark.parametrize("file", FILES, ids=by_name)
def test_import_errors_are_not_swallowed(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = ast.unparse(node.type)
            if "ImportError" in caught or "ModuleNotFoundError" in caught:
                assert any(isinstance(inner, ast.Raise) for inner in ast.walk(node)), caught


def test_no_folder_hides_a_module():
    """With the clone on the path, its folders go before installed packages of the same name."""
    assert not (ROOT / "__init__.py").exists()
    ours = {path.stem for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"}
    others = KERNEL_LIBRARIES | {"flax", "rich", "safetensors", "tokenizers", "typer"}
    assert not ours & (set(sys.stdlib_module_names) | others)
