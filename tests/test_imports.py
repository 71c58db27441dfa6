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
SHARED_TOP = max(SHARED.values())
WITHIN_KERNEL = {"entry": 5, "kernel": 4, "load": 3, "cta": 2, "config": 1, "cost": 1}
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


def place(module: str) -> tuple[str, int]:
    """The part of pallas_kernels that a module belongs to, and the rank of that part."""
    name, *rest = module.split(".")[1:] or [""]
    if name in SHARED:
        return name, SHARED[name]
    is_kernel = (ROOT / "pallas_kernels" / name).is_dir()
    # A module beside the kernels' folders puts several of them together.
    return name, SHARED_TOP + (1 if is_kernel or rest else 2)


@pytest.mark.parametrize(
    "file", [file for file in FILES if "pallas_kernels" in file.parts], ids=by_name
)
def test_kernels_import_no_other_kernel(file):
    mine, rank = place(module_name(file))
    for imported in imports(file):
        top = imported.split(".")[0]
        if top != "pallas_kernels":
            allowed = set() if mine in ("formats", "errors") else KERNEL_LIBRARIES
            assert top in sys.stdlib_module_names or top in allowed, imported
            continue
        theirs, their_rank = place(imported)
        assert theirs == mine or their_rank < rank, f"{module_name(file)} imports {imported}"


@pytest.mark.parametrize("file", FILES, ids=by_name)
def test_direction_within_a_kernel(file):
    *folder, stem = module_name(file).split(".")
    for imported in imports(file):
        *other, their_stem = imported.split(".")
        if folder == other and stem in WITHIN_KERNEL and their_stem in WITHIN_KERNEL:
            assert WITHIN_KERNEL[their_stem] < WITHIN_KERNEL[stem], imported


def test_table_names_references_and_entries():
    for op, implementations in dispatch.TABLE.items():
        for name, module in implementations.items():
            home = "mla_jax.reference." if name == "xla" else "pallas_kernels."
            assert module.startswith(home) and is_module(module), (op, name, module)


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
