"""SmolLM2-135M-Instruct, matrices rounded to four bits, against transformers, which reads the same
file.

`make real-tests` brings the file and names it in PARADEC_REAL.
"""

import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import paradec_jax as pd
from experiments.lm_eval import run
from experiments.real.settings import chats
from paradec_jax.text.chat import conversation

REAL, DATA = os.environ.get("PARADEC_REAL", ""), os.environ.get("PARADEC_DATA", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not REAL, reason="make real-tests names the file"),
]
TOKENS, ITEMS = 200, 50


@pytest.fixture(scope="module")
def model():
    return pd.load(REAL, dtype="float32")


@pytest.fixture(scope="module")
def texts(model):
    return list(chats(model).values())[::2]


def read_by_transformers(folder, **options):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", **options
    ).eval()


@pytest.fixture(scope="module")
def theirs():
    return read_by_transformers(Path(REAL).parent, gguf_file=Path(REAL).name)


def same_logits(model, theirs, text):
    import torch

    ids = model.tokenizer.encode_batch([text])
    network, params = model.network, model.network.prepare(model.params)
    out = network.forward(params, jnp.asarray(ids), jnp.arange(len(ids[0]))[None])
    ours = np.asarray(network.logits(params, out.hidden))
    with torch.inference_mode():
        want = theirs(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(ours, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert (ours.argmax(-1) == want.argmax(-1)).all()


def test_logits(model, theirs, texts):
    assert len(texts) == 5
    for text in texts:
        same_logits(model, theirs, text)


@pytest.fixture(scope="module")
def greedy(model, theirs, texts):
    """What transformers writes, one text after the other."""
    import torch

    stop, found = list(model.token_spec.stop), []
    options = {
        "max_new_tokens": TOKENS,
        "do_sample": False,
        "eos_token_id": stop,
        "pad_token_id": stop[0],
    }
    for text in texts:
        ids = torch.tensor(model.tokenizer.encode_batch([text]))
        with torch.inference_mode():
            whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(whole[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.parametrize(
    "decoder",
    [pd.AutoRegressive(), pd.PromptLookup(), pd.Jacobi(block=8)],
    ids=lambda of: type(of).__name__,
)
def test_greedy_tokens(model, greedy, texts, decoder):
    assert pd.generate(model, texts, decoder, max_new_tokens=TOKENS).tokens == greedy


def test_an_export_is_read_by_transformers_and_by_load(model, theirs, texts, tmp_path):
    import torch

    transformers = pytest.importorskip("transformers")
    from paradec_jax.cli import main as convert

    folder = tmp_path / "exported"
    pd.save(tmp_path / "model", model)
    assert not convert(["export", str(tmp_path / "model"), str(folder)])
    exported, want = read_by_transformers(folder).state_dict(), theirs.state_dict()
    assert exported.keys() == want.keys() and all(
        torch.equal(exported[name], want[name]) for name in want
    )
    same_logits(pd.load(str(folder)), theirs, texts[0])
    words = transformers.AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": "12 + 30?"}]
    for text in texts:
        assert words.encode(text) == model.tokenizer.encode_batch([text])[0]
    want = words.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert conversation(model, message) == want


@pytest.mark.skipif(not DATA, reason="PARADEC_DATA names a folder of benchmark files")
def test_gsm8k_has_the_same_answers_one_by_one_and_by_jacobi(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    pytest.importorskip("lm_eval")
    path, answers = Path(DATA) / "gsm8k" / "test.jsonl", []
    for decoder in ("autoregressive", "jacobi --block 8 --no-running --candidates 1"):
        out = tmp_path / f"{decoder[:6]}.json"
        run.main(run.Options("gsm8k", path, REAL, decoder, limit=ITEMS, rows=10, out=out))
        (samples,) = json.loads(out.read_text())["samples"].values()
        answers.append({(one["doc_id"], one["filter"]): one["resps"] for one in samples})
    assert answers[0] == answers[1] and len({item for item, _ in answers[0]}) == ITEMS
