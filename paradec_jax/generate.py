"""From texts to texts: encodes prompts, runs a decoder on them, and cuts its tokens where the text
ends.
"""

import collections
import dataclasses
import hashlib
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from paradec_jax.config import check_number
from paradec_jax.data.problems import encode_prompts
from paradec_jax.decode import Decoded, DecoderBase, Reason, Request, make_request, run, stream
from paradec_jax.decode.machine import NETWORK_CALLS, Setting, finish, keys_of, seed_words
from paradec_jax.families import choose
from paradec_jax.records import record
from paradec_jax.sharding.layout import shardings
from paradec_jax.sharding.mesh import mesh_of
from paradec_jax.sharding.processes import gathered, put
from paradec_jax.store import Model
from paradec_jax.text.stop_strings import StopStrings, text_of
from paradec_jax.text.tokenizer import Tokenizer

BUCKET = 32  # buffers of a multiple of it share a compiled program
NEW_TOKENS = 200  # at most, where nobody says
PARTS = {  # of a model, and what to do where a decoder asks for one that is not there
    "head": "asks a residual head, and the model has none: train one, or choose head 'zero'",
    "drafter": "asks masks that draft, and the model has none: train some (paradec train draft)",
}
Messages = Sequence[Mapping[str, Any]]
Prompts = Sequence[Any] | Mapping[str, Any]


@record
class Generation:
    """What `generate` returns: B = prompts * samples rows, the samples of a prompt one after the
    other.

    `infill` returns it too; text and tokens are then those of the whole row, given ones and all.

    Attributes:
      text: what each row adds to the text of its prompt, without special tokens, cut before a stop
        string.
      tokens: tokens of each row, its stop token included; where a stop string ended the row, the
        shortest prefix of them whose text contains it.
      reasons: why each row ended; `Reason.CALLER` is a stop string.
      counts: what each row cost, [B] each: "network_calls" (prefill included), "positions", and
        what the networks declare, such as "recurrences". Where a stop string ended the row, calls
        up to the next look for it are in it too (`every` of `generate`; 1 counts none of them).
      tokens_per_call: generated tokens over network calls, [B].
      log_probs: log-probability of each generated token in nats, or None where not asked for.
    """

    text: list[str]
    tokens: list[list[int]]
    reasons: list[Reason]
    counts: dict[str, Int32[np.ndarray, "B"]]
    tokens_per_call: Float32[np.ndarray, "B"]
    log_probs: list[Float32[np.ndarray, "..."]] | None

    @property
    def network_calls(self) -> Int32[np.ndarray, "B"]:
        """Calls of the network for each row, prefill included."""
        return self.counts[NETWORK_CALLS]


def generate(
    model: Model,
    prompts: Prompts,
    decoder: DecoderBase | None = None,
    *,
    knobs: Any = None,
    max_new_tokens: Any = NEW_TOKENS,
    seed: Any = 0,
    samples: int = 1,
    stop_strings: Sequence[str] = (),
    log_probs: bool = False,
    bucket: int = BUCKET,
    every: int = 8,
    continue_last: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Generation:
    """Continues texts, or answers conversations.

    A conversation is a list of messages, such as `{"role": "user", "content": "Hello"}`. The
    model's chat template makes a text of it, to which no begin-of-text is added. The answer also
    ends at the token that the template writes after an assistant's words. `{"messages": [...],
    "tools": [...]}` gives the template more than messages.

    A row's draws depend on the seed, its prompt and the number of its sample, never on the rest of
    the batch; the same prompt given twice gets the same text twice, so ask for `samples` instead.
    Calls whose longest prompts and whose budgets fall in the same bucket share one compiled
    program.

    Args:
      model: a model with a tokenizer.
      prompts: texts, or one conversation, or several. The model's begin-of-text token is put before
        each text that does not begin with it. Empty texts where the decoder can start from nothing.
      decoder: any decoder, bound or not; when None that which the model names, or else the plain
        one of its family.
      knobs: knobs of the decoder; the defaults when None, and for conversations the model's own
        sampling, where its files have one (`Model.sampling`; a line on standard error tells).
      max_new_tokens: new tokens of a row at most, a whole number.
      seed: seed of all draws, a whole number of 64 bits.
      samples: rows a prompt.
      stop_strings: texts that end a row; the row's text stops before the first of them. They are
        looked for in the text and in the text with its special tokens written out, so they may hold
        such tokens.
      log_probs: whether to keep log-probabilities.
      bucket: number of which the prompt buffer's size is a multiple; of a conversation it is a
        doubling of it, so that one that grows meets few programs.
      every: steps between two looks for a stop string. It changes no token; rows run on for up to
        as many steps less one, and the counts say so.
      continue_last: whether the last message of each conversation is an assistant's, whose words go
        on.
      mesh: mesh of `make_mesh`, on which parameters are put by the rules of `sharding` and rows lie
        over `data` and `fsdp`; where the model lies already (`load`) when None. No token depends on
        it.

    Raises:
      ValueError: no prompt, a prompt too long for the model, no tokenizer, messages that the
        model's template refuses, or a number below 1.
    """
    check_number("every", every)
    setting = choose(model.family, model.decoder) if decoder is None else Setting("", decoder)
    if knobs is None and conversations(prompts) and not getattr(decoder, "greedy", False):
        setting = answering(model, setting)
    decoder, knobs = setting.decoder, setting.knobs if knobs is None else knobs
    task = continuation_task(
        model,
        prompts,
        decoder,
        max_new_tokens=max_new_tokens,
        seed=seed,
        samples=samples,
        stop_strings=stop_strings,
        log_probs=log_probs,
        bucket=bucket,
        continue_last=continue_last,
        mesh=mesh,
    )
    return task.run(knobs, every)


@record
class Task:
    """A decoder and a request, ready to run: what `generate`, `infill` and `paradec generate` have
    in common.

    Attributes:
      model: the model, whose tokenizer makes the texts.
      decoder: decoder that is bound to a network and a buffer size.
      params: prepared parameters of the decoder's networks.
      request: encoded prompts, or texts with gaps.
      prompts: ids that each row's text follows; none where the text holds what was given.
      stop_strings: texts that end a row.
      whole: whether texts and tokens of the result hold what was given.
    """

    model: Model
    decoder: DecoderBase
    params: Any
    request: Request
    prompts: Sequence[Sequence[int]]
    stop_strings: Sequence[str] = ()
    whole: bool = False

    def run(self, knobs: Any = None, every: int = 8) -> Generation:
        """Decodes in one compiled loop, or in calls of `every` steps where stop strings are looked
        for.
        """
        if not self.stop_strings:
            return self.decode(run(self.decoder, self.params, self.request, knobs))
        watch = self.watch()
        last, _ = collections.deque(self.stream(watch, knobs, every), maxlen=1).pop()
        return self.decode(gathered(finish(self.decoder, last)), watch)

    def watch(self) -> StopStrings:
        """What looks for stop strings during one run of `stream`."""
        return StopStrings(
            tokenizer_of(self.model), self.decoder.spec, self.stop_strings, self.prompts
        )

    def stream(
        self, watch: StopStrings, knobs: Any = None, every: int = 1
    ) -> Iterator[tuple[Any, Any]]:
        """States while the request is decoded; rows end where `watch` finds a stop string."""
        return stream(self.decoder, self.params, self.request, knobs, every=every, interrupt=watch)

    def decode(self, decoded: Decoded, watch: StopStrings | None = None) -> Generation:
        """Tokens as texts, which end where `watch` has found a stop string."""
        tokenizer, spec = tokenizer_of(self.model), self.decoder.spec
        tokens = decoded.completions()
        reasons = [Reason(int(reason)) for reason in np.asarray(decoded.reasons)]
        rows = zip(tokens, self.prompts, strict=True)
        texts = [text_of(tokenizer, spec, ids, prompt) for ids, prompt in rows]
        stopped = {} if watch is None else watch.finish(tokens)
        for row, (length, text) in stopped.items():
            tokens[row], texts[row], reasons[row] = tokens[row][:length], text, Reason.CALLER
        # on the host: nothing to compile
        generated = np.asarray([len(row) for row in tokens], np.float32)
        log_probs = None
        if decoded.log_probs is not None:
            pairs = zip(decoded.generated_log_probs(), tokens, strict=True)
            log_probs = [row[: len(ids)] for row, ids in pairs]
        if self.whole:
            ends = zip(np.asarray(decoded.tokens), np.asarray(decoded.lengths), strict=True)
            tokens = [row[:length].tolist() for row, length in ends]
            texts = [tokenizer.decode(row, skip_special=True) for row in tokens]
        counts = {name: np.asarray(count) for name, count in decoded.counts.items()}
        per_call = generated / np.maximum(counts[NETWORK_CALLS], 1).astype(np.float32)
        return Generation(texts, tokens, reasons, counts, per_call, log_probs)


def continuation_task(
    model: Model,
    prompts: Prompts,
    decoder: DecoderBase,
    *,
    max_new_tokens: Any,
    seed: Any = 0,
    samples: int = 1,
    stop_strings: Sequence[str] = (),
    log_probs: bool = False,
    bucket: int = BUCKET,
    continue_last: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Task:
    """Encodes prompts and binds the decoder; arguments and errors are those of `generate`."""
    tokenizer, spec = tokenizer_of(model), model.token_spec
    check_number("max_new_tokens", max_new_tokens)
    check_number("samples", samples)
    if not isinstance(stop_strings, list | tuple) or {
        type(x) if x else "" for x in stop_strings
    } - {str}:
        raise ValueError(
            f"stop_strings must be a list of texts that are not empty, not {stop_strings!r}"
        )
    check_number("bucket", bucket, 1, max(BUCKET, model.network.max_length))
    max_new_tokens = int(max_new_tokens)  # NumPy's wraps around
    canvas = getattr(decoder, "any_order", False)
    texts: Any = prompts
    if chats := conversations(prompts):
        from paradec_jax.text.chat import as_prompts  # takes in Jinja, which texts do not need

        texts, spec = as_prompts(model, chats, continue_last)
    elif continue_last:
        raise ValueError("continue_last is for conversations, and the prompts are texts")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"prompts must hold texts, not {list(texts)!r:.60}")
    tokens, lengths = encode_prompts(
        tokenizer, texts, spec=spec, bucket=bucket, may_be_empty=canvas
    )
    if chats:
        extra = bucket * 2 ** (tokens.shape[1] // bucket - 1).bit_length() - tokens.shape[1]
        tokens = np.pad(tokens, ((0, 0), (0, extra)), constant_values=spec.pad)
    ids = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    for i, row in enumerate(ids):
        if canvas and spec.mask in row:
            raise ValueError(
                f"prompt {i} holds {tokenizer.token_text(spec.mask)!r}, "  # type: ignore[arg-type]
                "the model's mask, which no text may hold: leave it out"
            )
    longest = int(lengths.max())
    needed = longest + max_new_tokens
    # A decoder that appends reads windows of its buffer; every call of a canvas reads the whole
    # buffer. Its room for new tokens is rounded up, by a quarter at most beyond the first buckets:
    # budgets share programs.
    unit = bucket * 2 ** max((max_new_tokens // bucket).bit_length() - 3, 0)
    size = (
        -(-needed // bucket) * bucket
        if canvas
        else tokens.shape[1] + -(-max_new_tokens // unit) * unit
    )
    what = f"prompt {int(lengths.argmax())} has {longest} tokens and max_new_tokens is {max_new_tokens}"
    decoder = dataclasses.replace(
        bind(model, decoder, size, needed, what, log_probs=log_probs), spec=spec
    )
    request = make_request(
        np.repeat(tokens, samples, axis=0)[:, : decoder.size],
        np.repeat(lengths, samples),
        max_new_tokens=max_new_tokens,
        stop=spec.stop,
        keys=row_keys(ids, seed, samples),
    )
    before = [prompt for prompt in ids for _ in range(samples)]
    return Task(model, decoder, parameters(model, decoder, mesh), request, before, stop_strings)


def answering(model: Model, setting: Setting, given: Container[str] = ()) -> Setting:
    """The setting with the model's own sampling, but for what is given; a line on standard error
    tells of it.
    """
    drawn = {name: value for name, value in model.sampling.items() if name not in given}
    knobs: Any = {name: value for name, value in drawn.items() if hasattr(setting.values, name)}
    words = [f"{name} {drawn[name]:g}" + " (not applied)" * (name not in knobs) for name in drawn]
    if drawn:
        line = f"{type(setting.decoder).__name__} takes from the model's files: {', '.join(words)}"
        print(line, file=sys.stderr)
    if setting.decoder.top_p_rule == "keep" and "top_p_rule" not in given:
        knobs["top_p_rule"] = "keep-renormalised"  # transformers' order
    return setting.changed(knobs) if drawn else setting


def conversations(prompts: Prompts) -> list[Messages]:
    """Conversations where prompts are one or several of them; nothing where they are texts.

    Raises:
      ValueError: prompts that are no list, or an empty one.
    """
    if isinstance(prompts, str) or not hasattr(prompts, "__getitem__"):
        raise ValueError(f"prompts must be a list of texts, not {prompts!r:.60}")
    if not len(prompts):
        raise ValueError("prompts must hold at least one text")
    first: Any = prompts if isinstance(prompts, Mapping) else prompts[0]
    if first is prompts or (isinstance(first, Mapping) and "messages" not in first):
        return [prompts]  # type: ignore[list-item]
    return list(prompts) if isinstance(first, Mapping | list | tuple) else []  # type: ignore[arg-type]


def bind(
    model: Model,
    decoder: DecoderBase,
    size: int,
    needed: int | None = None,
    what: str | None = None,
    *,
    log_probs: bool = False,
) -> Any:
    """A decoder for a model's network, what stands beside it and special tokens; one that has
    networks keeps them.

    Args:
      model: the model.
      decoder: any decoder, bound or not.
      size: positions of the buffer, at most; the model's length may leave fewer.
      needed: positions that the request needs; `size` when None.
      what: description of the request for the error; a number of positions when None.
      log_probs: whether to keep log-probabilities.

    Raises:
      ValueError: a request that is too long for the model, a decoder that needs a part which the
        model lacks, or a decoder that does not suit the network.
    """
    if not isinstance(decoder, DecoderBase):
        raise ValueError(f"decoder must be a decoder, such as Jacobi(), not {decoder!r}")
    if part := lacking(model, decoder):
        raise ValueError(f"{type(decoder).__name__} {PARTS[part]}")
    for name in decoder.further_networks:
        if getattr(decoder, name) is None:
            part = getattr(model, name).network
            decoder = dataclasses.replace(decoder, **{name: part})
    network = decoder.network or model.network
    if not decoder.windowed:
        needed = needed or size
        if needed > network.max_length:
            what = what or f"{needed} positions are needed"
            raise ValueError(
                f"{what}, more than the {network.max_length} positions the model was built for"
            )
        size = min(size, network.max_length)
    decoder = decoder.bind(network, size, model.token_spec)
    return dataclasses.replace(decoder, log_probs=True) if log_probs else decoder


def lacking(model: Model, decoder: Any) -> str | None:
    """The part of a model that a decoder asks for, where there is none; None where all are there."""
    for name in decoder.further_networks:
        if getattr(decoder, name) is None and getattr(model, name) is None:
            return name
    return None


def parameters(
    model: Model, decoder: DecoderBase, mesh: jax.sharding.Mesh | None = None, network: Any = None
) -> Any:
    """The model's parameters, prepared for a bound decoder: those of the network, or of several by
    their fields.

    Args:
      model: the model.
      decoder: decoder that is bound to the model.
      mesh: mesh on which the parameters are put by the rules of `sharding`; where they are when
        None.
      network: prepared parameters of the model's network, where there are some.

    Raises:
      ValueError: a mesh with Explicit axes, given or theirs.
    """
    params: Any = model.params if network is None else network
    mesh_of(params)
    if network is None and mesh is None and alike(decoder.network, model.network):
        params = model.prepared
    if decoder.further_networks:
        beside = {name: getattr(model, name) for name in decoder.further_networks}
        beside = {name: part.params for name, part in beside.items() if part is not None}
        params = {"network": params} | beside
    return decoder.prepare(params if mesh is None else put(params, shardings(params, mesh)))


def alike(network: Any, other: Any) -> bool:
    """Whether two networks lay parameters out alike: networks of one class and config, of any
    depth.
    """
    return type(network) is type(other) and getattr(network, "config", None) == getattr(
        other, "config", None
    )


def tokenizer_of(model: Model) -> Tokenizer:
    """The model's tokenizer. Raises ValueError where it has none."""
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer: put a tokenizer.json into its folder")
    return model.tokenizer


def row_keys(prompts: Sequence[Any], seed: Any, samples: int = 1) -> Array:
    """One key for each prompt and sample, [prompts * samples], from seed, ids and number of the
    sample.

    Raises:
      ValueError: a seed that is no whole number of 64 bits.
    """
    marks = np.asarray([mark_of(np.asarray(ids, "<i4").tobytes()) for ids in prompts], np.uint32)
    return _keys_of_samples(seed_words(seed), marks, np.arange(samples, dtype=np.uint32))


def mark_of(data: bytes) -> int:
    """A number of 32 bits that equal bytes share."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


@jax.jit
def _keys_of_samples(words: Any, marks: Any, samples: Any) -> Array:
    """Keys [N * K] of N prompts' marks and K numbers of samples, in one program."""
    folded = keys_of(words, marks)
    per_sample = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return jax.vmap(per_sample, in_axes=(0, None))(folded, samples).reshape(-1)
