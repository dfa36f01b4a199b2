"""Before anything imports JAX: the CPU, a persistent compilation cache, and where TYPES is set type
checks of arrays.

With TYPES=1 the jaxtyping annotations of `paradec_jax`, the decoders of `experiments` and the stubs
are checked at every call (while tracing, so compiled programs do not change). The import hook must
be in place before any of them is imported.
"""

import collections
import gc
import itertools
import os
import sys
from pathlib import Path

import jaxlib

ROOT = Path(__file__).parents[1]
# Code of the host that answers values of a wrong type with sentences of its own, which tests read.
UNCHECKED = ("chat", "cli", "config", "data", "store", "tokenizer")
# Annotated with a protocol that cannot be checked at run time (it is not `runtime_checkable`).
UNCHECKABLE = ("losses",)
# Of so many settings of a replay, by a word of its file, the first is quick.
QUICK = {"decode": 10, "wavefront": 10, "residual": 5, "train": 6, "selfverify": 8}
# Folders whose files share models that take seconds to make.
TOGETHER = ("objectives",)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time goes into compiling programs that run once. Without LLVM's optimisation it takes
# half as long; with XLA's older code for fusions, in one piece, a third of that. (An unknown flag
# ends the process, and flags are a release's own.)
FLAGS = ["--xla_backend_optimization_level=0"]
if jaxlib.__version__.startswith("0.10."):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    FLAGS += ["--xla_cpu_enable_concurrency_optimized_scheduler=false"]
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"  # which commands do not change
os.environ["XLA_FLAGS"] = " ".join([*FLAGS, os.environ.get("XLA_FLAGS", "")]).strip()
for name in ("JAX_ENABLE_X64", "JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "JAX_DEFAULT_MATMUL_PRECISION"):
    os.environ.pop(name, None)

early = sorted(name for name in sys.modules if name.partition(".")[0] == "paradec_jax")
if early:
    raise RuntimeError(f"imported before the type checks were installed: {', '.join(early)}")

import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

# lowering writes no Python frames into programs
jax.config.update("jax_traceback_in_locations_limit", 0)

if os.environ.get("TYPES"):
    modules = {path.stem for path in (ROOT / "paradec_jax").iterdir()} - {"__init__", "__pycache__"}
    modules -= {*UNCHECKED, *UNCHECKABLE}
    checked = [f"paradec_jax.{name}" for name in sorted(modules)]
    checked += ["experiments.replicas", "experiments.decoders", "stubs"]
    install_import_hook(checked, "annotations.check")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One worker runs all laws of a row, all replays of a function, all tests of the objectives'
    folder, or all of another file's tests: they share programs and models, which a process makes
    once. What replays recorded arrays is marked. Few of the settings in which a decoder or a head
    is replayed or trained are quick, since each compiles a program of its own.
    """
    settings = collections.Counter()
    for item in items:
        if replays := item.path.name.startswith("test_golden_"):
            item.add_marker(pytest.mark.golden)
            every = next((n for word, n in QUICK.items() if word in item.path.stem), 1)
            if hasattr(item, "callspec") and settings[item.function] % every:
                item.add_marker(pytest.mark.slow)
            settings[item.function] += 1
        of_row = item.path.parent.name == "laws" and getattr(item, "callspec", None)
        row = of_row and item.callspec.params.get("name")
        shared = item.path.parent.name in TOGETHER and item.path.parent.name
        of_file = item.nodeid.partition("[" if replays else "::")[0]
        item.add_marker(pytest.mark.xdist_group(row or shared or of_file))


def pytest_collection_finish():
    """The garbage collector leaves modules alone and runs seldom: tracing makes many objects and
    few cycles.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


MAPS = Path("/proc/self/maps")
MOST_MAPS = 40_000
TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_memory_maps():
    """Compiled programs hold memory maps, of which Linux grants a process 65,530; beyond them it
    crashes.

    Reading tens of thousands of them takes longer than many a test does, so only every eighth test
    looks.
    """
    yield
    if next(TESTS) % 8 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
