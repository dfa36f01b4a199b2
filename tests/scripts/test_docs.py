"""README, docs, results: every block of Python runs, what is printed stands there, and what is
named exists.
"""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "experiments").glob("*/RESULTS.md"))
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "experiments/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *RESULTS,
    ROOT / "paradec_jax" / "assets" / "README.md",
)
BLOCK = re.compile(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", re.DOTALL)
PATH = re.compile(
    r"(?<![\w/.])(?:convert|docs|experiments|notebooks|paradec_jax|tests)/[\w./*-]*\w"
)
MODULE = re.compile(r"python -m ((?:convert|experiments)(?:\.\w+)*)")
BESIDE = re.compile(r"(?<![\w/.])(?:results|figures|logs)/[\w./*-]*\w")  # of a page of results
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
WITH_CODE = [
    pytest.param(page, id=page.stem)
    for page in PAGES
    if BLOCK.search(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_blocks_run_one_after_the_other(page):
    names: dict[str, Any] = {"__name__": page.stem}
    for code, printed in BLOCK.findall(page.read_text(encoding="utf-8")):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(page), "exec"), names)
        if printed:
            assert out.getvalue().strip() == printed.strip()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub spells them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    assert [path for path in sorted(set(PATH.findall(text))) if not any(ROOT.glob(path))] == []
    modules = {name for name in MODULE.findall(text) if name != "experiments.PAPER.NAME"}
    assert [name for name in sorted(modules) if importlib.util.find_spec(name) is None] == []
    if page in RESULTS:
        assert [
            path for path in sorted(set(BESIDE.findall(text))) if not any(page.parent.glob(path))
        ] == []
    for target, anchor in LINK.findall(text):
        if not target.startswith("https:"):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("page", RESULTS, ids=name_of)
def test_every_picture_of_a_paper_stands_in_its_results(page):
    shown = {target for target, _ in LINK.findall(page.read_text(encoding="utf-8"))}
    pictures = {f"figures/{path.name}" for path in (page.parent / "figures").glob("*.png")}
    assert pictures == {target for target in shown if target.startswith("figures/")}


def test_every_script_has_a_row_in_the_table():
    table = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    scripts = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for path in (ROOT / "experiments").glob("*/*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    assert len(scripts) > 20 and [name for name in sorted(scripts) if name not in table] == []


def test_the_readme_shows_the_autoregressive_decoder_as_it_is():
    shown = re.search(
        r"```py\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    source = (ROOT / "paradec_jax" / "decode" / "autoregressive.py").read_text(encoding="utf-8")
    assert shown and "def step(" in shown[1] and source.endswith(shown[1])
