"""`bench.accuracy`: the reference, and that formats come out in the order of their bits."""

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import accuracy, records

CONTEXTS = (768, 1024)


@pytest.fixture(scope="module", params=accuracy.INPUTS)
def case(request):
    return accuracy.INPUTS[request.param](np.random.default_rng(1), CONTEXTS[-1])


def test_reference_is_softmax_attention(case):
    out, lse = accuracy.reference(case, 704)
    keys = np.concatenate([case.latent, case.rope], 1)[:704].astype(np.float64)
    q = np.concatenate([case.q_latent, case.q_rope], 1).astype(np.float64)
    p = np.exp(q @ keys.T * accuracy.SCALE - lse[:, None])
    np.testing.assert_allclose(p.sum(1), 1)
    np.testing.assert_allclose(p @ keys[:, : accuracy.D_LATENT], out, rtol=1e-9, atol=1e-12)


def test_more_bits_are_more_accurate(case):
    errors = {
        format: accuracy.errors(case, accuracy.fill(case, format), 704, "xla")["rms_err"]
        for format in ("f32", "f16", "bf16", "fp8_ds_mla")
    }
    assert list(errors.values()) == sorted(errors.values())
    assert errors["f32"] < 1e-4 and errors["fp8_ds_mla"] < 0.1


def test_the_needle_is_found_and_matters():
    case = accuracy.needle(np.random.default_rng(1), 1024)
    out, _ = accuracy.reference(case, 1024)
    needles = case.latent[accuracy.NEEDLE_SLOTS]
    similar = (out * needles).sum(1) / np.linalg.norm(out, axis=1) / np.linalg.norm(needles, axis=1)
    assert (similar > 0.9).all()


def test_command(tmp_path):
    file, picture = tmp_path / "accuracy.json", tmp_path / "accuracy.svg"
    contexts = ",".join(map(str, CONTEXTS))
    args = ["--contexts", contexts, "--output", str(file), "--plot", str(picture)]
    result = CliRunner().invoke(accuracy.app, args)
    assert result.exit_code == 0, result.output
    rows = records.read(file)["rows"]
    assert len(rows) == len(accuracy.INPUTS) * len(accuracy.FORMATS) * len(CONTEXTS)
    assert all(f"{row['rms_err']:.1e}" in result.output for row in rows)
    assert picture.read_text().count("fp8_token") == 1
    for wrong in ("100", "1000", "1,x"):
        assert CliRunner().invoke(accuracy.app, ["--contexts", wrong]).exit_code == 2
