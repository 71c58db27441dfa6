"""Tables of results."""

from collections.abc import Sequence
from pathlib import Path

from bench import records
from bench.shapes import GOALS, Shape
from mla_jax.cli import console
from pallas_kernels.formats import E4M3_FORMATS
from pallas_kernels.hopper.gpus import Gpu

COLUMNS: tuple[console.Column, ...] = (
    ("shape (b x s_k x h x s_q)", "left"),
    ("format", "left"),
    ("implementation", "left"),
    ("us", "right"),
    ("spread", "right"),
    ("us warm", "right"),
    ("us end to end", "right"),
    ("TFLOPS", "right"),
    ("GB/s", "right"),
    ("% MMA", "right"),
    ("% memory", "right"),
    ("goal us", "right"),
    ("peer cold / warm", "right"),
    ("ratio", "right"),
    ("temp MiB", "right"),
    ("max err", "right"),
)
"""`ratio` is the peer's time over ours."""


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def peer_of(row: records.Row) -> records.Row | None:
    """What the row is compared with, if that was measured: a kernel that computes in e4m3 too, or
    FlashMLA."""
    return records.peer_row("vLLM fp8" if row["format"] in E4M3_FORMATS else "FlashMLA", row)


def ratio(row: records.Row, peer: records.Row | None) -> tuple[float | None, float | None]:
    """How many times faster than the peer: cold, warm."""
    if peer is None:
        return None, None
    divide = lambda theirs, ours: theirs / ours if theirs and ours else None
    return (
        divide(peer["us_cold"], row.get("us")),
        divide(peer["us_back_to_back"], row.get("us_warm")),
    )


def cells(row: records.Row, ceilings: Gpu) -> tuple[str, ...]:
    """The cells of a row of `COLUMNS`."""
    peer = peer_of(row)
    shape = Shape(row["b"], row["s_k"], row["h"], row["s_q"])
    us, (low, high) = row["us"], row["us_quartiles"]
    goal = GOALS.get(row["format"], {}).get(shape)
    cold, warm = ratio(row, peer)
    e4m3 = row["format"] in E4M3_FORMATS
    return (
        str(shape),
        row["format"],
        row["implementation"],
        number(us),
        f"{100 * (high - low) / us:.1f} %",
        number(row.get("us_warm")),
        number(row["us_end_to_end"]),
        number(row["tflops"], 0),
        number(row["gbs"], 0),
        number(100 * row["tflops"] / (ceilings.tflops_8 if e4m3 else ceilings.tflops_16), 0),
        number(100 * row["gbs"] / 1e3 / ceilings.tbs, 0),
        number(goal, 0),
        "" if peer is None else f"{peer['us_cold']} / {peer['us_back_to_back'] or '-'}",
        " / ".join("-" if x is None else f"{x:.2f}" for x in (cold, warm)) if peer else "",
        number(row["temp_bytes"] / 2**20) if "temp_bytes" in row else "",
        f"{row['max_err']:.1e}",
    )


def show(rows: Sequence[records.Row], ceilings: Gpu) -> None:
    """Print the table and what its columns are."""
    console.table(COLUMNS, [cells(row, ceilings) for row in rows])
    console.say()
    console.say(
        f"us: CUPTI time of all kernels of the op, plan excluded, L2 cleared before each call; "
        f"median, and between the quartiles the spread. us warm: the same back to back. us end to "
        f"end: host clock, from Python to the result. %: of {ceilings.tflops_16:.0f} TFLOPS (bf16 "
        f"8192^3) and {ceilings.tbs:.2f} TB/s. peer: FlashMLA, or vLLM's fp8 kernel where ours "
        f"computes in e4m3; its cold figures hold about 4.7 us of event overhead. ratio: its time "
        f"over ours, cold / warm."
    )


def show_by_length(rows: Sequence[records.Row]) -> None:
    """Print TFLOPS, a line for each batch, context length, heads and queries, a column for each
    implementation: the table of the ETAP paper (arXiv:2506.01969)."""
    lines: dict[tuple[int, ...], dict[str, float]] = {}
    for row in rows:
        shape = row["b"], row["s_k"], row["h"], row["s_q"]
        lines.setdefault(shape, {})[_series(row)] = row["tflops"]
    names = list(dict.fromkeys(map(_series, rows)))
    heads = ("sequences", "tokens", "heads", "queries")
    columns: list[console.Column] = [(head, "right") for head in heads]
    for name in names:
        columns.append((name, "right"))
    console.say()
    console.table(
        columns,
        [
            (*map(str, shape), *(number(line.get(n)) for n in names))
            for shape, line in lines.items()
        ],
    )
    console.say()
    console.say("TFLOPS of the kernels, L2 cleared before each call.")


def plot_by_length(rows: Sequence[records.Row], file: Path) -> None:
    """TFLOPS against context length, a panel for each batch, heads and queries, a line for each
    implementation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kind = lambda row: (row["b"], row["h"], row["s_q"])
    kinds = sorted(set(map(kind, rows)))
    figure, panels = plt.subplots(
        1, len(kinds), figsize=(5 * len(kinds), 3.6), sharey=True, squeeze=False
    )
    for panel, (b, h, s_q) in zip(panels[0], kinds, strict=True):
        for name in dict.fromkeys(map(_series, rows)):
            points = sorted(
                (row["s_k"], row["tflops"])
                for row in rows
                if (kind(row), _series(row)) == ((b, h, s_q), name)
            )
            if points:
                panel.semilogx(*zip(*points, strict=True), base=2, marker=".", label=name)
        queries = f", {s_q} queries" if s_q > 1 else ""
        panel.set_title(f"{b} sequences, {h} heads{queries}")
        panel.set_xlabel("tokens in the context")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("TFLOPS")
    panels[0][-1].legend(fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)


def _series(row: records.Row) -> str:
    return f"{row['implementation']}, {row['format']}"
