"""Writes a model of random weights, which a training of the small models begins with.

    python -m experiments.tasks.start tiny-recurrent runs/start                        tokens of the word problems
    python -m experiments.tasks.start tiny-mdlm runs/start --text FILE                 characters of a text
    python -m experiments.tasks.start tiny-sdar runs/start --chains --width 64 --layers 3
    --feed-forward 128

Its chat template marks what counts in rows of `experiments.tasks.curriculum`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments.common.command import run
from experiments.tasks.chains import SYMBOLS, Followers
from experiments.tasks.vocabulary import build_tokenizer, denoising_spec, token_spec
from paradec_jax import Model, store
from paradec_jax.data.text import character_spec, character_tokenizer, documents
from paradec_jax.families import PRESETS, init_params

TEMPLATE = (
    "<|bos|>{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    + ("{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}")
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to write.

    Attributes:
      preset: name of a shape, of `paradec_jax.PRESETS`.
      folder: folder of the model.
      text: file whose characters are the tokens; words of the problems by default.
      chains: whether the tokens are the symbols of chains.
      width, layers, heads, feed_forward, max_length, block: sizes in place of the preset's.
      alignment: which token a position of a model of blocks predicts, its "own" or the "next" one.
      seed: seed of the weights.
    """

    preset: tyro.conf.Positional[str]
    folder: tyro.conf.Positional[Path]
    text: Path | None = None
    chains: bool = False
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    feed_forward: int | None = None
    max_length: int | None = None
    block: int | None = None
    alignment: str = "own"
    seed: int = 0


def begun(options: Options) -> Model:
    """The model.

    Raises:
      ValueError: an unknown preset, or sizes that it has not.
    """
    if options.preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {options.preset!r}")
    config: Any = PRESETS[options.preset]
    masks = config.family in ("block_diffusion", "masked_diffusion")
    if options.text is None and not options.chains:
        tokenizer, template = build_tokenizer(mask=masks), TEMPLATE
        spec = denoising_spec(tokenizer) if masks else token_spec()
        size = max(tokenizer.vocab_size, config.vocab_size)
    else:
        known = (
            SYMBOLS[: Followers().symbols]
            if options.text is None
            else "".join(documents(options.text))
        )
        tokenizer, template = character_tokenizer(known), None
        spec, size = character_spec(tokenizer, "own" if masks else "next"), tokenizer.vocab_size
    names = ("width", "layers", "heads", "feed_forward", "max_length", "block")
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    if "heads" in changes and hasattr(config, "head_channels"):
        changes["kv_heads"] = options.heads
    try:
        config = dataclasses.replace(config, vocab_size=size, **changes)
    except TypeError:
        raise ValueError(
            f"a model of {config.family} has not all sizes {', '.join(changes)}"
        ) from None
    if config.family == "block_diffusion":
        spec = dataclasses.replace(spec, alignment=options.alignment)
    params = init_params(config, jax.random.fold_in(jax.random.key(options.seed), 0))
    return Model(config, params, spec, tokenizer, template)


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Draws a model and writes its folder."""
    store.save(options.folder, begun(options), overwrite=True)


if __name__ == "__main__":
    run(main)
