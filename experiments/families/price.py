"""What deciding several tokens at once costs, in nats: every rule on a network that knows the law.

    python -m experiments.families.price --out price.json --figure price.png
    python -m experiments.families.price --rows "wino --threshold 0.8" "block --rule entropy"

A decoder writes N texts of a Markov chain of three symbols at temperature 1. Its network knows the chain
(`experiments.common.known`), so that whatever its texts are off by is the decoder's doing::

    price = KL(q || p) / L = 1/L sum over texts x of q(x) log(q(x) / p(x)),    nats a token

p is the chain's law of the L symbols after a prompt, q the share of texts that are x. As an estimate
that is high by (M - 1) / 2N in the mean, M texts that occur (Miller 1955), which is taken off; the
interval is that of the mean of log(q / p) over texts. A price of 0 is the model's own law; orders
that look at the tokens they draw have a price even at one position a call. Texts are short, so that
all of them can be counted: 3^6 = 729.

Tokens a call count every call, the prompt's too.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tyro.conf import OmitArgPrefixes

from experiments.common.command import run as run_command
from experiments.common.known import Chain, KnownLaw
from experiments.common.plots import if_possible, picture
from experiments.common.record import write_record
from paradec_jax import make_request, run
from paradec_jax.decode.machine import Setting
from paradec_jax.decode.machine.request import keys_of, seed_words
from paradec_jax.evaluate.intervals import Z95
from paradec_jax.families import choose

PROMPT, NEW, BLOCK = (1, 2, 0), 6, 3
# Each symbol leaves as much open as any other, or one next to nothing and another one a lot.
LAWS = {
    "even": ((0.2, 0.7, 0.1), (0.1, 0.2, 0.7), (0.7, 0.1, 0.2)),
    "mixed": ((0.01, 0.97, 0.02), (0.25, 0.15, 0.6), (0.4, 0.35, 0.25)),
}
CHAINS = {name: Chain(rows, len(PROMPT) + NEW) for name, rows in LAWS.items()}
FAMILIES = {  # how networks see, and what their logits are about
    "causal": ("causal", None, "next"),
    "block_diffusion": ("block", BLOCK, "own"),
    "full_attention": ("full", None, "own"),
}
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
CANVAS = "semi_autoregressive --length"
MARKERS = "osv^DPX"


def each(words: str, values: Sequence[Any]) -> list[str]:
    """Rows of one line: a decoder with each value of its last option."""
    return [f"{words} {value}" for value in values]


# By family and line, as command lines name them.
LINES: dict[str, dict[str, list[str]]] = {
    "causal": {
        "one by one": ["autoregressive"],
        "Jacobi, blocks and running": ["jacobi --block 3", "jacobi --block 3 --running"],
        "prompt lookup": ["prompt_lookup --num-pred 3"],
        "lookahead": ["lookahead --window 3"],
    },
    "block_diffusion": {
        "blocks, leftmost": each("block --rule sequential --steps", (3, 2, 1)),
        "blocks, surest": each("block --rule static --steps", (3, 2, 1)),
        "blocks, at random": each("block --rule random --steps", (3, 2, 1)),
        "blocks, threshold": each("block --rule threshold --threshold", THRESHOLDS),
        "blocks, entropy": each("block --rule entropy --entropy", (1.6, 2.0, 2.2, 2.6)),
        "blocks, factor": each("block --rule factor --factor", (0.3, 0.6, 1, 1.5)),
        "blocks, self-verified": ["self_verified", "self_verified --causal"],
        "blocks, two in flight": [
            f"in_flight --admit {share} --rule threshold --threshold 0.6" for share in (0.3, 0.6)
        ],
        "blocks, residual, zero head": ["residual_speculative --head zero --rule static"],
    },
    "full_attention": {
        "canvas, surest": each(f"{CANVAS} 6 --rule static --steps", (6, 3, 2, 1)),
        "canvas, at random": each(f"{CANVAS} 6 --rule static --order random --steps", (6, 3, 2, 1)),
        "canvas, margin": each(f"{CANVAS} 6 --rule static --order margin --steps", (6, 3, 2, 1)),
        "canvas, blocks of 3, surest": each(f"{CANVAS} 3 --rule static --steps", (3, 2, 1)),
        "canvas, threshold": each(f"{CANVAS} 6 --rule threshold --threshold", THRESHOLDS),
        "canvas, factor": each(f"{CANVAS} 6 --rule factor --factor", (0.3, 0.6, 1, 1.5)),
        "canvas, entropy": each(
            f"{CANVAS} 6 --order entropy --rule entropy --entropy", (1.6, 2.0, 2.6, 3.4)
        ),
        "canvas, entropy bound": each(
            f"{CANVAS} 6 --order entropy --rule bound --entropy", (0.05, 0.3, 0.7, 1.1, 1.6)
        ),
        "WINO": each("wino --length 6 --threshold", (0.4, 0.6, 0.8)),
        "P2": each("planned --steps", (6, 3, 2)),
        "SSD": ["speculative --length 6"],
        "MDLM": each("masked --steps", (32, 6, 3, 2)),
    },
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
      laws: "even", whose symbols are all as hard to guess, and "mixed".
      rows: decoders as of `paradec generate`, for their families; all of the table when empty.
      samples: N, texts of a row.
      batch: texts that are written together.
      seed: of all draws.
      out: where the JSON goes.
      figure: where the picture goes; none when None.
    """

    laws: tuple[str, ...] = tuple(LAWS)
    rows: tuple[str, ...] = ()
    samples: int = 2**17
    batch: int = 2**13
    seed: int = 1
    out: Path = Path("price.json")
    figure: Path | None = None


def price(law: str, family: str, setting: Setting, options: Options) -> dict[str, Any]:
    """Price and tokens a call of a decoder."""
    chain = CHAINS[law]
    network = KnownLaw(chain, *FAMILIES[family])
    decoder = setting.decoder.bind(network, chain.length, network.spec)
    knobs = dataclasses.replace(setting.values, temperature=1.0)
    parts = dict.fromkeys(decoder.networks) if decoder.further_networks else None
    params = decoder.prepare(parts)
    counts, calls = np.zeros(chain.symbols**NEW, np.int64), 0
    digits = chain.symbols ** np.arange(NEW)[::-1]
    for first in range(0, options.samples, options.batch):
        size = min(options.batch, options.samples - first)
        keys = keys_of(seed_words(options.seed), np.arange(first, first + size))
        tokens = np.tile(np.asarray(PROMPT, np.int32), (size, 1))
        request = make_request(tokens, max_new_tokens=NEW, keys=keys)
        decoded = run(decoder, params, request, knobs)
        texts = np.asarray(decoded.tokens)[:, len(PROMPT) :]
        counts += np.bincount(texts @ digits, minlength=len(counts))
        calls += int(np.asarray(decoded.network_calls).sum())
    return {
        "law": law,
        "family": family,
        "decoder": setting.name,
        "tokens a call": options.samples * NEW / calls,
        **divergence(chain, counts),
    }


def divergence(chain: Chain, counts: np.ndarray) -> dict[str, Any]:
    """The price by counts of all texts, and its interval, in nats a token."""
    texts = np.asarray([*itertools.product(range(chain.symbols), repeat=NEW)])
    law = chain.log_conditional(texts, np.full(len(texts), PROMPT[-1]))
    some = counts > 0
    q, total = counts[some] / counts.sum(), counts.sum()
    ratios = np.log(q) - law[some]
    mean = float(q @ ratios)
    spread = math.sqrt(max(float(q @ ratios**2) - mean**2, 0) / total)
    middle = mean - (int(some.sum()) - 1) / (2 * total)
    ends = middle - Z95 * spread, middle + Z95 * spread
    return {"price": middle / NEW, "interval": [end / NEW for end in ends]}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Price over tokens a call: a panel a law, a line a rule."""
    laws, lines = ([*dict.fromkeys(row[name] for row in rows)] for name in ("law", "line"))
    with picture(path, (2.6 + 3.4 * len(laws), 4.4)) as figure:
        panels = figure.subplots(1, len(laws), squeeze=False, sharey=True)[0]
        for panel, law in zip(panels, laws, strict=True):
            for number, line in enumerate(lines):
                of = [row for row in rows if (row["law"], row["line"]) == (law, line)]
                points = sorted((row["tokens a call"], row["price"]) for row in of)
                style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, "linewidth": 1}
                panel.plot(*zip(*points, strict=True), label=line, **style)
            panel.set(title=f"{law} law", xlabel="tokens a call", xscale="log")
            panel.set_xticks([1, 1.5, 2, 3, 6], ["1", "1.5", "2", "3", "6"])
            panel.minorticks_off()
            panel.set_yscale("symlog", linthresh=1e-3)
        panels[0].set_ylabel("nats a token off the model's law")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)


def main(options: OmitArgPrefixes[Options]) -> None:
    """Measures all rows and writes them."""
    rows = []
    for law, (family, lines) in itertools.product(options.laws, LINES.items()):
        for line, word in ((line, word) for line, words in lines.items() for word in words):
            if options.rows and word not in options.rows:
                continue
            setting = choose(family, f"{word} --temperature 1")
            row = {"line": line, "row": word, **price(law, family, setting, options)}
            rows.append(row)
            low, high = row["interval"]
            print(
                f"{law:6} {family:16} {word:66} {row['tokens a call']:5.2f} tokens a call, "
                f"{row['price']:.4f} [{low:.4f}, {high:.4f}]",
                flush=True,
            )
    write_record(options.out, options, {"rows": rows})
    if options.figure is not None:
        if_possible(draw, rows, options.figure)


if __name__ == "__main__":
    run_command(main)
