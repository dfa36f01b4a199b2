"""The commands of docs/your_model.md, at toy size, in a shell."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from commands import ROOT

pytestmark = pytest.mark.slow


def test_the_commands(source, tmp_path):
    page = (ROOT / "docs" / "your_model.md").read_text(encoding="utf-8")
    commands = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    for option, toy in (
        ("updates", 40),
        ("new-tokens", 8),
        ("max-new-tokens", 8),
        ("learning-rate", 1e-2),
    ):
        commands = re.sub(rf"--{option} \S+", f"--{option} {toy}", commands)
    commands = commands.replace("train draft", "train draft --rank 2")  # of the toy's matrices
    shutil.copytree(source / "llama", tmp_path / "M")
    lines = [json.dumps({"prompt": f"x {i} ", "response": f"is {i}"}) + "\n" for i in range(50)]
    for name, some in (("train", lines), ("held", lines[:5])):
        (tmp_path / f"{name}.jsonl").write_text("".join(some))
    words = f'paradec() {{ "{sys.executable}" -m paradec_jax.cli "$@"; }}\n{commands}'
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["bash", "-ec", words], cwd=tmp_path, env=path, text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr
    assert commands.count("paradec ") == 9 and "held out: nats a token" in ended.stdout
    assert (tmp_path / "for-transformers" / "model.safetensors").exists()
    assert len(json.loads((tmp_path / "rows.json").read_text())) > 4
