"""README and docs: every block of Python runs, what is printed stands there, and every path that is named exists."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import paradec_jax as pd
from paradec_jax.data import build_tokenizer, token_spec
from paradec_jax.store import Model
from paradec_jax.testing import StubNetwork

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", re.DOTALL)
PATH = re.compile(r"(?<![\w/.])(?:convert|docs|experiments|notebooks|paradec_jax|tests)/[\w./*-]*\w")
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """Code of each Python block, and what it prints where a block of text follows it."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(code, printed or None) for code, printed in found]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_blocks_run_one_after_the_other(page):
    names: dict[str, Any] = {"__name__": page.stem}
    for code, printed in blocks(page):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(page), "exec"), names)
        if printed is not None:
            assert out.getvalue().strip() == printed.strip()


def test_pages_have_code_and_the_readme_its_output():
    assert {page.stem for page in WITH_CODE} >= {"README", "decoding", "own_decoder"}
    assert any(printed for _, printed in blocks(ROOT / "README.md"))


def test_paths_exist():
    named = {path for page in PAGES for path in PATH.findall(page.read_text(encoding="utf-8"))}
    assert {"experiments/RESULTS.md", "docs/decoding.md", "paradec_jax/families.py"} <= named
    assert [path for path in sorted(named) if not any(ROOT.glob(path))] == []


def test_the_own_decoder_writes_what_its_network_says():
    code = next(code for code, _ in blocks(ROOT / "docs" / "own_decoder.md") if "class Vote" in code)
    names: dict[str, Any] = {"__name__": "own_decoder"}
    exec(code, names)
    network = StubNetwork(vocab_size=384, max_length=256)
    model = Model(pd.PRESETS["test-recurrent"], {}, token_spec(), build_tokenizer())
    out = pd.generate(model, ["Ana"], names["Vote"](), max_new_tokens=5, network=network)
    prompt = [model.token_spec.bos, *model.tokenizer.encode("Ana")]
    assert out.tokens == [network.expected(prompt, 5)]
    assert out.network_calls.tolist() == [1 + 4 * 3]
