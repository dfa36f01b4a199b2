"""`paradec compare` of families that draw texts: what a judge says of them, how varied they are, what they cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from paradec_jax import store
from paradec_jax.cli.output import check_json, progress, write_json
from paradec_jax.cli.tables import print_texts
from paradec_jax.data.text import read_text
from paradec_jax.disk.bundled import is_bundled
from paradec_jax.evaluate.compare_texts import SAMPLES, Source, compare_texts, write_texts
from paradec_jax.families import Family
from paradec_jax.generate import tokenizer_of


def compare_families_texts(
    family: Family,
    models: Sequence[str],
    *,
    judge: str | None,
    real: str | None,
    samples: int | None,
    length: int | None,
    seed: int,
    texts: str | None,
    json: str | None,
) -> int:
    """Draws texts with every model and setting, measures them and prints one table; see `paradec compare --help`."""
    table = family.texts
    assert table is not None
    judge = table.judge if judge is None else judge
    names = list(models) or usual_of(family)
    if not names or judge is None:
        raise ValueError(
            f"no model of family {family.name} is bundled yet: give --model and --judge, folders of models that "
            f"were trained or converted"
        )
    if texts is not None and not Path(texts).absolute().parent.is_dir():
        raise ValueError(f"--texts cannot write {texts}: there is no folder {Path(texts).absolute().parent}")
    check_json(json)
    loaded = {name: store.load(name) for name in names}
    sources = sources_of(family, loaded)
    judging = store.load(judge)
    pieces = [] if real is None else _held_out(real, sources[0].model)
    with progress() as report:
        compared = compare_texts(
            sources,
            judging,
            pieces,
            length=room_of(list(loaded.values())) if length is None else length,
            samples=SAMPLES if samples is None else samples,
            judge_name=store.names_of([judge])[0],
            seed=seed,
            report=report,
        )
    if texts is not None:
        write_texts(Path(texts), compared)
    if json is not None:
        write_json([row | {"seed": seed, "facts": compared.facts} for row in compared.rows], json)
    if json != "-":
        print_texts(compared, seed)
    return 0


def usual_of(family: Family) -> list[str]:
    """Models that are compared when none is named: the bundled ones, and rivals of theirs that are here."""
    assert family.texts is not None
    return [*family.bundled, *filter(is_bundled, family.texts.rivals)] if family.bundled else []


def sources_of(family: Family, models: Mapping[str, store.Model]) -> list[Source]:
    """Each model with the settings of the table, the first with the tempered ones too, and rivals with theirs.

    Raises:
      ValueError: no model of the family, or one that neither belongs to it nor predicts the next token.
    """
    table = family.texts
    assert table is not None
    own = [name for name, model in models.items() if model.family == family.name]
    if not own:
        raise ValueError(f"--model must name a model of family {family.name} at least once")
    short = dict(zip(models, store.names_of(list(models)), strict=True))
    found = []
    for name, model in models.items():
        settings = (*table.settings, *(table.tempered if name == own[0] else ()))
        if name not in own:
            if model.network.visibility != "causal":
                raise ValueError(
                    f"{name} is of family {model.family}, which draws no texts beside {family.name}"
                )
            settings = (table.rival,)
        found += [Source(short[name], model, setting) for setting in settings]
    return found


def room_of(models: Sequence[store.Model]) -> int:
    """Tokens of the longest text that every one of the models can draw, begin-of-text left out."""
    return min(model.network.max_length - (model.network.visibility == "causal") for model in models)


def _held_out(path: str, model: store.Model) -> list[str]:
    """The last tenth of a text."""
    tokenizer = tokenizer_of(model)
    return [tokenizer.decode(ids) for ids in read_text(path, tokenizer)[0].held_out]
