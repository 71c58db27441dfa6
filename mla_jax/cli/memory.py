"""`mla-jax cache`: what the KV cache takes."""

from pathlib import Path

from mla_jax.cli import console
from mla_jax.config import MLAConfig
from pallas_kernels.formats import FORMATS, ITEM_BYTES


def run(checkpoint: Path, context: int, batch: int, page_size: int) -> None:
    """Print the table for `batch` sequences of `context` tokens."""
    with console.input_errors():
        config = MLAConfig.from_pretrained(checkpoint)
    pages = -(-context // page_size)
    slots = pages * page_size * batch
    mha_channels = config.num_heads * (config.d_nope + config.d_rope + config.d_v)
    mha = mha_channels * ITEM_BYTES["bfloat16"]

    console.say(
        f"{checkpoint}: {config.num_layers} layers, {config.num_heads} heads, "
        f"latent {config.d_latent} + rope {config.d_rope}"
    )
    console.say(
        f"{batch} x {context} tokens in {pages * batch} pages of {page_size} ({slots} slots)"
    )
    if context > config.max_positions:
        console.say(f"The model takes at most {config.max_positions} tokens per sequence.")
    console.say()

    def row(name: str, per_token: int, slots: int) -> tuple[str, ...]:
        return (
            name,
            f"{per_token} B",
            console.human_bytes(per_token * config.num_layers),
            console.human_bytes(per_token * config.num_layers * slots),
            f"{per_token / mha:.2%}" if per_token < mha else f"{per_token / mha:.0%}",
        )

    formats = [
        row(name, f.bytes_per_token(config.d_latent, config.d_rope), slots)
        for name, f in FORMATS.items()
    ]
    console.table(
        [
            ("cache", "left"),
            ("token, one layer", "right"),
            ("token, all layers", "right"),
            ("whole cache", "right"),
            ("of MHA", "right"),
        ],
        # A cache of keys and values per head would not have to be paged.
        [*formats, row("MHA, K and V in bf16", mha, batch * context)],
    )
