"""Tables of results."""

from collections.abc import Sequence

from bench import records
from bench.shapes import GOALS, Shape
from mla_jax.cli import console
from pallas_kernels.hopper.gpus import Gpu

PEER = "FlashMLA"

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
    (f"{PEER} cold / warm", "right"),
    ("ratio", "right"),
    ("temp MiB", "right"),
    ("max err", "right"),
)
"""`ratio` is the peer's time over ours."""


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


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
    peer = records.peer_row(PEER, row)
    shape = Shape(row["b"], row["s_k"], row["h"], row["s_q"])
    us, (low, high) = row["us"], row["us_quartiles"]
    goal = GOALS.get(shape) if row["format"] == "bf16" else None
    cold, warm = ratio(row, peer)
    e4m3 = row["format"] in ("fp8_token", "fp8_full")
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
        f"8192^3) and {ceilings.tbs:.2f} TB/s. ratio: {PEER}'s time over ours, cold / warm; its "
        f"cold figures hold about 4.7 us of event overhead."
    )
