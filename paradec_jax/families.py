"""The only registry: what belongs to each family, so that a family is added in one place."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any, get_args

import jax.numpy as jnp
from jaxtyping import Array

from paradec_jax import decode
from paradec_jax.config import (
    BLOCK_DIFFUSION_PRESETS,
    CAUSAL_PRESETS,
    FULL_ATTENTION_PRESETS,
    MASKED_DIFFUSION_PRESETS,
    RECURRENT_PRESETS,
    BlockDiffusionConfig,
    CausalConfig,
    DraftConfig,
    FullAttentionConfig,
    MaskedDiffusionConfig,
    ModelConfig,
    RecurrentDepthConfig,
    ResidualHeadConfig,
)
from paradec_jax.decode.machine import Setting, alternatives
from paradec_jax.models import (
    DenoiserNetwork,
    DraftNetwork,
    RecurrentDepthNetwork,
    ResidualHeadNetwork,
    TransformerNetwork,
)
from paradec_jax.models.network import ModelNetwork
from paradec_jax.records import record
from paradec_jax.sharding import axes


@record
class Family:
    """One family of models.

    Attributes:
      name: on disk, on the command line, in tables.
      config: class of its shapes.
      network: class of the network as decoders and losses see it, of a config.
      presets: named shapes.
      decoders: its decoders by name, each with its own defaults; the last one is the decoder that
        its bundled models were made for.
      baseline: name of the decoder that the others are compared with.
      bundled: models that `paradec compare` puts side by side; the others are paired with the
        first.
    """

    name: str
    config: type[Any]
    network: type[ModelNetwork]
    presets: Mapping[str, Any]
    decoders: Mapping[str, decode.DecoderBase]
    baseline: str
    bundled: tuple[str, ...]

    def named(self, name: str | None = None) -> Setting | None:
        """The decoder of a name with its own defaults, None where there is none; the baseline by
        default.
        """
        name = self.baseline if name is None else name
        return Setting(name, self.decoders[name]) if name in self.decoders else None


OPTION = re.compile(r" --(no-)?([\w-]+)(?:[ =](?!--)(\S+))?")
Shape = ModelConfig | ResidualHeadConfig | DraftConfig
# Networks that stand beside a model's, by their configs.
BESIDE: dict[type, type[Any]] = {ResidualHeadConfig: ResidualHeadNetwork, DraftConfig: DraftNetwork}
EVERY_STEP = jnp.inf  # an exit threshold that every position meets

RECURRENT_DEPTH = Family(
    name="recurrent_depth",
    config=RecurrentDepthConfig,
    network=RecurrentDepthNetwork,
    presets=RECURRENT_PRESETS,
    decoders={
        "autoregressive": decode.Static(),
        "adaptive": decode.Adaptive(),
        "speculative": decode.SelfSpeculative(),
        "jacobi": decode.Jacobi(),
        "wavefront": decode.Wavefront(),
    },
    baseline="autoregressive",
    bundled=("tiny-recurrent-distilled",),
)

CAUSAL = Family(
    name="causal",
    config=CausalConfig,
    network=TransformerNetwork,
    presets=CAUSAL_PRESETS,
    decoders={
        "autoregressive": decode.AutoRegressive(),
        "prompt_lookup": decode.PromptLookup(),
        "lookahead": decode.Lookahead(),
        "drafted": decode.Drafted(),
        "multiblock": decode.Jacobi(blocks=2),
        "jacobi": decode.Jacobi(),
    },
    baseline="autoregressive",
    bundled=("tiny-causal", "tiny-jacobi"),
)

MASKED_DIFFUSION = Family(
    name="masked_diffusion",
    config=MaskedDiffusionConfig,
    network=DenoiserNetwork,
    presets=MASKED_DIFFUSION_PRESETS,
    decoders={"strided": decode.Strided(), "masked": decode.Masked()},
    baseline="masked",
    bundled=("tiny-mdlm", "tiny-mdlm-distilled"),
)

BLOCK_DIFFUSION = Family(
    name="block_diffusion",
    config=BlockDiffusionConfig,
    network=TransformerNetwork,
    presets=BLOCK_DIFFUSION_PRESETS,
    decoders={
        "residual_speculative": decode.ResidualSpeculative(),
        "residual": decode.Residual(),
        "self_verified": decode.SelfVerified(),
        "in_flight": decode.MultiBlock(),
        "block": decode.BlockDenoising(),
    },
    baseline="block",
    bundled=("tiny-sdar",),
)

FULL_ATTENTION = Family(
    name="full_attention",
    config=FullAttentionConfig,
    network=TransformerNetwork,
    presets=FULL_ATTENTION_PRESETS,
    decoders={
        "masked": decode.Masked(),
        "planned": decode.Planned(),
        "prophet": decode.Prophet(),
        "wino": decode.Wino(),
        "speculative": decode.SpeculativeDenoising(),
        "in_flight": decode.MultiBlock(),
        "semi_autoregressive": decode.SemiAutoregressive(),
    },
    baseline="semi_autoregressive",
    bundled=(),
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (RECURRENT_DEPTH, CAUSAL, MASKED_DIFFUSION, BLOCK_DIFFUSION, FULL_ATTENTION)
}
PRESETS: dict[str, ModelConfig] = {
    name: preset for family in FAMILIES.values() for name, preset in family.presets.items()
}


def family_named(name: str) -> Family:
    """The family of that name.

    Raises:
      ValueError: an unknown name.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    raise ValueError(f"family must be one of {', '.join(FAMILIES)}, not {name!r}")


def choose(
    family: str, text: str | None = None, options: Mapping[str, Any] | None = None
) -> Setting:
    """The decoder and knobs that a text names as on a command line: its own defaults, changed by
    options.

    Args:
      family: name of the family.
      text: name and options, such as "jacobi --block 8 --running"; the name of the family's
        baseline when None.
      options: further values by field, which count before those of the text.

    Raises:
      ValueError: a decoder of another family, or options that this decoder does not have.
    """
    of, words = family_named(family), [] if text is None else str(text).split() or [""]
    row = of.named(*(word.replace("-", "_") for word in words[:1]))
    if row is None:
        raise ValueError(
            f"{words[0]} does not suit a model of family {family}; it takes one of "
            f"{', '.join(of.decoders)}"
        )
    rest = "".join(f" {word}" for word in words[1:])
    if wrong := OPTION.sub("", rest):
        raise ValueError(f"{row.name} takes options such as --temperature 0.5, not{wrong}")
    kinds, given = alternatives(row.decoder.__class__) | alternatives(row.values.__class__), {}
    for no, option, word in OPTION.findall(rest):
        value: Any = word or not no
        fits = kinds.get(field := option.replace("-", "_"), (float, int, str, bool))
        for read in (float, int):
            with contextlib.suppress(ValueError):
                value = read(word) if read in fits else value
        if type(value) not in fits and value not in sum(map(get_args, fits), ()):
            raise ValueError(f"--{option} of {row.name} must not be {value!r}")
        given[field] = value
    return row.changed(given | dict(options or {}))


def family_of(config: Any) -> Family:
    """The family of a config."""
    return next(family for family in FAMILIES.values() if isinstance(config, family.config))


def _class_of(config: Shape) -> type[ModelNetwork]:
    """The class of a config's network, that of what stands beside a model too."""
    return BESIDE.get(type(config)) or family_of(config).network


def network_of(config: Shape) -> Any:
    """The network of a config, as decoders and losses see it."""
    return _class_of(config)(config)


def init_params(config: Shape, key: Array) -> dict[str, Any]:
    """Random parameters; see each model's own function for their spread."""
    return _class_of(config).init_params(config, key)


def parameter_shapes(config: Shape) -> dict[str, Any]:
    """Shapes and dtypes of the parameters, without allocating any."""
    return _class_of(config).shapes(config)


def matrix_axes(config: Shape) -> dict[str, Any]:
    """Places of the input and output axes of the matrices, by regex, as `train.muon` takes them; an
    adapter's too.
    """
    return axes.matrices({**_class_of(config).table, **axes.ADAPTER})
