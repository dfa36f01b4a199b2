"""Trains models of a text's characters: a denoiser, its autoregressive rival, and a judge of both.

    python -m experiments.masked_diffusion.train --text FILE tiny-mdlm
    python -m experiments.masked_diffusion.train --text FILE tiny-rival
    python -m experiments.masked_diffusion.train --text FILE tiny-judge

The text is any file of plain text, such as Tiny Shakespeare; its last tenth is held out. A run that was stopped, or
that its limit of minutes ended, goes on where its last checkpoint stood when the same command is given again.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments.common import precision
from experiments.common.command import run
from experiments.common.processes import by_first, claim_together, on_this
from experiments.common.runs import hooks_of, in_half, optimizer_of, over
from experiments.common.watch import Watch
from experiments.masked_diffusion.held_out import HeldOut
from paradec_jax import Model, store
from paradec_jax.config import CausalConfig, MaskedDiffusionConfig, TokenSpec
from paradec_jax.data.endless import Endless
from paradec_jax.data.text import Text, WindowMaker, character_spec, read_text
from paradec_jax.families import PRESETS, init_params
from paradec_jax.losses import masked_diffusion_loss, next_token_loss
from paradec_jax.losses.masked_diffusion import BoundRules
from paradec_jax.models import batch_flops
from paradec_jax.noise import Times
from paradec_jax.recipes.cluster import Cluster
from paradec_jax.tokenizer import Tokenizer
from paradec_jax.train import Loss, TrainState, fit, make_train_step

CHECKPOINT_EVERY, EVALUATE_EVERY = 200, 1000  # updates


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of one run.

    Attributes:
      name: of the run and its folder.
      preset: model shape, a name of `paradec_jax.PRESETS`, with the text's vocabulary.
      width, layers, heads, feed_forward: in place of the preset's where they are set; a denoiser's last one follows
        from its width.
      length: characters of a window.
      rows: windows of a batch.
      steps: updates.
      warmup: first updates, over which the learning rates rise.
      cooldown: share of the updates, the last ones, over which they fall.
      learning_rate: peak of Muon, for matrices.
      adam_learning_rate: peak of NAdam, for the other parameters.
      weight_decay: decoupled decay of matrices.
      ema_decay: decay of the averaged weights, which are the ones exported.
      floor: smallest time of a denoiser's noise. The variance of the gradient grows as `log(1 / floor)`, for a row at
        time t has few hidden characters, each with the weight 1 / t; MDLM's floor is 1e-3.
      held_out: share of the text that is held out.
      matmul_precision: `jax.default_matmul_precision` of the run; what suits the device when None.
      seed: of parameters, windows and noise.
    """

    name: str = "tiny-mdlm"
    preset: str = "tiny-mdlm"
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    feed_forward: int | None = None
    length: int = 256
    rows: int = 16
    steps: int = 5900
    warmup: int = 100
    cooldown: float = 0.4
    learning_rate: float = 8e-3
    adam_learning_rate: float = 3e-3
    weight_decay: float = 0.05
    ema_decay: float = 0.998
    floor: float = 0.02
    held_out: float = 0.1
    matmul_precision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"cooldown must be a share of the updates, from 0 to 1, not {self.cooldown}")

    def settled(self) -> "Recipe":
        """The recipe with the precision of this device where none is set, so that a run keeps its own."""
        return dataclasses.replace(self, matmul_precision=self.matmul_precision or precision.natural())


RECIPES = {
    "tiny-mdlm": Recipe(),
    # As many parameters as the denoiser, up to a twentieth.
    "tiny-rival": Recipe(name="tiny-rival", preset="tiny-causal", layers=5, steps=2000, cooldown=0.5, seed=1),
    "tiny-judge": Recipe(
        name="tiny-judge",
        preset="tiny-causal",
        width=160,
        layers=4,
        feed_forward=400,
        steps=1500,
        cooldown=0.5,
        seed=2,
    ),
}


def one_text(path: Path, tokenizer: Tokenizer | None, held_out: float) -> tuple[Text, Tokenizer]:
    """As `read_text`, of a file that is one text: windows of these recipes begin anywhere in it.

    Raises:
      SystemExit: a file of several documents.
    """
    source, tokenizer = read_text(path, tokenizer, held_out)
    count = len(source.train) + len(source.held_out)
    if count > 2:
        raise SystemExit(f"{path} holds {count} documents, but these recipes read one text: join them")
    return source, tokenizer


def shape_of(recipe: Recipe, vocabulary: int) -> MaskedDiffusionConfig | CausalConfig:
    """The preset with the recipe's sizes.

    Raises:
      SystemExit: a preset of another family, or an inner width that a denoiser has not.
    """
    config = PRESETS.get(recipe.preset)
    if not isinstance(config, MaskedDiffusionConfig | CausalConfig):
        raise SystemExit(f"preset must be a denoiser or a causal model, not {recipe.preset!r}")
    changes: dict[str, Any] = {
        name: value for name in ("width", "layers", "heads") if (value := getattr(recipe, name)) is not None
    }
    if isinstance(config, MaskedDiffusionConfig):
        if recipe.feed_forward is not None:
            raise SystemExit("feed_forward is four times a denoiser's width: leave it out")
        return dataclasses.replace(config, vocab_size=vocabulary, max_length=recipe.length, **changes)
    if recipe.feed_forward is not None:
        changes["feed_forward"] = recipe.feed_forward
    if recipe.heads is not None:
        changes["kv_heads"] = recipe.heads
    return dataclasses.replace(config, vocab_size=vocabulary, **changes)


def untrained(recipe: Recipe, tokenizer: Tokenizer) -> Model:
    """A model of random weights on a text's characters."""
    config = shape_of(recipe, tokenizer.vocab_size)
    spec = character_spec(tokenizer, "own" if isinstance(config, MaskedDiffusionConfig) else "next")
    params = init_params(config, jax.random.fold_in(jax.random.key(recipe.seed), 0))
    return Model(config, params, spec, tokenizer)


def objective(recipe: Recipe, network: Any, spec: TokenSpec) -> Loss:
    """The loss: the bound of a denoiser, the next token's cross-entropy of a causal model."""
    if spec.mask is None:
        return next_token_loss(network)
    return masked_diffusion_loss(network, spec, BoundRules(times=Times(floor=recipe.floor)))


def train(
    recipe: Recipe,
    model: Model,
    source: Text,
    folder: Path,
    minutes: float,
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
) -> TrainState:
    """The state after the training, or where its minutes were over; `options` are further ones of `hooks_of`."""
    spec = model.token_spec
    bos = None if spec.mask is not None else spec.bos
    make = WindowMaker(source.train[0], recipe.seed, recipe.rows, recipe.length, bos)
    some = HeldOut(recipe.length, 32)

    def evaluate(state: TrainState) -> Mapping[str, float]:
        return some.per_token(model, on_this(state.ema), source.held_out[0])

    optimizer, key = optimizer_of(recipe, model.config), jax.random.fold_in(jax.random.key(recipe.seed), 1)
    judged: dict[str, Any] = {"evaluate": evaluate, "evaluate_every": EVALUATE_EVERY}
    flops = batch_flops(model.network)
    return fit(
        make_train_step(objective(recipe, model.network, spec), optimizer, ema_decay=recipe.ema_decay),
        TrainState.create(dict(model.params), optimizer, key, ema=True, mesh=mesh),
        Endless(make, digest=source.digest),
        steps=recipe.steps,
        hooks=hooks_of(folder, CHECKPOINT_EVERY, flops=flops, minutes=minutes, **judged, **options),
    )


def main(
    recipe: tyro.conf.OmitSubcommandPrefixes[tyro.extras.subcommand_type_from_defaults(RECIPES)],
    text: Path,
    folder: Path | None = None,
    export: Path | None = None,
    minutes: float = 75.0,
    allow: tuple[str, ...] = (),
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = Cluster(),  # noqa: B008
    watch: tyro.conf.OmitArgPrefixes[Watch] = Watch(),  # noqa: B008
) -> None:
    """Trains a model and, when done, writes the averaged weights as a model folder and what held-out text costs.

    Args:
      recipe: the numbers of the run.
      text: a file of plain text.
      folder: where checkpoints, metrics, `held_out.json` and `model` go; `runs/NAME` by default.
      export: where a copy of the model with parameters in bfloat16 goes; none by default.
      minutes: after so many this call saves and ends; the next one goes on.
      allow: what may differ from what the run was begun with (`FOLDER/run.json`, `recipe.json`), such as "loss".
      cluster: processes and devices.
      watch: what is told beside the log.
    """
    folder = Path("runs") / recipe.name if folder is None else folder
    options = {"allow": allow, "more": watch.hooks(folder, recipe.steps)}
    mesh, recipe = cluster.join(), recipe.settled()
    source, tokenizer = one_text(text, None, recipe.held_out)
    model = untrained(recipe, tokenizer)
    go_on(recipe, model, source, folder, export, minutes, mesh=mesh, **options)


def go_on(
    recipe: Recipe,
    model: Model,
    source: Text,
    folder: Path,
    export: Path | None,
    minutes: float,
    **options: Any,
) -> bool:
    """Trains a model from where its run stood and, when done, writes it; tells whether it is done.

    Further options are those of `train`.
    """
    claim_together(folder, recipe, options.get("allow", ()))
    with jax.default_matmul_precision(recipe.matmul_precision):
        state = train(recipe, model, source, folder, minutes, **options)
        if int(state.step) < recipe.steps:
            over(minutes, int(state.step), recipe.steps)
            return False
        trained = dataclasses.replace(model, params=on_this(state.ema))
        by_first("export", lambda: finish(trained, recipe.length, source, folder, export))
    return True


def finish(model: Model, length: int, source: Text, folder: Path, export: Path | None) -> None:
    """Writes a trained model, perhaps a copy in half the size, and what held-out text costs."""
    store.save(folder / "model", model, overwrite=True)
    if export is not None:
        store.save(export, in_half(model), overwrite=True)
    found = HeldOut(length, draws=16).write(folder / "held_out.json", model, model.params, source.held_out[0])
    print(f"held out: {found['nats']:.4f} nats a character (standard error {found['nats_error']:.4f})")


if __name__ == "__main__":
    run(main)
