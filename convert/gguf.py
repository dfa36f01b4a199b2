"""GGUF files of causal transformers: metadata as fields of a config.json, names and layouts,
tokenizer.

The package `gguf` reads a file, knows its names, and expands its tensors, rounded ones among them,
to float32.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paradec_jax.config import CausalConfig, TokenSpec
from paradec_jax.disk.tensors import MAX_TENSORS, Lazy
from paradec_jax.io import one_sentence, regular
from paradec_jax.store.model import Model
from paradec_jax.text import template as templates
from paradec_jax.text.tokenizer import Tokenizer

from . import qwen2
from .engine import ConvertError, Json, Source, columns, note, table_shapes
from .fields import present, token_ids, token_spec

LONGEST_PIECE, ALL_PIECES = 256, 2_500_000  # characters of one and of all; each is cut everywhere
# Fields of config.json, and keys of the metadata without the architecture.
FIELDS = dict(
    columns("""
        hidden_size              embedding_length
        num_hidden_layers        block_count
        intermediate_size        feed_forward_length
        num_attention_heads      attention.head_count
        num_key_value_heads      attention.head_count_kv
        head_dim                 attention.key_length
        max_position_embeddings  context_length
        rms_norm_eps             attention.layer_norm_rms_epsilon
        rope_theta               rope.freq_base
    """)
)
SCALING = columns("""
    rope_type                         type
    factor                            factor
    beta_fast                         yarn_beta_fast
    beta_slow                         yarn_beta_slow
    original_max_position_embeddings  original_context_length
""")  # the same of rope_scaling
# Keys that change nothing where they are 1.
NEUTRAL = "rope.scaling.attn_factor rope.scaling.yarn_attn_factor rope.scaling.yarn_ext_factor "
NEUTRAL += "rope.scale_linear logit_scale residual_scale embedding_scale attention.causal"
MOST_READS = 2_000_000  # of strings and numbers in the metadata
IDLE = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
CHANNELS = ("rope.dimension_count", "attention.value_length")  # must be those of a head
EMBEDDING, HEAD, FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

# Tokenizers: `tokenizer.ggml.pre`, and how a text is split before bytes are merged.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
SPLIT += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = "llama-bpe"  # where what is a token is not merged, and texts have a beginning
DIGITS = {LLAMA3: "{1,3}", "qwen2": "", "deepseek-r1-qwen": ""}  # that stay together
PLAIN = ("gpt-2", "default", "smollm")  # split by GPT-2's rule
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # kinds of tokens
# Of texts, turns and messages.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
# In templates, and in the metadata.
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def read(path: Path, dtype: str | None = None, words: bool = True) -> Model:
    """A file as a model with its template, and with its tokenizer if `words`; as `qwen2.read`."""
    try:
        with np.errstate(all="ignore"):  # numbers that become infinite are refused elsewhere
            return _read(path, dtype, words)
    except ImportError as error:
        raise ConvertError(f"{path} is read by the package gguf: pip install gguf") from error
    except ConvertError as error:
        sentence = str(error).replace("config.json", f"the metadata of {path}")
        for field, key in FIELDS.items():
            sentence = sentence.replace(f"field {field} ", f"field {key} ")
        raise ConvertError(sentence) from error
    except Exception as error:  # what is damaged raises errors of many kinds
        why = "it lacks the field " * isinstance(error, KeyError) + one_sentence(error, 99)
        raise ConvertError(f"{path} is missing, damaged or unknown: {why}") from error


def _opened(path: Path) -> Any:
    """The package's reader of a file, in which no tensor lies over another one or beyond its end."""
    import gguf

    class Reader(gguf.GGUFReader):
        """Reads a plain array, not a map: 49,152 tokens in 1.4 s of processor time in place of 3.8.

        Nothing is read past the end of the file, and an array of numbers at once.
        """

        def _keep(self, data: Any) -> None:
            self.plain = np.asarray(data)

        data = property(lambda self: self.plain, _keep)  # type: ignore[assignment]
        reads = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            kind, self.reads = np.dtype(dtype), self.reads + 1
            end = int(offset) + int(count) * kind.itemsize
            if end > len(self.data) or self.reads > MOST_READS:
                raise ValueError(
                    "its header has a size beyond the end of the file, or too many values"
                )
            return self.data[offset:end].view(kind.newbyteorder(override_order or self.byte_order))

        def _build_tensor_info(self, offs: int, count: int) -> Any:
            if count > MAX_TENSORS:
                raise ValueError(f"its header has {count} tensors, and {MAX_TENSORS} are allowed")
            return super()._build_tensor_info(offs, count)

    reader, end = Reader(regular(path)), 0
    places = ((int(t.field.parts[-1][0]), t.n_bytes, t.name) for t in reader.tensors)
    for begin, size, name in sorted(places):
        if begin < end or begin % reader.alignment or begin > len(reader.data):
            raise ConvertError(
                f"tensor {name} of {path} lies over another one, beyond the file or beside its grid"
            )
        end = begin + size
    return reader


def _read(path: Path, dtype: str | None, words: bool) -> Model:
    import gguf

    def numbers(tensor: Any, heads: int | None, index: Any) -> np.ndarray:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if heads:  # whose channels (2i, 2i + 1) turn together there, and (i, i + C/2) here
            array = rearrange(array, "(h c two) ... -> (h two c) ...", h=heads, two=2)
        return array[index]

    reader = _opened(path)
    values = {name: field.contents() for name, field in reader.fields.items()}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if (parts := values.get("split.count", 1)) > 1:
        raise ConvertError(
            f"{path} is one of {parts} parts: join them with llama-gguf-split --merge"
        )
    for tensor in reader.tensors:  # of which none may be of a type that the package does not know
        gguf.dequantize(tensor.data[:1], tensor.tensor_type)
    fields = config_fields(values, stored)
    config, kind = qwen2.parse_config(fields, CausalConfig), fields["model_type"]
    table = qwen2.table(dataclasses.replace(config, layers=min(config.layers, len(stored))))
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], len(stored))
    names = (*table_shapes(table), qwen2.HEAD)
    official = {known.get_name(name, (".weight", ".bias")): name for name in names}
    turned = {"q_proj": config.heads, "k_proj": config.kv_heads} if kind == "llama" else {}
    tensors = {}
    for key, tensor in stored.items():
        name = official.get(key, key)
        heads = next((heads for part, heads in turned.items() if f".{part}." in name), None)
        read = functools.partial(numbers, tensor, heads)
        tensors[name] = Lazy(tuple(tensor.shape[::-1].tolist()), "float32", read)
    tensors.pop(FACTORS, None)
    params, config = qwen2.read_params(Source(path, tensors), fields, config, dtype)
    spec, special = _special(values, config.vocab_size)
    if (template := values.get("tokenizer.chat_template")) is not None:
        templates.check(template)
    if rounded := {tensor.tensor_type.name for tensor in reader.tensors} - {"F32", "F16", "BF16"}:
        note(f"{path} is quantised ({', '.join(sorted(rounded))}): its numbers are rounded")
    tokenizer = _tokenizer(values, path) if words else None
    return Model(config, params, spec, tokenizer, template, special_tokens=special)


def config_fields(values: Json, stored: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata and the tensors as fields of config.json. Raises ConvertError."""
    kind, known = values.get("general.architecture"), ", ".join(qwen2.MODEL_TYPES)
    if kind not in qwen2.MODEL_TYPES:
        raise ConvertError(
            f"general.architecture in config.json must be one of {known}, not {kind!r}"
        )
    start = f"{kind}."
    given = {k.removeprefix(start): value for k, value in values.items() if k.startswith(start)}
    scaling = {field: given.pop(f"rope.scaling.{key}", None) for field, key in SCALING}
    fields = {field: given.get(key) for field, key in FIELDS.items()}
    split = (fields["hidden_size"] or 0) // (fields["num_attention_heads"] or 1)
    channels = fields["head_dim"] or split
    for key, value in given.items():
        idle = (key in CHANNELS and value == channels) or (key in NEUTRAL.split() and value == 1)
        if value and not idle and key not in (*FIELDS.values(), *IDLE):
            raise ConvertError(f"{kind}.{key} = {value!r} in config.json is not supported")
    for field in ("rms_norm_eps", "rope_theta"):  # the shortest number with these 32 bits
        fields[field] = fields[field] and float(str(np.float32(fields[field])))
    if FACTORS in stored:
        fields["rope_scaling"] = _llama3(stored[FACTORS].data, fields["rope_theta"] or 1e4)
    elif scaling["rope_type"] not in (None, "none"):
        fields["rope_scaling"] = present(scaling)
    return fields | {
        "model_type": kind,
        "vocab_size": int(stored[EMBEDDING].shape[-1]),
        "tie_word_embeddings": HEAD not in stored,
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
    }


def _llama3(factors: np.ndarray, base: float) -> dict[str, Any]:
    """The rope_scaling of factors of wavelengths [C/2]; releases of Llama 3 share the rest."""
    factor, low, high, length = float(factors.max()), 1.0, 4.0, 8192
    turns = length / (2 * np.pi) * base ** -(np.arange(factors.size) / factors.size)
    r = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / (r + (1 - r) / factor), rtol=1e-3):
        raise ConvertError(f"tensor {FACTORS} does not scale rotary positions as Llama 3 does")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def _tokenizer(values: Json, path: Path) -> Tokenizer | None:
    """The tokenizer; None, and a line for the user, where it is of a kind that is not read."""
    model, kind = values.get("tokenizer.ggml.model"), values.get("general.architecture")
    usual = "qwen2" if kind in ("qwen2", "qwen3") else None  # older files name none
    pre = values.get("tokenizer.ggml.pre", usual)
    if model != "llama" and (model != "gpt2" or pre not in (*DIGITS, *PLAIN)):
        note(
            f"{path} has no tokenizer that is read (model {model}, pre {pre}): paradec import takes one"
        )
        return None
    texts, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    each = enumerate(zip(texts, kinds, strict=True))
    ids = {text: i for i, (text, kind) in each if kind != UNUSED}
    if model == "llama":
        unknown = texts[values.get("tokenizer.ggml.unknown_token_id", 0)]
        scores = values["tokenizer.ggml.scores"]
        if not np.isfinite(scores).all():
            raise ConvertError(
                f"tokenizer.ggml.scores of {path} holds numbers that are NaN or infinite"
            )
        whole = {text: scores[i] for text, i in ids.items() if kinds[i] == NORMAL}
        prefix = values.get("tokenizer.ggml.add_space_prefix", True)
        backend = from_pieces(ids, whole, unknown, prefix)
    else:
        pairs = [tuple(pair.split(" ", 1)) for pair in values["tokenizer.ggml.merges"]]
        backend = Backend(models.BPE(ids, pairs, ignore_merges=pre == LLAMA3))
        split: list[Any] = []
        if pre == "smollm":
            split.append(pre_tokenizers.Digits(individual_digits=True))
        if pre in DIGITS:
            split.append(pre_tokenizers.Split(Regex(SPLIT % DIGITS[pre]), "isolated"))
        split.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in PLAIN))
        backend.pre_tokenizer = pre_tokenizers.Sequence(split)
        backend.decoder = decoders.ByteLevel()
        backend.normalizer = normalizers.NFC() if pre == "qwen2" else None
    added = [text for text, i in ids.items() if UNKNOWN <= kinds[i] <= USER_DEFINED]
    special = {text: kinds[ids[text]] != USER_DEFINED for text in added}
    backend.add_tokens([AddedToken(t, normalized=False, special=special[t]) for t in added])
    return Tokenizer(backend, str(path))


def from_pieces(
    ids: Mapping[str, int], scores: Mapping[str, float], unknown: str, blank: bool
) -> Backend:
    """The library's form of a BPE of SentencePiece, in which bytes stand for what is no piece.

    Args:
      ids: id of every piece, those of bytes and special ones among them.
      scores: a number for each piece; of two merges the one with the larger number comes first.
      unknown: the piece of what has no bytes.
      blank: whether a blank is put before a text.

    Raises:
      ValueError: a piece that is longer than `LONGEST_PIECE`, or all together than `ALL_PIECES`.
    """
    sizes = [0, *map(len, scores)]
    if max(sizes) > LONGEST_PIECE:
        raise ValueError(f"a piece of {max(sizes)} characters is longer than {LONGEST_PIECE}")
    if sum(sizes) > ALL_PIECES:
        raise ValueError(
            f"the list of pieces of {sum(sizes)} characters is longer than {ALL_PIECES}"
        )
    cuts = ((text[:i], text[i:]) for text in scores for i in range(1, len(text)))
    pairs = [(a, b) for a, b in cuts if a in ids and b in ids]
    pairs.sort(key=lambda pair: (-scores[pair[0] + pair[1]], ids[pair[0]], ids[pair[1]]))
    model = models.BPE(dict(ids), pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend, first = Backend(model), [normalizers.Prepend("▁")] * blank
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    last = [decoders.ByteFallback(), decoders.Fuse(), *[decoders.Strip(" ", 1, 0)] * blank]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *last])
    return backend


def _special(values: Json, vocab_size: int) -> tuple[TokenSpec, dict[str, str]]:
    """Special tokens, ends of turns and messages among them; texts by their names in templates."""
    texts, model, pre = (values.get(f"tokenizer.ggml.{x}") for x in ("tokens", "model", "pre"))

    def ids(name: str) -> list[int]:
        return token_ids(values, f"tokenizer.ggml.{name}_token_id", vocab_size)

    begins = values.get("tokenizer.ggml.add_bos_token", model == "llama" or pre == LLAMA3)
    kinds = values.get("tokenizer.ggml.token_type", ())
    # Files name one end of a text and have more of them.
    ends = [i for i, kind in enumerate(kinds) if kind == CONTROL and texts and texts[i] in ENDS]
    stop = [*ids("eos"), *ids("eot"), *ids("eom"), *ends]
    named = {n: texts[i] for n, key in NAMES.items() for i in ids(key) if texts}
    spec = token_spec(ids("bos") if begins else (), stop, [*ids("padding"), *stop])
    return spec, {f"{name}_token": text for name, text in named.items()}
