"""Commands, options and errors; the work is in the modules beside this one."""

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from typer.core import TyperGroup

from mla_jax.cli import bench, console, demo, doctor, generate, memory
from mla_jax.dispatch import IMPLEMENTATIONS
from pallas_kernels.formats import FORMATS

_TRACEBACK = "MLA_JAX_TRACEBACK"

# Device files of the NVIDIA driver, on Linux and in WSL 2.
DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")


class _Commands(TyperGroup):
    """Ends with exit code 2 and one line on standard error for bad input."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except console.UserError as error:
            code = _report(str(error))
        except NotImplementedError as error:
            code = _report(str(error))
        except Exception as error:
            # Typer's own errors; their base class is not in its interface.
            if not hasattr(error, "format_message"):
                raise
            code = _report(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def _report(message: str) -> int:
    if os.environ.get(_TRACEBACK):
        traceback.print_exc()
    console.note("error: " + " ".join(message.split()))
    return 2


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="DeepSeek models and their paged latent caches in JAX.",
    epilog=f"Set {_TRACEBACK}=1 to see where an error comes from.",
)

Checkpoint = Annotated[
    Path,
    typer.Option(
        metavar="DIR",
        help="Directory of a Hugging Face checkpoint: config.json, *.safetensors.",
        show_default=False,
    ),
]
PageSize = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per cache page.")]
Implementation = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[,NAME...]",
        help=f"Attention implementations to try in order: {', '.join(IMPLEMENTATIONS)}. "
        "Default: the best that can serve the call.",
        show_default=False,
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        console.say(f"mla-jax {doctor.installed('mla-jax') or '(not installed)'}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        console.say(context.get_help())


@app.command("demo", short_help="Compare the cache formats on a small checkpoint.")
def demo_command(
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Checkpoint to run. Default: the small one of the repository.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to generate.")
    ] = 48,
    implementation: Implementation = None,
) -> None:
    """Generate with a small checkpoint, once per cache format, and compare the formats.

    Each format continues the same prompts greedily. "same token" is how often the format chooses
    the token that the f32 cache chooses, given the same text; "logit error" is how far its logits
    are off in that comparison, the largest of a token and the median over tokens; "diverges"
    is the new token at which its own continuation leaves that of f32.
    """
    _prepare_jax()
    demo.run(checkpoint, max_new_tokens, _implementations(implementation))


@app.command("generate", short_help="Continue a prompt with a checkpoint.")
def generate_command(
    checkpoint: Checkpoint,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text to continue; needs tokenizer.json."),
    ] = None,
    prompt_ids: Annotated[
        str | None,
        typer.Option(metavar="ID,ID,...", help="Token ids to continue; the output is ids too."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to generate at most.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(min=0, metavar="T", help="0 takes the likeliest token each time.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P", help="Sample from the smallest set of tokens with this probability."
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the sampling.")] = 0,
    cache_format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help=f"Of the cache: {', '.join(FORMATS)}. Default: follows the dtype.",
            show_default=False,
        ),
    ] = None,
    implementation: Implementation = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help=f"Of weights and activations: {', '.join(generate.DTYPES)}. "
            "Default: the checkpoint's.",
            show_default=False,
        ),
    ] = None,
    page_size: PageSize = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")
    ] = False,
) -> None:
    """Continue a prompt; tokens appear as they come.

    Standard output has the new text (or the new ids) and nothing else.
    """
    request = generate.Request(
        checkpoint=checkpoint,
        prompt=prompt,
        prompt_ids=prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        cache_format=cache_format,
        implementation=_implementations(implementation),
        dtype=dtype,
        page_size=page_size,
        ignore_eos=ignore_eos,
    )
    _prepare_jax()
    generate.run(request)


@app.command("cache", short_help="Compute the memory of the KV cache.")
def cache_command(
    checkpoint: Checkpoint,
    context: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of each sequence.")
    ] = 4096,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences.")] = 1,
    page_size: PageSize = 64,
) -> None:
    """Compute the KV cache's memory in each format, against multi-head attention's.

    Only config.json is read.
    """
    memory.run(checkpoint, context, batch, page_size)


@app.command("doctor", short_help="Say what can run on this machine, and why.")
def doctor_command() -> None:
    """Say what this machine has, which implementations can run on it, and why others cannot."""
    _prepare_jax()
    doctor.run()


@app.command(
    "bench",
    short_help="Measure the kernels; needs a clone of the repository.",
    # What stands behind the name belongs to the bench.
    context_settings={"allow_interspersed_args": False},
    epilog="Benches: " + "; ".join(f"{name}, {what}" for name, what in bench.BENCHES.items()),
)
def bench_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which bench.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTIONS]...", help="Its options; --help lists them."),
    ] = None,
) -> None:
    """Run a bench, as `python -m bench.NAME` does in a clone of the repository."""
    bench.run(name, arguments or [])


def _implementations(names: str | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in IMPLEMENTATIONS:
            known = ", ".join(IMPLEMENTATIONS)
            console.fail(f"--implementation: {name!r} is none of {known}")
    return chosen


def _prepare_jax() -> None:
    """Settle the platform before JAX looks for devices.

    An installed CUDA plugin on a machine without a driver (`mla-jax[aot]` compiles there) makes JAX
    log a stack trace and go on with the CPU; this goes on with the CPU at once. Where there is a
    GPU, compiled programs are kept between runs.
    """
    has_driver = any(os.path.exists(file) for file in DRIVER_FILES)
    has_plugin = any(
        importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin")
    )
    if has_plugin and not has_driver and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    if has_driver and not jax.config.jax_compilation_cache_dir:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "mla-jax"))


def main() -> None:
    """The program `mla-jax`."""
    app()
