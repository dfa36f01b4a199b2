"""Greedy generations by transformers, asked one by one: a process of an environment that has torch.

    python peer.py SmolLM2-135M.gguf float32
    {"ids": [1, 2], "new": 128, "stop": [2], "lookup": 10}   ->   {"ids": [3, 4], "calls": 2}

The first line that it writes says its versions, each later one answers a line that it reads.
"""

import json
import sys
from pathlib import Path

import torch
import transformers


def main(file: Path, dtype: str) -> None:
    """Answers until nothing more is asked."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    kinds = {"dtype": getattr(torch, dtype), "gguf_file": file.name}
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **kinds).eval()
    calls: list[None] = []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(versions | {"threads": torch.get_num_threads()}), file=answers, flush=True)
    for line in sys.stdin:
        asked, ids = json.loads(line), torch.tensor([json.loads(line)["ids"]])
        options = {
            "max_new_tokens": asked["new"],
            "do_sample": False,
            "attention_mask": torch.ones_like(ids),
        }
        options |= {"eos_token_id": asked["stop"], "pad_token_id": asked["stop"][0]}
        if asked["lookup"]:
            options["prompt_lookup_num_tokens"] = asked["lookup"]
        calls.clear()
        with torch.inference_mode():
            made = model.generate(ids, **options)[0, ids.shape[1] :].tolist()
        print(json.dumps({"ids": made, "calls": len(calls)}), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
