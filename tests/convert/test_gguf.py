"""GGUF files, written by the package gguf: the same models as from folders, tokenizers, and what is
refused.
"""

import json
import re
import sys

import numpy as np
import pytest
import small_tokenizers as small
from exports import TABLES, WEIGHTS, assert_same, exported, imported, make_model, rewrite
from marks import over
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

import paradec_jax as pd
from paradec_jax.config import RopeScaling
from paradec_jax.convert.engine import ConvertError
from paradec_jax.convert.gguf import read

gguf = pytest.importorskip("gguf")
NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "o_proj": "attn_output",
}
NAMES |= {
    "rope_freqs": "rope_freqs",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
NAMES |= {
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    **{f"{x}_proj": f"attn_{x}" for x in "qkv"},
}
NAMES |= {f"{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
KEYS = "embedding_length block_count context_length feed_forward_length attention.head_count attention.head_count_kv "
KEYS += (
    "attention.key_length attention.value_length rope.dimension_count rope.freq_base expert_count "
)
KEYS += "attention.layer_norm_rms_epsilon"
IDS = {"eos": 1, "eot": 2, "bos": 3, "padding": 4}
KINDS = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}


def metadata(network, kind, **more):
    """What a file says of a model, and `more` of its tokenizer."""
    c = network.config
    values = (
        c.width,
        c.layers,
        c.max_length,
        c.feed_forward,
        c.heads,
        c.kv_heads,
        *[c.head_dim] * 3,
    )
    own = dict(zip(KEYS.split(), (*values, c.rope_base, 0, c.norm_eps), strict=True))
    words = {f"{name}_token_id": token for name, token in IDS.items()} | more
    own = {f"{kind}.{name}": value for name, value in own.items()}
    return {
        "general.architecture": kind,
        **own,
        **{f"tokenizer.ggml.{k}": v for k, v in words.items()},
    }


def written(path, values, tensors, types=("F32",)):
    """The numbers in a file of tensors in the names of transformers, whose matrices are of those
    types in turns.
    """
    writer = gguf.GGUFWriter(path, values["general.architecture"])
    for name, value in list(values.items())[1:]:
        getattr(writer, f"add_{KINDS[type(value)]}")(name, value)
    numbers = {}
    for i, (name, array) in enumerate(tensors.items()):
        kind = gguf.GGMLQuantizationType[types[i % len(types)] if array.ndim > 1 else "F32"]
        data, (part, ending) = gguf.quantize(array, kind), name.split(".")[-2:]
        layer = "".join(f"blk.{i}." for i in re.findall(r"layers\.(\d+)", name))
        writer.add_tensor(f"{layer}{NAMES[part]}.{ending}", data, raw_dtype=kind)
        numbers[name] = gguf.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


LLAMA3 = RopeScaling(
    kind="llama3", factor=32.0, original=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
LLAMA3_1 = {"rope_base": 5e5, "rope_scaling": LLAMA3, "max_length": 16_384}
BIASES = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
YARN = RopeScaling(kind="yarn", factor=4.0, original=32, beta_fast=16.0)
KEYS_OF_YARN = {
    "attn_factor": 1.0,
    "type": "yarn",
    "factor": 4.0,
    "original_context_length": 32,
    "yarn_beta_fast": 16.0,
}
MODELS = {
    "llama": {},
    "llama tied": {"tie_embeddings": True},
    "llama biases, llama3": BIASES | LLAMA3_1,
    "qwen2 yarn": {"rope_scaling": YARN},
    "qwen2 untied": {"tie_embeddings": False},
    "qwen3": {},
}


def factors(config):
    """Of wavelengths of Llama 3, a pair of channels after the other."""
    for i in range(config.head_dim // 2):
        length = 2 * np.pi * config.rope_base ** (2 * i / config.head_dim)
        smooth = (8192 / length - 1) / 3
        yield 1 if length < 2048 else 32 if length > 8192 else 1 / ((1 - smooth) / 32 + smooth)


@over(MODELS)
def test_a_file_is_the_model_of_a_folder_with_the_same_numbers(name, tmp_path, capsys):
    kind, sizes = (
        name.split()[0],
        {"width": 32, "feed_forward": 64, "head_channels": 16, "norm_eps": 1e-5},
    )
    folder = exported(model := make_model(kind, **sizes | MODELS[name]), tmp_path)
    tensors, path = load_file(folder / WEIGHTS), tmp_path / "a.gguf"
    heads = {"q_proj": 4, "k_proj": model.config.kv_heads} if kind == "llama" else {}

    def turn(*lengths):  # `llama` has channels i and i + C/2 of queries and keys beside each other
        for part, count in heads.items():
            for key in [key for key in tensors if part in key]:
                shape = (count, *lengths, *tensors[key].shape[1:])
                tensors[key] = (
                    tensors[key].reshape(shape).swapaxes(1, 2).reshape(tensors[key].shape)
                )

    turn(2, -1)
    values = metadata(model, kind, add_bos_token=True)
    if "llama3" in name:
        tensors["rope_freqs.weight"] = np.array([*factors(model.config)], np.float32)
    if "yarn" in name:
        values |= {f"{kind}.rope.scaling.{key}": value for key, value in KEYS_OF_YARN.items()}
    tensors = written(path, values, tensors, ("F32", "F16", "BF16", "Q8_0", "Q4_0"))
    tensors.pop("rope_freqs.weight", None)
    turn(-1, 2)
    rewrite(folder, lambda stored: stored.update(tensors))
    capsys.readouterr()
    found = pd.load(path)
    assert "is quantised (Q4_0, Q8_0): its numbers are rounded" in capsys.readouterr().err
    assert_same(found, imported(folder))
    assert (found.config, found.token_spec) == (model.config, model.token_spec)
    assert_same(pd.load(path, dtype="bfloat16"), pd.load(folder, dtype="bfloat16"))


def test_what_is_refused_or_damaged_is_named(tmp_path, monkeypatch):
    path, tensors = (
        tmp_path / "a.gguf",
        load_file(exported(make_model("llama"), tmp_path) / WEIGHTS),
    )
    values = metadata(make_model("llama"), "llama")

    def refused(message):
        with pytest.raises(ConvertError, match=message):
            read(path)

    for change, message in TABLES["gguf"]:
        written(path, values | json.loads(change), tensors)
        refused(message)
    written(path, values, tensors | {"rope_freqs.weight": np.ones(2) * 3})
    refused(r"rope_freqs\.weight does not scale")
    written(path, values, tensors)
    whole = path.read_bytes()
    for content in (
        whole[:-500],
        whole[:300],
        b"GGUF",
        b"",
        whole.replace(b"token_embd", b"token_empt"),
    ):
        path.write_bytes(content)
        refused(r"a\.gguf is missing, damaged")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused("pip install gguf")


def with_words(root, model, words, kinds, **more):
    """What is read of a file with a tokenizer of these tokens."""
    llama = make_model("llama", vocab_size=512)
    values = metadata(llama, "llama", model=model, tokens=[*words], token_type=[*kinds], **more)
    written(root / "a.gguf", values, load_file(exported(llama, root) / WEIGHTS))
    return read(root / "a.gguf")


# By `pre`: how "a1234's b" is split, where digits would melt into one token.
SPLITS = {"default": "1234", "smollm": "1 2 3 4", "llama-bpe": "123 4", "qwen2": "1 2 3 4"}


@over(SPLITS, argument="pre")
def test_tokenizers_of_bytes(pre, tmp_path):
    merges = ["1 2", "12 3", "123 4", "Ġ b", "b 1"]
    words = ["<|eot_id|>", "</s>", "<u>", "<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [merge.replace(" ", "") for merge in merges] + ["two words", "[PAD]"]
    kinds = [3, 3, 3, 3, *[1] * (len(words) - 6), 4, 5]
    model = with_words(tmp_path, "gpt2", words, kinds, pre=pre, merges=merges, unknown_token_id=2)
    found = model.tokenizer
    assert [
        found.token_text(i) for i in found.encode("a1234's b")
    ] == f"a {SPLITS[pre]} ' s Ġb".split()
    text = "<s>two words\n  é日 <|eot_id|>"
    ids = found.encode(text)
    assert (ids[:2], ids[-1]) == ([3, len(words) - 2], 0) and found.decode(ids) == text
    assert found.decode(ids, skip_special=True) == text[3:-10] and found.id_of("[PAD]") is None
    # one letter, of two codes
    assert (found.decode(found.encode("\u212b")) == "\u00c5") == (pre == "qwen2")
    assert model.token_spec.bos == (
        3 if pre == "llama-bpe" else None
    ) and model.token_spec.stop == (1, 2, 0)
    texts = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": words[4], "unk_token": "<u>"}
    assert model.special_tokens == texts


@over([True, False], argument="blank")
def test_a_tokenizer_of_sentencepiece(blank, tmp_path):
    own = small.llama() if blank else small.byte_fallback()
    words, made = (
        [*small.SPECIAL, *small.BYTES, *small.WORDS],
        ["".join(pair) for pair in small.MERGES],
    )
    kinds = [2, 3, 3, 3, *[6] * 256, *[1] * len(small.WORDS)]
    scores = [-float(made.index(word)) if word in made else -99.0 for word in words]
    model = with_words(tmp_path, "llama", words, kinds, scores=scores, add_space_prefix=blank)
    assert model.token_spec.bos == 3
    for text in ("a b", "ab   c\n return H.", "<s>a</s> b x", "é日😀", ""):
        ids = own.encode(text)
        assert model.tokenizer.encode(text) == ids
        for skip in (True, False):
            assert model.tokenizer.decode(ids, skip_special=skip) == own.decode(
                ids, skip_special=skip
            )


WORDS = {
    "tokens": [*"abcdef"],
    "token_type": [1] * 6,
    "scores": [0.0] * 6,
    "merges": ["a b"],
    "pre": "default",
}


@over([("llama", "scores"), ("gpt2", "merges"), ("gpt2", "token_type")], argument="model, field")
def test_fields_of_a_tokenizer_that_are_not_there(model, field, tmp_path):
    llama, others = (
        make_model("llama"),
        {name: value for name, value in WORDS.items() if name != field},
    )
    values = metadata(llama, "llama", model=model, **others)
    written(tmp_path / "a.gguf", values, load_file(exported(llama, tmp_path) / WEIGHTS))
    with pytest.raises(
        ConvertError, match=rf"a\.gguf .* lacks the field 'tokenizer\.ggml\.{field}"
    ):
        read(tmp_path / "a.gguf")
    assert read(tmp_path / "a.gguf", words=False).tokenizer is None


def test_scores_are_numbers(tmp_path):
    with pytest.raises(ConvertError, match=r"scores of .* NaN"):
        with_words(tmp_path, "llama", "abcdef", [1] * 6, scores=[float("nan")] * 6)


@over([{"pre": "poro-chat"}, {}], argument="rule")
def test_a_tokenizer_of_another_kind_is_left_out(rule, tmp_path, capsys):
    assert with_words(tmp_path, "gpt2", "abcdef", [1] * 6, **rule).tokenizer is None
    assert (
        f"has no tokenizer that is read (model gpt2, pre {rule.get('pre')})"
        in capsys.readouterr().err
    )
