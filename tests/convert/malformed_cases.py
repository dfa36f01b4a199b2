"""More than 300 ways to spoil what commands read, drawn from a seed, and what must come of each.

A case copies a model of `malformed_models`, changes the copy, and runs a command on it. Most are wrong whatever they
hit ("sure"); a byte that is flipped may hit nothing that counts, and then the command's result must be what it is
without the flip.
"""

from collections.abc import Callable, Iterator
from typing import Any

import malformed_files
import numpy as np
from malformed_changes import CONFIG, DEEP, HUGE, Case, cut, fields_of, splice, text_of, without


def cases(seed: int = 0) -> list[Case]:
    """All cases, the same ones for a seed."""
    rng = np.random.default_rng(seed)
    found = [
        *_configs(),
        *_own_configs(),
        *_texts(rng),
        *_templates(),
        *_prompts(),
        *malformed_files.cases(rng),
    ]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "two cases of one name"
    return found


def _configs() -> Iterator[Case]:
    """Fields of a config.json of Hugging Face with values that cannot be."""
    integers = (-1, 10**9, *HUGE, "16", 1.5, True, [16])
    floats: tuple[Any, ...] = (-1.0, 0.0, 1e300, float("nan"), float("inf"), 10**400, "1e-6", [1.0])
    sizes = {
        "qwen2": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        "huginn": ("n_embd", "n_heads", "intermediate_size", "n_layers_in_recurrent_block", "vocab_size"),
        "sdar": ("intermediate_size", "num_hidden_layers", "head_dim"),
    }
    scales = {"qwen2": ("rms_norm_eps", "rope_theta"), "huginn": ("norm_eps", "rope_base")}
    for base, names in sizes.items():
        for name in names:
            for value in integers:
                yield _field(base, name, value)
    for base, names in scales.items():
        for name in names:
            for value in floats:
                yield _field(base, name, value)
    for base, name in (
        ("qwen2", "max_position_embeddings"),
        ("huginn", "block_size"),
        ("sdar", "block_size"),
    ):
        for value in (-1, *HUGE, "long", 2.5):
            yield _field(base, name, value)
    for value in (10**9, -3, "many"):
        yield _field("huginn", "mean_recurrence", value)
    for value in ("mamba", ["qwen2"], {"a": 1}, 7, "x" * 5000):
        yield _field("qwen2", "model_type", value)
    for name, value in (
        ("eos_token_id", 32),
        ("eos_token_id", [1, -4]),
        ("bos_token_id", "a"),
        ("pad_token_id", 1.5),
    ):
        yield _field("qwen2", name, value)
    yield _field("qwen2", "layer_types", ["sliding_attention"] * 2)
    yield _field("qwen2", "rope_scaling", {"rope_type": "yarn", "factor": 4})
    yield _field("qwen2", "num_experts", 8)
    yield _field("qwen2", "torch_dtype", ["float32"])


def _field(base: str, name: str, value: Any) -> Case:
    return Case(
        f"{base}: {name} = {str(value)[:30]} ({type(value).__name__})",
        "import",
        base,
        fields_of(CONFIG, lambda fields: fields.update({name: value})),
    )


def _own_configs() -> Iterator[Case]:
    """Our own config.json."""
    for name in ("width", "layers", "heads", "vocab_size", "feed_forward"):
        for value in (-1, 10**9, 10**30, "16", 1.5):
            yield _own_field("model", name, value)
    for name in ("norm_eps", "rope_base"):
        for value in (0, -1.0, float("nan"), 10**400, "small"):
            yield _own_field("model", name, value)
    for name, value in (("block", 0), ("block", 10**9), ("blocks", [4, "a"]), ("blocks", [[4]])):
        yield _own_field("blocks", name, value)
    for value in (10**9, 0, "4"):
        yield _own_field("recurrent", "mean_recurrence", value)
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "no parts": lambda d: d.pop("parts"),
        "parts as a list": lambda d: d.update(parts=[1]),
        "a path as weights": lambda d: d["parts"]["network"].update(weights="../../etc/passwd"),
        "a zero byte in weights": lambda d: d["parts"]["network"].update(weights="a\0b"),
        "no digests": lambda d: d["parts"]["network"].update(sha256={}),
        "digests as numbers": lambda d: d["parts"]["network"]["sha256"].update(embedding=7),
        "family as a list": lambda d: d["parts"]["network"].update(family=["causal"]),
        "another family": lambda d: d["parts"]["network"].update(family="recurrent_depth"),
        "a stop beyond": lambda d: d["token_spec"].update(stop=[32]),
        "stops in a list": lambda d: d["token_spec"].update(stop=[[1]]),
        "pad below": lambda d: d["token_spec"].update(pad=-1),
        "a mask as text": lambda d: d["token_spec"].update(mask="x"),
        "format 0": lambda d: d.update(format_version=0),
        "format 1": lambda d: d.update(format_version=1),
        "format 10^9": lambda d: d.update(format_version=10**9),
        "a long name": lambda d: d["parts"]["network"]["config"].update({"x" * 10_000: 1}),
        "lines and colours in a name": lambda d: d["parts"]["network"]["config"].update({"a\nb\x1b[31m": 1}),
    }
    for name, change in changes.items():
        yield _own(name, change)


def _own_field(base: str, name: str, value: Any) -> Case:
    change = fields_of(CONFIG, lambda d: d["parts"]["network"]["config"].update({name: value}))
    return Case(f"{base}: own {name} = {str(value)[:20]} ({type(value).__name__})", "generate", base, change)


def _own(name: str, change: Callable[[dict[str, Any]], Any]) -> Case:
    command = "check" if len(name) % 3 == 0 else "generate"
    return Case(f"own config: {name}", command, "model", fields_of(CONFIG, change))


def _texts(rng: np.random.Generator) -> Iterator[Case]:
    """JSON files that are no JSON, or no object."""
    texts = {
        "deep lists": DEEP,
        "deep objects": '{"a":' * 100_000,
        "a list": "[]",
        "nothing": "",
        "bytes": b"\xff\xfe\x00",
        "a long number": '{"model_type": ' + "9" * 5000 + "}",
        "zeros": bytes(1000),
    }
    files = (
        ("import", "qwen2", CONFIG),
        ("import", "qwen2", "generation_config.json"),
        ("import", "qwen2", "tokenizer_config.json"),
        ("import", "huginn", CONFIG),
        ("generate", "model", CONFIG),
        ("check", "model", CONFIG),
    )
    for command, base, file in files:
        seen = without("chat_template.jinja") if file == "tokenizer_config.json" else without()
        for name, text in texts.items():
            yield Case(f"{command} {base}/{file}: {name}", command, base, seen(text_of(file, text)))
        for share in rng.uniform(0.02, 0.95, 3):
            yield Case(f"{command} {base}/{file}: cut at {share:.3f}", command, base, seen(cut(file, share)))
        for place in rng.uniform(0, 1, 2):
            change = seen(splice(file, place, 9))
            yield Case(f"{command} {base}/{file}: splice at {place:.3f}", command, base, change, sure=False)


def _templates() -> Iterator[Case]:
    """Chat templates, in a file of their own and in tokenizer_config.json."""
    templates = {
        "open": "{% if a %}",
        "an unknown filter": "{{ a | unheard_of }}",
        "an unknown tag": "{% launch %}",
        "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "long": "a" * 10**6,
        "blocks of one name": "{% block a %}{% endblock %}{% block a %}{% endblock %}",
    }
    for name, template in templates.items():
        yield Case(f"template: {name}", "import", "qwen2", text_of("chat_template.jinja", template))
        change = fields_of("tokenizer_config.json", lambda fields, t=template: fields.update(chat_template=t))
        instead = without("chat_template.jinja")(change)
        yield Case(f"template in JSON: {name}", "import", "qwen2", instead)
        yield Case(f"own template: {name}", "generate", "model", text_of("chat_template.jinja", template))
    yield Case("template: bytes", "import", "qwen2", text_of("chat_template.jinja", b"\xff\xfe"))


def _prompts() -> Iterator[Case]:
    """Prompts and numbers beside them."""

    def prompt(
        name: str, *options: str, text: str = "a b c", stdin: bytes = b"", base: str = "model"
    ) -> Case:
        return Case(f"prompt: {name}", "generate", base, prompt=text, stdin=stdin, options=options)

    yield prompt("empty", text="")
    yield prompt("spaces alone", text="   \n")
    yield prompt("too long", text="a " * 200)
    yield prompt("a megabyte", text="-", stdin=b"a " * 2**19)
    yield prompt("no UTF-8", text="-", stdin=b"\xff\xfe\x00a")
    yield prompt("half a character", text="-", stdin=b"a \xe2\x82")
    yield prompt("half a surrogate pair", text="a \udcff b")
    yield prompt("more tokens than int32", "--max-new-tokens", "99999999999")
    yield prompt("no tokens", "--max-new-tokens", "0")
    yield prompt("more samples than int32", "--samples", "99999999999")
    yield prompt("a seed beyond int64", "--seed", str(10**30))
    yield prompt("an empty stop", "--stop", "")
    yield prompt("a gap for a decoder of none", "--gaps", text="a [3] b")
    for number in (0, 99_999_999, 10**30):
        yield prompt(f"a gap of {number}", "--gaps", text=f"a [{number}] b", base="blocks")
