"""Trains models of block diffusion on word problems and on a chain language.

    python -m experiments.block_diffusion.train tiny-sdar         from the weights of tiny-causal; also tiny-sdar-next
    python -m experiments.block_diffusion.train scratch
    python -m experiments.block_diffusion.train chains            also chains-next

A causal model's weights know the words, but a position of it predicts the next one. A model of alignment "next" goes
on so. One of alignment "own" has to look back one position; `look_back` puts a layer for that below the others, which
passes everything through until it has learned. A run that was stopped, or that its limit of minutes ended, goes on
where its last checkpoint stood when the same command is given again:

    FOLDER/recipe.json  FOLDER/metrics.jsonl  FOLDER/checkpoints/  FOLDER/model/  FOLDER/held_out.json
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

from experiments.block_diffusion.grounds import Chains, Ground, HeldOut, Words, batches_of
from experiments.common import precision
from experiments.common.command import run
from experiments.common.processes import by_first, claim_together, on_this
from experiments.common.runs import hooks_of, in_half, optimizer_of, over
from experiments.common.watch import Watch
from experiments.tasks.batches import Mixture
from experiments.tasks.chains import Followers
from paradec_jax import Model, load, store
from paradec_jax.config import BLOCK_DIFFUSION_PRESETS, BlockDiffusionConfig
from paradec_jax.families import init_params, parameter_shapes
from paradec_jax.losses import BlockRules, block_diffusion_loss
from paradec_jax.models import batch_flops
from paradec_jax.noise import BlockNoise
from paradec_jax.recipes.cluster import Cluster
from paradec_jax.train import TrainState, fit, make_train_step

CHECKPOINT_EVERY, EVALUATE_EVERY = 200, 500  # updates


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of one run.

    Attributes:
      name: of the run and its folder.
      ground: "words" or "chains".
      preset: model shape, a name of `BLOCK_DIFFUSION_PRESETS`.
      width, layers, heads, feed_forward: in place of the preset's where they are set.
      init: a model folder or the name of a bundled model whose weights the run starts from; random ones when None.
      look_back: whether one layer more lies below those of `init`, which adds nothing at first.
      alignment: which token a position predicts, its "own" or the "next" one.
      blocks: lengths of blocks that rows are trained with; the first one is the model's, and it serves all.
      noise: what draws a level of noise, "sample" or "block", or "count" for exact counts of each block.
      packed: length of rows that several word problems share; rows of one when None.
      mixture: from which update on, and how often, each of `grounds.BUCKETS` is drawn.
      law: of the chain's texts.
      prompt: symbols of a text that are given.
      batch_tokens: positions of a batch, padding included.
      steps: updates.
      warmup: first updates, over which the learning rates rise.
      cooldown: share of the updates, the last ones, over which they fall.
      learning_rate: peak of Muon, for matrices.
      adam_learning_rate: peak of NAdam, for the other parameters.
      weight_decay: decoupled decay of matrices.
      ema_decay: decay of the averaged weights, which are the ones exported.
      matmul_precision: `jax.default_matmul_precision` of the run; what suits the device when None.
      seed: of parameters, data and noise.
    """

    name: str = "tiny-sdar"
    ground: Literal["words", "chains"] = "words"
    preset: str = "tiny-sdar"
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    feed_forward: int | None = None
    init: str | None = "tiny-causal"
    look_back: bool = False
    alignment: Literal["own", "next"] = "own"
    blocks: tuple[int, ...] = (8,)
    noise: Literal["sample", "block", "count"] = "sample"
    packed: int | None = None
    mixture: Mixture = Words().mixture
    law: Followers = Followers()  # noqa: RUF009
    prompt: int = 8
    batch_tokens: int = 2048
    steps: int = 3000
    warmup: int = 100
    cooldown: float = 0.5
    learning_rate: float = 5e-3
    adam_learning_rate: float = 2e-3
    weight_decay: float = 0.05
    ema_decay: float = 0.998
    matmul_precision: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.preset not in BLOCK_DIFFUSION_PRESETS:
            raise ValueError(
                f"preset must be one of {', '.join(BLOCK_DIFFUSION_PRESETS)}, not {self.preset!r}"
            )
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"cooldown must be a share of the updates, from 0 to 1, not {self.cooldown}")
        if self.look_back and self.init is None:
            raise ValueError("look_back puts a layer below those of a trained model: name one with init")
        BlockRules(blocks=self.blocks)

    def settled(self) -> "Recipe":
        """The recipe with the precision of this device where none is set, so that a run keeps its own."""
        return dataclasses.replace(self, matmul_precision=self.matmul_precision or precision.natural())

    def source(self) -> Ground:
        """Where the run's text comes from."""
        if self.ground == "chains":
            return Chains(self.law, self.prompt)
        return Words(self.mixture, self.packed)


# Problems of two steps first, then practice, then problems of all lengths.
_FROM_NOTHING: Mixture = (
    (0, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
    (500, (0.15, 0.2, 0.1, 0.05, 0.2, 0.3, 0.0)),
    (2700, (0.25, 0.4, 0.15, 0.1, 0.05, 0.05, 0.0)),
)
_CHAINS: dict[str, Any] = {
    "ground": "chains",
    "init": None,
    "width": 64,
    "layers": 3,
    "feed_forward": 128,
    "batch_tokens": 4096,
    "steps": 800,
    "warmup": 50,
    "weight_decay": 0.01,
}
RECIPES = {
    "tiny-sdar": Recipe(look_back=True),
    "tiny-sdar-next": Recipe(name="tiny-sdar-next", alignment="next"),
    "without-look-back": Recipe(name="without-look-back"),
    "scratch": Recipe(
        name="scratch",
        init=None,
        steps=5000,
        learning_rate=8e-3,
        adam_learning_rate=3e-3,
        mixture=_FROM_NOTHING,
    ),
    "packed": Recipe(name="packed", alignment="next", packed=512),
    "block-noise": Recipe(name="block-noise", alignment="next", noise="block"),
    "count-noise": Recipe(name="count-noise", alignment="next", noise="count"),
    "lengths": Recipe(name="lengths", alignment="next", blocks=(8, 4, 16)),
    "chains": Recipe(name="chains", **_CHAINS),
    "chains-next": Recipe(name="chains-next", alignment="next", **_CHAINS),
    "chains-block-noise": Recipe(name="chains-block-noise", noise="block", **_CHAINS),
    "chains-count-noise": Recipe(name="chains-count-noise", noise="count", **_CHAINS),
    "chains-lengths": Recipe(name="chains-lengths", blocks=(8, 4, 16), **_CHAINS),
}


def shape_of(recipe: Recipe, ground: Ground) -> BlockDiffusionConfig:
    """The preset with the recipe's sizes and the ground's vocabulary."""
    config = BLOCK_DIFFUSION_PRESETS[recipe.preset]
    sizes = ("width", "layers", "heads", "feed_forward")
    changes: dict[str, Any] = {name: value for name in sizes if (value := getattr(recipe, name)) is not None}
    if recipe.heads is not None:
        changes["kv_heads"] = recipe.heads
    changes["layers"] = changes.get("layers", config.layers) + recipe.look_back
    vocabulary = ground.vocabulary(config.vocab_size)
    lengths = tuple(sorted(set(recipe.blocks)))
    changes |= {"block": recipe.blocks[0], "blocks": lengths if len(lengths) > 1 else None}
    return dataclasses.replace(config, vocab_size=vocabulary, **changes)


def untrained(recipe: Recipe, ground: Ground) -> Model:
    """The model that a run begins with.

    Raises:
      SystemExit: a model to start from that has another shape or other tokens.
    """
    config, tokenizer = shape_of(recipe, ground), ground.tokenizer()
    params = init_params(config, jax.random.fold_in(jax.random.key(recipe.seed), 0))
    if recipe.init is not None:
        start = load(recipe.init, dtype="float32")
        wanted = parameter_shapes(dataclasses.replace(config, layers=config.layers - recipe.look_back))
        if _shapes(start.params) != _shapes(wanted):
            raise SystemExit(f"{recipe.init} has not the shape of {recipe.name}: {start.config}")
        text = ground.text()
        if start.tokenizer is None or start.tokenizer.encode(text) != tokenizer.encode(text):
            raise SystemExit(f"{recipe.init} has other tokens than {recipe.ground}")
        params = above(start.params, params["layer_0"]) if recipe.look_back else dict(start.params)
    return Model(config, params, ground.spec(recipe.alignment), tokenizer)


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


def above(params: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with `layer` below their layers; its branches add zero, so that it passes everything through."""
    moved = {}
    for name, tree in params.items():
        part, _, number = name.partition("layer_")
        moved[name if part else f"layer_{int(number) + 1}"] = tree
    attention, mlp = dict(layer["attention"]), dict(layer["mlp"])
    attention["out"], mlp["down"] = jnp.zeros_like(attention["out"]), jnp.zeros_like(mlp["down"])
    return moved | {"layer_0": dict(layer) | {"attention": attention, "mlp": mlp}}


def train(
    recipe: Recipe,
    model: Model,
    ground: Ground,
    folder: Path,
    minutes: float,
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
) -> TrainState:
    """The state after the training, or where its minutes were over; `options` are further ones of `hooks_of`."""
    rules = BlockRules(BlockNoise(recipe.noise), recipe.blocks)
    judge = HeldOut(ground, recipe.blocks[0], batches=2).of(model)

    def evaluate(state: TrainState) -> Mapping[str, float]:
        return judge(on_this(state.ema))

    loss = block_diffusion_loss(model.network, model.token_spec, rules)
    optimizer, key = optimizer_of(recipe, model.config), jax.random.fold_in(jax.random.key(recipe.seed), 1)
    judged: dict[str, Any] = {"evaluate": evaluate, "evaluate_every": EVALUATE_EVERY}
    flops = batch_flops(model.network)
    return fit(
        make_train_step(loss, optimizer, ema_decay=recipe.ema_decay),
        TrainState.create(dict(model.params), optimizer, key, ema=True, mesh=mesh),
        batches_of(ground, recipe.seed, recipe.batch_tokens, math.lcm(*recipe.blocks)),
        steps=recipe.steps,
        hooks=hooks_of(folder, CHECKPOINT_EVERY, flops=flops, minutes=minutes, **judged, **options),
    )


def main(
    recipe: tyro.conf.OmitSubcommandPrefixes[tyro.extras.subcommand_type_from_defaults(RECIPES)],
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
    ground = recipe.source()
    model = untrained(recipe, ground)
    claim_together(folder, recipe, allow)
    with jax.default_matmul_precision(recipe.matmul_precision):
        state = train(recipe, model, ground, folder, minutes, mesh=mesh, **options)
        if int(state.step) < recipe.steps:
            over(minutes, int(state.step), recipe.steps)
            return
        trained = dataclasses.replace(model, params=on_this(state.ema))
        judge = HeldOut(ground, recipe.blocks[0])
        by_first("export", lambda: finish(trained, judge, folder, export))


def finish(model: Model, judge: HeldOut, folder: Path, export: Path | None) -> None:
    """Writes a trained model, perhaps a copy in half the size, and what held-out text costs."""
    store.save(folder / "model", model, overwrite=True)
    if export is not None:
        store.save(export, in_half(model), overwrite=True)
    found = judge.write(folder / "held_out.json", model)
    least = "" if found["floor"] is None else f", at least {found['floor']:.4f} for any model"
    print(f"held out: {found['nats']:.4f} nats a token{least}")


if __name__ == "__main__":
    run(main)
