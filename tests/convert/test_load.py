"""`load` of what others wrote, from a folder or the Hub's cache, in each of three kinds of
installation.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest
from exports import assert_same
from marks import over

import paradec_jax as pd
from paradec_jax.cli import main
from paradec_jax.disk.folders import ASSETS

ROOT = Path(__file__).parents[2]
# The folder of packages comes without its .pth files, so that no other installation is seen.
PROGRAM = """
import site, sys
kind, place, packages, out = sys.argv[1:]
site.addsitedir(place) if kind == "editable" else sys.path.insert(0, place)
sys.path.append(packages)
import paradec_jax as pd
from paradec_jax.cli import main
assert "paradec_jax.convert" not in sys.modules
assert main(["export", "tiny-causal", out]) == 0
models = [pd.load(name) for name in ("tiny-causal", out)]
first, again = (pd.generate(m, ["Question: Ana"], pd.AutoRegressive(), max_new_tokens=8).text for m in models)
assert first == again
print(pd.__file__, sys.modules["paradec_jax.convert.engine"].__file__, sep="\\n")
"""


@over(["checkout", "editable", "wheel"], ["checkout", "editable", "wheel"], "kind")
def test_an_installation_loads_generates_and_exports(kind, tmp_path):
    source = place = ROOT
    if kind != "checkout":
        pytest.importorskip("setuptools", minversion="77")
        source, place = tmp_path / "source", tmp_path / "site"
        for folder in ("paradec_jax", "convert"):
            shutil.copytree(
                ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
            )
        for file in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / file, source)
        build = f"from setuptools import build_meta as b; b.build_{kind}({str(tmp_path)!r})"
        subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
        zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(place)
    words = [kind, str(place), sysconfig.get_path("purelib"), str(tmp_path / "out")]
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-P", "-c", PROGRAM, *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=free, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    home, converters = (place, "paradec_jax/convert") if kind == "wheel" else (source, "convert")
    assert done.stdout.splitlines()[-2:] == [
        f"{home}/paradec_jax/__init__.py",
        f"{home}/{converters}/engine.py",
    ]


@over(["tiny-recurrent-distilled", "tiny-causal", "tiny-mdlm", "tiny-sdar"])
def test_a_hugging_face_folder_loads_as_the_model_that_it_was(name, tmp_path):
    out, want = tmp_path / "out", pd.load(name)
    assert main(["export", name, str(out)]) == 0
    for dtype in (None, "bfloat16"):
        found = pd.load(out, dtype=dtype)
        assert_same(found, pd.load(name, dtype=dtype))
        assert found.tokenizer.encode("Ana has") == want.tokenizer.encode("Ana has")
    split = pd.load(out, mesh=pd.make_mesh())
    assert np.array_equal(split.params["embedding"], want.params["embedding"])


def test_a_name_on_the_hub_is_read_from_its_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "hub" / "models--org--tiny.1"
    assert main(["export", "tiny-causal", str(cache / "snapshots" / "a1")]) == 0
    shutil.copytree(ASSETS / "tiny-jacobi", cache / "snapshots" / "b2")  # a model folder of ours
    (cache / "refs").mkdir()
    for revision, commit in (("main", "a1"), ("v2", "b2")):
        (cache / "refs" / revision).write_text(commit)
    assert_same(pd.load("org/tiny.1"), pd.load("tiny-causal"))
    assert_same(pd.load("org/tiny.1@v2"), pd.load("tiny-jacobi"))
    assert main(["import", "org/tiny.1", str(tmp_path / "model")]) == 0
    for source in ("org/tiny.1@v3", "org/other"):
        with pytest.raises(
            pd.StoreError, match=r"no folder org/.*, and the Hugging .*HF_HUB_OFFLINE"
        ):
            pd.load(source)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(pd.StoreError, match=r"pip install huggingface_hub"):
        pd.load("org/tiny.1")
    (tmp_path / "org").mkdir()
    with pytest.raises(pd.StoreError, match="there is no model org/tiny"):
        pd.load("org/tiny.1")
