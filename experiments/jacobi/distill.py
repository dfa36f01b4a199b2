"""Progressive consistency distillation: `python -m experiments.jacobi.distill tiny-jacobi`.

Each round decodes training problems with the current model, keeps the Jacobi trajectories, and trains the
model to say at every iterate of a trajectory what it says at the end of it. Later rounds take larger blocks.
A run that was stopped goes on where it stood, within a collection as within a training:

    FOLDER/recipe.json
    FOLDER/round-0/trajectories/   FOLDER/round-0/training/   FOLDER/round-0/model/   FOLDER/round-1/...

The recipes of tables 3 and 4 can share what the first round collects (options stand before the recipe):

    python -m experiments.jacobi.distill --trajectories runs/tiny-jacobi/round-0/trajectories mask-nc
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.progress import track

from experiments.common.command import run
from experiments.common.processes import by_first, claim_together, on_this
from experiments.common.runs import hooks_of
from experiments.tasks import word_problems
from experiments.tasks.batches import Bucket, word_problem_batches
from paradec_jax import Jacobi, Model, load, make_request, store
from paradec_jax.data.collect import collect
from paradec_jax.data.noisy_iterates import Selection, kept
from paradec_jax.data.pair_batches import PairBucket, pair_batches
from paradec_jax.data.problems import encode_prompts
from paradec_jax.data.trajectories import Trajectories, TrajectoryWriter
from paradec_jax.families import matrix_axes
from paradec_jax.losses.consistency import ConsistencyRules, consistency_loss
from paradec_jax.losses.next_token import next_token_loss
from paradec_jax.objective import Metrics, Objective, Sums
from paradec_jax.recipes.cluster import Cluster
from paradec_jax.train import DataIterator, TrainState, fit, make_train_step, muon
from paradec_jax.train.recipe import check_allowed

ROWS = 64  # problems decoded together
CHECKPOINT_EVERY = 200  # updates
# Shapes of replayed problems and their shares of the batches.
FRESH = ((Bucket(2, 5, 252), 0.6), (Bucket(6, 8, 328), 0.4))
REPLAY = 100  # added to a seed, so that replayed problems are none of those with trajectories


RULES = ConsistencyRules(
    context="clean",
    ar_weight=10.0,
    divide_by_pairs=False,
    prompt_weight=0.0,
    after_eos="drop",
    over="batch",
)


@dataclasses.dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
      block: n, tokens of a block.
      problems: training problems whose trajectories are collected.
      updates: of the training.
      warmup, cooldown: first and last updates, over which the learning rate rises and falls.
      window: w, blocks over which the wanted noise rises from 0 to 1.
      learning_rate: peak of Muon, for matrices; NAdam's is `adam_share` of it.
    """

    block: int = 16
    problems: int = 6144
    updates: int = 300
    warmup: int = 50
    cooldown: int = 150
    window: int = 4
    learning_rate: float = 8e-3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Numbers of one run.

    Attributes:
      name: of the run and its folder.
      start: model folder or name of a bundled model that the run starts from.
      rounds: one after the other.
      order: of the wanted noise, see `Selection`.
      rules: of the loss, see `ConsistencyRules`. Clean context is figure 1a of Jacobi Forcing; its own model was
        trained with noisy context (figure 1b, "nc").
      steps: fewest and most written steps of the problems.
      max_new_tokens: budget of a problem's answer.
      batch_tokens: positions of a batch, both copies and padding included.
      replay_tokens: positions that each batch has besides, of fresh training problems with their reference
        solutions; None for no replay. Their next-token loss is a term of its own with the weight
        `rules.ar_weight`, so both next-token terms weigh that much. A small model forgets in a distillation
        what it solves by; the released recipe has no such part.
      adam_share: learning rate of embedding, norms and biases, relative to that of the matrices.
      ema_decay: decay of the averaged weights, which are the ones exported.
      matmul_precision: `jax.default_matmul_precision` of the run.
      seed: of problems, random drafts and batches.
    """

    name: str = "tiny-jacobi"
    start: str = "tiny-causal"
    rounds: tuple[Round, ...] = (Round(),)
    order: str = "linear"
    rules: ConsistencyRules = RULES
    steps: tuple[int, int] = (2, 8)
    max_new_tokens: int = 224
    batch_tokens: int = 4096
    replay_tokens: int | None = 1024
    adam_share: float = 0.4
    ema_decay: float = 0.99
    matmul_precision: str = "BF16_BF16_F32"
    seed: int = 0


def short(name: str, *, order: str = "linear", window: int = 4, rules: ConsistencyRules = RULES) -> Recipe:
    """One short round; all of these recipes can share the trajectories of the first round of "tiny-jacobi"."""
    return Recipe(name, rounds=(Round(window=window),), order=order, rules=rules)


# What a noisy block sees of earlier blocks (table 3). The window of "nc_ic" is that of the noise.
MASKS = {
    name: short(name, rules=dataclasses.replace(RULES, context=context, window=Round().window))
    for name, context in (("mask-nc", "nc"), ("mask-nc-ic", "nc_ic"), ("mask-clean", "clean"))
}
# How noise is spread over the blocks of a window of w (table 4), each of which sees the noise of those before it;
# "noise-linear-4" trains as "mask-nc" does.
SCHEDULES = {
    f"noise-{order}-{window}": short(
        f"noise-{order}-{window}", order=order, window=window, rules=MASKS["mask-nc"].rules
    )
    for window in (4, 8)
    for order in ("linear", "random", "reverse")
}
# Any noisy iterate for each block, no ramp over a window, as CLLM (arXiv 2403.00835) takes them (CLLM* of table 1).
UNIFORM = short("clean-uniform", order="uniform")
WITHOUT = dataclasses.replace(short("without-rehearsal"), replay_tokens=None)  # beside "mask-clean"
TINY_JACOBI = Recipe("tiny-jacobi", rounds=(Round(updates=1500, warmup=150, cooldown=600),))
# As long as "tiny-jacobi", for tables 1 and 2.
CLLM = dataclasses.replace(TINY_JACOBI, name="cllm", order="uniform")
SECOND_ROUND = Round(block=32, problems=2048, updates=600, cooldown=400, window=2, learning_rate=4e-3)
TWO_ROUNDS = Recipe("two-rounds", rounds=(*TINY_JACOBI.rounds, SECOND_ROUND))
RECIPES = {
    "tiny-jacobi": TINY_JACOBI,
    "cllm": CLLM,
    "two-rounds": TWO_ROUNDS,
    "clean-uniform": UNIFORM,
    "without-rehearsal": WITHOUT,
    **MASKS,
    **SCHEDULES,
}


def gather(model: Model, place: str | Path, recipe: Recipe, which: int, folder: Path) -> Trajectories:
    """The trajectories of one round, collected with the model that lies at `place`."""
    stage = recipe.rounds[which]
    if model.tokenizer is None:
        raise SystemExit(f"{recipe.start} has no tokenizer, without which problems cannot be read")
    settings = {
        "start": recipe.start,
        "model_sha256": store.fingerprint(place),
        "matmul_precision": recipe.matmul_precision,
        "round": which,
        "seed": recipe.seed,
        "problems": stage.problems,
        "steps": list(recipe.steps),
        "max_new_tokens": recipe.max_new_tokens,
    }
    problems = word_problems(stage.problems, seed=recipe.seed + which, steps=recipe.steps, split="train")
    problems.sort(key=lambda problem: len(problem.solution))  # rows of a batch end at about the same time
    tokens, lengths = encode_prompts(model.tokenizer, problems, spec=model.token_spec)
    size = tokens.shape[1] + recipe.max_new_tokens + -recipe.max_new_tokens % stage.block
    decoder = Jacobi(block=stage.block, greedy=True).bind(model.network, size, model.token_spec)
    params = decoder.prepare(model.params)
    batches = [
        np.arange(start, min(start + ROWS, stage.problems)) for start in range(0, stage.problems, ROWS)
    ]
    with TrajectoryWriter(folder, block_size=stage.block, shard_size=ROWS, settings=settings) as writer:
        # A batch ends with its shard; one that gave nothing has none, so shards do not count batches.
        done = int(Trajectories(folder).ids.max()) // ROWS + 1 if writer.shards else 0
        for batch in track(batches[done:], description=f"round {which}: trajectories"):
            filled = np.resize(batch, ROWS)
            request = make_request(
                tokens[filled],
                lengths[filled],
                max_new_tokens=recipe.max_new_tokens,
                stop=model.token_spec.stop,
                keys=jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
                    jax.random.key(recipe.seed + which), filled
                ),
            )
            found = collect(decoder, params, request, filled.tolist())
            for generation in {item.data_id: item for item in found}.values():
                writer.add(generation)
            writer.flush()
    if not writer.shards:
        raise SystemExit(f"round {which}: no answer fills a block of {stage.block} tokens")
    return Trajectories(folder)


def buckets(trajectories: Trajectories, indices: np.ndarray) -> tuple[PairBucket, ...]:
    """Three shapes of batches: a third of the generations fits each."""
    prompts, counts = trajectories.prompt_lengths[indices], trajectories.block_counts[indices]
    shapes = []
    for share in (1 / 3, 2 / 3, 1.0):
        inside = counts <= np.quantile(counts, share)
        shapes.append(PairBucket(-(-int(prompts[inside].max()) // 8) * 8, int(counts[inside].max())))
    return tuple(dict.fromkeys(shapes))


class Together:
    """Iterators side by side: a batch is a dict of one batch of each."""

    def __init__(self, **parts: DataIterator) -> None:
        self.parts = parts

    def __next__(self) -> dict[str, Any]:
        return {name: next(part) for name, part in self.parts.items()}

    def get_state(self) -> dict[str, Any]:
        return {name: part.get_state() for name, part in self.parts.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.set_state(state[name])


def fresh_problems(model: Model, recipe: Recipe, which: int) -> DataIterator:
    """Batches of training problems that no trajectory was collected of."""
    if model.tokenizer is None:
        raise SystemExit(f"{recipe.start} has no tokenizer, without which problems cannot be read")
    assert recipe.replay_tokens is not None
    low, high = recipe.steps
    parts = [
        (Bucket(max(low, part.steps_low), min(high, part.steps_high), part.length), weight)
        for part, weight in FRESH
        if low <= part.steps_high and part.steps_low <= high
    ]
    return word_problem_batches(
        model.tokenizer,
        seed=recipe.seed + REPLAY + which,
        batch_tokens=recipe.replay_tokens,
        buckets=[part for part, _ in parts],
        mixture=((0, tuple(weight for _, weight in parts)),),
        spec=model.token_spec,
    )


def with_replay(
    model: Model, recipe: Recipe, loss: Objective, pairs: DataIterator, fresh: DataIterator
) -> tuple[Objective, Together]:
    """A loss over pairs and its data, both with a next-token part over fresh problems."""
    next_token = next_token_loss(model.network)

    def sums(params: Any, frozen: Any, batch: dict[str, Any], key: jax.Array) -> Sums:
        again = next_token.sums(params, frozen, batch["fresh"], key)
        return loss.sums(params, frozen, batch["pairs"], key) | rehearsed(again)

    return Objective(sums, with_rehearsal(loss, recipe.rules.ar_weight)), Together(pairs=pairs, fresh=fresh)


def rehearsed(sums: Sums) -> Sums:
    """The sums of a next-token loss, by names that no other loss has."""
    return {f"rehearsal_{name}": part for name, part in sums.items()}


def with_rehearsal(loss: Objective, weight: float) -> Callable[[Sums], tuple[jax.Array, Metrics]]:
    """The value of a loss with a weighted next-token part, whose sums are `rehearsed`."""

    def value(sums: Sums) -> tuple[jax.Array, Metrics]:
        own = {name: part for name, part in sums.items() if not name.startswith("rehearsal_")}
        found, metrics = loss.value(own)
        again, accuracy = sums["rehearsal_loss"].mean, sums["rehearsal_accuracy"].mean
        return found + weight * again, metrics | {"rehearsal": again, "rehearsal_accuracy": accuracy}

    return value


def train(
    model: Model,
    recipe: Recipe,
    which: int,
    trajectories: Trajectories,
    fresh: DataIterator | None,
    folder: Path,
    allow: Sequence[str],
    mesh: jax.sharding.Mesh | None,
) -> Model:
    """The model after one round of training, on trajectories and, where there are some, fresh problems."""
    stage = recipe.rounds[which]
    indices = kept(trajectories, stop=model.token_spec.stop, unique=True)
    if len(indices) == 0:
        raise SystemExit(f"round {which}: every answer repeats one token too often to be learned from")
    data: DataIterator = pair_batches(
        trajectories,
        seed=recipe.seed + which,
        selection=Selection(order=recipe.order, window=stage.window),
        batch_tokens=recipe.batch_tokens,
        buckets=buckets(trajectories, indices),
        indices=indices,
    )
    network = model.network
    loss = consistency_loss(network, model.token_spec, recipe.rules)
    if fresh is not None:
        loss, data = with_replay(model, recipe, loss, data, fresh)
    optimizer = muon(
        stage.learning_rate,
        stage.updates,
        axes=matrix_axes(model.config),
        warmup=stage.warmup,
        cooldown=stage.cooldown,
        weight_decay=0.0,
        adam_learning_rate=recipe.adam_share * stage.learning_rate,
    )
    key = jax.random.fold_in(jax.random.key(recipe.seed), which)
    state = TrainState.create(dict(model.params), optimizer, key, ema=True, mesh=mesh)
    step = make_train_step(loss, optimizer, ema_decay=recipe.ema_decay)
    hooks = hooks_of(folder, CHECKPOINT_EVERY, allow=allow)
    state = fit(step, state, data, steps=stage.updates, hooks=hooks)
    return dataclasses.replace(model, params=on_this(state.ema))


def main(
    recipe: tyro.conf.OmitSubcommandPrefixes[tyro.extras.subcommand_type_from_defaults(RECIPES)],
    folder: Path | None = None,
    trajectories: Path | None = None,
    allow: tuple[str, ...] = (),
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = Cluster(),  # noqa: B008
) -> None:
    """Runs all rounds; the model of the last one is the result. Of several processes one collects trajectories.

    Args:
      recipe: the numbers of the run.
      folder: where everything goes; `runs/NAME` by default.
      trajectories: where those of the first round are, or go to; in its own folder by default. Recipes that differ in
        their training alone can share them; others are refused.
      allow: what may differ from what the run was begun with (`FOLDER/round-*/training/run.json`, `recipe.json`).
      cluster: processes and devices.
    """
    check_allowed(allow)
    folder = Path("runs") / recipe.name if folder is None else folder
    mesh = cluster.join()
    place: str | Path = recipe.start
    model = load(place)
    if model.family != "causal":
        raise SystemExit(f"{recipe.start} is of family {model.family}; distillation needs a causal model")
    claim_together(folder, recipe, allow)
    for which in range(len(recipe.rounds)):
        here = folder / f"round-{which}"
        if not (here / "model" / "config.json").exists():
            shared = trajectories if which == 0 else None
            # Before the collection, which takes long, so that an option without sense is refused at once.
            fresh = fresh_problems(model, recipe, which) if recipe.replay_tokens is not None else None
            with jax.default_matmul_precision(recipe.matmul_precision):
                where = shared or here / "trajectories"
                by_first(
                    f"trajectories {which}", functools.partial(gather, model, place, recipe, which, where)
                )
                found = Trajectories(where)
                trained = train(model, recipe, which, found, fresh, here / "training", allow, mesh)
            by_first(f"model {which}", functools.partial(store.save, here / "model", trained))
        place = here / "model"
        model = load(place)


if __name__ == "__main__":
    run(main)
