"""Training problems of which samplers learn: prompts and right texts in buffers of one shape."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.tasks import word_problems
from paradec_jax import Model, make_request
from paradec_jax.data.problems import encode_prompts
from paradec_jax.decode.machine.request import keys_of, seed_words


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """Training problems: prompts [N, P] with their lengths, and whole right texts [N, S] with
    theirs.
    """

    problems: list
    prompts: np.ndarray
    lengths: np.ndarray
    texts: np.ndarray
    ends: np.ndarray

    @property
    def budget(self) -> int:
        """Tokens that the longest right text may hold after the longest prompt."""
        return self.texts.shape[1] - self.prompts.shape[1]


def draw_pool(model: Model, count: int, seed: int, steps: tuple[int, int]) -> Pool:
    """The first `count` problems of the training split with so many steps; a right text ends in the
    stop token.
    """
    assert model.tokenizer is not None
    problems = word_problems(count, seed=seed, steps=steps, split="train")
    prompts, lengths = encode_prompts(model.tokenizer, problems, spec=model.token_spec)
    solutions = [model.tokenizer.encode_after(item.prompt, item.solution) for item in problems]
    budget = max(len(ids) for ids in solutions) + 1
    texts = np.pad(prompts, ((0, 0), (0, budget)), constant_values=model.token_spec.pad)
    ends = lengths.copy()
    for i, ids in enumerate(solutions):
        ends[i] += len(ids) + 1
        texts[i, lengths[i] : ends[i]] = [*ids, model.token_spec.stop[0]]
    if texts.shape[1] > model.network.max_length:
        raise SystemExit(
            f"texts of {texts.shape[1]} tokens are longer than the model's length: use fewer steps"
        )
    return Pool(problems, prompts, lengths, texts, ends)


def batch_of(model: Model, pool: Pool, seed: int, rows: np.ndarray) -> dict[str, Any]:
    """The training problems `rows` as a request, with their right texts."""
    # a problem's own, whatever batch it is in
    request = make_request(
        pool.prompts[rows],
        pool.lengths[rows],
        max_new_tokens=pool.budget,
        stop=model.token_spec.stop,
        keys=keys_of(seed_words(seed), rows.astype(np.int32)),
    )
    return {
        "request": request,
        "texts": jnp.asarray(pool.texts[rows]),
        "ends": jnp.asarray(pool.ends[rows]),
    }
