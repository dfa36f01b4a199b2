"""From texts to texts: encodes prompts, runs a decoder on them, and cuts its tokens where the text ends."""

import collections
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from paradec_jax.config import TokenSpec
from paradec_jax.data.problems import encode_prompts
from paradec_jax.decode import Decoded, Reason, Request, make_request, run, stream
from paradec_jax.decode.machine.drive import finish
from paradec_jax.decode.machine.request import keys_of, whole_numbers
from paradec_jax.decode.machine.rows import NETWORK_CALLS
from paradec_jax.sharding.layout import shardings
from paradec_jax.sharding.mesh import mesh_of
from paradec_jax.sharding.processes import gathered, put
from paradec_jax.stop_strings import StopStrings, text_of
from paradec_jax.store import Model
from paradec_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """What `generate` returns: B = prompts * samples rows, the samples of a prompt one after the other.

    `infill` returns it too; text and tokens are then those of the whole row, given ones and all.

    Attributes:
      text: what each row adds to the text of its prompt, without special tokens, cut before a stop string.
      tokens: tokens of each row, its stop token included; where a stop string ended the row, the shortest
        prefix of them whose text contains it.
      reasons: why each row ended; `Reason.CALLER` is a stop string.
      counts: what each row cost, [B] each: "network_calls" (prefill included), "positions", and what the networks
        declare, such as "recurrences". Where a stop string ended the row, calls up to the next look for it are in
        it too (`every` of `generate`; 1 counts none of them).
      tokens_per_call: generated tokens over network calls, [B].
      log_probs: log-probability of each generated token in nats, or None where not asked for.
      samples: rows a prompt.
    """

    text: list[str]
    tokens: list[list[int]]
    reasons: list[Reason]
    counts: dict[str, Int32[np.ndarray, "B"]]
    tokens_per_call: Float32[np.ndarray, "B"]
    log_probs: list[Float32[np.ndarray, "..."]] | None
    samples: int = 1

    @property
    def network_calls(self) -> Int32[np.ndarray, "B"]:
        """Calls of the network for each row, prefill included."""
        return self.counts[NETWORK_CALLS]


def generate(
    model: Model,
    prompts: Sequence[str],
    decoder: Any,
    *,
    knobs: Any = None,
    max_new_tokens: Any,
    seed: Any = 0,
    samples: int = 1,
    stop_strings: Sequence[str] = (),
    log_probs: bool = False,
    bucket: int = 32,
    network: Any = None,
    every: int = 8,
    mesh: jax.sharding.Mesh | None = None,
) -> Generation:
    """Continues texts.

    A row's draws depend on the seed, its prompt and the number of its sample, never on the rest of the batch;
    the same prompt given twice gets the same text twice, so ask for `samples` instead. Calls whose longest
    prompts fall in the same bucket share one compiled program.

    Args:
      model: a model with a tokenizer.
      prompts: texts; the model's begin-of-text token is put before each that does not begin with it. Empty ones
        where the decoder can start from nothing.
      decoder: any decoder, bound or not.
      knobs: its knobs; the defaults when None.
      max_new_tokens: tokens each row may get, a whole number.
      seed: of all draws, a whole number of 64 bits.
      samples: rows a prompt.
      stop_strings: texts that end a row; the row's text stops before the first of them. They are looked for in
        the text and in the text with its special tokens written out, so they may hold such tokens.
      log_probs: whether to keep log-probabilities.
      bucket: the prompt buffer is rounded up to a multiple of it.
      network: the network to use; the decoder's own, or else the model's, by default.
      every: steps between two looks for a stop string. It changes no token; rows run on for up to as many
        steps less one, and the counts say so.
      mesh: of `make_mesh`, on which parameters are put by the rules of `sharding` and rows lie over `data` and
        `fsdp`; that on which the model lies already (`load`), or none, when None. No token depends on it.

    Raises:
      ValueError: no prompt, a prompt too long for the model, no tokenizer, or a number below 1.
    """
    check_positive(every=every)
    prepared = prepare(
        model,
        prompts,
        decoder,
        max_new_tokens=max_new_tokens,
        seed=seed,
        samples=samples,
        stop_strings=stop_strings,
        log_probs=log_probs,
        bucket=bucket,
        network=network,
    )
    decoder, request = prepared.decoder, prepared.request
    params = decoder.prepare(on_mesh(parameters_for(model, decoder), mesh))
    if prepared.watch is None:
        return prepared.collect(run(decoder, params, request, knobs))
    states = stream(decoder, params, request, knobs, every=every, interrupt=prepared.watch)
    last, _ = collections.deque(states, maxlen=1).pop()
    return prepared.collect(gathered(finish(decoder, last)))


@dataclasses.dataclass(frozen=True, eq=False)
class Prompted:
    """Prompts made ready for a driver: what `generate` does before and after it runs one.

    Attributes:
      decoder: bound to a network and a buffer size.
      request: the encoded prompts.
      watch: to be handed to `stream` as `interrupt`, or None where there are no stop strings.
      tokenizer, spec, samples: what `collect` needs.
      prompts: ids of each row's prompt, which its text follows; none where the text holds what was given.
      whole: whether the texts that `collect` returns hold what was given.
    """

    decoder: Any
    request: Request
    watch: StopStrings | None
    tokenizer: Tokenizer
    spec: TokenSpec
    prompts: Sequence[Sequence[int]]
    samples: int = 1
    whole: bool = False

    def collect(self, decoded: Decoded) -> Generation:
        """Tokens as texts."""
        tokens = decoded.completions()
        own = np.asarray([len(row) for row in tokens])  # on the host: nothing to compile
        reasons = [Reason(int(reason)) for reason in np.asarray(decoded.reasons)]
        rows = zip(tokens, self.prompts, strict=True)
        texts = [text_of(self.tokenizer, self.spec, ids, prompt) for ids, prompt in rows]
        if self.watch is not None:
            for row, (length, text) in self.watch.finish(tokens).items():
                tokens[row], texts[row], reasons[row] = tokens[row][:length], text, Reason.CALLER
                own[row] = length
        log_probs = None
        if decoded.log_probs is not None:
            kept = decoded.generated_log_probs()
            log_probs = [row[:count] for row, count in zip(kept, own, strict=True)]
        if self.whole:
            ends = zip(np.asarray(decoded.tokens), np.asarray(decoded.lengths), strict=True)
            tokens = [row[:length].tolist() for row, length in ends]
            texts = [self.tokenizer.decode(row, skip_special=True) for row in tokens]
        counts = {name: np.asarray(count) for name, count in decoded.counts.items()}
        calls = counts[NETWORK_CALLS]
        return Generation(
            texts,
            tokens,
            reasons,
            counts,
            own.astype(np.float32) / np.maximum(calls, 1).astype(np.float32),
            log_probs,
            self.samples,
        )


def prepare(
    model: Model,
    prompts: Sequence[str],
    decoder: Any,
    *,
    max_new_tokens: Any,
    seed: Any = 0,
    samples: int = 1,
    stop_strings: Sequence[str] = (),
    log_probs: bool = False,
    bucket: int = 32,
    network: Any = None,
) -> Prompted:
    """Encodes prompts and binds the decoder; arguments and errors are those of `generate`."""
    tokenizer = tokenizer_of(model)
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of texts, not one text")
    if not prompts:
        raise ValueError("prompts must hold at least one text")
    check_positive(max_new_tokens=max_new_tokens, samples=samples, bucket=bucket)
    if isinstance(stop_strings, str) or not all(stop_strings):
        raise ValueError(f"stop_strings must be a list of texts that are not empty, not {stop_strings!r}")
    spec = model.token_spec
    network, decoder = network_for(model, decoder, network), equipped(model, decoder)
    canvas = decoder.any_order
    tokens, lengths = encode_prompts(tokenizer, prompts, spec=spec, bucket=bucket, may_be_empty=canvas)
    longest = int(lengths.max())
    if not decoder.windowed and longest + max_new_tokens > network.max_length:
        raise ValueError(
            f"prompt {int(lengths.argmax())} has {longest} tokens and max_new_tokens is {max_new_tokens}: "
            f"together more than the {network.max_length} positions the model was built for"
        )
    given = [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]
    keys = row_keys(given, seed, samples)
    given = [prompt for prompt in given for _ in range(samples)]
    tokens, lengths = np.repeat(tokens, samples, axis=0), np.repeat(lengths, samples)
    size = tokens.shape[1] + max_new_tokens
    if canvas:  # every call reads the whole buffer
        size = -(-(longest + max_new_tokens) // bucket) * bucket
    size = size if decoder.windowed else min(size, network.max_length)
    request = make_request(
        tokens[:, :size], lengths, max_new_tokens=max_new_tokens, stop=spec.stop, keys=keys
    )
    decoder = decoder.bind(network, size, spec)
    if log_probs:
        decoder = dataclasses.replace(decoder, log_probs=True)
    watch = StopStrings(tokenizer, spec, stop_strings, request.batch, given) if stop_strings else None
    return Prompted(decoder, request, watch, tokenizer, spec, given, samples)


def tokenizer_of(model: Model) -> Tokenizer:
    """The model's tokenizer. Raises ValueError where it has none."""
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer: put a tokenizer.json into its folder")
    return model.tokenizer


def network_for(model: Model, decoder: Any, network: Any) -> Any:
    """The network asked for, or the decoder's own, or the model's."""
    if network is not None:
        return network
    return model.network if decoder.network is None else decoder.network


def equipped(model: Model, decoder: Any) -> Any:
    """The decoder, with the model's residual head where it has none of its own.

    Raises:
      ValueError: a decoder that needs a head, and a model without one.
    """
    if lacks_head(model, decoder):
        raise ValueError(
            f"{type(decoder).__name__} asks a residual head, and the model has none: train one, or choose head 'zero'"
        )
    if "head" not in decoder.further_networks or decoder.head is not None or model.head is None:
        return decoder
    return dataclasses.replace(decoder, head=model.head.network)


def lacks_head(model: Model, decoder: Any) -> bool:
    """Whether a decoder asks the model's residual head, and there is none."""
    return "head" in decoder.further_networks and decoder.head is None and model.head is None


def parameters_for(model: Model, decoder: Any) -> Any:
    """The model's parameters as a decoder takes them: the network's, or those of several networks by their fields."""
    if not decoder.further_networks:
        return model.params
    return {"network": model.params} | ({} if model.head is None else {"head": model.head.params})


def on_mesh(params: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """The parameters on a mesh, by the rules of `sharding`; where they are when None.

    Raises:
      ValueError: a mesh with Explicit axes, given or theirs.
    """
    mesh_of(params)
    return params if mesh is None else put(params, shardings(params, mesh))


def check_positive(**values: Any) -> None:
    """Refuses what is no whole number of 32 bits, and numbers below 1. Raises ValueError."""
    for name, value in values.items():
        if whole_numbers(name, value).ndim:
            raise ValueError(f"{name} must be one number, not {value}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def row_keys(prompts: Sequence[Any], seed: Any, samples: int = 1) -> Array:
    """One key for each prompt and sample, [prompts * samples], from seed, ids and number of the sample.

    Raises:
      ValueError: a seed that is no whole number of 64 bits.
    """
    number = whole_numbers("seed", seed, 64)[()]
    digests = [hashlib.blake2b(np.asarray(ids, "<i4").tobytes(), digest_size=4).digest() for ids in prompts]
    marks = np.asarray([int.from_bytes(digest, "little") for digest in digests], np.uint32)
    return _keys_of_samples(number, marks, np.arange(samples, dtype=np.uint32))


@jax.jit
def _keys_of_samples(seed: Any, marks: Any, samples: Any) -> Array:
    """Keys [N * K] of N prompts' marks and K numbers of samples, in one program."""
    folded = keys_of(seed, marks)
    per_sample = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(per_sample, in_axes=(0, None))(folded, samples).reshape(-1)
