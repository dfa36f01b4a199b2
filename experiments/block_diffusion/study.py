"""The studies of block diffusion and residual prediction (MRP): `python -m
experiments.block_diffusion.study table2`.

Each on word problems (`--ground words`) or on the chain language (`chains`). Each has the rival of
every residual head beside it: the same decoder with a head that adds nothing (`head` "zero").

    python -m experiments.block_diffusion.study all --ground words
    python -m experiments.block_diffusion.study table1 table2 --ground chains --count 2000

Trainings leave their models where studies look for them: RUNS/NAME/model, with "chains-" before the
names of heads trained on the chain (`recipes/blocks.sh`, `recipes/head.sh`). `--heads NAME=DIR`
names others; a head that is missing is left out, and said so. Tables go to
RESULTS/STUDY-GROUND.json; `lines.beside` says what each row is held against.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.block_diffusion.chosen import HEAD, Options, Shop
from experiments.block_diffusion.lines import Line, Row, Rows, baseline_of
from experiments.common.command import run as run_command
from experiments.common.plots import draw_panels, if_possible
from experiments.common.ratios import times
from experiments.common.record import write_record
from paradec_jax import BlockDenoising, ResidualSpeculative, SelfVerified, load, store

Study = Callable[[Shop], Sequence[Line]]


def table1(shop: Shop) -> list[Line]:
    """Residual against direct modelling."""
    found = [shop.baseline()]
    for k in shop.options.steps_ahead:
        residual = HEAD if k == 2 else f"unroll-{k}"  # the default head was trained on two steps
        found += [
            *shop.direct(k, None),
            *shop.direct(k, residual),
            *shop.direct(k, f"direct-{k}", "none"),
        ]
    return found


def table2(shop: Shop) -> list[Line]:
    """Static decoding, direct and speculative."""
    found = shop.static(1, 2, 3)
    for head in (None, HEAD):
        found += [
            *shop.direct(1, head),
            *shop.direct(2, head),
            *shop.spec(3, head),
            *shop.spec(3, head, ride=False),
        ]
    return found


def table3(shop: Shop) -> list[Line]:
    """The dynamic rule at several thresholds, alone and with one and two steps of a head."""
    found = [shop.baseline()]
    for threshold in shop.options.thresholds:
        found.append(shop.base("dynamic", threshold=threshold))
        for head in (None, HEAD):
            for k in (1, 2):
                found += shop.direct(k, head, rule="dynamic", threshold=threshold)
    return found


def depths(shop: Shop) -> list[Line]:
    """Layers of the head."""
    return shop.usual(None, *(HEAD if n == 3 else f"depth-{n}" for n in shop.options.depths))


def noise(shop: Shop) -> list[Line]:
    """Noise of heads, and of backbones without any."""
    found, options = shop.usual(None, HEAD, "noise-block", "noise-count"), shop.options
    for name in ("block-noise", "count-noise"):
        found += of_backbone(shop, f"chains-{name}" if options.chains else name)
    return found


def of_backbone(shop: Shop, name: str) -> list[Line]:
    """Another backbone without a head: static, dynamic, speculative."""
    place = shop.options.there(name, f"sh experiments/recipes/blocks.sh {name}")
    if place is None:
        return []
    static, half = BlockDenoising(rule="static"), -(-shop.block // 2)
    spec = ResidualSpeculative(head="zero", rule="static")
    return [
        Line(name, place, baseline_of(shop.temperature)),
        shop.line(name, place, "block", static, steps=half),
        *shop.dynamic(name, place, "block", BlockDenoising()),
        shop.line(name, place, "residual_speculative", spec),
    ]


def alignment(shop: Shop) -> list[Line]:
    """Which token a position predicts."""
    names = ("chains", "chains-next") if shop.options.chains else ("tiny-sdar", "tiny-sdar-next")
    return [line for name in names for line in of_backbone(shop, name)]


def speculation(shop: Shop) -> list[Line]:
    """What is written token for token: K, rule, riding."""
    threshold = max(shop.options.thresholds)
    found = [shop.baseline(), shop.base("dynamic", threshold=threshold)]
    for head in (None, HEAD):
        for k in (k for k in shop.options.steps_ahead if k > 1):
            for ride in (False, True):
                found += shop.spec(k, head, ride=ride)
                found += shop.spec(k, head, "dynamic", ride, threshold=threshold)
    return found


def adaptive(shop: Shop) -> list[Line]:
    """Thresholds of backbone and head together, beside fixed K and plain thresholds."""
    most = max(shop.options.steps_ahead)
    found = [
        shop.baseline(),
        *(shop.base("dynamic", threshold=tau) for tau in shop.options.thresholds),
    ]
    for head in (None, HEAD):
        for tau in shop.options.thresholds:
            for own in (None, *shop.options.thresholds):
                asked: dict[str, Any] = {} if own is None else {"head_threshold": own, "enough": 2}
                found += shop.direct(most, head, rule="dynamic", threshold=tau, **asked)
    return found


def verified(shop: Shop) -> list[Line]:
    """Self-verification (S2D2) beside plain thresholds: always, by score and with extras, each with
    the stores of the checkpoint and token-causal ones.
    """
    found = [shop.baseline()]
    found += [shop.base("dynamic", threshold=tau) for tau in shop.options.thresholds]
    most = max(shop.options.thresholds)
    for causal in (False, True):
        for options, knobs in (
            ({}, {}),
            ({"route": "score"}, {"threshold": most}),
            ({"extras": True}, {"threshold": most}),
        ):
            decoder = SelfVerified(causal=causal, **options)
            place = shop.options.first
            found.append(shop.line("self-verified", place, "self_verified", decoder, **knobs))
    return found


STUDIES: dict[str, tuple[str, Study]] = {
    "table1": ("Residual against direct modelling (Table 1)", table1),
    "table2": ("Static decoding, direct and speculative (Table 2)", table2),
    "table3": ("Dynamic decoding at several thresholds (Table 3)", table3),
    "depth": ("Layers of the head (Table 5, Figure 1)", depths),
    "initialisations": (
        "How the head's parameters begin",
        lambda shop: shop.usual(None, HEAD, "init-released", "init-ordinary"),
    ),
    "reveals": (
        "Reveals of the truth and of the model's own tokens",
        lambda shop: shop.usual(None, HEAD, "own-tokens", "counts"),
    ),
    "objectives": (
        "Objective, normaliser, layout and optimizer",
        lambda shop: shop.usual(
            None, HEAD, "official", "mean", "infer-matched", "cross-entropy", "mse", "muon"
        ),
    ),
    "noise": ("Kinds of noise", noise),
    "alignment": ("Which token a position predicts", alignment),
    "speculation": ("Speculation beside what it must write", speculation),
    "adaptive": ("Thresholds of backbone and head", adaptive),
    "verified": ("Self-verification beside thresholds", verified),
}


def lines_of(study: Study, shop: Shop) -> list[Line]:
    """The lines of a study, each once."""
    return list({line.label: line for line in study(shop)}.values())


def draw(rows: Sequence[Row], path: Path) -> None:
    """Right answers, or lawful blocks of a chain, against tokens a network call, a line a name."""
    lines: dict[str, list[tuple[float, float, Sequence[float]]]] = {}
    chain = all("block_share" in row for row in rows)
    for row in sorted(rows, key=lambda row: row["tokens_per_network_call"]):
        share = row["block_share"] if chain else row["exact"] / row["problems"]
        ends = [100 * end for end in row["block_share_interval" if chain else "interval"]]
        point = row["tokens_per_network_call"], 100 * share, ends
        lines.setdefault(f"{row['line']}, {row['decoder']}", []).append(point)
    what = "lawful blocks (%)" if chain else "right (%)"
    draw_panels({what: lines}, path, x="tokens / network call", log_x=False)


def told(row: Row) -> str:
    """A row in a line."""
    blocks = f"  blocks {100 * row['block_share']:.1f}%" if "block_share" in row else ""
    zero = ""
    if "zero_fewer_calls" in row:
        fewer = times(row["zero_fewer_calls"], row["zero_fewer_calls_interval"])
        zero = f"  against no head {100 * row['zero_difference']:+.1f} points, calls {fewer}"
    same = (
        f"  equal to its base {100 * row['base_equal_texts']:.1f}%"
        if "base_equal_texts" in row
        else ""
    )
    return (
        f"{row['label']:70s} {100 * row['exact'] / row['problems']:5.1f}%{blocks}  "
        f"{row['tokens_per_network_call']:.2f} tokens a call, {row['head_calls_per_token']:.2f} head calls a token"
        f"{zero}{same}"
    )


def run(name: str, rows: Rows, shop: Shop) -> list[Row]:
    """Decodes what is missing of a study, and writes, draws and prints the whole of it."""
    (title, study), options = STUDIES[name], shop.options
    lines = lines_of(study, shop)
    if not lines:
        print(f"{title}: nothing to decode", file=sys.stderr)
        return []
    found = rows.of(lines)
    stem = f"{name}-{options.asked.ground}" + (
        "" if options.asked.split == "test" else f"-{options.asked.split}"
    )
    shown = rows.kept | {
        "study": name,
        "backbone": store.names_of([options.first])[0],
        "backbone_sha256": store.fingerprint(options.first),
    }
    without = ("right", "calls", "texts")
    table = [{k: v for k, v in row.items() if k not in without} for row in found]
    dtypes = [dtype for row in found for dtype in row["facts"]["dtypes"]]
    write_record(
        options.folder / f"{stem}.json", shown, {"title": title, "rows": table}, dtypes=dtypes
    )
    if_possible(draw, found, options.folder.parent / "figures" / f"{stem}.png")
    print(f"{title}: {len(found)} rows of {found[0]['problems']} problems")
    for row in found:
        print(told(row))
    return found


def main(options: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Runs studies, writes their tables and draws them."""
    if not options.study:
        raise ValueError(f"name a study: {', '.join(STUDIES)} or all")
    if unknown := [name for name in options.study if name not in (*STUDIES, "all")]:
        raise ValueError(f"no study {', '.join(unknown)}: choose of {', '.join(STUDIES)} or all")
    model = load(options.first)
    if model.family != "block_diffusion":
        raise ValueError(
            f"{options.first} is of family {model.family}; these studies are of block diffusion"
        )
    problems = options.asked.read(model)
    split = "" if options.asked.split == "test" else f"-{options.asked.split}"
    path = options.folder / f"rows-{options.asked.ground}{split}.json"
    rows = Rows(path, problems, options.kept())
    shop = Shop(options, problems.temperature, model.network.block)
    for name in STUDIES if "all" in options.study else options.study:
        run(name, rows, shop)


if __name__ == "__main__":
    run_command(main)
