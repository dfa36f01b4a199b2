"""Self-distillation through time, all rounds: `python -m experiments.masked_diffusion.distill --text FILE halves`.

Each round trains a student to do in one step what its teacher does in two, and makes it the next teacher. The first
teacher stands for 64 steps, so after five rounds the student aims at two. A run that was stopped, or that its limit
of minutes ended, goes on where its last checkpoint stood, to the same weights, when the same command is given again:

    FOLDER/recipe.json  FOLDER/checkpoints/  FOLDER/metrics.jsonl  FOLDER/round-0/model/  FOLDER/round-1/model/  ...

The loss hardly falls within a round, for most of it is the variance of targets that are drawn anew each time: judge a
round by the samples of its model.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
import tyro

from experiments.common import precision
from experiments.common.command import run
from experiments.common.processes import by_first, claim_together, on_this
from experiments.common.runs import hooks_of, in_half, over
from experiments.common.watch import Watch
from experiments.masked_diffusion.held_out import HeldOut
from paradec_jax import Model, TokenSpec, load, store
from paradec_jax.data.endless import Endless
from paradec_jax.data.text import Text, WindowMaker, read_text
from paradec_jax.losses.self_distillation import DistillationRules, self_distillation_loss
from paradec_jax.models import batch_flops
from paradec_jax.models.work import BACKWARD
from paradec_jax.recipes.cluster import Cluster
from paradec_jax.tokenizer import Tokenizer
from paradec_jax.train import Loss, Rounds, TrainState, adamw, fit, make_train_step

CHECKPOINT_EVERY = 200  # updates


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of one run.

    Attributes:
      name: of the run and its folder.
      rounds: how many; the student of the last one aims at `first_steps / jump^rounds` steps.
      first_steps, jump, grid, divergence, released: of the objective, see `DistillationRules`.
      updates, weights, reset_optimizer, reset_ema: of a round, see `Rounds`.
      exported: which weights are a round's model: the average ("ema") or the student's ("raw").
      length: characters of a window; as long as the model when None.
      rows: windows of a batch.
      warmup: updates over which the learning rate rises, at the beginning and after each reset of the optimizer.
      learning_rate: of Adam.
      ema_decay: decay of the averaged weights; where it remembers a whole round, models lag a round behind.
      held_out: share of the text that is held out, as it was when the teacher was trained.
      matmul_precision: `jax.default_matmul_precision` of the run; what suits the device when None.
      seed: of windows, noise and the teacher's draws.
    """

    name: str = "halves"
    rounds: int = 5
    first_steps: int = 64
    jump: int = 2
    grid: str = "paper"
    divergence: str = "kld"
    released: bool = False
    updates: int = 400
    weights: str = "raw"
    reset_optimizer: bool = False
    reset_ema: bool = False
    exported: str = "ema"
    length: int | None = None
    rows: int = 16
    warmup: int = 100
    learning_rate: float = 3e-4
    ema_decay: float = 0.99
    held_out: float = 0.1
    matmul_precision: str | None = None
    seed: int = 10

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.first_steps < self.jump**self.rounds:
            raise ValueError(
                f"rounds must be at least 1 and first_steps at least jump^rounds, not {self.rounds} rounds of jump "
                f"{self.jump} from {self.first_steps}"
            )
        if self.exported not in ("ema", "raw"):
            raise ValueError(f"exported must be ema or raw, not {self.exported!r}")

    def settled(self) -> "Recipe":
        """The recipe with the precision of this device where none is set, so that a run keeps its own."""
        return dataclasses.replace(self, matmul_precision=self.matmul_precision or precision.natural())

    @property
    def steps(self) -> int:
        """Updates of all rounds."""
        return self.rounds * self.updates


def changed(name: str, **changes: object) -> Recipe:
    """The default recipe with changes."""
    return dataclasses.replace(Recipe(), name=name, **changes)  # type: ignore[arg-type]


# What the studies put side by side: divergences, grids, jumps, lengths of rounds, and what a round resets.
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(),
        changed("forward-kl", divergence="forward_kl"),
        changed("tvd", divergence="tvd"),
        changed("tvd-released", divergence="tvd", released=True),
        changed("mse", divergence="mse"),
        changed("chi-square", divergence="chi_square"),
        changed("grid-released", grid="released"),
        changed("fourths", jump=4, rounds=3, updates=667),
        changed("eighths", jump=8, rounds=2, updates=1000),
        changed("short-rounds", updates=100),
        changed("half-rounds", updates=200),
        changed("ema-teacher", weights="ema", reset_ema=True),
        changed("ema-teacher-reset", weights="ema", reset_ema=True, reset_optimizer=True),
        changed("optimizer-reset", reset_optimizer=True),
    )
}


def objective(recipe: Recipe, network: Any, spec: TokenSpec) -> Loss:
    """The loss of all rounds."""
    rules = DistillationRules(
        first_steps=recipe.first_steps,
        jump=recipe.jump,
        grid=recipe.grid,
        divergence=recipe.divergence,
        released=recipe.released,
    )
    return self_distillation_loss(network, spec, rules, chunk=None)


def optimizer_of(recipe: Recipe) -> optax.GradientTransformation:
    """Adam as the paper has it, of a constant rate after the warm-up."""
    return adamw(recipe.learning_rate, recipe.steps, warmup=recipe.warmup, b2=0.999, weight_decay=0.0)


def flops_of(recipe: Recipe, network: Any) -> Callable[[Any, Any], float]:
    """Operations of an update: the student's, and as many forwards of the teacher as its steps are to be one."""
    student = batch_flops(network)

    def flops(batch: Any, metrics: Any) -> float:
        return student(batch, metrics) * (1 + BACKWARD + recipe.jump) / (1 + BACKWARD)

    return flops


def all_rounds(
    recipe: Recipe,
    model: Model,
    source: Text,
    folder: Path,
    minutes: float,
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
) -> TrainState:
    """The state after all rounds, or where the minutes were over; each round's model lies in the folder.

    Further options are those of `hooks_of`.
    """
    length = model.network.max_length if recipe.length is None else recipe.length
    some = HeldOut(length, 32)

    def evaluate(state: TrainState) -> Mapping[str, float]:
        """Writes the model of the round that ends, before the checkpoint, so that no kill can lose it."""
        which = (int(state.step) - 1) // recipe.updates
        params: Any = on_this(state.ema if recipe.exported == "ema" else state.params)
        made, where = dataclasses.replace(model, params=params), folder / f"round-{which}" / "model"
        by_first(f"round {which}", lambda: store.save(where, made, overwrite=True))
        return {"round": which, **some.per_token(model, params, source.held_out[0])}

    loss, optimizer = objective(recipe, model.network, model.token_spec), optimizer_of(recipe)
    rounds = Rounds(recipe.updates, recipe.weights, recipe.reset_optimizer, recipe.reset_ema)
    params, key = dict(model.params), jax.random.key(recipe.seed)
    judged: dict[str, Any] = {"evaluate": evaluate, "evaluate_every": recipe.updates}
    flops = flops_of(recipe, model.network)
    return fit(
        make_train_step(loss, optimizer, rounds=rounds, ema_decay=recipe.ema_decay),
        TrainState.create(params, optimizer, key, ema=True, teacher=params, mesh=mesh),
        Endless(WindowMaker(source.train[0], recipe.seed, recipe.rows, length), digest=source.digest),
        steps=recipe.steps,
        hooks=hooks_of(folder, CHECKPOINT_EVERY, flops=flops, minutes=minutes, **judged, **options),
    )


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


def main(
    recipe: tyro.conf.OmitSubcommandPrefixes[tyro.extras.subcommand_type_from_defaults(RECIPES)],
    text: Path,
    start: str = "runs/tiny-mdlm/model",
    folder: Path | None = None,
    export: Path | None = None,
    minutes: float = 75.0,
    allow: tuple[str, ...] = (),
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = Cluster(),  # noqa: B008
    watch: tyro.conf.OmitArgPrefixes[Watch] = Watch(),  # noqa: B008
) -> None:
    """Runs all rounds; the model of the last one is the result, in FOLDER/model too.

    Args:
      recipe: the numbers of the run.
      text: the file that the first teacher was trained on.
      start: model folder, or name of a bundled model, of the first teacher.
      folder: where everything goes; `runs/NAME` by default.
      export: where a copy of the last model with parameters in bfloat16 goes; none by default.
      minutes: after so many this call saves and ends; the next one goes on.
      allow: what may differ from what the run was begun with (`FOLDER/run.json`, `recipe.json`), such as "loss".
      cluster: processes and devices.
      watch: what is told beside the log.
    """
    folder = Path("runs") / recipe.name if folder is None else folder
    options = {"allow": allow, "more": watch.hooks(folder, recipe.steps)}
    mesh, recipe = cluster.join(), recipe.settled()
    model = load(start, dtype="float32")
    if model.family != "masked_diffusion" or model.tokenizer is None:
        raise SystemExit(
            f"{start} is of family {model.family}; distillation needs a denoiser with a tokenizer"
        )
    source, _ = one_text(text, model.tokenizer, recipe.held_out)
    if any((ids == model.token_spec.mask).any() for ids in (*source.train, *source.held_out)):
        raise SystemExit(
            f"{text} has characters that {start} does not know: give the text that it was trained on"
        )
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
    """Does all rounds from where their run stood and, when done, writes the last model; tells whether it is.

    Further options are those of `all_rounds`.
    """
    claim_together(folder, recipe, options.get("allow", ()))
    with jax.default_matmul_precision(recipe.matmul_precision):
        state = all_rounds(recipe, model, source, folder, minutes, **options)
        if int(state.step) < recipe.steps:
            over(minutes, int(state.step), recipe.steps)
            return False
        length = recipe.length or model.network.max_length

        def write() -> None:
            finish(load(folder / f"round-{recipe.rounds - 1}" / "model"), length, source, folder, export)

        by_first("export", write)
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
