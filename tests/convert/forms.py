"""Forms of checkpoints (`forms.toml`), made of random weights by transformers, and what it makes of
them.

The peers' Python writes those of `tests/golden/forms`: `PYTHONPATH=.:tests python
tests/convert/forms.py FOLDER`.
"""

import json
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from exports import CONFIG, WEIGHTS, edit, rewrite
from small_tokenizers import KINDS, SPECIAL, WORDS
from tokenizers import decoders, models, pre_tokenizers, processors

GENERATION = "generation_config.json"
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def form_of(name: str) -> dict[str, Any]:
    """What a form is made of: the plain one's, and the changes of its words."""
    form = dict(TABLE["plain"])
    for word in name.split()[1:]:
        other = {"prefix" if word.endswith(".") else "dtype": word}
        for key, value in TABLE["changes"].get(word, other).items():
            form[key] = form[key] | value if isinstance(value, dict) else value
    return form


def class_of(name: str, suffix: str):
    """transformers' class of a form's model type, such as its `Config`."""
    import transformers

    return getattr(transformers, TABLE["classes"][name.split()[0]] + suffix)


def make(name: str, folder: Path) -> dict[str, np.ndarray]:
    """Writes a form and returns what `read` reads of it, before what transformers does not read is
    put in.
    """
    import safetensors.torch
    import torch

    form = form_of(name)
    torch.manual_seed(0)
    config = class_of(name, "Config")(**form["config"], rope_parameters=form["rope"])
    model = class_of(name, "ForCausalLM")(config)
    for key, parameter in model.named_parameters():
        parameter.data.normal_(float("norm" in key), form["spread"])
    model.to(getattr(torch, form["dtype"])).save_pretrained(folder, max_shard_size=form["shards"])
    if "spelling" in form:
        respell(folder / CONFIG)
    edit(folder, **{"model_type": name.split()[0]} | form["fields"])
    edit(folder / GENERATION, **form["generation"] or {})
    if form["generation"] is False:
        (folder / GENERATION).unlink()
    if "vectors" in form:
        flat = form["vectors"]
        rewrite(
            folder, lambda t: t.update({k: x.astype(flat) for k, x in t.items() if x.ndim == 1})
        )
    if "words" in form:
        write_words(folder, form)
    made = {} if name in TABLE["refused"] else read(name, folder)
    if "head" in form:
        rewrite(
            folder,
            lambda t: t.update({"lm_head.weight": form["head"] * t["model.embed_tokens.weight"]}),
        )
    if "prefix" in form:
        new = (
            (form["prefix"] + "{}").format
            if form["prefix"]
            else lambda key: key.removeprefix("model.")
        )
        rewrite(folder, lambda t: [t.update({new(key): t.pop(key)}) for key in list(t)])
    if "bin" in form:
        torch.save(safetensors.torch.load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()
    return made


def respell(path: Path):
    """Gives the fields of a config.json the names that transformers 4 gives them."""
    fields = json.loads(path.read_text())
    rope = fields.pop("rope_parameters")
    fields |= {"rope_theta": rope.pop("rope_theta"), "torch_dtype": fields.pop("dtype")}
    if rope["rope_type"] != "default":
        fields["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    fields.pop("layer_types", None)
    path.write_text(json.dumps(fields))


def write_words(folder: Path, form: dict[str, Any]):
    """Writes a tokenizer and a chat template."""
    from transformers import PreTrainedTokenizerFast

    words, backend = TABLE["words"], backend_of(form["words"])
    if "begin" in form:
        backend.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 1)]
        )
    options = {"tokenizer_object": backend, "chat_template": words["template"]}
    PreTrainedTokenizerFast(**options, **words["special"]).save_pretrained(folder)
    if "template" in form:
        (folder / "chat_template.jinja").unlink()
        edit(folder / form["template"], chat_template=words["template"])
    if "slow" in form:
        (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def backend_of(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of a few words: as of BERT ("wordpiece"), of sentencepiece ("unigram"), or of
    `KINDS`.
    """
    if kind in KINDS:
        return KINDS[kind]()._backend
    if kind == "unigram":
        scores = [(word, -float(i)) for i, word in enumerate([*SPECIAL, *WORDS])]
        backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        return backend
    ids = {word: i for i, word in enumerate([*SPECIAL, "a", "b", "x", "re", "##turn", "."])}
    backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return backend


def read(name: str, folder: Path) -> dict[str, np.ndarray]:
    """What transformers makes of a folder in float32.

    `input_ids` [1, T] and `logits` [1, T, V], seen block by block where the form has a block, else
    causally; of calls with a cache where its step is shorter than the text. `stops`, the tokens
    that end a text. With a tokenizer, `ids` of the table's text, and `chat`, its messages in the
    template.
    """
    import torch
    from transformers import PreTrainedTokenizerFast

    form, length = form_of(name), TABLE["plain"]["step"]
    tokens = torch.from_numpy(np.random.default_rng(0).integers(4, 60, (1, length)))
    blocks = torch.arange(length) // form.get("block", 1)
    unseen = torch.where(blocks > blocks[:, None], -torch.inf, 0.0)[None, None]
    cls = class_of(name, "ForCausalLM")
    model = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits, options = [], {"use_cache": True, "attention_mask": unseen if "block" in form else None}
    for piece in tokens.split(form["step"], dim=1):
        with torch.no_grad():
            out = model(piece, **options)
        options["past_key_values"] = out.past_key_values
        logits.append(out.logits.numpy())
    found = {"input_ids": tokens.numpy(), "logits": np.concatenate(logits, 1)}
    found["stops"] = np.ravel(model.generation_config.eos_token_id or np.zeros(0, int))
    if (folder / "tokenizer.json").is_file():
        words = PreTrainedTokenizerFast.from_pretrained(folder)
        found["ids"] = np.array(words(TABLE["words"]["text"])["input_ids"])
        found["chat"] = np.array(
            words.apply_chat_template(TABLE["words"]["messages"], tokenize=False)
        )
    return found


if __name__ == "__main__":
    for name in TABLE["recorded"]:
        target = Path(sys.argv[1]) / name.replace(" ", "_")
        shutil.rmtree(target, ignore_errors=True)
        arrays = make(name, target)
        np.savez_compressed(target / "recorded.npz", **arrays)
