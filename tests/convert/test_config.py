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
    DYNAMIC,
    FAMILIES,
    NEXT,
    OWN,
    WEIGHTS,
    assert_same,
    edit,
    exported,
    imported,
    json_in,
    make_model,
    make_shards,
    recorded,
    rewrite,
    rows,
)
from flax.traverse_util import flatten_dict
from marks import over
from safetensors.numpy import load_file
from small_tokenizers import KINDS

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.config import CausalConfig, TokenSpec
from paradec_jax.convert import full, huginn, mdlm, qwen2, sdar
from paradec_jax.convert.engine import ConvertError

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
EMBEDDING = "model.embed_tokens.weight"


def cast(folder, kind: str, part: str = ""):
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
        edit(source, torch_dtype="float16")
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

    def test_a_copy_of_the_embedding_in_another_type(self, copy, refused):
        source = copy("qwen2")
        cast(source, "float16")
        rewrite(source, lambda t: t.update({"lm_head.weight": t[EMBEDDING].astype(np.float32)}))
        imported(source)
        rewrite(source, lambda t: t["lm_head.weight"].__setitem__((0, 0), 1.0001))
        assert "lm_head.weight differs from" in refused(source)

    @rows("types", "fields", "want")
    def test_names(self, fields, want, copy, capsys):
        source = copy("qwen2")
        edit(source, **fields)
        assert imported(source).config.dtype == want
        assert f"(float32, computing in {want})" in capsys.readouterr().out


class TestFields:
    @over(FAMILIES)
    def test_that_nobody_needs(self, name, copy):
        source = copy(name)
        more = {"transformers_version": "5.0.0", "quantization_config": {}, "new": [1, {"a": "b"}]}
        fields = json_in(source) | more
        nulls = {
            "mlp_bias",
            "use_sliding_window",
            "bias",
            "time_conditioning",
            "effective_expected_depth",
            "alibi",
        } & fields.keys()
        (source / CONFIG).write_text(json.dumps(fields | dict.fromkeys(nulls)))
        assert_same(imported(source), make_model(name))

    @rows("idle", "fields")
    def test_that_change_nothing(self, fields, copy):
        source = copy("qwen2")
        edit(source, **fields)
        rewrite(source, lambda tensors: tensors.update({qwen2.HEAD: tensors[qwen2.EMBEDDING]}))
        assert_same(imported(source), make_model("qwen2"))

    def test_aliases_and_defaults_of_the_recurrent_release(self, copy):
        source = copy("huginn")
        edit(
            source,
            n_heads=None,
            num_key_value_heads=None,
            num_attention_heads=2,
            rope_base=None,
        )
        left = ("vocab_size", "torch_dtype", "norm_eps", "qk_bias", "tie_embeddings")
        edit(source, **dict.fromkeys(left))
        assert_same(imported(source), make_model())

    def test_byte_order_marks(self, copy):
        source = copy("qwen2")
        for name in (CONFIG, "generation_config.json", "tokenizer_config.json"):
            (source / name).write_bytes(b"\xef\xbb\xbf" + (source / name).read_bytes())
        assert_same(imported(source), make_model("qwen2"))

    def test_of_a_training_config(self, copy, refused):
        source = copy("mdlm")
        fields = json_in(source)
        sizes = {"length": fields["model_length"], "hidden_size": fields["hidden_dim"]}
        sizes |= {name: fields[name] for name in ("cond_dim", "n_blocks", "n_heads")}
        nested = {"model": sizes, "dtype": "torch.bfloat16", "parameterization": "subs"}
        (source / CONFIG).write_text(json.dumps(nested))
        want = make_model("mdlm").config
        assert imported(source).config == dataclasses.replace(want, dtype="bfloat16")
        edit(source, parameterization="sedd")
        want = "field parameterization of config.json must be 'subs', not 'sedd'"
        assert want in refused(source)
        del sizes["length"]
        edit(source, model=sizes, parameterization=None)
        assert "field model_length is missing" in refused(source)


@rows("sampling", "fields", "want")
def test_sampling(fields, want, copy, tmp_path, refused):
    source = copy("qwen2")
    (source / "generation_config.json").write_text(json.dumps(fields))
    if isinstance(want, str):
        assert f"generation_config.json: {want}" in refused(source)
        return
    model = imported(source)
    assert model.sampling == want and imported(exported(model, tmp_path)).sampling == want


class TestTokens:
    @rows("tokens", "layout", "vocab_size", "config", "generation", "want")
    def test_of_files(self, tmp_path, layout, vocab_size, config, generation, want):
        if generation:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        bos, stop, *others = want
        source = (tmp_path,) if layout == "qwen2" else ()
        parse = {"huginn": huginn, "mdlm": mdlm, "qwen2": qwen2}[layout].parse_tokens
        assert parse(*source, config, vocab_size) == TokenSpec(bos, tuple(stop), *others)

    def test_of_block_diffusion(self, tmp_path, refused):
        source, spec = recorded("block_diffusion", tmp_path), TokenSpec(None, (1,), 1, 150, "own")

        def read(*options):
            model = imported(source, *options)
            return model.config.block, model.token_spec

        assert read() == (4, spec)
        edit(source, block_size=8, alignment="next")
        assert read() == (8, dataclasses.replace(spec, alignment="next"))
        other = ("--mask", "7", "--block", "2", "--alignment", "own")
        assert read(*other) == (2, dataclasses.replace(spec, mask=7))
        edit(source, block_size=None, mask_token_id=None, alignment=None)
        assert "of 160, not 151669: name it with paradec import --mask" in refused(source)
        assert read("--mask", "150") == (4, spec)
        edit(source, model_type="a2d-qwen3")
        assert read("--mask", "150", "--kind", "bd3lm") == (32, spec)
        bd3lm = ("--mask", "150", "--kind", "bd3lm", "--origin", "padded")
        assert imported(source, *bd3lm).config.origin == "padded"
        assert "how it was trained: name it with paradec import --kind" in refused(source)
        edit(source, rope_scaling={"rope_type": "longrope"})
        assert "longrope" in refused(source, "--mask", "150", "--block", "32")

    def test_of_block_diffusion_with_shifted_logits(self, tmp_path, refused):
        source = exported(make_model("Fast_dLLM_Qwen"), tmp_path)
        fields = json_in(source)
        assert fields["bd_size"] == 32 and fields["architectures"] == ["Fast_dLLM_QwenForCausalLM"]
        edit(source, bd_size=None, mask_token_id=None)
        edit(source / "generation_config.json", mask_token_id=None)
        assert "of 32, not 151665: name it with paradec import --mask" in refused(source)
        assert_same(imported(source, "--mask", "31"), make_model("Fast_dLLM_Qwen"))

    def test_of_full_attention(self, tmp_path, refused):
        """Kind and mask where config.json does not say them."""
        source = exported(make_model("a2d-qwen2"), tmp_path)
        edit(source, diffusion_kind=None)
        assert "name it with paradec import --kind mdlm (or bd3lm), or load(" in refused(source)
        assert_same(imported(source, "--kind", "mdlm"), make_model("a2d-qwen2"))
        edit(source, mask_token_id=None)
        edit(source / "generation_config.json", mask_token_id=None)
        assert "not None: name it with paradec import --mask" in refused(source, "--kind", "mdlm")
        KINDS["metaspace"]().save(source / "tokenizer.json")
        special = {"mask_token": "</s>", "add_bos_token": False}
        (source / "tokenizer_config.json").write_text(json.dumps(special))
        assert imported(source, "--kind", "mdlm").token_spec.mask == 2
        edit(source, model_type="qwen2")
        assert imported(source).family == "causal"
        model = pd.load(source, kind="mdlm")
        assert (model.family, model.token_spec.alignment) == ("full_attention", "next")
        for kind in ("bd3lm", "full"):
            with pytest.raises(ConvertError, match=f"kind '{kind}' is not one of model type"):
                pd.load(source, kind=kind)

    def test_a_head_that_is_there_is_read_whatever_the_field_says(self, tmp_path):
        source = exported(make_model("CoDA bfloat16"), tmp_path)
        edit(source, tie_word_embeddings=True)
        assert_same(imported(source), make_model("CoDA bfloat16"))


@rows("wrong", "name", "fields", "message")
def test_config_that_is_wrong(refused, copy, tmp_path, name, fields, message):
    source = recorded("head", tmp_path) if name == "head" else copy(name)
    edit(source, **fields)
    assert re.search(message, refused(source))


def test_options_that_are_wrong(capsys, refused, copy, tmp_path):
    source = copy("sdar")
    for option, value, message in (
        ("--mask", "32", "must be an id of the vocabulary of 32, not 32"),
        ("--mask", "-1", "must be an id of the vocabulary of 32, not -1"),
        ("--block", "129", "no valid model: --block must be between 1 and max_length 128, not 129"),
    ):
        assert message in refused(source, option, value)
    edit(source, model_type="qwen3")
    (source / "last.ckpt").touch()
    for option, value in (("--block", "4"), ("--mask", "3"), ("--alignment", "own")):
        for place in (source, source / "last.ckpt"):
            assert main(["import", str(place), str(tmp_path / "x"), option, value]) == 1
            want = f"{option} is for other models than that of {place}"
            assert want in capsys.readouterr().err
    assert "--weights chooses those of a .ckpt file" in refused(source, "--weights", "ema")


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
            full,
            dataclasses.replace(make_model("Dream"), token_spec=NEXT),
            "only a model with a mask",
        ),
        (full, make_model("llada", rope_scaling=DYNAMIC), "of a llada has no place for rope_sc"),
        (full, make_model("llada", head_channels=6), "of a llada has no place for head_channels"),
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


@rows("long", "fields", "want")
def test_fields_of_long_texts(fields, want):
    plain = qwen2.format_config(make_model("qwen2", layers=4).config, "qwen2")
    config = qwen2.parse_config(plain | fields, CausalConfig)
    assert qwen2.parse_config(qwen2.format_config(config, "qwen2"), CausalConfig) == config
    found = json.loads(json.dumps(config.to_dict()))
    found |= found["rope_scaling"] or {}
    assert {name: found[name] for name in want} == want
