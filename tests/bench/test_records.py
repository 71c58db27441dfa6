"""Files of results and peers, shapes, and tables."""

import json

import pytest

from bench import accuracy, records, report
from bench.shapes import MORE, SETS, Shape
from tests.bench.ceilings import H200_MEASURED


def row(**changes):
    return {
        "op": "decode",
        "format": "bf16",
        "b": 128,
        "s_k": 4096,
        "h": 128,
        "s_q": 1,
        "topk": None,
        "us": 200.0,
        "us_end_to_end": 240.0,
        "tflops": 730.0,
        "gbs": 3200.0,
        "implementation": "mosaic",
        "max_err": 1e-3,
        "date": "2026-01-01",
        "us_quartiles": [199.0, 201.0],
        "us_warm": 220.6,
    } | changes


def test_newer_rows_replace_older_ones(tmp_path):
    file = tmp_path / "sub" / "h200.json"
    records.add(file, {"device": "one"}, [row(), row(h=64)])
    records.add(file, {"device": "two"}, [row(us=100.0), row(implementation="xla")])
    found = json.loads(file.read_text())
    assert found["device"] == "two"
    assert [(r["h"], r["implementation"], r["us"]) for r in found["rows"]] == [
        (128, "mosaic", 100.0),
        (64, "mosaic", 200.0),
        (128, "xla", 200.0),
    ]
    assert list(tmp_path.rglob("*")) == [file.parent, file]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    file = tmp_path / "h200.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"h200\.json: "):
        records.read(file)


def test_results_in_the_repository_can_be_read():
    for file in records.RESULTS.glob("*.json"):
        identity = accuracy.IDENTITY if file.stem == "accuracy" else records.IDENTITY
        for found in records.read(file)["rows"]:
            assert all(name in found for name in identity), found


def test_slug():
    assert records.slug("NVIDIA H200") == "h200"
    assert records.slug("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


def test_source_digest_follows_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    (tmp_path / "pallas_kernels").mkdir()
    file = tmp_path / "pallas_kernels" / "a.py"
    file.write_text('"""A."""\n\n\ndef f():\n    """B."""\n    return 1  # C\n')
    before = records.source_digest()
    assert len(before) == 12
    file.write_text('"""D."""\ndef f():\n    return 1\n')
    assert records.source_digest() == before
    file.write_text('"""D."""\ndef f():\n    return 2\n')
    assert records.source_digest() != before


def test_peers():
    found = records.peer_row("FlashMLA", row())
    assert found is not None
    assert (found["us_cold"], found["us_back_to_back"]) == (230.5, 220.6)
    assert records.peer_row("FlashMLA", row(b=127)) is None
    rows = records.peers()["rows"]
    identities = [tuple(r[name] for name in records.IDENTITY) for r in rows]
    assert len(set(identities)) == len(identities)
    # One flop count for all: the table of the peers names the same TFLOPS.
    assert Shape(128, 4096, 128).flops / found["us_back_to_back"] / 1e6 == pytest.approx(662, abs=1)


def test_every_goal_has_a_peer():
    for shape in [*SETS["goals"], *MORE]:
        sizes = {"b": shape.b, "s_k": shape.s_k, "h": shape.h, "s_q": shape.s_q}
        assert records.peer_row("FlashMLA", row(**sizes)), shape


def test_shape_text():
    assert Shape.parse("128x4096x16") == Shape(128, 4096, 16, 1)
    assert Shape.parse(str(Shape(1, 2, 3, 2))) == Shape(1, 2, 3, 2)
    for text in ("", "1x2", "1x2x3x4x5", "0x2x3", "1x-2x3", "ax2x3", "1x2x3x4"):
        with pytest.raises(ValueError, match=r"not a shape|at most s_k"):
            Shape.parse(text)


def test_table(capsys):
    unknown = row(b=7, us_warm=None)
    report.show([row(), unknown, row(format="fp8_token")], H200_MEASURED)
    head, first, second, in_e4m3, _, legend, *_ = capsys.readouterr().out.splitlines()
    assert head.split()[:1] == ["shape"] and "peer cold / warm" in head
    for text in ("128x4096x128x1", "200.0", "1.0 %", "96", "216", "230.5 / 220.6", "1.15 / 1.00"):
        assert text in first, text
    assert "/" not in second and "216" not in second
    assert "224.1 / 219.0" in in_e4m3 and "165" in in_e4m3
    assert "L2 cleared" in legend


def test_table_and_picture_by_length(tmp_path, capsys):
    rows = [
        {**row(), "b": b, "s_k": s_k, "implementation": name, "tflops": tflops}
        for b in (16, 32)
        for s_k, tflops in ((512, 10.0), (1024, 20.0))
        for name in ("mosaic", "mosaic_transposed")
    ]
    rows[-1]["h"] = 64  # in a line of its own
    report.show_by_length(rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in ("16 512 128 1 10.0 10.0", "32 1024 128 1 20.0", "32 1024 64 1 20.0"):
        assert line.split() in lines
    report.plot_by_length(rows, tmp_path / "a" / "tflops.png")
    assert (tmp_path / "a" / "tflops.png").read_bytes().startswith(b"\x89PNG")
