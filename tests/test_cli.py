"""The command line: what it prints where, and how it refuses."""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

import mla_jax.models
from mla_jax.cli import app, console, doctor, text
from pallas_kernels.formats import FORMATS

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "data" / "golden"
V2, V3 = str(GOLDEN / "v2lite-tiny"), str(GOLDEN / "v3-tiny")
# Control sequences, and anything beyond ASCII: lines of boxes, bars, spinners.
NOT_PLAIN = re.compile(r"[^\x20-\x7e\n]")


@pytest.fixture(autouse=True)
def leave_jax_as_it_is(monkeypatch):
    monkeypatch.setattr(app, "_prepare_jax", lambda: None)


def run(*args: str):
    return CliRunner().invoke(app.app, args, catch_exceptions=False)


def program(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-c", "from mla_jax.cli import main; main()", *args],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def on_terminal(*args: str, **environment: str) -> str:
    """What the command line writes to a terminal."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from mla_jax.cli import main; main()", *args],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        | {"TERM": "xterm", "COLUMNS": "80"}
        | environment,
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child,
    )
    os.close(child)
    written = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:  # the end, on Linux
            break
        if not piece:
            break
        written += piece
    os.close(parent)
    assert process.wait() == 0, written
    return written.decode().replace("\r\n", "\n")


@pytest.fixture(scope="session")
def checkpoint_with_text(tmp_path_factory) -> Path:
    """The V2 checkpoint with a tokenizer whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    for file in Path(V2).iterdir():
        if file.suffix != ".npz":
            shutil.copy(file, folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


IDS = ("--prompt-ids", "3,4")

BAD_INPUT = [
    (["nonsense"], "No such command 'nonsense'."),
    (["cache"], "Missing option '--checkpoint'."),
    (
        ["cache", "--checkpoint", "nowhere"],
        "no config.json at 'nowhere': pass the directory of a Hugging Face checkpoint",
    ),
    (["generate", "--checkpoint", "nowhere", *IDS], "--checkpoint: no directory 'nowhere'"),
    (["demo", "--checkpoint", "nowhere"], "--checkpoint: no directory 'nowhere'"),
    (["generate", "--checkpoint", V2], "give either --prompt or --prompt-ids"),
    (
        ["generate", "--checkpoint", V2, *IDS, "--prompt", "both"],
        "give either --prompt or --prompt-ids",
    ),
    (
        ["generate", "--checkpoint", V2, "--prompt", "text"],
        f"no tokenizer.json in {V2!r}: give token ids with --prompt-ids instead",
    ),
    (
        ["generate", "--checkpoint", V2, "--prompt-ids", "3,x"],
        "--prompt-ids is '3,x': must be whole numbers, such as 1,2,3",
    ),
    (
        ["generate", "--checkpoint", V2, "--prompt-ids", ","],
        "the prompt is empty: must hold at least one token",
    ),
    (
        ["generate", "--checkpoint", V2, "--prompt-ids", "3,256"],
        "token id 256: must be from 0 to 255",
    ),
    (
        ["generate", "--checkpoint", V2, "--prompt-ids=-1"],
        "token id -1: must be from 0 to 255",
    ),
    (
        ["generate", "--checkpoint", V2, *IDS, "--max-new-tokens", "200000"],
        "2 prompt tokens and --max-new-tokens 200000 make 200002: the model takes at most 163840",
    ),
    (
        ["generate", "--checkpoint", V2, *IDS, "--cache-format", "int4"],
        "--cache-format is 'int4': must be one of bf16, f16, f32, fp8_ds_mla, fp8_token, fp8_full",
    ),
    (
        ["generate", "--checkpoint", V2, *IDS, "--dtype", "int8"],
        "--dtype is 'int8': must be one of float32, bfloat16, float16",
    ),
    (
        ["generate", "--checkpoint", V2, *IDS, "--top-p", "0"],
        "--top-p is 0.0: must be above 0 and at most 1",
    ),
    (
        ["generate", "--checkpoint", V2, *IDS, "--implementation", "cuda"],
        "--implementation: 'cuda' is none of mosaic, mosaic_transposed, triton, xla",
    ),
]


@pytest.mark.parametrize(("args", "message"), BAD_INPUT, ids=lambda x: None)
def test_bad_input_is_one_line_and_exit_code_2(args, message):
    result = run(*args)
    assert (result.exit_code, result.stderr, result.stdout) == (2, f"error: {message}\n", "")


@pytest.mark.parametrize(
    "args",
    [
        ["cache", "--checkpoint", V2, "--context", "0"],
        ["cache", "--checkpoint", V2, "--batch", "many"],
        ["generate", "--checkpoint", V2, *IDS, "--max-new-tokens", "0"],
        ["generate", "--checkpoint", V2, *IDS, "--temperature=-1"],
        ["generate", "--checkpoint", V2, *IDS, "--page-size", "0"],
    ],
    ids=lambda args: " ".join(args[-2:]),
)
def test_bad_numbers_name_the_option(args):
    option = next(arg for arg in reversed(args) if arg.startswith("--")).split("=")[0]
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: Invalid value for '{option}': ")
    assert result.stderr.count("\n") == 1


def test_implementation_that_is_not_available():
    result = run("generate", "--checkpoint", V2, *IDS, "--implementation", "triton")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --implementation: triton: ")


def test_damaged_checkpoint_is_one_line(tmp_path):
    shutil.copy(Path(V2, "config.json"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    result = run("generate", "--checkpoint", str(tmp_path), *IDS)
    assert result.exit_code == 2
    assert [line for line in result.stderr.splitlines() if line.startswith("error: ")] == [
        f"error: {tmp_path / 'model.safetensors'}: not a safetensors file; if it is a Git LFS "
        "pointer, pull it"
    ]


def test_broken_config_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    result = run("cache", "--checkpoint", str(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert str(tmp_path) in result.stderr


def test_broken_tokenizer_is_one_line(checkpoint_with_text, tmp_path):
    shutil.copytree(checkpoint_with_text, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    result = run("generate", "--checkpoint", str(tmp_path), "--prompt", "text")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'tokenizer.json'}: not a tokenizer: ")
    assert result.stderr.count("\n") == 1


def test_help_lists_the_commands():
    alone, asked = run(), run("--help")
    assert alone.exit_code == asked.exit_code == 0
    assert alone.stdout == asked.stdout
    for command in ("demo", "generate", "cache", "doctor"):
        assert re.search(rf"^  {command} +\w", asked.stdout, re.MULTILINE)
        page = run(command, "--help")
        assert page.exit_code == 0
        assert not NOT_PLAIN.search(page.stdout)


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"mla-jax (\d+\.\d+\.\d+|\(not installed\))\n", result.stdout)


def test_cache_counts_pages():
    """V3 in small: 576 channels a token against 16 heads of 80 + 24; 100 tokens take 2 pages."""
    result = run("cache", "--checkpoint", V3, "--context", "100", "--batch", "3")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == [
        "3 x 100 tokens in 6 pages of 64 (384 slots)",
        "",
        "cache                 token, one layer  token, all layers  whole cache  of MHA",
        "bf16                            1152 B           2.25 KiB      864 KiB  34.62%",
        "f16                             1152 B           2.25 KiB      864 KiB  34.62%",
        "f32                             2304 B           4.50 KiB     1.69 MiB  69.23%",
        "fp8_ds_mla                       656 B           1.28 KiB      492 KiB  19.71%",
        "fp8_token                        644 B           1.26 KiB      483 KiB  19.35%",
        "fp8_full                         584 B           1.14 KiB      438 KiB  17.55%",
        "MHA, K and V in bf16            3328 B           6.50 KiB     1.90 MiB    100%",
    ]


@pytest.mark.parametrize(
    ("size", "written"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (656 * 64, "41.0 KiB"),
        (999 * 1024, "999 KiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**55, "32.0 PiB"),
        (2**65, "32768 PiB"),
    ],
)
def test_human_bytes(size, written):
    assert console.human_bytes(size) == written


def test_generate_prints_the_golden_ids():
    golden = np.load(GOLDEN / "v2lite-tiny" / "golden.npz")
    prompt = ",".join(map(str, golden["input_ids"][0]))
    result = run("generate", "--checkpoint", V2, "--prompt-ids", prompt, "--max-new-tokens", "24")
    assert result.exit_code == 0
    assert result.stdout == ",".join(map(str, golden["gen_ids"][0])) + "\n"
    assert re.search(r"^24 tokens, [\d.]+ tokens/s$", result.stderr, re.MULTILINE)


@pytest.fixture
def scripted(monkeypatch):
    """Makes `generate` skip the model: it streams these ids."""

    def use(ids, before=lambda: None):
        def stream(model, prompts, **kwargs):
            for i in ids:
                before()
                yield np.array([i], np.int32)

        monkeypatch.setattr(mla_jax.models, "load", lambda *args, **kwargs: None)
        monkeypatch.setattr(mla_jax.models, "stream", stream)

    return use


def test_generate_prints_each_token_as_it_comes(scripted, capfd):
    seen = []
    scripted([7, 8, 9], before=lambda: seen.append(capfd.readouterr().out))
    with pytest.raises(SystemExit):
        app.app(["generate", "--checkpoint", V2, *IDS])
    assert [*seen, capfd.readouterr().out] == ["", "7", ",8", ",9\n"]


def test_generate_stops_at_the_end_of_the_text(scripted):
    end = json.loads(Path(V2, "generation_config.json").read_text())["eos_token_id"]
    scripted([7, end, 8])
    assert run("generate", "--checkpoint", V2, *IDS).stdout == "7\n"
    assert run("generate", "--checkpoint", V2, *IDS, "--ignore-eos").stdout == f"7,{end},8\n"


def test_generate_text(checkpoint_with_text, scripted):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("naïve → 語").ids
    scripted(ids)
    args = ("generate", "--checkpoint", str(checkpoint_with_text), "--prompt", "So", "--ignore-eos")
    assert run(*args).stdout == "naïve → 語\n"
    scripted(ids[:-1])
    assert run(*args).stdout == "naïve → \N{REPLACEMENT CHARACTER}\n"


def test_generate_text_with_the_model(checkpoint_with_text):
    args = ("--checkpoint", str(checkpoint_with_text), "--max-new-tokens", "12", "--ignore-eos")
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("A prompt").ids
    as_ids = run("generate", *args, "--prompt-ids", ",".join(map(str, ids))).stdout
    as_text = run("generate", *args, "--prompt", "A prompt").stdout
    new = [int(i) for i in as_ids.split(",")]
    assert as_text == tokenizer.decode(ids + new)[len("A prompt") :] + "\n"


@pytest.mark.parametrize(
    ("config", "first"),
    [
        ({}, None),
        ({"add_bos_token": True, "bos_token": "!"}, "!"),
        ({"add_bos_token": True, "bos_token": {"content": "!"}}, "!"),
        ({"add_bos_token": False, "bos_token": "!"}, None),
    ],
)
def test_encode_adds_the_first_token_that_the_checkpoint_wants(config, first, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = byte_tokenizer()
    ids = text.encode(tokenizer, tmp_path, "ab")
    assert tokenizer.decode(ids) == (first or "") + "ab"
    again = text.encode(tokenizer, tmp_path, "!ab")
    assert tokenizer.decode(again) == "!ab"


def test_text_stream_shows_characters_when_complete():
    tokenizer = byte_tokenizer()
    stream = text.TextStream(tokenizer, tokenizer.encode("é").ids)
    shown = [stream.push(i) for i in tokenizer.encode("aé😀b").ids]
    assert shown == ["a", "", "é", "", "", "", "😀", "b"]
    assert stream.finish() == ""


def test_text_stream_keeps_the_spaces_of_words():
    words = {"▁one": 0, "▁two": 1, "s": 2}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    stream = text.TextStream(tokenizer, [0])
    assert [stream.push(i) for i in (1, 2, 0)] == [" two", "s", " one"]


H200 = """\
NVIDIA H200, 9.0, 143771 MiB, 575.57.08
"""
SUMMARY = """\
| NVIDIA-SMI 575.57.08              Driver Version: 575.57.08      CUDA Version: 12.9     |
"""


def nvidia_smi(folder: Path, script: str) -> None:
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            f"case $1 in --query-gpu*) printf '%s' '{H200}';; *) printf '%s' '{SUMMARY}';; esac",
            [
                ("driver", "575.57.08"),
                ("CUDA", "up to 12.9"),
                ("GPU 0", "NVIDIA H200, compute capability 9.0, 143771 MiB"),
            ],
        ),
        (
            "echo 'NVIDIA-SMI has failed because it cannot reach the driver.'; exit 9",
            [
                (
                    "driver",
                    "nvidia-smi names no GPU: NVIDIA-SMI has failed because it cannot reach the "
                    "driver.",
                )
            ],
        ),
        ("exit 0", [("driver", "nvidia-smi names no GPU: ")]),
        (None, [("driver", "none found (there is no nvidia-smi)")]),
    ],
    ids=["h200", "fails", "silent", "missing"],
)
def test_doctor_reads_the_driver(script, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if script else str(tmp_path))
    if script:
        nvidia_smi(tmp_path, script)
    assert doctor._driver()[1] == expected


def test_doctor_without_a_driver():
    """In a process of its own, as a user starts it: nothing but the report."""
    done = program("doctor", PATH="")
    assert (done.returncode, done.stderr) == (0, "")
    assert not NOT_PLAIN.search(done.stdout)
    for op in ("mla_decode", "mla_sparse_decode", "mla_sparse_prefill", "mla_prefill"):
        assert re.search(rf"^{op} +xla +yes$", done.stdout, re.MULTILINE)
        assert re.search(rf"^{op} +triton +no +\w", done.stdout, re.MULTILINE)


@pytest.mark.skipif(
    any(os.path.exists(file) for file in app.DRIVER_FILES), reason="there is an NVIDIA driver"
)
def test_cuda_plugin_without_a_driver_is_left_alone():
    """JAX would log a stack trace for it (`make test` installs one, to compile)."""
    done = program("doctor", JAX_PLATFORMS="")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^backend +cpu$", done.stdout, re.MULTILINE)


def test_doctor_says_when_jax_cannot_start(monkeypatch):
    def refuse():
        raise RuntimeError("Unable to initialize\nbackend")

    monkeypatch.setattr(doctor.jax, "devices", refuse)
    result = run("doctor")
    assert result.exit_code == 1
    assert result.stdout.endswith("error  Unable to initialize backend\n")


def test_demo_compares_the_formats():
    done = program("demo", "--max-new-tokens", "3")
    assert done.returncode == 0, done.stderr
    assert not NOT_PLAIN.search(done.stdout + done.stderr)
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("cache "))
    rows = [line.split() for line in lines[start + 1 : start + 1 + len(FORMATS)]]
    assert {row[0]: int(row[1]) for row in rows} == {
        name: f.bytes_per_token(512, 64) for name, f in FORMATS.items()
    }
    unquantised = rows[0]
    assert (unquantised[0], *unquantised[3:6]) == ("f32", "100.0%", "0", "never")
    assert all(float(row[3].rstrip("%")) >= 50 for row in rows)
    assert {row[6] for row in rows} <= {"mosaic", "xla"}
    assert re.search(r"^triton did not run: \w", done.stdout, re.MULTILINE)
    for name in FORMATS:
        assert f"{name}: compiling, then generating" in done.stderr


def test_demo_without_the_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(mla_jax, "__file__", str(tmp_path / "mla_jax" / "__init__.py"))
    result = run("demo")
    assert result.exit_code == 2
    assert "is in the repository" in result.stderr
    assert result.stderr.count("\n") == 1


def test_terminal_gets_colours_unless_it_wants_none():
    args = ("cache", "--checkpoint", V3)
    assert "\x1b[" in on_terminal(*args)
    assert not NOT_PLAIN.search(on_terminal(*args, NO_COLOR="1"))
    assert not NOT_PLAIN.search(on_terminal(*args, TERM="dumb"))
    piped = program(*args, FORCE_COLOR="1")
    assert (piped.returncode, piped.stderr) == (0, "")
    assert not NOT_PLAIN.search(piped.stdout)


def test_tables_fit_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(console, "is_plain", lambda stream: False)
    monkeypatch.setenv("COLUMNS", "80")
    titles = ("cache", "bytes/token", "tokens/s", "same token", "logit error", "diverges", "ran on")
    cells = ("fp8_ds_mla", "656", "12345", "100.0%", "0.0019", "never", "xla")
    console.table([(title, "left") for title in titles], [cells])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert all(word in shown for title in titles for word in title.split())
    assert all(cell in shown for cell in cells)


def test_reader_of_a_pipe_may_leave():
    command = f"{shlex.quote(sys.executable)} -c 'from mla_jax.cli import main; main()' doctor | :"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert "Traceback" not in done.stderr
