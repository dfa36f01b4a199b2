"""Trains a residual head (MRP) beside a frozen backbone of block diffusion.

    python -m experiments.block_diffusion.train_head tiny-head --start runs/tiny-sdar/model
    python -m experiments.block_diffusion.train_head chains-head --start runs/chains/model

Judge a head by `eval/kl_ratio`: its divergence from the backbone on held-out text over that of a head that adds
nothing, in all and (`eval/kl_ratio_1`, ..) after each step. A run that was stopped, or that its limit of minutes
ended, goes on where its last checkpoint stood when the same command is given again:

    FOLDER/recipe.json  FOLDER/metrics.jsonl  FOLDER/checkpoints/  FOLDER/model/  FOLDER/held_out.json

FOLDER/model holds the backbone and its head.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from experiments.block_diffusion.grounds import Chains, Ground, Words, batches_of
from experiments.block_diffusion.head_flops import head_flops
from experiments.block_diffusion.inherited import inherited
from experiments.common import precision
from experiments.common.command import run
from experiments.common.processes import by_first, claim_together, on_this
from experiments.common.runs import hooks_of, in_half, optimizer_of, over
from experiments.common.watch import Watch
from experiments.tasks.batches import Mixture
from experiments.tasks.chains import Followers
from paradec_jax import Model, load, store
from paradec_jax.config import ResidualHeadConfig
from paradec_jax.io import atomic_write_text
from paradec_jax.losses import ResidualRules, residual_loss
from paradec_jax.losses.block_diffusion import lengths_of
from paradec_jax.losses.residual import Unrolling
from paradec_jax.models import ResidualHeadNetwork
from paradec_jax.models.residual_head import init_params
from paradec_jax.noise import BlockNoise
from paradec_jax.recipes.cluster import Cluster
from paradec_jax.train import TrainState, fit, make_train_step

CHECKPOINT_EVERY, EVALUATE_EVERY = 200, 250  # updates
JUDGED = ("kl", "uncorrected_kl", "agreement", "uncorrected_agreement")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of one run.

    Attributes:
      name: of the run and its folder.
      backbone: fingerprint of the backbone; the one that the run begins with when None.
      ground: "words" or "chains"; what the backbone was trained on.
      packed, mixture, law, prompt: of the ground, see `train`.
      layers: of the head.
      init: how its parameters begin, see `models.residual_head.init_params` and `inherited`.
      unroll, normaliser, objective, direct, layout, reveals, tokens, blocks: of the objective, see `ResidualRules`.
      noise: what draws a level of noise, "sample" or "block", or "count" for exact counts of each block.
      batch_tokens: positions of a batch, padding included.
      steps: updates.
      optimizer: "adamw" on a cosine to a tenth of `learning_rate`, as the released heads were trained, or "muon".
      warmup: first updates, over which the learning rates rise.
      cooldown: share of the updates, the last ones, over which Muon's rates fall.
      learning_rate: peak, of matrices with Muon.
      adam_learning_rate: peak of NAdam, for the other parameters with Muon.
      weight_decay: decoupled decay, of matrices with Muon.
      ema_decay: decay of the averaged weights, which are the ones exported.
      matmul_precision: `jax.default_matmul_precision` of the run; what suits the device when None.
      seed: of parameters, data, noise and reveals.
    """

    name: str = "tiny-head"
    backbone: str | None = None
    ground: Literal["words", "chains"] = "words"
    packed: int | None = None
    mixture: Mixture = Words().mixture
    law: Followers = Followers()  # noqa: RUF009
    prompt: int = 8
    layers: int = 3
    init: Literal["zero_gain", "normal_0.2", "ordinary", "inherited"] = "zero_gain"
    unroll: int = 2
    normaliser: Literal["selfnorm", "official", "mean"] = "selfnorm"
    objective: Literal["kl", "cross_entropy", "mse"] = "kl"
    direct: bool = False
    layout: Literal["doubled", "infer_matched"] = "doubled"
    reveals: tuple[int, ...] = (1,)
    tokens: Literal["truth", "own"] = "truth"
    blocks: tuple[int, ...] | None = None
    noise: Literal["sample", "block", "count"] = "sample"
    batch_tokens: int = 2048
    steps: int = 3000
    optimizer: Literal["adamw", "muon"] = "adamw"
    warmup: int = 90
    cooldown: float = 0.5
    learning_rate: float = 3e-3
    adam_learning_rate: float = 2e-3
    weight_decay: float = 0.0
    ema_decay: float = 0.998
    matmul_precision: str | None = None
    seed: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"warmup must be from 0 to below steps {self.steps}, not {self.warmup}")
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"cooldown must be a share of the updates, from 0 to 1, not {self.cooldown}")
        self.rules()

    def settled(self, backbone: str) -> "Recipe":
        """The recipe with its backbone, and the precision of this device where none is set.

        Raises:
          SystemExit: another backbone than the recipe's.
        """
        if self.backbone not in (None, backbone):
            raise SystemExit(f"{self.name} is for the backbone {self.backbone}, not {backbone}")
        chosen = self.matmul_precision or precision.natural()
        return dataclasses.replace(self, backbone=backbone, matmul_precision=chosen)

    def source(self) -> Ground:
        """Where the run's text comes from."""
        return Chains(self.law, self.prompt) if self.ground == "chains" else Words(self.mixture, self.packed)

    def rules(self) -> ResidualRules:
        """The choices of the objective."""
        names = "unroll normaliser objective direct layout reveals tokens blocks"
        return ResidualRules(
            noise=BlockNoise(self.noise), **{name: getattr(self, name) for name in names.split()}
        )


_CHAINS: dict[str, Any] = {"ground": "chains", "batch_tokens": 4096, "steps": 800, "warmup": 25}
# What the studies put side by side on both grounds: ways to begin, steps, direct modelling, depth, what is revealed,
# the objective, the noise.
VARIANTS: dict[str, dict[str, Any]] = {
    "init-released": {"init": "normal_0.2"},
    "init-ordinary": {"init": "ordinary"},
    "init-inherited": {"init": "inherited"},
    **{f"unroll-{k}": {"unroll": k} for k in (1, 3, 4)},
    **{f"direct-{k}": {"unroll": k, "direct": True} for k in (1, 2, 3, 4)},
    **{f"depth-{n}": {"layers": n} for n in (1, 2, 5, 8)},
    "official": {"normaliser": "official"},
    "mean": {"normaliser": "mean"},
    "infer-matched": {"layout": "infer_matched"},
    "own-tokens": {"tokens": "own"},
    "counts": {"reveals": (1, 2, 3, 4)},
    "cross-entropy": {"objective": "cross_entropy"},
    "mse": {"objective": "mse"},
    "mse-inherited": {"objective": "mse", "init": "inherited"},
    "noise-block": {"noise": "block"},
    "noise-count": {"noise": "count"},
    "muon": {"optimizer": "muon", "learning_rate": 5e-3, "weight_decay": 0.05},
}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(),
        Recipe(name="chains-head", **_CHAINS),
        *(dataclasses.replace(Recipe(), name=name, **changes) for name, changes in VARIANTS.items()),
        *(Recipe(name=f"chains-{name}", **{**_CHAINS, **changes}) for name, changes in VARIANTS.items()),
    )
}


def backbone_of(start: str, ground: Ground) -> Model:
    """The model of a folder.

    Raises:
      SystemExit: a model that fills no masks, or with other tokens than the ground's.
    """
    model = load(start, dtype="float32")
    if model.family != "block_diffusion" or model.token_spec.mask is None:
        raise SystemExit(
            f"{start} is of family {model.family}; a residual head needs a backbone of block diffusion"
        )
    text, tokenizer = ground.text(), ground.tokenizer()
    if model.tokenizer is None or model.tokenizer.encode(text) != tokenizer.encode(text):
        raise SystemExit(f"{start} has other tokens than the ground that its head is to be trained on")
    return model


def adamw_of(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, on a cosine that ends at a tenth of its peak."""
    peak = recipe.learning_rate
    rate = optax.warmup_cosine_decay_schedule(
        peak / (recipe.warmup + 1), peak, recipe.warmup, recipe.steps, end_value=peak / 10
    )
    adamw = optax.adamw(rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=recipe.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@dataclasses.dataclass(frozen=True, eq=False)
class Judge:
    """How far a head's corrected scores are from those of its backbone, on held-out text.

    Attributes:
      model: the backbone.
      head: the head's network.
      rules: the objective, whose steps are judged.
      ground: where the text comes from.
      batch_tokens: positions of a batch.
      batches: how many.
    """

    model: Model
    head: ResidualHeadNetwork
    rules: ResidualRules
    ground: Ground
    batch_tokens: int = 4096
    batches: int = 2

    def of(self) -> Callable[[Any], dict[str, float]]:
        """Means over judged positions, of all steps and of each one, as a function of the head's parameters."""
        unrolling = Unrolling(self.model.network, self.head, self.model.token_spec, self.rules, 32)
        lengths = lengths_of(self.model.network, self.rules.blocks)
        made = self.ground.held_out(self.batch_tokens, math.lcm(*lengths))
        kept = [made(i) for i in range(self.batches)]
        keys = jax.random.split(jax.random.key(0), self.batches)

        def judge(params: Any) -> dict[str, float]:
            parts = [
                sums(unrolling, params, self.model.params, b, key) for b, key in zip(kept, keys, strict=True)
            ]
            total = {
                name: np.sum([np.asarray(p[name], np.float64) for p in parts], axis=0) for name in parts[0]
            }
            count = max(total["judged"].sum(), 1)
            told = {name: float(total[name].sum() / count) for name in JUDGED}
            ratios = total["kl"] / np.maximum(total["uncorrected_kl"], 1e-9)
            told["kl_ratio"] = told["kl"] / max(told["uncorrected_kl"], 1e-9)
            return told | {f"kl_ratio_{k}": float(ratio) for k, ratio in enumerate(ratios, start=1)}

        return judge

    def write(self, path: Path, params: Any) -> dict[str, Any]:
        """Writes what is found, and how, to a JSON file, and returns it."""
        told: dict[str, Any] = {
            **self.of()(params),
            "rules": dataclasses.asdict(self.rules),
            "positions": self.batch_tokens * self.batches,
            "matmul_precision": getattr(jax.config, "jax_default_matmul_precision", None),
        }
        atomic_write_text(path, json.dumps(told, indent=2) + "\n")
        return told


@functools.partial(jax.jit, static_argnums=0)
def sums(unrolling: Unrolling, params: Any, frozen: Any, batch: Any, key: jax.Array) -> dict[str, jax.Array]:
    """What is judged, summed over the positions of each step, and how many positions these are."""
    of_texts, of_reveals = jax.random.split(key)
    texts = unrolling.texts(batch, of_texts)
    steps = unrolling.unroll(params, frozen, texts, unrolling.reveals(texts, of_reveals))
    _, found = unrolling.judge(frozen, texts, steps)
    found["judged"] = jnp.ones_like(found["kl"])
    return {name: jnp.sum(jnp.where(steps.still, value, 0), axis=(1, 2)) for name, value in found.items()}


def train(
    recipe: Recipe,
    model: Model,
    head: ResidualHeadNetwork,
    folder: Path,
    minutes: float,
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
) -> TrainState:
    """The state after the training, or where its minutes were over; `options` are further ones of `hooks_of`."""
    ground, key = recipe.source(), jax.random.key(recipe.seed)
    judge = Judge(model, head, recipe.rules(), ground).of()

    def evaluate(state: TrainState) -> Mapping[str, float]:
        return judge(on_this(state.ema))

    loss = residual_loss(model.network, head, model.token_spec, recipe.rules())
    of_head = jax.random.fold_in(key, 0)
    if recipe.init == "inherited":
        params = inherited(head.config, of_head, model.params)
    else:
        params = init_params(head.config, of_head, recipe.init)
    optimizer = adamw_of(recipe) if recipe.optimizer == "adamw" else optimizer_of(recipe, head.config)
    judged: dict[str, Any] = {"evaluate": evaluate, "evaluate_every": EVALUATE_EVERY}
    flops = head_flops(model.network, head, recipe.unroll, recipe.layout)
    return fit(
        make_train_step(loss, optimizer, frozen=dict(model.params), ema_decay=recipe.ema_decay),
        TrainState.create(params, optimizer, jax.random.fold_in(key, 1), ema=True, mesh=mesh),
        batches_of(ground, recipe.seed, recipe.batch_tokens, math.lcm(*(recipe.blocks or (head.block,)))),
        steps=recipe.steps,
        hooks=hooks_of(folder, CHECKPOINT_EVERY, flops=flops, minutes=minutes, **judged, **options),
    )


def with_head(model: Model, head: ResidualHeadNetwork, params: Any) -> Model:
    """The backbone and its head."""
    return dataclasses.replace(model, head=store.ResidualHead(head.config, params))


def halved(model: Model) -> Model:
    """Both in bfloat16, whose files are half as large."""
    assert model.head is not None
    config = dataclasses.replace(model.head.config, param_dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), dict(model.head.params))
    return dataclasses.replace(in_half(model), head=store.ResidualHead(config, params))


def main(
    recipe: tyro.conf.OmitSubcommandPrefixes[tyro.extras.subcommand_type_from_defaults(RECIPES)],
    start: str = "runs/tiny-sdar/model",
    folder: Path | None = None,
    export: Path | None = None,
    minutes: float = 75.0,
    allow: tuple[str, ...] = (),
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = Cluster(),  # noqa: B008
    watch: tyro.conf.OmitArgPrefixes[Watch] = Watch(),  # noqa: B008
) -> None:
    """Trains a head and, when done, writes its averaged weights beside the backbone, and how far it is from it.

    Args:
      recipe: the numbers of the run.
      start: model folder, or name of a bundled model, of the backbone; a head in it is left out.
      folder: where checkpoints, metrics, `held_out.json` and `model` go; `runs/NAME` by default.
      export: where a copy of backbone and head with parameters in bfloat16 goes; none by default.
      minutes: after so many this call saves and ends; the next one goes on.
      allow: what may differ from what the run was begun with (`FOLDER/run.json`, `recipe.json`), such as "loss".
      cluster: processes and devices.
      watch: what is told beside the log.
    """
    folder = Path("runs") / recipe.name if folder is None else folder
    options = {"allow": allow, "more": watch.hooks(folder, recipe.steps)}
    mesh = cluster.join()
    ground = recipe.source()
    model = backbone_of(start, ground)
    recipe = recipe.settled(store.fingerprint(start))
    head = ResidualHeadNetwork(ResidualHeadConfig.of(model.config, recipe.layers))
    claim_together(folder, recipe, allow)
    with jax.default_matmul_precision(recipe.matmul_precision):
        state = train(recipe, model, head, folder, minutes, mesh=mesh, **options)
        if int(state.step) < recipe.steps:
            over(minutes, int(state.step), recipe.steps)
            return
        whole = with_head(model, head, on_this(state.ema))
        judge = Judge(model, head, recipe.rules(), ground, batches=8)
        by_first("export", lambda: finish(whole, judge, folder, export))


def finish(whole: Model, judge: Judge, folder: Path, export: Path | None) -> None:
    """Writes a backbone and its trained head, perhaps a copy in half the size, and how far the head is from it."""
    assert whole.head is not None
    store.save(folder / "model", whole, overwrite=True)
    if export is not None:
        store.save(export, halved(whole), overwrite=True)
    found = judge.write(folder / "held_out.json", whole.head.params)
    print(
        f"held out: {found['kl']:.4f} nats from the backbone, {found['kl_ratio']:.3f} of what no head leaves"
    )


if __name__ == "__main__":
    run(main)
