"""What a config.json says, or must not say: names of fields and types, special tokens, options of
the command.
"""

import dataclasses
import json
import re

import ml_dtypes
import numpy as np
import pytest
from exports import (
    CONFIG,
    FAMILIES,
    NEXT,
    OWN,
    WEIGHTS,
    assert_same,
    edit,
    exported,
    fails,
    imported,
    make_model,
    make_shards,
    recorded,
    rewrite,
)
from flax.traverse_util import flatten_dict
from marks import over
from safetensors.numpy import load_file

from paradec_jax.cli import main
from paradec_jax.config import CausalConfig, TokenSpec
from paradec_jax.convert import huginn, mdlm, qwen2, sdar
from paradec_jax.convert.engine import ConvertError

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
EMBEDDING = "model.embed_tokens.weight"


def cast(folder, kind: str, part: str = "") -> None:
    """Casts the tensors whose names hold `part`."""
    rewrite(
        folder, lambda t: t.update({n: x.astype(TYPES[kind]) for n, x in t.items() if part in n})
    )


class TestTypes:
    @over(FAMILIES)
    @over([((), "float32"), (("--dtype", "bfloat16"), "bfloat16")], argument="options, kind")
    def test_float16(self, name, options, kind, copy):
        source = copy(name)
        cast(source, "float16")
        edit(source / CONFIG, torch_dtype="float16")
        model = imported(source, *options)
        assert (model.config.param_dtype, model.config.dtype) == (kind, kind)
        leaves = flatten_dict(model.params, sep="/")
        for path, before in flatten_dict(make_model(name).params, sep="/").items():
            want = before.astype(np.float16).astype(TYPES[kind])
            assert leaves[path].dtype == want.dtype and leaves[path].tobytes() == want.tobytes(), (
                path
            )

    def test_several_types_become_the_one_that_loses_nothing(self, copy):
        source = copy("qwen2")
        cast(source, "bfloat16", "self_attn")
        cast(source, "float16", "mlp")
        down = load_file(source / WEIGHTS)["model.layers.0.mlp.down_proj.weight"].astype(np.float32)
        make_shards(source)
        leaves = flatten_dict(imported(source).params, sep="/")
        assert {leaf.dtype.name for leaf in leaves.values()} == {"float32"}
        np.testing.assert_array_equal(leaves["layer_0/mlp/down"], down.T)

    def test_a_copy_of_the_embedding_in_another_type(self, copy, capsys):
        source = copy("qwen2")
        cast(source, "float16")
        rewrite(source, lambda t: t.update({"lm_head.weight": t[EMBEDDING].astype(np.float32)}))
        imported(source)
        rewrite(source, lambda t: t["lm_head.weight"].__setitem__((0, 0), 1.0001))
        assert "lm_head.weight differs from" in fails(capsys, "import", source)

    @over(
        [
            ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
            ({"torch_dtype": None, "dtype": "torch.bfloat16"}, "bfloat16"),
            ({"torch_dtype": "float32", "dtype": "bfloat16"}, "bfloat16"),  # the newer field counts
        ],
        argument="fields, want",
    )
    def test_names(self, fields, want, copy, capsys):
        source = copy("qwen2")
        edit(source / CONFIG, **fields)
        assert imported(source).config.dtype == want
        assert f"(float32, computing in {want})" in capsys.readouterr().out


class TestFields:
    @over(FAMILIES)
    def test_that_nobody_needs(self, name, copy):
        source = copy(name)
        more = {"transformers_version": "5.0.0", "quantization_config": {}, "new": [1, {"a": "b"}]}
        fields = json.loads((source / CONFIG).read_text()) | more
        nulls = {
            "mlp_bias",
            "use_sliding_window",
            "bias",
            "time_conditioning",
            "n_layers",
        } & fields.keys()
        (source / CONFIG).write_text(json.dumps(fields | dict.fromkeys(nulls)))
        assert_same(imported(source), make_model(name))

    @over(
        [
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            {"layer_types": ["full_attention"] * 2, "use_sliding_window": True},
            {"rope_parameters": dict.fromkeys(qwen2.LAYER_TYPES, ROPE), "rope_theta": None},
            {"rope_scaling": {"rope_type": "default", "original_max_position_embeddings": 64}},
            {"rope_theta": None, "rope_parameters": ROPE, "head_dim": None},
            {"torch_dtype": None, "dtype": "float32"},
        ],
        argument="fields",
    )
    def test_that_change_nothing(self, fields, copy):
        source = copy("qwen2")
        edit(source / CONFIG, **fields)
        rewrite(source, lambda tensors: tensors.update({qwen2.HEAD: tensors[qwen2.EMBEDDING]}))
        assert_same(imported(source), make_model("qwen2"))

    def test_aliases_and_defaults_of_the_recurrent_release(self, copy):
        source = copy("huginn")
        edit(
            source / CONFIG,
            n_heads=None,
            num_key_value_heads=None,
            num_attention_heads=2,
            rope_base=None,
        )
        left = ("vocab_size", "torch_dtype", "norm_eps", "qk_bias", "tie_embeddings")
        edit(source / CONFIG, **dict.fromkeys(left))
        assert_same(imported(source), make_model())

    def test_byte_order_marks(self, copy):
        source = copy("qwen2")
        for name in (CONFIG, "generation_config.json", "tokenizer_config.json"):
            (source / name).write_bytes(b"\xef\xbb\xbf" + (source / name).read_bytes())
        assert_same(imported(source), make_model("qwen2"))

    def test_of_a_training_config(self, copy, capsys):
        source = copy("mdlm")
        fields = json.loads((source / CONFIG).read_text())
        sizes = {"length": fields["model_length"], "hidden_size": fields["hidden_dim"]}
        sizes |= {name: fields[name] for name in ("cond_dim", "n_blocks", "n_heads")}
        nested = {"model": sizes, "dtype": "torch.bfloat16", "parameterization": "subs"}
        (source / CONFIG).write_text(json.dumps(nested))
        want = make_model("mdlm").config
        assert imported(source).config == dataclasses.replace(want, dtype="bfloat16")
        edit(source / CONFIG, parameterization="sedd")
        want = "field parameterization of config.json must be 'subs', not 'sedd'"
        assert want in fails(capsys, "import", source)
        del sizes["length"]
        edit(source / CONFIG, model=sizes, parameterization=None)
        assert "field model_length is missing" in fails(capsys, "import", source)


# A generation_config.json, and the sampling of the model or what is refused.
DRAWN = [
    (
        {"do_sample": True, "top_p": 0.8, "min_p": 0},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.8},
    ),
    ({"do_sample": True, "top_k": 0}, {"temperature": 1.0}),
    ({"temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"num_beams": 4, "typical_p": 1.0}, {"num_beams": 4}),
    ({"do_sample": "yes"}, "do_sample must be true or false, not 'yes'"),
    ({"do_sample": True, "top_p": 1.5}, "top_p must be above 0 and at most 1, not 1.5"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0, not 0"),
]


@over(DRAWN, argument="fields, want")
def test_sampling(fields, want, copy, tmp_path, capsys):
    source = copy("qwen2")
    (source / "generation_config.json").write_text(json.dumps(fields))
    if isinstance(want, str):
        assert f"generation_config.json: {want}" in fails(capsys, "import", source)
        return
    model = imported(source)
    assert model.sampling == want and imported(exported(model, tmp_path)).sampling == want


class TestTokens:
    @over(
        [
            (128, {}, TokenSpec()),
            (128, {"eos_token_id": [5, 65505], "bos_token_id": 65504}, TokenSpec(None, (5,), 0)),
            (65536, {}, TokenSpec(65504, (65504, 65505, 65508), 65509)),
            (
                65536,
                {"eos_token_id": 9, "pad_token_id": 0},
                TokenSpec(65504, (65504, 65505, 65508, 9), 0),
            ),
        ],
        argument="vocab_size, fields, want",
    )
    def test_of_the_recurrent_release(self, vocab_size, fields, want):
        assert huginn.parse_tokens(fields, vocab_size) == want

    def test_of_denoisers(self):
        assert mdlm.parse_tokens({}, 50_258) == TokenSpec(50_256, (50_256,), 50_256, 50_257, "own")
        assert mdlm.parse_tokens({}, 30_522).mask == 103 and mdlm.parse_tokens({}, 35).mask == 4
        assert mdlm.parse_tokens({"eos_token_id": 5}, 128) == TokenSpec(None, (5,), 5, 127, "own")
        given = {"mask_token_id": 9, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}
        assert mdlm.parse_tokens(given, 50_258) == TokenSpec(1, (2, 3), 0, 9, "own")

    @over(
        [
            ({}, None, TokenSpec()),
            (
                {"eos_token_id": 5, "pad_token_id": 7, "bos_token_id": 6},
                None,
                TokenSpec(None, (5,), 7),
            ),
            ({"eos_token_id": [5, 8], "mask_token_id": 7}, None, TokenSpec(None, (5, 8), 5, 7)),
            (
                {"eos_token_id": 5},
                {"eos_token_id": [8, 5], "pad_token_id": 9},
                TokenSpec(None, (8, 5), 9),
            ),
            (
                {"eos_token_id": None, "pad_token_id": -1},
                {"eos_token_id": 2},
                TokenSpec(None, (2,), 2),
            ),
        ],
        argument="config, generation, want",
    )
    def test_of_two_files(self, tmp_path, config, generation, want):
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        assert qwen2.parse_tokens(tmp_path, config, 32) == want

    def test_of_block_diffusion(self, tmp_path, capsys):
        source = recorded("block_diffusion", tmp_path)
        model = imported(source)
        assert (model.config.block, model.token_spec) == (4, TokenSpec(None, (1,), 1, 150, "own"))
        edit(source / CONFIG, block_size=8, alignment="next")
        assert (imported(source).config.block, imported(source).token_spec.alignment) == (8, "next")
        model = imported(source, "--mask", "7", "--block", "2", "--alignment", "own")
        assert (model.config.block, model.token_spec.mask, model.token_spec.alignment) == (
            2,
            7,
            "own",
        )
        edit(source / CONFIG, block_size=None, mask_token_id=None, alignment=None)
        assert "of 160, not 151669: name it with paradec import --mask" in fails(
            capsys, "import", source
        )
        model = imported(source, "--mask", "150")
        assert (model.config.block, model.token_spec) == (4, TokenSpec(None, (1,), 1, 150, "own"))
        edit(source / CONFIG, model_type="a2d-qwen3")
        model = imported(source, "--mask", "150", "--kind", "bd3lm")
        assert (model.config.block, model.token_spec) == (32, TokenSpec(None, (1,), 1, 150, "own"))
        for more in ((), ("--kind", "mdlm")):
            assert "mdlm is not supported" in fails(
                capsys, "import", source, "--mask", "150", *more
            )
        edit(source / CONFIG, rope_scaling={"rope_type": "longrope"})
        assert "longrope" in fails(capsys, "import", source, "--mask", "150", "--block", "32")

    def test_of_block_diffusion_with_shifted_logits(self, tmp_path, capsys):
        source = exported(make_model("Fast_dLLM_Qwen"), tmp_path)
        fields = json.loads((source / CONFIG).read_text())
        assert fields["bd_size"] == 32 and fields["architectures"] == ["Fast_dLLM_QwenForCausalLM"]
        edit(source / CONFIG, bd_size=None, mask_token_id=None)
        edit(source / "generation_config.json", mask_token_id=None)
        assert "of 32, not 151665: name it with paradec import --mask" in fails(
            capsys, "import", source
        )
        assert_same(imported(source, "--mask", "31"), make_model("Fast_dLLM_Qwen"))


# Layout, fields, options, a part of the sentence.
WRONG = [
    (
        "huginn",
        {"model_type": "mamba"},
        "model_type must be one of huginn_raven, qwen2, .*, not 'mamba'",
    ),
    ("huginn", {"n_embd": None}, "field n_embd is missing"),
    ("huginn", {"n_embd": 0}, "no valid model: width must be at least 1"),
    ("huginn", {"injection_type": "add"}, "field injection_type .* must be 'linear', not 'add'"),
    (
        "huginn",
        {"torch_dtype": "int8"},
        "torch_dtype .*float32, bfloat16, float16, float64, not 'int8'",
    ),
    ("huginn", {"eos_token_id": ["a"]}, "field eos_token_id of config.json must hold token ids"),
    ("huginn", {"rope_base": 10000}, "freqs_cis contradicts rotary positions of base 10000"),
    ("huginn", {"block_size": 32}, r"freqs_cis has shape \(1, 64, 1, 4, 2\).*\(1, 32, 1, 4, 2\)"),
    (
        "huginn",
        {"n_layers_in_coda": 10**9, "n_layers": None},
        "asks for 1000000000 layers, but .* only",
    ),
    ("huginn", {"qk_bias": False}, r"tensor \S+qk_bias .*unknown"),
    ("huginn", {"tie_embeddings": False}, r"tensor lm_head\.weight is missing"),
    (
        "llama",
        {"use_sliding_window": True, "max_window_layers": 1},
        "sliding_window .* for model type llama",
    ),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types .* for each of 2 layers"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "where use_sliding_window is true"),
    (
        "qwen2",
        {"rope_scaling": 4.0},
        r"rope_scaling of config.json must be one object, not \[4.0\]",
    ),
    (
        "qwen2",
        {"rope_scaling": {"type": "longrope"}},
        "rope_type .* default, linear, .*, not 'longrope'",
    ),
    (
        "qwen2",
        {"rope_scaling": {"type": "linear", "m": 1}},
        "field m of rotary positions .* is unknown",
    ),
    (
        "qwen2",
        {"rope_parameters": {kind: {"a": kind} for kind in qwen2.LAYER_TYPES}},
        "must be one object",
    ),
    (
        "qwen2",
        {"rope_parameters": {**ROPE, "rope_theta": 5.0}},
        "_theta = 10000.0, rope_theta in .* = 5.0",
    ),
    ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act .* must be 'silu', not 'gelu'"),
    ("qwen2", {"vocab_size": 64}, r"embed_tokens\.weight has shape \(32, 16\).*\(64, 16\)"),
    ("qwen2", {"tie_word_embeddings": False}, r"lm_head\.weight is missing"),
    (
        "qwen2",
        {"model_type": "qwen2_moe"},
        "mixture of experts .model_type = 'qwen2_moe'., which is not",
    ),
    ("qwen2", {"quantization_config": {"quant_method": "gptq"}}, "quantised weights .*gptq"),
    (
        "qwen2",
        {"eos_token_id": 32},
        "eos_token_id of config.json holds 32, but the vocabulary ends at 31",
    ),
    ("sdar", {"block_size": 0}, "no valid model: block must be at least 1, not 0"),
    ("sdar", {"block_sizes": [2, 4]}, "no valid model: .* with block 8 among them"),
    (
        "sdar",
        {"alignment": "previous"},
        "field alignment .* must be 'own' or 'next', not 'previous'",
    ),
    ("mdlm", {"cond_dim": None}, "field cond_dim is missing"),
    ("mdlm", {"time_conditioning": True}, "field time_conditioning of config.json must be False"),
    (
        "mdlm",
        {"mask_token_id": 32},
        "mask_token_id of config.json holds 32, but the vocabulary ends at 31",
    ),
]


@over(WRONG, argument="name, fields, message")
def test_config_that_is_wrong(capsys, copy, name, fields, message):
    source = copy(name)
    edit(source / CONFIG, **fields)
    assert re.search(message, fails(capsys, "import", source))


@over(
    [
        ({"num_nextn_predict_layers": None}, "field num_nextn_predict_layers is missing"),
        (
            {"num_nextn_predict_layers": 9},
            "no valid model: layers of a residual head must be 1 to 8",
        ),
        ({"num_mrp_heads": 2}, "field num_mrp_heads of config.json must be 1, not 2"),
    ],
    argument="fields, message",
)
def test_config_of_a_residual_head_that_is_wrong(capsys, tmp_path, fields, message):
    source = recorded("head", tmp_path)
    edit(source / CONFIG, **fields)
    assert re.search(message, fails(capsys, "import", source))


def test_options_that_are_wrong(capsys, copy, tmp_path):
    source = copy("sdar")
    for option, value, message in (
        ("--mask", "32", "must be an id of the vocabulary of 32, not 32"),
        ("--mask", "-1", "must be an id of the vocabulary of 32, not -1"),
        ("--block", "129", "no valid model: --block must be between 1 and max_length 128, not 129"),
    ):
        assert message in fails(capsys, "import", source, option, value)
    edit(source / CONFIG, model_type="qwen3")
    (source / "last.ckpt").touch()
    for option, value in (("--block", "4"), ("--mask", "3"), ("--alignment", "own")):
        for place in (source, source / "last.ckpt"):
            assert main(["import", str(place), str(tmp_path / "x"), option, value]) == 1
            want = f"{option} is for models of block diffusion, but {place} holds another"
            assert want in capsys.readouterr().err
    assert "--weights chooses those of a .ckpt file" in fails(
        capsys, "import", source, "--weights", "ema"
    )


def test_export_of_what_the_layout_cannot_hold(tmp_path):
    head, own = make_model("sdar head"), dataclasses.replace(make_model("qwen2"), token_spec=OWN)
    other = dataclasses.replace(
        head.head, config=dataclasses.replace(head.head.config, feed_forward=20)
    )
    for module, model, message in (
        (sdar, dataclasses.replace(head, token_spec=NEXT), "and with a mask has the sdar layout"),
        (sdar, make_model("sdar", qk_norm=False), "norms of queries and keys and with a mask"),
        (
            sdar,
            dataclasses.replace(head, head=other),
            "a residual head whose blocks have the shape",
        ),
        (qwen2, own, "only a model of alignment 'next' has a layout of qwen2"),
        (
            qwen2,
            make_model("qwen3", mlp_bias=True),
            "config.json of a qwen3 has no place for mlp_bias",
        ),
        (
            qwen2,
            make_model("llama", sliding_window=6),
            "of a llama has no place for sliding_window",
        ),
        (
            mdlm,
            dataclasses.replace(make_model("mdlm"), token_spec=NEXT),
            "a mask and of alignment 'own'",
        ),
    ):
        with pytest.raises(ConvertError, match=message):
            module.write(tmp_path, model)
    assert not list(tmp_path.iterdir())


def test_biases_of_the_output_projection_that_are_zero_are_none(tmp_path):
    source = exported(make_model("qwen3 biases"), tmp_path)
    name = "model.layers.0.self_attn.o_proj.bias"
    assert not load_file(source / WEIGHTS)[name].any() and not imported(source).config.out_bias
    rewrite(source, lambda tensors: tensors[name].__setitem__(3, 0.5))
    assert imported(source).params["layer_0"]["attention"]["out_bias"][3] == 0.5


YARN, ORIGINAL = {"type": "yarn", "factor": 4.0}, qwen2.ORIGINAL
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}


@over(
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"factor": 4.0, "max_length": 512}),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 1.5, ORIGINAL: 8}},
            {"max_length": 192},
        ),
        ({"rope_parameters": LLAMA3, ORIGINAL: 16}, {"original": 16, "low_freq_factor": 1.0}),
        ({"rope_scaling": YARN}, {"original": 128, "max_length": 512, "attention_factor": None}),
        (
            {"rope_scaling": {**YARN, ORIGINAL: 16, "finetuned": True}},
            {"original": 16, "max_length": 128},
        ),
        ({"rope_parameters": {"rope_type": "yarn", ORIGINAL: 16}}, {"factor": 8.0}),
        (
            {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
            {"attention_factor": 1.0},
        ),
        (
            {"rope_scaling": {**YARN, "attention_factor": 2, "truncate": False}},
            {"attention_factor": 2.0},
        ),
        ({**SLIDING, "max_window_layers": 1}, {"sliding_layers": (False, True, True, True)}),
        ({**SLIDING, "layer_types": [*qwen2.LAYER_TYPES] * 2}, {"sliding_layers": (False, True)}),
    ],
    argument="fields, want",
)
def test_fields_of_long_texts(fields, want):
    plain = qwen2.format_config(make_model("qwen2", layers=4).config, "qwen2")
    config = qwen2.parse_config(plain | fields, CausalConfig)
    assert qwen2.parse_config(qwen2.format_config(config, "qwen2"), CausalConfig) == config
    found = config.to_dict() | (config.to_dict()["rope_scaling"] or {})
    assert {name: found[name] for name in want} == want
