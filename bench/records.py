"""The files of the bench: measured results, and what peers reach on the same GPU."""

import ast
import datetime
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PEERS = Path(__file__).parent / "peers" / "h200.json"

IDENTITY = ("op", "format", "b", "s_k", "h", "s_q", "topk", "implementation")
"""What makes two rows the same measurement: the newer one replaces the older."""

Row = dict[str, Any]


def slug(device: str) -> str:
    """The name that the results of a device are filed under: `NVIDIA H200` is `h200`."""
    words = device.lower().split()
    return "-".join(word for word in words if word != "nvidia") or "unknown"


class _WithoutText(ast.NodeTransformer):
    """Takes out docstrings, the attributes' too."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def source_digest(folders: Iterable[str] = ("pallas_kernels",)) -> str:
    """Twelve hexadecimal digits that change with the code, not with what is said about it: what a
    row was measured with."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            code = _WithoutText().visit(ast.parse(file.read_text(encoding="utf-8")))
            digest.update(f"{file.relative_to(ROOT).as_posix()}\0{ast.unparse(code)}".encode())
    return digest.hexdigest()[:12]


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def read(file: Path) -> dict[str, Any]:
    """The results in `file`; without rows if there is no such file.

    Raises:
        ValueError: the file holds something else.
    """
    if not file.exists():
        return {"rows": []}
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(results, dict) or not isinstance(results.get("rows"), list):
        raise ValueError(f"{file}: must hold an object with a list `rows`")
    return results


def merge(
    results: dict[str, Any],
    about: dict[str, Any],
    rows: Iterable[Row],
    identity: Sequence[str] = IDENTITY,
) -> dict[str, Any]:
    """`results` with `about` renewed and `rows` in the place of older ones of the same identity."""
    key = lambda row: tuple(row.get(name) for name in identity)
    merged = {key(row): row for row in results["rows"]}
    for row in rows:
        merged[key(row)] = row
    head = {name: value for name, value in results.items() if name != "rows"}
    return {**head, **about, "rows": list(merged.values())}


def write(file: Path, results: dict[str, Any]) -> None:
    """Write the results, a row a line; a reader never sees half a file."""
    head = [
        f"  {json.dumps(name)}: {json.dumps(value)}"
        for name, value in results.items()
        if name != "rows"
    ]
    rows = ",\n".join(f"    {json.dumps(row)}" for row in results["rows"])
    text = "{\n" + ",\n".join([*head, f'  "rows": [\n{rows}\n  ]']) + "\n}\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def add(
    file: Path,
    about: dict[str, Any],
    rows: Iterable[Row],
    identity: Sequence[str] = IDENTITY,
) -> None:
    """Merge `rows` into the results in `file`."""
    write(file, merge(read(file), about, rows, identity))


def peers(file: Path = PEERS) -> dict[str, Any]:
    """What others reach; the file says by which protocol."""
    return json.loads(file.read_text(encoding="utf-8"))


def peer_row(implementation: str, row: Row, rows: list[Row] | None = None) -> Row | None:
    """A peer's measurement of the same step, whatever its format is called."""
    names = ("op", "b", "s_k", "h", "s_q", "topk")
    for peer in peers()["rows"] if rows is None else rows:
        if peer["implementation"] == implementation and all(
            peer[name] == row[name] for name in names
        ):
            return peer
    return None
