"""`mla-jax bench`: hands over to the benches, which only a clone of the repository has."""

import importlib
import importlib.util
from pathlib import Path

import mla_jax
from mla_jax.cli import console

BENCHES = {
    "decode": "dense decode: correctness, then times (needs a Hopper GPU)",
    "append": "writing tokens to the cache: correctness, then times (needs a Hopper GPU)",
    "model_step": "a decode step of a whole model (needs a Hopper GPU)",
    "p_terms": "one and two e4m3 terms of the probabilities (needs a Hopper GPU)",
    "accuracy": "what each cache format costs in accuracy (no GPU needed)",
    "compile_report": "what the compiler makes of the kernels (needs no GPU)",
}


def run(name: str, arguments: list[str]) -> None:
    """Run `python -m bench.<name>` with `arguments` in this process."""
    name = name.replace("-", "_")
    if name not in BENCHES:
        console.fail(f"bench: {name!r} is none of {', '.join(BENCHES)}")
    root = Path(mla_jax.__file__).parents[1]
    spec = importlib.util.find_spec("bench")
    if spec is None or spec.origin is None or Path(spec.origin).parents[1] != root:
        console.fail(
            "the benches are not part of the installed package: clone the repository and run "
            f"`python -m bench.{name}` in it"
        )
    importlib.import_module(f"bench.{name}").app(arguments, prog_name=f"mla-jax bench {name}")
