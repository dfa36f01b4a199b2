"""A task that needs depth, tried: where does a chain of pointers lead? `python experiments/pointers.py`.

A prompt is a table of pointers between names, `Ana has Tom Zoe has Ana ... ?`, then `Ana has` asks for the name that
some hops lead to, and so on with other names. No hop is written down, so the hops must be done in the latent state,
one look-up after another. Training starts from a bundled model, which can look up one name, and goes on to more hops
when nearly all answers are right. `RESULTS.md` says how far that went.

Two kinds of tables: "chains" ask for the end of a chain, which points to itself; "cycle" is one cycle through all
names and asks for the name K hops on. With `--every-recurrence` the answer after r recurrences is the name r hops on
(the last one from there on), so that each recurrence is taught to be one hop.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro

from paradec_jax import load
from paradec_jax.data.word_problems import NAMES
from paradec_jax.losses import exponential, recurrent_loss
from paradec_jax.models.recurrent_depth import MATRIX_AXES
from paradec_jax.tokenizer import Tokenizer
from paradec_jax.train import muon

RECURRENCES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
WINDOW = 30  # batches of the hardest kind over which accuracy is averaged before a stage ends


@dataclasses.dataclass(frozen=True)
class Options:
    """Numbers of one try.

    Attributes:
      kind: of tables.
      every_recurrence: whether r recurrences are asked for r hops; otherwise r is at least the number of hops.
      children_first: in a table of chains, a name stands before the one that it points to.
      names: in a table.
      queries: of a table.
      hops: of the last stage.
      first_hops: of the stage behind one hop.
      start: a model folder or the name of a bundled one.
      init_scale: of the initial latent states.
      rows: tables of a batch.
      updates: at most.
      learning_rate, adam_learning_rate: peaks, as in `train.py`.
      backprop_depth: recurrences that carry gradient.
      pass_mark: accuracy that ends a stage.
      seed: of everything.
      out: JSON lines, one every 50 updates.
    """

    kind: Literal["chains", "cycle"] = "cycle"
    every_recurrence: bool = True
    children_first: bool = False
    names: int = 15
    queries: int = 15
    hops: int = 8
    first_hops: int = 2
    start: str = "tiny-recurrent"
    init_scale: float = 0.0
    rows: int = 28
    updates: int = 6000
    learning_rate: float = 8e-3
    adam_learning_rate: float = 2e-3
    backprop_depth: int = 8
    pass_mark: float = 0.95
    seed: int = 0
    out: Path = Path("runs/pointers.jsonl")

    def __post_init__(self) -> None:
        if not 2 <= self.names <= len(NAMES):
            raise ValueError(f"names must be from 2 to {len(NAMES)}, not {self.names}")
        if not 1 < self.first_hops <= self.hops < self.names:
            raise ValueError(f"need 1 < first_hops <= hops < names, not {self.first_hops} and {self.hops}")


@dataclasses.dataclass(frozen=True)
class Table:
    """Pointers among names: entries in the order in which they stand, and how far each name is from its goal."""

    order: np.ndarray
    pointer: np.ndarray
    distance: np.ndarray

    def ask(self, hops: int) -> np.ndarray:
        """Where `hops` pointers lead from each name."""
        goal = np.arange(len(self.pointer))
        for _ in range(hops):
            goal = self.pointer[goal]
        return goal


def draw(rng: np.random.Generator, options: Options, names: int, hops: int) -> Table:
    """A table of `names` names in which some are `hops` hops from their goal."""
    chosen = rng.permutation(len(NAMES))[:names]
    pointer, distance = np.arange(len(NAMES)), np.full(len(NAMES), -1)
    when = rng.random(len(NAMES))
    if options.kind == "cycle":
        pointer[chosen] = np.roll(chosen, 1)
        distance[chosen] = hops
        return Table(rng.permutation(chosen), pointer, distance)
    for begin in range(0, names, hops + 1):
        chain = chosen[begin : begin + hops + 1]
        pointer[chain[1:]] = chain[:-1]
        distance[chain] = np.arange(len(chain))
        if options.children_first:
            when[chain] = np.sort(when[chain])[::-1]
    return Table(chosen[np.argsort(when[chosen])], pointer, distance)


def batch(
    rng: np.random.Generator,
    tokenizer: Tokenizer,
    options: Options,
    *,
    names: int,
    hops: int,
    asked: int,
    hard: float = 0.5,
) -> dict[str, Any]:
    """Tables and queries; a share `hard` of the queries starts `hops` hops from its goal."""
    ids = np.asarray([tokenizer.encode(f" {name}")[0] for name in NAMES])
    has, ask = (tokenizer.encode(text)[0] for text in (" has", "?"))
    rows, weights = [], []
    for _ in range(options.rows):
        table = draw(rng, options, names, hops)
        far = rng.choice(np.flatnonzero(table.distance == hops), options.queries)
        queries = np.where(rng.random(options.queries) < hard, far, rng.choice(table.order, options.queries))
        goal = table.ask(min(asked, hops))
        row = [1, *(x for name in table.order for x in (ids[name], has, ids[table.pointer[name]])), ask]
        row += [x for name in queries for x in (ids[name], has, ids[goal[name]])]
        rows.append(row)
        weights.append([0] * (3 * names + 2) + [0, 0, 1] * options.queries)
    tokens, counted = np.asarray(rows, np.int32), np.asarray(weights, np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": counted[:, 1:]}


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Trains, stage after stage, and writes accuracy by recurrence every 500 updates."""
    jax.config.update("jax_default_matmul_precision", "BF16_BF16_F32")
    model = load(options.start)
    assert model.tokenizer is not None
    # Every batch brings its recurrence, so the draw is never used.
    loss = recurrent_loss(
        model.network, exponential(4.0), options.backprop_depth, init_scale=options.init_scale, remat=True
    )
    optimizer = muon(
        options.learning_rate,
        options.updates,
        axes=MATRIX_AXES,
        warmup=100,
        cooldown=options.updates // 4,
        weight_decay=0.05,
        adam_learning_rate=options.adam_learning_rate,
    )

    @jax.jit
    def update(params: Any, state: Any, rows: Any, key: Any) -> Any:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, None, rows, key)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, value, metrics["accuracy"]

    @jax.jit
    def accuracy(params: Any, rows: Any, key: Any) -> Any:
        return loss(params, None, rows, key)[1]["accuracy"]

    stages = [(1, 8), (1, options.names)]
    stages += [(hops, options.names) for hops in range(options.first_hops, options.hops + 1)]
    rng, key = np.random.default_rng(options.seed), jax.random.key(options.seed)
    params = dict(model.params)
    state: Any = optimizer.init(params)
    stage, recent = 0, list[float]()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    with options.out.open("a") as log:
        for i in range(options.updates):
            hops, names = stages[stage]
            now = hops if rng.random() < 0.7 else int(rng.integers(1, hops + 1))
            r = int(rng.integers(1 if options.every_recurrence else now, now + 4))
            asked = r if options.every_recurrence else now
            rows = batch(rng, model.tokenizer, options, names=names, hops=now, asked=asked)
            rows |= {"recurrence": np.int32(r), "step": np.int32(i)}
            params, state, value, right = update(params, state, rows, jax.random.fold_in(key, i))
            if now == hops:
                recent = [*recent[1 - WINDOW :], float(right)]
            line: dict[str, Any] = {"update": i + 1, "hops": hops, "names": names, "loss": float(value)}
            if (i + 1) % 500 == 0:
                unseen = np.random.default_rng([options.seed, 1])
                test = batch(unseen, model.tokenizer, options, names=names, hops=hops, asked=hops, hard=1.0)
                line["by_recurrence"] = {
                    r: float(accuracy(params, test | {"recurrence": np.int32(r), "step": np.int32(i)}, key))
                    for r in RECURRENCES
                }
            if (i + 1) % 50 == 0:
                line |= {"accuracy": float(np.mean(recent)), "seconds": round(time.time() - begun)}
                print(json.dumps(line), file=log, flush=True)
                print(json.dumps(line), flush=True)
            if len(recent) == WINDOW and np.mean(recent) > options.pass_mark and stage + 1 < len(stages):
                stage, recent = stage + 1, []
    print(f"ended at {stages[stage][0]} hops among {stages[stage][1]} names")


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", str(Path(".cache/jax").resolve()))
    try:
        tyro.cli(main)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
