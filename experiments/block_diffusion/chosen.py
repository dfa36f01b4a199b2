"""What the studies of block diffusion choose from: models by name, and decoders with the knobs of a
row.
"""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import tyro

from experiments.block_diffusion.lines import Line, baseline_of
from experiments.block_diffusion.problems import Asked
from paradec_jax import BlockDenoising, Residual, ResidualSpeculative
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.disk.folders import StoreError, locate

HEAD = "head"
# backbone and default head
TRAINED = {
    "words": ("tiny-sdar", "tiny-head"),
    "chains": ("chains", "chains-head"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to study.

    Attributes:
      study: names of studies; "all" for every one.
      asked: which problems.
      backbone: model folder, or name of a bundled model; RUNS/tiny-sdar/model or RUNS/chains/model
        when None.
      heads: NAME=DIR of heads (a folder holds backbone and head) and of other backbones, DIR a
        model folder or the name of a bundled model; RUNS/NAME/model else.
      runs: folder of the runs.
      steps_ahead: K of direct decoding and of what speculation verifies.
      thresholds: of the dynamic rule.
      depths: layers of heads.
      folder: where tables go; pictures go to `figures` beside it.
    """

    study: tyro.conf.Positional[tuple[str, ...]]
    asked: tyro.conf.OmitArgPrefixes[Asked] = Asked()  # noqa: RUF009
    backbone: str | None = None
    heads: tuple[str, ...] = ()
    runs: Path = Path("runs")
    steps_ahead: tuple[int, ...] = (1, 2, 3, 4)
    thresholds: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    depths: tuple[int, ...] = (1, 2, 3, 5, 8)
    folder: Path = Path("experiments/block_diffusion/results")

    def __post_init__(self) -> None:
        if wrong := [pair for pair in self.heads if not all(pair.partition("="))]:
            raise ValueError(f"heads must be NAME=DIR, not {wrong[0]!r}")
        if not self.steps_ahead or min(self.steps_ahead) < 1 or not self.thresholds:
            raise ValueError(
                "steps_ahead and thresholds need at least one number each, steps from 1 on"
            )

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
        return self.there(name, f"MODEL={self.first} sh experiments/recipes/head.sh {name}")

    def there(self, name: str, command: str) -> str | None:
        """The folder of that name, None and a sentence where there is none."""
        place = self.place(name)
        with contextlib.suppress(StoreError):
            locate(place)
            return place
        print(
            f"left out: {name}, which is not at {place}; train it with {command}",
            file=sys.stderr,
        )
        return None

    def kept(self) -> dict[str, Any]:
        """What must be the same for two rows to stand in one file."""
        asked = dataclasses.asdict(self.asked) | {"steps": list(self.asked.steps)}
        del asked["rows"]
        return asked


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

    def line(self, name: str, place: str, kind: str, decoder: Any, **knobs: Any) -> Line:
        """A line, whose decoder has no knobs that it has no use for."""
        chosen = Setting(kind, decoder).changed({"temperature": self.temperature, **knobs})
        return Line(name, place, dataclasses.replace(chosen, decoder=decoder))

    def dynamic(self, name: str, place: str, kind: str, decoder: Any, **knobs: Any) -> list[Line]:
        """A line a threshold."""
        return [
            self.line(name, place, kind, decoder, threshold=tau, **knobs)
            for tau in self.options.thresholds
        ]

    def base(self, rule: str = "static", **knobs: Any) -> Line:
        """The backbone alone."""
        return self.line(
            "backbone", self.options.first, "block", BlockDenoising(rule=rule), **knobs
        )

    def baseline(self) -> Line:
        """One token a step."""
        return Line("backbone", self.options.first, baseline_of(self.temperature))

    def static(self, *tokens: int) -> list[Line]:
        """The backbone, so many tokens a step."""
        return [self.baseline() if n == 1 else self.base(steps=-(-self.block // n)) for n in tokens]

    def direct(
        self, k: int, head: str | None = HEAD, mix: str = "sum", rule: str = "static", **knobs: Any
    ) -> list[Line]:
        """Direct decoding with K steps of a head, of none where `head` is None; nothing where it is
        missing.
        """
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
