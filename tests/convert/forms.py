"""Forms of checkpoints (`forms.toml`), made of random weights by transformers, and what it makes of them.

The peers' Python writes those of `tests/golden/forms`: `PYTHONPATH=.:tests python tests/convert/forms.py FOLDER`.
"""

import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import small_tokenizers
import tokenizers
from exports import CONFIG, WEIGHTS, edit, rewrite
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SIZES = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
LENGTH = 48  # of the text: past windows, and past the lengths before scaling
SPREAD = 0.2  # standard deviation of weights
# What the names of transformers' classes begin with, where it is not the model type.
PEERS = {"sdar": "Qwen3", "a2d-qwen3": "Qwen3", "Fast_dLLM_Qwen": "Qwen2"}
CHAT = "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
TEXT, MESSAGES = "a b return x.a", [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "x"}]
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def unigram() -> tokenizers.Tokenizer:
    """Pieces with scores, as of sentencepiece."""
    pieces = [*small_tokenizers.SPECIAL, *small_tokenizers.WORDS]
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    """Words and what continues them, as of BERT."""
    pieces = [*small_tokenizers.SPECIAL, "a", "b", "x", "re", "##turn", "."]
    backend = tokenizers.Tokenizer(models.WordPiece({n: i for i, n in enumerate(pieces)}, unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    backend.decoder = decoders.WordPiece()
    return backend


def form_of(name: str) -> dict[str, Any]:
    """All changes of a form, by what they change."""
    rope = {"rope_theta": 100.0, "rope_type": "default"}
    form = {
        "config": SIZES,
        "rope": rope,
        "fields": {},
        "generation": {},
        "dtype": "float32",
        "shards": "1GB",
    }
    for word in name.split()[1:]:
        other = {"prefix" if word.endswith(".") else "dtype": word}
        for key, value in TABLE["changes"].get(word, other).items():
            form[key] = form[key] | value if isinstance(value, dict) else value
    return form


def class_of(name: str, suffix: str) -> Any:
    """transformers' class of a form's model type, such as its `Config`."""
    import transformers

    kind = name.split()[0]
    return getattr(transformers, PEERS.get(kind, kind.capitalize()) + suffix)


def make(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Writes a form and returns what `read` reads of it, before what transformers does not read is put in."""
    import safetensors.torch
    import torch

    form = form_of(name)
    torch.manual_seed(0)
    config = class_of(name, "Config")(**form["config"], rope_parameters=form["rope"])
    model = class_of(name, "ForCausalLM")(config)
    for key, parameter in model.named_parameters():
        parameter.data.normal_(float("norm" in key), SPREAD)
    model.to(getattr(torch, form["dtype"])).save_pretrained(folder, max_shard_size=form["shards"])
    if "spelling" in form:
        respell(folder / CONFIG)
    edit(folder / CONFIG, **{"model_type": name.split()[0]} | form["fields"])
    if form["generation"] is False:
        (folder / "generation_config.json").unlink()
    else:
        edit(folder / "generation_config.json", **form["generation"])
    if "vectors" in form:
        rewrite(
            folder, lambda t: t.update({k: x.astype(form["vectors"]) for k, x in t.items() if x.ndim == 1})
        )
    if "words" in form:
        write_words(folder, form)
    made = {} if name in TABLE["refused"] else read(name, folder)
    if "slow" in form:
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    if "head" in form:
        rewrite(folder, lambda t: t.update({"lm_head.weight": form["head"] * t["model.embed_tokens.weight"]}))
    if "prefix" in form:
        new = (form["prefix"] + "{}").format if form["prefix"] else lambda key: key.removeprefix("model.")
        rewrite(folder, lambda t: [t.update({new(key): t.pop(key)}) for key in list(t)])
    if "bin" in form:
        torch.save(safetensors.torch.load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()
    return made


def respell(path: Path) -> None:
    """Gives the fields of a config.json the names that transformers 4 gives them."""
    fields = json.loads(path.read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": fields.pop("dtype")}
    if rope["rope_type"] != "default":
        fields["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    fields.pop("layer_types", None)
    path.write_text(json.dumps(fields))


def write_words(folder: Path, form: dict[str, Any]) -> None:
    """Writes a tokenizer and a chat template."""
    from transformers import PreTrainedTokenizerFast

    own = {"unigram": unigram, "wordpiece": wordpiece}.get(form["words"])
    backend = own() if own else small_tokenizers.KINDS[form["words"]]()._backend
    if "begin" in form:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    words = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT, **SPECIAL)
    words.save_pretrained(folder)
    if "template" in form:
        (folder / "chat_template.jinja").unlink()
        edit(folder / form["template"], chat_template=CHAT)


def read(name: str, folder: Path) -> dict[str, np.ndarray]:
    """What transformers makes of a folder in float32.

    `input_ids` [1, T] and `logits` [1, T, V], of one call or, where the form has a step, of calls with a cache; seen
    block by block where it has a block, else causally. `stops`, the tokens that end a text. Where there is a
    tokenizer, `ids` of `TEXT` and the text `chat` of `MESSAGES`.
    """
    import torch
    from transformers import PreTrainedTokenizerFast

    tokens, form = torch.from_numpy(np.random.default_rng(0).integers(4, 60, (1, LENGTH))), form_of(name)
    blocks = torch.arange(LENGTH) // form.get("block", 1)
    unseen = torch.where(blocks > blocks[:, None], -torch.inf, 0.0)[None, None]
    cls = class_of(name, "ForCausalLM")
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits, options = [], {"use_cache": True, "attention_mask": unseen if "block" in form else None}
    for piece in tokens.split(form.get("step", LENGTH), dim=1):
        with torch.no_grad():
            out = model(piece, **options)
        options["past_key_values"] = out.past_key_values
        logits.append(out.logits.numpy())
    found = {"input_ids": tokens.numpy(), "logits": np.concatenate(logits, 1)}
    found["stops"] = np.ravel(model.generation_config.eos_token_id or np.zeros(0, int))
    if (folder / "tokenizer.json").is_file():
        words = PreTrainedTokenizerFast.from_pretrained(folder)
        found["ids"] = np.array(words(TEXT)["input_ids"])
        found["chat"] = np.array(words.apply_chat_template(MESSAGES, tokenize=False))
    return found


if __name__ == "__main__":
    for name in TABLE["recorded"]:
        target = Path(sys.argv[1]) / name.replace(" ", "_")
        shutil.rmtree(target, ignore_errors=True)
        arrays = make(name, target)
        np.savez_compressed(target / "recorded.npz", **arrays)
