"""What README and docs show is run; what they name exists."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mla_jax import dispatch
from mla_jax.cli import app
from pallas_kernels.formats import FORMATS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = sorted((ROOT / "mla_jax").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def table(first_title: str) -> list[list[str]]:
    """The rows of README's table whose first column has this title, titles included."""
    (text,) = re.findall(rf"^\| {re.escape(first_title)} \|.*\n(?:\|.*\n)+", README, re.MULTILINE)
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [rows[0], *rows[2:]]


def anchor(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("code", blocks("python"), ids=range(len(blocks("python"))))
def test_readme_code_runs(code, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})
    # Each ends with a print, and a comment beside it says what comes out.
    promised = re.search(r"print\(.*\)  # ([^;\n]*)", code)
    printed = capsys.readouterr().out
    assert printed
    if promised:
        assert printed.strip() == promised[1]


def test_decode_example_is_short():
    assert len(blocks("python")[0].splitlines()) <= 15


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_readme_commands(command, monkeypatch):
    program, *arguments = command
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in targets
        return
    assert program == "mla-jax"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(app, "_prepare_jax", lambda: None)
    result = CliRunner().invoke(app.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stdout


def test_support_table_is_the_dispatch_table():
    (_, *implementations), *rows = table("op")
    assert tuple(implementations) == dispatch.IMPLEMENTATIONS
    claimed = {op: dict(zip(implementations, cells, strict=True)) for op, *cells in rows}
    built = {
        op: {name: "yes" if name in table else "no" for name in implementations}
        for op, table in dispatch.TABLE.items()
    }
    assert claimed == built


def test_format_table_is_the_formats():
    claimed = {row[0]: int(row[-1]) for row in table("format")[1:]}
    assert claimed == {name: f.bytes_per_token() for name, f in FORMATS.items()}


def test_packed_row_has_no_gap():
    ranges = [row[0].split(" to ") for row in table("bytes")[1:]]
    starts, ends = zip(*((int(a), int(b) + 1) for a, b in ranges), strict=True)
    assert starts == (0, *ends[:-1])
    assert ends[-1] == FORMATS["fp8_ds_mla"].bytes_per_token()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if fragment:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in map(anchor, titles), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    """Code spans that look like a path of the repository are one."""
    folders = "|".join(("mla_jax", "pallas_kernels", "tests", "bench", "docs", "tools", r"\.ci"))
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text(encoding="utf-8")):
        if "<" not in path:
            assert (ROOT / path).exists(), path


def public_definitions(file: Path):
    """Public functions and classes of a module, with the public methods and properties that the
    classes themselves define; `__init__` and `__call__` count as public."""
    todo = [("", ast.parse(file.read_text(encoding="utf-8")))]
    while todo:
        prefix, parent = todo.pop()
        for node in parent.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if node.name.startswith("_") and node.name not in ("__init__", "__call__"):
                continue
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                todo.append((f"{prefix}{node.name}.", node))


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_public_functions_are_documented(file):
    missing = [name for name, node in public_definitions(file) if not ast.get_docstring(node)]
    assert not missing


def test_undocumented_methods_and_properties_are_found(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "class A(B):\n    def __init__(self): ...\n    def f(self): ...\n"
        "    @property\n    def g(self): ...\n    def _h(self): ...\n    def __str__(self): ...\n"
        "class _C:\n    def f(self): ...\n"
        "def f():\n    'Documented.'\n    def inner(): ...\n"
    )
    names = [name for name, node in public_definitions(file) if not ast.get_docstring(node)]
    assert names == ["A", "A.__init__", "A.f", "A.g"]
