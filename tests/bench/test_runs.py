"""The benches from end to end on the CPU, with a stand-in for the profiler."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from bench import append, baselines, decode, inputs, measure, model_step, p_terms
from bench.shapes import GOALS, Shape
from mla_jax.cli import app, console
from pallas_kernels.hopper import plan
from tests import oracle, tolerances
from tests.bench.ceilings import H200_MEASURED
from tests.kernels import simulator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """Kernel `a` takes 50 us, `b` 25, and a clearing of the L2 100."""
    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    monkeypatch.setattr(measure, "ceilings", lambda: H200_MEASURED)
    clear = measure._clear()
    log = []
    monkeypatch.setattr(measure, "_clear", lambda: lambda: log.append(("clear", 1e2)) or clear())

    def trace(run):
        log.clear()
        jax.block_until_ready(run())
        found = [entry for entry in log]
        log.clear()
        return found

    monkeypatch.setattr(measure, "trace", trace)
    return log


def test_kernel_times(no_gpu_needed, monkeypatch):
    monkeypatch.setattr(measure, "CLEAR_BYTES", 64)
    log = no_gpu_needed
    us = iter([*[0.0] * 2, *map(float, range(10, 15))])

    def call():
        log.extend([("a", next(us)), ("b", 1.0), ("a", 2.0)])

    times = measure.kernel_times(call, iterations=5)
    assert times.total == measure.Spread(14.0, 13.0, 15.0)
    assert times.kernels == {"a": 13.0, "b": 1.0}


@pytest.mark.parametrize(
    "timings",
    [
        [("c", 1.0), ("a", 1.0), ("c", 1.0)],
        [("c", 1.0), ("c", 1.0)],
        [("c", 1.0), ("a", 1.0), ("a", 1.0), ("c", 1.0)],
        [("c", 1.0), ("a", 1.0), ("c", 1.0), ("b", 1.0)],
    ],
)
def test_kernels_that_cannot_be_told_apart(timings):
    with pytest.raises(measure.MeasurementError):
        measure._split(timings, ["c"], 2)


@pytest.mark.parametrize("format", ["bf16", "fp8_ds_mla", "fp8_token", "fp8_full"])
def test_expected_is_the_oracle(format):
    args = inputs.make(Shape(2, 70, 3, 2), format)
    found = inputs.expected(*args)
    wanted, _ = oracle.decode(
        *(np.asarray(x) for x in args[:2]),
        args.cache,
        np.asarray(args.block_table),
        np.asarray(args.seq_lens),
        scale=inputs.SCALE,
    )
    np.testing.assert_allclose(found, wanted, **tolerances.BENCH_EXPECTED)


@pytest.mark.parametrize("format", ["bf16", "f16", "fp8_ds_mla", "fp8_token", "fp8_full"])
def test_a_step_compiled_ahead_takes_the_inputs(format):
    shape = Shape(2, 70, 3, 2)
    args = inputs.make(shape, format)
    avals = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert avals(inputs.abstract(shape, format)) == avals(args)
    plan = decode._plan(shape, format)(args.seq_lens)
    out = decode.compile_step(shape, format, "xla")(args, plan)
    np.testing.assert_array_equal(out, decode._decode("xla")(args, plan))


def test_comparison():
    wanted = jnp.ones((4, 4), jnp.float32)
    assert not inputs.compare(wanted.astype(jnp.bfloat16), wanted).fault("bfloat16")
    off = wanted.at[1, 1].set(1.5).astype(jnp.bfloat16)
    assert inputs.compare(off, wanted).fault("bfloat16") == "1 elements are off, by up to 0.5"
    nan = wanted.at[1, 1].set(jnp.nan).astype(jnp.bfloat16)
    assert inputs.compare(nan, wanted).fault("bfloat16").startswith("1 elements")


def test_decode(no_gpu_needed, monkeypatch, tmp_path, capsys):
    log, output = no_gpu_needed, tmp_path / "out.json"
    attend = jax.jit(functools.partial(baselines.attend, implementation="xla"))
    monkeypatch.setattr(baselines, "attend", attend)
    monkeypatch.setattr(baselines, "free_bytes", lambda: baselines.expand_bytes(shapes[0]))
    real = measure.kernel_times
    monkeypatch.setattr(
        measure,
        "kernel_times",
        lambda call, **kwargs: real(lambda: log.append(("a", 50.0)) or call(), **kwargs),
    )
    shapes = [Shape(1, 70, 3), Shape(1, 71, 3)]
    code = decode.run(
        [(shape, "bf16") for shape in shapes],
        implementations=["mosaic", "xla", baselines.NAME],
        iterations=2,
        calls=2,
        memory=True,
        output=output,
        limit_s=100,
    )
    assert code == 0
    results = json.loads(output.read_text())
    assert {r["implementation"]: r["us"] for r in results["rows"]} == {
        "xla": 50.0,
        baselines.NAME: 50.0,
    }
    assert all(r["temp_bytes"] > 0 for r in results["rows"])
    assert results["rows"][0]["tflops"] == round(shapes[0].flops / 50 / 1e6, 1)
    assert results["device"] == "cpu" and results["protocol"]["page_size"] == 64
    said = capsys.readouterr()
    assert "1x70x3x1 bf16 mosaic: left out: " in said.err
    assert "1x71x3x1 bf16 expand+cudnn: left out: needs 0 GiB for keys and values" in said.err
    assert "1x70x3x1" in said.out


def test_steps_of_a_set():
    steps = decode._steps(None, "goals", ["fp8_full", "f32"])
    assert steps == [(shape, "fp8_full") for shape in GOALS["fp8_full"]]
    assert decode._steps("1x2x3", "goals", ["bf16", "f16"]) == [
        (Shape(1, 2, 3), "bf16"),
        (Shape(1, 2, 3), "f16"),
    ]
    assert len(decode._steps(None, "etap", ["bf16"])) == 16


def test_a_wrong_result_is_not_timed(no_gpu_needed, monkeypatch, tmp_path, capsys):
    expected = inputs.expected
    monkeypatch.setattr(inputs, "expected", lambda *args: expected(*args) + 0.1)
    output = tmp_path / "out.json"
    code = decode.run(
        [(Shape(1, 70, 3), "bf16")],
        implementations=["xla"],
        iterations=2,
        calls=2,
        memory=True,
        output=output,
        limit_s=100,
    )
    assert code == 1 and not output.exists()
    assert "wrong result, not timed" in capsys.readouterr().err


def test_append(no_gpu_needed, monkeypatch, tmp_path, capsys):
    log, output = no_gpu_needed, tmp_path / "out.json"
    real = measure.kernel_times
    monkeypatch.setattr(
        measure,
        "kernel_times",
        lambda call, **kwargs: real(lambda: log.append(("a", 2.0)) or call(), **kwargs),
    )
    code = append.run(
        [1, 3],
        formats=["f16", "fp8_full"],
        implementations=["mosaic", "xla"],
        iterations=2,
        calls=2,
        output=output,
    )
    assert code == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(r["op"], r["format"], r["b"]) for r in rows] == [
        (op, format, tokens)
        for op in append.OPS
        for format in ("f16", "fp8_full")
        for tokens in (1, 3)
    ]
    assert all((r["implementation"], r["us"], r["max_err"]) == ("xla", 2.0, 0.0) for r in rows)
    said = capsys.readouterr()
    assert "append fp8_full 3 mosaic: left out: " in said.err
    assert "norm_rope_append" in said.out


def test_an_append_that_is_off_is_not_timed(no_gpu_needed, monkeypatch, tmp_path, capsys):
    make = append.make_step
    broken = lambda cache, tokens: jax.tree.map(jnp.zeros_like, cache)
    monkeypatch.setattr(
        append, "make_step", lambda op, name: broken if name == "x" else make(op, name)
    )
    output = tmp_path / "out.json"
    code = append.run(
        [3], formats=["bf16"], implementations=["x"], iterations=2, calls=2, output=output
    )
    assert code == 1 and not output.exists()
    assert "append bf16 3 x: wrong result, not timed: " in capsys.readouterr().err


def test_p_terms(no_gpu_needed, monkeypatch, tmp_path, capsys):
    """A second term makes the error smaller; on the simulated GPU."""
    real = measure.kernel_times
    log = no_gpu_needed
    monkeypatch.setattr(
        measure,
        "kernel_times",
        lambda call, **kwargs: real(lambda: log.append(("a", 50.0)) or call(), **kwargs),
    )
    row = functools.partial(p_terms.measure_row, interpret=simulator.PARAMS)
    monkeypatch.setattr(p_terms, "measure_row", row)
    monkeypatch.setattr(plan, "num_sms", lambda: 2)
    output = tmp_path / "results.json"
    p_terms.run([Shape(2, 130, 8)], ["fp8_token"], iterations=1, output=output)
    one, two = json.loads(output.read_text())["rows"]
    assert (one["us"], two["us"]) == (50.0, 50.0)
    assert one["implementation"] == "mosaic, p_terms=1" and 1e-5 < one["cos_err"] < 5e-4
    assert two["cos_err"] < one["cos_err"]
    assert "mosaic, p_terms=2" in capsys.readouterr().out
    with pytest.raises(console.UserError, match="would be split"):
        p_terms.run([Shape(1, 2000, 8)], ["fp8_token"], iterations=1, output=output)


def test_model_step(no_gpu_needed, monkeypatch, tmp_path, capsys):
    big = model_step.V2_LITE
    assert big.moe is not None
    moe = dataclasses.replace(big.moe, num_experts=4, num_experts_per_token=2, d_expert=16)
    config = dataclasses.replace(
        big, vocab_size=64, d_model=32, num_layers=2, num_heads=2, d_ff=48, moe=moe
    )
    us = iter([60.0, 100.0])

    def trace(run):
        jax.block_until_ready(run())
        return [("a", next(us))]

    monkeypatch.setattr(measure, "trace", trace)
    output = tmp_path / "out.json"
    model_step.run(config, batch=2, context=70, implementations=["xla"], steps=2, output=output)
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["us"], row["attention_us"], row["attention_share"]) == (50.0, 20.0, 0.4)
    assert "40.0 %" in capsys.readouterr().out


def test_sizes_of_the_model():
    """What DeepSeek-V2-Lite has: 15.7 billion parameters."""
    from flax import nnx

    from mla_jax import models

    build = lambda: models.DeepseekModel(model_step.V2_LITE, rngs=nnx.Rngs(0))
    leaves = jax.tree.leaves(nnx.state(nnx.eval_shape(build), nnx.Param))
    assert sum(x.size for x in leaves) == pytest.approx(15.7e9, rel=0.005)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["decode", "--quick"], "this measurement needs an NVIDIA Hopper GPU"),
        (["append"], "this measurement needs an NVIDIA Hopper GPU"),
        (["model-step"], "this measurement needs an NVIDIA Hopper GPU"),
        (["decode", "--rows", "3x"], "'3x' is not a shape: must be BxS_KxH or BxS_KxHxS_Q"),
        (["decode", "--format", "b"], "--format: 'b' is none of bf16, f16"),
        (
            ["nothing"],
            "bench: 'nothing' is none of decode, append, model_step, p_terms, accuracy, "
            "compile_report",
        ),
    ],
)
def test_refusals_are_one_line(args, message):
    if jax.devices()[0].platform == "gpu" and "GPU" in message:
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app.app, ["bench", *args])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: {message}"), done.stderr
    assert not done.stdout


@pytest.mark.skipif(
    any(os.path.exists(file) for file in app.DRIVER_FILES), reason="there is an NVIDIA driver"
)
def test_module_without_a_gpu():
    """In a process of its own, without JAX's log of the driver that it does not find."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.decode", "--quick"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: this measurement needs")
