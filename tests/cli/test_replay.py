"""The page of a replay: one file without addresses, whose trace is that of `rollout`, whatever the
texts hold.
"""

import dataclasses
import html.parser
import json
import re

import numpy as np
import pytest
from small_tokenizers import llama
from stubs import StubCausal, StubDenoiser, StubNetwork

import paradec_jax as pd
from paradec_jax import cli
from paradec_jax.cli.generate import with_gaps
from paradec_jax.cli.replay import PLACE, piece_of
from paradec_jax.families import choose
from paradec_jax.generate import continuation_task
from paradec_jax.infill import infill_task

PROMPT = "Question: Ana has 3 apples. </script><!-- \x1b Who?\nAnswer:\n"
PAGES = {  # by model: its network's stub, a prompt, the decoder and a second one
    "tiny-jacobi": (
        StubCausal(weights=(0, 0, 1, 0), slope=0, constant=0),
        PROMPT,
        "jacobi",
        "prompt-lookup --num-pred 3",
    ),
    "tiny-recurrent-distilled": (
        StubNetwork(),
        PROMPT,
        "wavefront",
        "autoregressive --recurrence 2",
    ),
    "tiny-sdar": (StubDenoiser(block=8, alignment="own"), PROMPT, "block", "block --rule random"),
    "tiny-mdlm": (StubDenoiser(), "Ana: [4] and [3].", "masked", None),
}


class Page(html.parser.HTMLParser):
    """Scripts of a page, and the addresses that its elements name."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.addresses = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.scripts += [""] * (tag == "script")
        self.addresses += [
            (name, value) for name, value in attributes if name in ("src", "href", "data")
        ]

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_trace_is_that_of_rollout(tmp_path, monkeypatch, name):
    stub, prompt, first, beside = PAGES[name]
    gaps, path, model = beside is None, tmp_path / "page.html", pd.load(name)
    stub = dataclasses.replace(stub, vocab_size=model.config.vocab_size, max_length=256)
    monkeypatch.setattr(pd.Model, "network", stub)
    more = ["--gaps"] if gaps else ["--beside", beside, "--max-new-tokens", "12"]
    assert cli.main(["generate", first, prompt, "--model", name, "--html", str(path), *more]) == 0
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.scripts) == 2 and page.addresses == [] and PLACE not in text
    assert not re.search(r"https?:|@import|url\(|fetch\(|import\(|[\x00-\x09\x0b-\x1f]", text)
    shown = json.loads(page.scripts[0])
    assert shown["prompt"] == ("" if gaps else prompt) and len(shown["runs"]) == 2 - gaps
    for run, chosen in zip(shown["runs"], filter(None, (first, beside)), strict=True):
        setting = choose(model.family, chosen)
        if gaps:
            task = infill_task(model, with_gaps(prompt), setting.decoder)
        else:
            task = continuation_task(model, [prompt], setting.decoder, max_new_tokens=12)
        record = lambda state, _: (state.rows, task.decoder.drafts(state))  # noqa: B023, E731
        frames, start = run["frames"], run["start"]
        options = {"n": len(frames) - 1, "record": record}
        _, (rows, drafts) = pd.rollout(
            task.decoder, task.params, task.request, setting.knobs, **options
        )
        for k, frame in enumerate(frames[1:]):
            length = frame["length"]
            assert (frame["calls"], length) == (
                rows.counts["network_calls"][k, 0],
                rows.length[k, 0],
            )
            assert run["tokens"][: length - start] == rows.tokens[k, 0, start:length].tolist()
            guesses = frame["guesses"] + [-1] * (drafts.shape[-1] - len(frame["guesses"]))
            assert guesses == drafts[k, 0].tolist()
        assert (
            np.all(np.diff([frame["seconds"] for frame in frames]) >= 0)
            and frames[0]["seconds"] > 0
        )
        assert {str(token) for token in run["tokens"]} <= shown["pieces"].keys()


def test_pieces_of_odd_tokens():
    words = llama()
    ids = {text: words.id_of(text) for text in ("▁a", "<0xE2>", "<0x0A>", "<|im_end|>", "b")}
    found = {text: piece_of(words, words.encode("a"), token) for text, token in ids.items()}
    assert found == {
        "▁a": " a",
        "<0xE2>": "<0xE2>",
        "<0x0A>": "\n",
        "<|im_end|>": "<|im_end|>",
        "b": "b",
    }
    assert piece_of(words, [], 10_000) == "<10000>"
