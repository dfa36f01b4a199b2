"""Training of recurrent-depth models in which every recurrence has a target of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from paradec_jax.decode.machine.network import Prefix
from paradec_jax.losses.cross_entropy import cross_entropy, scorer
from paradec_jax.losses.recurrent import Draw, settle
from paradec_jax.objective import Metrics, Objective, Sum, Sums, drawn, weighted


def stepwise_loss(
    network: Any,
    draw: Draw,
    backprop_depth: int | None = None,
    *,
    remat: bool | None = None,
    chunk: int | None = None,
) -> Objective:
    """Cross-entropy of the answers after each recurrence, after a prompt that is read apart from
    them.

        loss = mean over k = 1 .. r of CE(coda(s_k), targets_k) + CE(prompt, prompt_targets)

    The prompt recurs r_p times, as a decoder's prefill does, and leaves keys and values; the
    answers' recurrences see those and each other. So whatever a recurrence finds, it finds at the
    answers' positions. Only the last of the prompt's recurrences carries gradient.

    Args:
      draw: draw of r_p, one a step for the whole batch, such as `exponential`.
      backprop_depth: answers' recurrences that gradients cross; before every such number of them
        the state counts as a constant. Each has a target of its own, so few are enough, and through
        many they explode; the config's mean when None.
      remat: whether the backward pass recomputes each of the answers' recurrences; as the config
        says when None.

    Returns:
      A loss over batches of `tokens` [B, T], `targets` [B, K, A] of the last A positions after each
      of K recurrences, `recurrences` r <= K, those that count, `prompt_targets` and
      `prompt_weights` [B, T - A], and the scalar `step`. Metrics: `accuracy`, over all recurrences
      that count, `last_accuracy`, after the last of them, and `prompt_recurrence`.
    """
    depth, remat = settle(network.config, backprop_depth, remat)

    def sums(params: Any, frozen: Any, batch: dict[str, Array], key: Array) -> Sums:
        del frozen
        of_recurrence, of_state = jax.random.split(key)
        tokens, targets, count = batch["tokens"], batch["targets"], batch["recurrences"]
        rows, _, width = targets.shape
        prompt = tokens.shape[1] - width
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        states = network.initial_state(jax.random.split(of_state, tokens.shape))
        prompt_recurrence = draw(of_recurrence, batch["step"])

        view = network.view(positions[:, :prompt])
        e, window = network.embed(
            params, tokens[:, :prompt], view, network.empty_window(rows, prompt)
        )
        fixed, fixed_e = lax.stop_gradient((params, e))
        state = lax.fori_loop(
            0,
            prompt_recurrence - 1,
            lambda _, s: network.iterate(fixed, s, fixed_e, view, window, 0)[0],
            states[:, :prompt],
        )
        state, window = network.iterate(params, state, e, view, window, 0)
        out = network.readout(params, state, view, window)
        nll, _ = cross_entropy(scorer(network, params), out.hidden, batch["prompt_targets"], chunk)
        start = jnp.zeros(rows, jnp.int32)
        cache = network.init_cache(jax.random.split(of_state, rows), prompt, states=states[0])
        cache = network.write(cache, out.kv, start)

        view = network.view(positions[:, prompt:], Prefix(cache, start + prompt))
        e, empty = network.embed(
            params, tokens[:, prompt:], view, network.empty_window(rows, width)
        )

        def recur(
            params: Any, state: Array, e: Array, target: Array
        ) -> tuple[Array, tuple[Array, Array]]:
            state, window = network.iterate(params, state, e, view, empty, 0)
            hidden = network.readout(params, state, view, window).hidden
            nll, hits = cross_entropy(scorer(network, params), hidden, target, chunk)
            return state, (jnp.sum(nll), jnp.sum(hits, dtype=nll.dtype))

        step = jax.checkpoint(recur) if remat else recur

        def body(state: Array, xs: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            index, target = xs
            state = jnp.where(index % depth == 0, lax.stop_gradient(state), state)
            zero = jnp.zeros((), jnp.promote_types(state.dtype, jnp.float32))
            return lax.cond(
                index < count,
                lambda s: step(params, s, e, target),
                lambda s: (s, (zero, zero)),
                state,
            )

        after = jnp.moveaxis(targets, 1, 0)  # each recurrence
        _, (nlls, hits) = lax.scan(body, states[:, prompt:], (jnp.arange(len(after)), after))
        each = jnp.asarray(rows * width, jnp.float32)
        return {
            "answers": Sum(jnp.sum(nlls), count * each),
            "prompt": weighted(nll, batch["prompt_weights"]),
            "accuracy": Sum(jnp.sum(hits), count * each),
            "last_accuracy": Sum(hits[count - 1], each),
            "prompt_recurrence": drawn(prompt_recurrence),
        }

    def value(sums: Sums) -> tuple[Array, Metrics]:
        metrics = {
            name: sums[name].mean for name in ("accuracy", "last_accuracy", "prompt_recurrence")
        }
        return sums["answers"].mean + sums["prompt"].mean, metrics

    return Objective(sums, value)
