"""What a first answer waits for: packages that decoding does not need, and programs that are
compiled for it.
"""

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from recital import CONFIG, recite
from stubs.tiny import ones

import paradec_jax as pd
from experiments.tasks import build_tokenizer, token_spec
from paradec_jax.families import PRESETS
from paradec_jax.store import Model, save

# Each takes from a tenth of a second to more than a second.
NOT_NEEDED = (
    "orbax tensorstore grain optax scipy matplotlib pandas jinja2 jax.experimental.sparse torch"
)


@contextlib.contextmanager
def compiled() -> Iterator[list[str]]:
    """Names of the programs that are compiled, or found in the cache on disk, inside."""
    names = []

    def listen(event: str, seconds: float, **facts: str):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(facts["fun_name"].removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_decoding_and_the_command_import_nothing_that_they_do_not_need():
    code = "import sys, paradec_jax.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert {"jax", "paradec_jax.generate", "paradec_jax.cli.generate"} <= modules
    assert not set(NOT_NEEDED.split()) & modules


def test_a_call_compiles_its_loop_and_its_keys_and_other_knobs_nothing():
    tokenizer = build_tokenizer()
    model = Model(CONFIG, {}, token_spec(), tokenizer)
    network = recite(tokenizer, "0 1 2 3 4 5 6 7", end=False)
    prompts = ["0"] * 7  # a batch of no other test, so that nothing is there yet

    def call(**options):
        with compiled() as names:
            pd.generate(model, prompts, pd.AutoRegressive(network), max_new_tokens=5, **options)
        return names

    assert call() == ["_keys_of_samples", "compiled_run"]
    assert call(knobs=pd.AutoRegressive.Knobs(temperature=0.5, top_k=3), seed=2) == []
    stopped = call(stop_strings=["4"])
    assert set(stopped) == {"_begin", "advance_with_info", "not_equal", "_interrupt", "finish"}
    assert call(stop_strings=["5"], knobs=pd.AutoRegressive.Knobs(top_p=0.5)) == []


@pytest.mark.parametrize(("preset", "vocabulary"), [("test-causal", 389), ("test-recurrent", 391)])
def test_a_model_is_loaded_without_programs_and_laid_out_by_one(tmp_path, preset, vocabulary):
    """A head of a shape that no other test lays out."""
    config = dataclasses.replace(PRESETS[preset], vocab_size=vocabulary)
    save(tmp_path / "model", Model(config, ones(config), token_spec()))
    with compiled() as names:
        model = pd.load(tmp_path / "model")
    assert names == []
    with compiled() as names:
        model.network.prepare(model.params)
    assert names == ["_laid_out"]


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**31), 2**31 + 5, 2**32 - 1])
def test_keys_are_those_of_jax(seed):
    want = [jax.random.fold_in(jax.random.key(seed), i) for i in range(2)]
    request = pd.make_request([[1], [2]], max_new_tokens=1, seed=seed)
    np.testing.assert_array_equal(
        jax.random.key_data(request.keys), [jax.random.key_data(k) for k in want]
    )


def test_a_request_keeps_its_prompts_when_the_caller_writes_on():
    """Buffers on the host are copied: on the CPU a device may read them in place."""
    tokens = np.ones((64, 64), np.int32)
    request = pd.make_request(tokens, max_new_tokens=1)
    tokens[:] = 5
    assert (np.asarray(request.tokens) == 1).all()
