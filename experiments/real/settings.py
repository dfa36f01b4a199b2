"""The decoders that a real model is measured with, the baseline first, and the ten chats that it
answers.
"""

import json
from pathlib import Path
from typing import Any

from paradec_jax.decode import AutoRegressive, Jacobi, Lookahead, PromptLookup
from paradec_jax.decode.machine.setting import Setting
from paradec_jax.text.chat import conversation

HERE = Path(__file__).parent
SETTINGS = (
    Setting("one by one", AutoRegressive(), baseline=True),
    Setting("prompt lookup", PromptLookup()),
    Setting("lookahead", Lookahead()),
    Setting("Jacobi, blocks of 8", Jacobi(block=8)),
    Setting("Jacobi, blocks of 16", Jacobi(block=16)),
    Setting("running window of 16", Jacobi(block=16, running=True)),
)


def chats(model: Any) -> dict[str, str]:
    """The ten chats by name, as the model's template writes them."""
    lines = map(json.loads, (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines())
    return {
        one["name"]: conversation(model, [{"role": "user", "content": one["text"]}])
        for one in lines
    }
