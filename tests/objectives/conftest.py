"""Tiny models of random weights with a user's tokenizer, and 50 lines."""

import dataclasses
import json

import pytest
from small_tokenizers import byte_level
from stubs.tiny import drawn, tiny_denoiser_params

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.config import CausalConfig, TokenSpec
from paradec_jax.families import init_params

SHAPE = {"width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "feed_forward": 24, "qkv_bias": False}
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    + ("{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}")
)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A Llama in a Hugging Face folder in bfloat16, models of the other families, and 50 lines."""
    root, words = tmp_path_factory.mktemp("source"), byte_level()
    half = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
    sizes = {"vocab_size": words.vocab_size, "max_length": 64}
    spec = TokenSpec(stop=(words.id_of("<|im_end|>"),))
    wide = sizes | {"vocab_size": words.vocab_size + 1}
    hides = TokenSpec(mask=words.vocab_size, alignment="own")
    fills = dataclasses.replace(hides, stop=spec.stop)
    models = {
        "sdar": (
            dataclasses.replace(pd.PRESETS["test-sdar"], param_dtype="bfloat16", **wide),
            fills,
        ),
        "ours": (CausalConfig(tie_embeddings=False, **sizes, **SHAPE, **half), spec),
        "recurrent": (dataclasses.replace(pd.PRESETS["test-recurrent"], **sizes), spec),
        "denoiser": (dataclasses.replace(pd.PRESETS["test-mdlm"], **wide), hides),
    }
    for name, (config, tokens) in models.items():
        # whose answers then depend on its block, beyond rounding
        gain = 4.0 if name == "sdar" else 1.0
        params = (
            tiny_denoiser_params(**wide)
            if name == "denoiser"
            else drawn(init_params, config, 0, gain)
        )
        pd.save(root / name, pd.Model(config, params, tokens, words, TEMPLATE))
    assert main(["export", str(root / "ours"), str(root / "llama")]) == 0
    with (root / "data.jsonl").open("w") as file, (root / "prompts.jsonl").open("w") as alone:
        for i in range(25):
            pair = [("user", f"a b {i}"), ("assistant", f"b a {i}")]
            talk = {"messages": [{"role": role, "content": text} for role, text in pair]}
            lines = (talk, {"prompt": f"x {i} ", "response": f"is {i}"})
            file.writelines(json.dumps(line) + "\n" for line in lines)
            asks = ({"messages": talk["messages"][:1]}, {"prompt": f"x {i} "})
            alone.writelines(json.dumps(line) + "\n" for line in asks)
    return root
