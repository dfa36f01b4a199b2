"""The studies of block diffusion and residual prediction (MRP): `python -m experiments.block_diffusion.study table2`.

Each on word problems (`--ground words`), on the chain language (`chains`), or on a benchmark's file, and each with the
rival of every residual head beside it: the same decoder with a head that adds nothing (`head` "zero").

    python -m experiments.block_diffusion.study all --ground words
    python -m experiments.block_diffusion.study table1 table2 --ground chains --count 2000
    python -m experiments.block_diffusion.study table2 --ground gsm8k --file gsm8k.jsonl --chat \\
        --backbone SDAR --heads head=SDAR-MRP --dtype bfloat16

Trainings leave their models where studies look for them: RUNS/NAME/model, with "chains-" before the names of heads
trained on the chain (`train`, `train_head`). `--heads NAME=DIR` names others; a head that is missing is left out, and
said so. Tables go to RESULTS/STUDY-GROUND.json and .csv; `lines.beside` says what each row is held against.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments.block_diffusion.lines import Line, Row, Rows, baseline_of
from experiments.block_diffusion.problems import Asked
from experiments.common.command import run as run_command
from experiments.common.plots import draw_panels
from experiments.common.record import write_record
from paradec_jax import BlockDenoising, Residual, ResidualSpeculative, load, store
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.evaluate.intervals import times
from paradec_jax.evaluate.options import choose

HEAD = "head"
TRAINED = {
    "words": ("tiny-sdar", "tiny-head"),
    "chains": ("chains", "chains-head"),
}  # backbone and default head


@dataclasses.dataclass(frozen=True)
class Options:
    """What to study.

    Attributes:
      study: names of studies; "all" for every one.
      asked: which problems.
      backbone: model folder, or name of a bundled model; RUNS/tiny-sdar/model or RUNS/chains/model when None.
      heads: NAME=DIR of heads (a folder holds backbone and head) and of other backbones, in the place of RUNS/NAME/model.
      runs: folder of the runs.
      steps_ahead: K of direct decoding and of what speculation verifies.
      thresholds: of the dynamic rule.
      depths: layers of heads.
      lengths: blocks that one checkpoint is decoded with.
      timed: problems of the speed measurement; 0 leaves speed out.
      passes: timings of each row.
      dtype: of weights and activations, "stored", "float32" or "bfloat16".
      folder: where tables go; pictures go to `figures` beside it.
    """

    study: tyro.conf.Positional[tuple[str, ...]]
    asked: tyro.conf.OmitArgPrefixes[Asked] = Asked()
    backbone: str | None = None
    heads: tuple[str, ...] = ()
    runs: Path = Path("runs")
    steps_ahead: tuple[int, ...] = (1, 2, 3, 4)
    thresholds: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    depths: tuple[int, ...] = (1, 2, 3, 5, 8)
    lengths: tuple[int, ...] = (4, 8, 16)
    timed: int = 0
    passes: int = 5
    dtype: str = "float32"
    folder: Path = Path("experiments/block_diffusion/results")

    def __post_init__(self) -> None:
        if wrong := [pair for pair in self.heads if not all(pair.partition("="))]:
            raise ValueError(f"heads must be NAME=DIR, not {wrong[0]!r}")
        if self.dtype not in ("stored", "float32", "bfloat16"):
            raise ValueError(f"dtype must be stored, float32 or bfloat16, not {self.dtype!r}")
        if not self.steps_ahead or min(self.steps_ahead) < 1 or not self.thresholds:
            raise ValueError("steps_ahead and thresholds need at least one number each, steps from 1 on")

    @property
    def chains(self) -> bool:
        """Whether heads are those of the chain."""
        return self.asked.ground == "chains"

    @property
    def first(self) -> str:
        """The backbone."""
        return self.backbone or self.place(TRAINED["chains" if self.chains else "words"][0])

    def place(self, name: str) -> str:
        """Folder of a head or of another backbone."""
        given = dict(pair.split("=", 1) for pair in self.heads)
        return given.get(name) or str(self.runs / name / "model")

    def head(self, name: str = HEAD) -> str | None:
        """Folder of a head, None and a sentence where there is none."""
        if name == HEAD:
            own = name if any(pair.startswith(f"{HEAD}=") for pair in self.heads) else None
            name = own or TRAINED["chains" if self.chains else "words"][1]
        elif self.chains and not any(pair.startswith(f"{name}=") for pair in self.heads):
            name = f"chains-{name}"
        return self.there(name, f"train_head {name} --start {self.first}")

    def there(self, name: str, command: str) -> str | None:
        """The folder of that name, None and a sentence where there is none."""
        place = self.place(name)
        if Path(place).exists():
            return place
        print(
            f"left out: {name}, which is not at {place}; train it with python -m experiments.block_diffusion.{command}",
            file=sys.stderr,
        )
        return None

    def kept(self) -> dict[str, Any]:
        """What must be the same for two rows to stand in one file."""
        asked = dataclasses.asdict(self.asked) | {"steps": list(self.asked.steps)}
        asked["file"] = None if self.asked.file is None else self.asked.file.name
        del asked["rows"]
        return asked | {"timed": self.timed, "passes": self.passes, "dtype": self.dtype}


@dataclasses.dataclass(frozen=True)
class Shop:
    """Makes the lines of studies.

    Attributes:
      options: of the command.
      temperature: of all decoders.
      block: B of the backbone.
    """

    options: Options
    temperature: float
    block: int

    def line(
        self, name: str, place: str, kind: str, decoder: Any, *, blocks: int | None = None, **knobs: Any
    ) -> Line:
        """A line, whose decoder has no knobs that it has no use for."""
        _, own = choose(kind, decoder, options={"temperature": self.temperature, **knobs})
        return Line(name, place, Setting(kind, decoder, own), blocks)

    def base(self, rule: str = "static", **knobs: Any) -> Line:
        """The backbone alone."""
        return self.line("backbone", self.options.first, "block", BlockDenoising(rule=rule), **knobs)

    def baseline(self) -> Line:
        """One token a step."""
        return Line("backbone", self.options.first, baseline_of(self.temperature))

    def static(self, *tokens: int) -> list[Line]:
        """The backbone, so many tokens a step."""
        return [self.baseline() if n == 1 else self.base(steps=-(-self.block // n)) for n in tokens]

    def direct(
        self, k: int, head: str | None = HEAD, mix: str = "sum", rule: str = "static", **knobs: Any
    ) -> list[Line]:
        """Direct decoding with K steps of a head, of none where `head` is None; nothing where it is missing."""
        return self._with(head, "residual", Residual(head_steps=k, mix=mix, rule=rule), **knobs)

    def spec(
        self, k: int, head: str | None = HEAD, rule: str = "static", ride: bool = True, **knobs: Any
    ) -> list[Line]:
        """Speculation over K states."""
        decoder = ResidualSpeculative(candidates=max(k, 2), rule=rule, ride=ride)
        return self._with(head, "residual_speculative", decoder, **knobs)

    def _with(self, head: str | None, kind: str, decoder: Any, **knobs: Any) -> list[Line]:
        if head is None:
            decoder = dataclasses.replace(decoder, head="zero")
            return [self.line("no head", self.options.first, kind, decoder, **knobs)]
        place = self.options.head(head)
        return [] if place is None else [self.line(head, place, kind, decoder, **knobs)]

    def usual(self, *heads: str | None) -> list[Line]:
        """One token a step, direct K = 1 and 2, and speculation, of several heads."""
        found = [self.baseline()]
        for head in heads:
            found += [*self.direct(1, head), *self.direct(2, head), *self.spec(3, head)]
        return found


Study = Callable[[Shop], Sequence[Line]]


def table1(shop: Shop) -> list[Line]:
    """Residual against direct modelling."""
    found = [shop.baseline()]
    for k in shop.options.steps_ahead:
        residual = HEAD if k == 2 else f"unroll-{k}"  # the default head was trained on two steps
        found += [*shop.direct(k, None), *shop.direct(k, residual), *shop.direct(k, f"direct-{k}", "none")]
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
    """Dynamic decoding at several thresholds."""
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


def of_backbone(shop: Shop, name: str, blocks: int | None = None) -> list[Line]:
    """Another backbone, or one at another block length, without a head: static, dynamic, speculative."""
    place = shop.options.there(name, f"train {name}")
    if place is None:
        return []
    length = blocks or shop.block

    def line(kind: str, decoder: Any, **knobs: Any) -> Line:
        return shop.line(name, place, kind, decoder, blocks=blocks, **knobs)

    static = BlockDenoising(rule="static")
    return [
        Line(name, place, baseline_of(shop.temperature), blocks),
        line("block", static, steps=-(-length // 2)),
        *(line("block", BlockDenoising(), threshold=tau) for tau in shop.options.thresholds),
        line("residual_speculative", ResidualSpeculative(head="zero", rule="static")),
    ]


def alignment(shop: Shop) -> list[Line]:
    """Which token a position predicts."""
    names = ("chains", "chains-next") if shop.options.chains else ("tiny-sdar", "tiny-sdar-next")
    return [line for name in names for line in of_backbone(shop, name)]


def block_length(shop: Shop) -> list[Line]:
    """One checkpoint, trained with several lengths, decoded at each."""
    name = "chains-lengths" if shop.options.chains else "lengths"
    return [line for length in shop.options.lengths for line in of_backbone(shop, name, length)]


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


def thresholds(shop: Shop) -> list[Line]:
    """Thresholds of the backbone and K."""
    found = [shop.baseline()]
    for threshold in shop.options.thresholds:
        found.append(shop.base("dynamic", threshold=threshold))
        for head in (None, HEAD):
            for k in shop.options.steps_ahead:
                found += shop.direct(k, head, rule="dynamic", threshold=threshold)
    return found


def adaptive(shop: Shop) -> list[Line]:
    """Thresholds of backbone and head together, beside fixed K and plain thresholds."""
    most = max(shop.options.steps_ahead)
    found = [shop.baseline(), *(shop.base("dynamic", threshold=tau) for tau in shop.options.thresholds)]
    for head in (None, HEAD):
        for tau in shop.options.thresholds:
            for own in (None, *shop.options.thresholds):
                asked = {} if own is None else {"head_threshold": own, "enough": 2}
                found += shop.direct(most, head, rule="dynamic", threshold=tau, **asked)
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
    "block_length": ("One checkpoint at several block lengths", block_length),
    "speculation": ("Speculation beside what it must write", speculation),
    "thresholds": ("Thresholds and steps of the head", thresholds),
    "adaptive": ("Thresholds of backbone and head", adaptive),
}


def lines_of(study: Study, shop: Shop) -> list[Line]:
    """The lines of a study, each once."""
    return list({line.label: line for line in study(shop)}.values())


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Right answers against tokens a network call, a line a name."""
    lines: dict[str, list[tuple[float, float, Sequence[float]]]] = {}
    for row in sorted(rows, key=lambda row: row["tokens_per_network_call"]):
        ends = [100 * end for end in row["interval"]]
        point = row["tokens_per_network_call"], 100 * row["exact"] / row["problems"], ends
        lines.setdefault(f"{row['line']}, {row['decoder']}", []).append(point)
    draw_panels({f"{title}: right (%)": lines}, path, x="tokens / network call", log_x=False)


def told(row: Row) -> str:
    """A row in a line."""
    blocks = f"  blocks {100 * row['block_share']:.1f}%" if "block_share" in row else ""
    zero = ""
    if "zero_fewer_calls" in row:
        fewer = times(row["zero_fewer_calls"], row["zero_fewer_calls_interval"])
        zero = f"  against no head {100 * row['zero_difference']:+.1f} points, calls {fewer}"
    same = f"  equal to its base {100 * row['base_equal_texts']:.1f}%" if "base_equal_texts" in row else ""
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
    flat = [{**row["settings"], **{k: v for k, v in row.items() if k != "settings"}} for row in table]
    write_record(
        options.folder / f"{stem}.json", shown, {"title": title, "rows": table}, dtypes=dtypes, lines=flat
    )
    try:
        draw(found, options.folder.parent / "figures" / f"{stem}.png", title)
    except ImportError:
        print("no picture: matplotlib is missing (pip install -e '.[eval]')", file=sys.stderr)
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
        raise ValueError(f"{options.first} is of family {model.family}; these studies are of block diffusion")
    problems = options.asked.read(model)
    split = "" if options.asked.split == "test" else f"-{options.asked.split}"
    path = options.folder / f"rows-{options.asked.ground}{split}.json"
    rows = Rows(path, problems, options.kept(), None if options.dtype == "stored" else options.dtype)
    shop = Shop(options, problems.temperature, model.config.block)
    for name in STUDIES if "all" in options.study else options.study:
        run(name, rows, shop)


if __name__ == "__main__":
    run_command(main)
