"""The only registry: what belongs to each family of models, so that a family is added in one place."""

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, get_args

import jax.numpy as jnp
from jaxtyping import Array

from paradec_jax import decode
from paradec_jax.config import (
    BLOCK_DIFFUSION_PRESETS,
    CAUSAL_PRESETS,
    MASKED_DIFFUSION_PRESETS,
    RECURRENT_PRESETS,
    BlockDiffusionConfig,
    CausalConfig,
    MaskedDiffusionConfig,
    ModelConfig,
    RecurrentDepthConfig,
    ResidualHeadConfig,
)
from paradec_jax.decode.machine.knobs import alternatives
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.models import (
    DenoiserNetwork,
    RecurrentDepthNetwork,
    ResidualHeadNetwork,
    TransformerNetwork,
)
from paradec_jax.models.network import ModelNetwork
from paradec_jax.sharding import axes


@dataclasses.dataclass(frozen=True, eq=False)
class TextTable:
    """How a family is compared by the texts that it draws, instead of by answers.

    Attributes:
      settings: rows of each of its models, in the place of `Family.settings`, which then hold
        defaults alone.
      tempered: further rows of the first model alone.
      rival: how a model of another family, which predicts the next token, draws texts beside them.
      judge: bundled model that judges the texts.
      rivals: models of another family, drawn where they lie beside the package; a checkout has
        them.
    """

    settings: tuple[Setting, ...]
    tempered: tuple[Setting, ...]
    rival: Setting
    judge: str
    rivals: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """One family of models.

    Attributes:
      name: on disk, on the command line, in tables.
      config: class of its shapes.
      network: class of the network as decoders and losses see it, of a config.
      presets: named shapes.
      settings: rows of the table of `paradec compare`, which suit the bundled models.
      bundled: models that `paradec compare` puts side by side; the others are paired with the
        first.
      texts: how it is compared where its models draw texts and answer nothing; None for answers.
    """

    name: str
    config: type[Any]
    network: type[ModelNetwork]
    presets: Mapping[str, Any]
    settings: tuple[Setting, ...]
    bundled: tuple[str, ...]
    texts: TextTable | None = None

    def named(self, name: str | None = None) -> Setting | None:
        """The decoder of a row's name with its own defaults, None where no row has it; the
        baseline's by default.
        """
        for row in self.settings:
            if row.baseline if name is None else row.name == name:
                return Setting(row.name, type(row.decoder)(**MEANT.get(row.name, {})))
        return None


MEANT = {"multiblock": {"blocks": 2}}  # by a name, beyond its class
OPTION = re.compile(r" --(no-)?([\w-]+)(?:[ =](?!--)(\S+))?")
Shape = ModelConfig | ResidualHeadConfig
EVERY_STEP = jnp.inf  # an exit threshold that every position meets

_Wave = decode.Wavefront.Knobs

RECURRENT_DEPTH = Family(
    name="recurrent_depth",
    config=RecurrentDepthConfig,
    network=RecurrentDepthNetwork,
    presets=RECURRENT_PRESETS,
    settings=(
        Setting("autoregressive", decode.Static(recurrence=1)),
        Setting("autoregressive", decode.Static(recurrence=2)),
        Setting("autoregressive", decode.Static(recurrence=4)),
        Setting("autoregressive", decode.Static(recurrence=16), baseline=True),
        Setting("adaptive", decode.Adaptive(), decode.Adaptive.Knobs(exit_threshold=0.2)),
        Setting(
            "speculative", decode.SelfSpeculative(recurrence=4, draft_recurrence=1, lookahead=4)
        ),
        Setting("jacobi", decode.Jacobi(block=8, recurrence=1)),
        Setting("jacobi", decode.Jacobi(block=8, running=True, recurrence=1)),
        Setting(
            "wavefront",
            decode.Wavefront(inner_recurrence=16, window=1),
            _Wave(exit_threshold=EVERY_STEP, momentum=0.0),
        ),
        Setting(
            "wavefront",
            decode.Wavefront(
                inner_recurrence=1, window=8, headway=8, warm_start=False, prefill_recurrence=1
            ),
            _Wave(exit_threshold=EVERY_STEP, momentum=0.0),
        ),
        Setting(
            "wavefront",
            decode.Wavefront(inner_recurrence=1, window=2, prefill_recurrence=4),
            _Wave(exit_threshold=0.4, momentum=0.0),
        ),
        Setting(
            "wavefront",
            decode.Wavefront(inner_recurrence=1, window=3, prefill_recurrence=4),
            _Wave(exit_threshold=0.1, momentum=0.0),
        ),
    ),
    bundled=("tiny-recurrent-distilled",),
)

CAUSAL = Family(
    name="causal",
    config=CausalConfig,
    network=TransformerNetwork,
    presets=CAUSAL_PRESETS,
    settings=(
        Setting("autoregressive", decode.AutoRegressive(), baseline=True),
        Setting("prompt_lookup", decode.PromptLookup()),
        Setting("lookahead", decode.Lookahead()),
        Setting("jacobi", decode.Jacobi(block=16)),
        Setting("jacobi", decode.Jacobi(block=16, pool=4)),
        Setting(
            "multiblock", decode.Jacobi(block=16, blocks=2, pool=4), decode.Jacobi.Knobs(spawn=0.5)
        ),
        Setting(
            "multiblock",
            decode.Jacobi(block=16, blocks=2, candidates=4),
            decode.Jacobi.Knobs(spawn=0.0),
        ),
        Setting("jacobi", decode.Jacobi(block=8, running=True)),
        Setting("jacobi", decode.Jacobi(block=16, running=True)),
        Setting("jacobi", decode.Jacobi(block=16, running=True, candidates=2)),
    ),
    bundled=("tiny-causal", "tiny-jacobi"),
)

MASKED_DIFFUSION = Family(
    name="masked_diffusion",
    config=MaskedDiffusionConfig,
    network=DenoiserNetwork,
    presets=MASKED_DIFFUSION_PRESETS,
    settings=(
        Setting("strided", decode.Strided(), decode.Strided.Knobs(steps=64)),
        Setting("masked", decode.Masked(), decode.Masked.Knobs(steps=64), baseline=True),
    ),
    bundled=("tiny-mdlm", "tiny-mdlm-distilled"),
    texts=TextTable(
        settings=tuple(
            Setting("masked", decode.Masked(), decode.Masked.Knobs(steps=steps))
            for steps in (4, 8, 16, 32, 64, 128)
        ),
        tempered=tuple(
            Setting(
                "masked", decode.Masked(), decode.Masked.Knobs(steps=steps, temperature=temperature)
            )
            for steps in (8, 16)
            for temperature in (0.9, 0.8)
        ),
        rival=Setting(
            "autoregressive", decode.AutoRegressive(), decode.AutoRegressive.Knobs(temperature=1.0)
        ),
        judge="tiny-judge",
        rivals=("tiny-rival",),
    ),
)

BLOCK_DIFFUSION = Family(
    name="block_diffusion",
    config=BlockDiffusionConfig,
    network=TransformerNetwork,
    presets=BLOCK_DIFFUSION_PRESETS,
    settings=(
        Setting("block", decode.BlockDenoising(rule="static"), baseline=True),
        Setting("block", decode.BlockDenoising(rule="static", fuse_store=False, fuse_prompt=False)),
        Setting(
            "block", decode.BlockDenoising(rule="static"), decode.BlockDenoising.Knobs(steps=4)
        ),
        Setting("block", decode.BlockDenoising(rule="entropy")),
        Setting("block", decode.BlockDenoising(rule="factor")),
        Setting("block", decode.BlockDenoising(rule="threshold")),
        *(
            Setting(name, dataclasses.replace(decoder, head=head))
            for name, decoder in (
                ("residual_speculative", decode.ResidualSpeculative(rule="static")),
                ("residual_speculative", decode.ResidualSpeculative()),
                ("residual", decode.Residual(rule="static")),
                ("residual", decode.Residual()),
            )
            for head in ("zero", None)
        ),
        Setting("block", decode.BlockDenoising()),
    ),
    bundled=("tiny-sdar",),
)

FAMILIES: dict[str, Family] = {
    family.name: family for family in (RECURRENT_DEPTH, CAUSAL, MASKED_DIFFUSION, BLOCK_DIFFUSION)
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
        known = ", ".join(dict.fromkeys(setting.name for setting in of.settings))
        raise ValueError(
            f"{words[0]} does not suit a model of family {family}; it takes one of {known}"
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


def family_of(config: ModelConfig) -> Family:
    """The family of a config."""
    return next(family for family in FAMILIES.values() if isinstance(config, family.config))


def _class_of(config: Shape) -> type[ModelNetwork]:
    """The class of a config's network, a residual head's too."""
    return (
        ResidualHeadNetwork if isinstance(config, ResidualHeadConfig) else family_of(config).network
    )


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
    table = {**_class_of(config).table, **axes.ADAPTER}
    return {
        pattern: (tuple(map(of.names.index, of.inputs)), tuple(map(of.names.index, of.outputs)))
        for pattern, of in table.items()
        if of.inputs
    }
