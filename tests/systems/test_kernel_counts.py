"""Kernels of programs for a described GPU: how they are counted, and at most how many there are;
how often a host waits for a decoder's step.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from marks import over

from experiments.systems import kernels

ROOT = Path(__file__).parents[2]
CUDA = Path(os.environ.get("PARADEC_CUDA", ROOT / ".cache/cuda"))  # of `make kernels`
GROUPED = {"width": 64, "heads": 2, "kv_heads": 1, "feed_forward": 128}
# Fields of toys, and kernels of a layer.
TOYS = {"test-causal": (GROUPED | {"qkv_bias": False}, 7), "test-sdar": (GROUPED, 7)}
TOYS |= {"test-mdlm": ({"width": 64, "heads": 2}, 11), "test-full": (GROUPED, 8)}
# Looks of a greedy decoder's step: one asks whether rows still run, one chooses a shape.
LOOKS = {
    "test-causal": {
        "autoregressive": 1,
        "lookahead": 1,
        "jacobi --block 16": 1,
        "jacobi --block 16 --pool 4": 2,
        "prompt_lookup": 2,
    },
    "test-sdar": {"block --rule static": 2, "block --no-fuse-store --no-fuse-prompt": 1},
    "test-full": {"semi_autoregressive --rule static": 1, "wino --length 32": 1},
}

# What the compiler of GPUs writes, shortened: a loop that the data ends, in it one of three turns,
# a conditional, an update in place and a kernel that reads two arrays.
TEXT = """\
HloModule jit_run, is_scheduled=true

%update (a: f32[100], b: f32[4]) -> f32[100] {
  %a = f32[100]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %at = s32[] constant(8)
  ROOT %new = f32[100]{0} dynamic-update-slice(%a, %b, %at)
}

%less (p: (s32[], f32[100])) -> pred[] {
  %p = (s32[], f32[100]) parameter(0)
  ROOT %known = pred[] custom-call(%p), custom_call_target="less"
}

%inner (p: (s32[], f32[100])) -> (s32[], f32[100]) {
  %p = (s32[], f32[100]) parameter(0)
  %c = f32[100]{0} get-tuple-element(%p), index=1
  %d = f32[4]{0} constant({...})
  %e = f32[100]{0} fusion(%c, %d), kind=kLoop, calls=%update
  ROOT %t = (s32[], f32[100]) tuple(%p, %e)
}

%one (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %q = f32[4]{0} copy(%p)
}

%none (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

%outer (p: (s32[], f32[100], f32[4])) -> (s32[], f32[100], f32[4]) {
  %p = (s32[], f32[100], f32[4]) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=2
  %i = s32[] get-tuple-element(%p), index=0
  %w = (s32[], f32[100]) while(%p), condition=%less, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[4]{0} conditional(%i, %x, %x), branch_computations={%none, %one}
  %z = f32[4]{0} custom-call(%x, %y), custom_call_target="product"
  ROOT %t = (s32[], f32[100], f32[4]) tuple(%i, %w, %z)
}

ENTRY %main (p: (s32[], f32[100], f32[4])) -> (s32[], f32[100], f32[4]) {
  %p = (s32[], f32[100], f32[4]) parameter(0)
  ROOT %loop = (s32[], f32[100], f32[4]) while(%p), condition=%less, body=%outer
}
"""


def test_what_counts():
    """Three updates with their conditions, the dearer branch, the product, the loop's condition."""
    found = kernels.count(TEXT)
    assert found["kernels"] == 3 * 2 + 1 + 1 + 1
    assert found["looks"] == 1 + 1
    update, condition, branch, product = 2 * 16, 404 + 1, 2 * 16, 3 * 16
    assert found["bytes"] == 3 * (update + condition) + branch + product + condition


COUNTS = """
import dataclasses, json, os
os.environ["PARADEC_LAYOUTS"] = "plain"
from experiments.systems import kernels
from paradec_jax.families import PRESETS, choose

def show(text, *names):
    found = kernels.count(text)
    print(json.dumps([*names, found["kernels"], found["looks"]]))

for name, (fields, _) in {toys}.items():
    for layers in (1, 3):
        config = dataclasses.replace(kernels.shape_of(name), layers=layers, **fields)
        for positions in (1, 8):
            show(kernels.call(config, positions, "h100")[0], name, positions)
    config = dataclasses.replace(config, layers=1)
    for row in {looks}.get(name, ()):
        show(kernels.step(config, choose(PRESETS[name].family, row), "h100"), name, row)
"""


def with_plugin(*words: str) -> str:
    """What a process prints whose JAX has the plugin."""
    if not (CUDA / "nvidia").exists():
        pytest.skip("needs JAX's CUDA plugin: make kernels")
    compiler = CUDA / "nvidia" / "cuda_nvcc"
    paths = os.pathsep.join(map(str, (CUDA, ROOT)))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    environment |= {"XLA_FLAGS": f"--xla_gpu_cuda_data_dir={compiler}"}
    environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment["PATH"] = os.pathsep.join((str(compiler / "bin"), os.environ["PATH"]))
    options = {"env": environment, "capture_output": True, "text": True, "cwd": ROOT}
    done = subprocess.run([sys.executable, *words], check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def counted():
    """Rows of names, kernels and looks."""
    lines = with_plugin("-c", COUNTS.format(toys=TOYS, looks=LOOKS)).splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_layer_is_few_kernels():
    """Of each kind of block, by what two layers add; the host looks once a call."""
    found = {}
    for name, what, count, looks in counted():
        if isinstance(what, int):
            assert looks == 1
            found.setdefault((name, what), []).append(count)
    for (name, _), (one, three) in found.items():
        assert three - one <= 2 * TOYS[name][1], found


@pytest.mark.slow
def test_a_host_looks_once_a_step_or_twice():
    found = {}
    for name, what, _, looks in counted():
        if isinstance(what, str):
            found.setdefault(name, {})[what] = looks
    assert found == LOOKS


@pytest.mark.slow
@over(["smollm2-135m", "qwen3-0.6b", "sdar-1.7b", "mdlm-small"], argument="preset")
def test_the_table_holds(preset, tmp_path):
    """No call launches more kernels than the table says, or moves more than 1.1 times weights and
    cache.
    """
    path, recorded = tmp_path / "kernels.json", ROOT / "experiments/systems/results/kernels.json"
    with_plugin("-m", "experiments.systems.kernels", "--presets", preset, "--out", str(path))
    table = {
        (row["preset"], row["what"]): row
        for row in json.loads(recorded.read_text())["h100"]["rows"]
    }
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 3
    for row in rows:
        known = table[preset, row["what"]]
        assert row["kernels"] <= known["kernels"] and row["looks"] == 1
        assert max(row["share"], known["share"]) <= 1.1
