# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One block, with and without residual prediction
#
# A model of *block diffusion* (SDAR, arXiv 2510.06303) writes a text block by block. A block of $B$ tokens begins as $B$ masks.
# Each call of the network reads the block as it stands and says, for every position at once, which token it expects there. The
# surest position is *revealed*, and the network is called again: $B$ calls for $B$ tokens.
#
# Why not reveal two positions in a call? Because the second token was chosen before the first one stood there. The network would
# say something else of it now, but to know *what*, it would have to be called again.
#
# **Multi-token residual prediction** (MRP) asks a small head instead. It reads the block with the new token in it and what the
# network said before, and returns what it expects the network to *change its mind by*: a residual. The sum takes the place of a
# call. This notebook looks at one block and shows who revealed what, when, and how sure it was: the network alone, the network
# with its own scores taken once more, and the network with its head. It needs no accelerator. Run it as a notebook
# (`jupytext --to notebook --execute notebooks/residual_prediction.py`) or as a script (`python notebooks/residual_prediction.py`).

# %%
import dataclasses
import os
import string
from pathlib import Path
from types import SimpleNamespace

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch, Rectangle

import paradec_jax as pd
from paradec_jax.config import ResidualHeadConfig
from experiments.tasks.chains import Followers
from paradec_jax.data.text import character_spec, character_tokenizer
from experiments.tasks.words import problem
from paradec_jax.families import init_params
from paradec_jax.models import ResidualHeadNetwork
from paradec_jax.store import ResidualHead

# %% [markdown]
# What can be set from outside: the model (a folder that holds a network and its head), whether it continues word problems or a
# chain of symbols, the text to continue, steps of the head after a call, which block is shown (the first whole one after the
# prompt is 0), and whether (and under which folder) to keep the figures.

# %% tags=["parameters"]
MODEL = os.environ.get("RESIDUAL_MODEL", "tiny-sdar")
GROUND = os.environ.get("RESIDUAL_GROUND", "words")  # or "chains"
PROMPT = os.environ.get("RESIDUAL_PROMPT", "")  # one of the ground's when empty
STEPS = int(os.environ.get("RESIDUAL_STEPS", "2"))  # K, steps of the head after each call
BLOCK = int(os.environ.get("RESIDUAL_BLOCK", "0"))
TEMPERATURE = float(os.environ.get("RESIDUAL_TEMPERATURE", "0"))
FIGURES = os.environ.get("RESIDUAL_FIGURES", "")  # a folder; nothing is written when empty


# %%
def load(name):
    """A network and its head, or random weights and a sentence that says so."""
    try:
        model = pd.load(name, dtype="float32")
    except pd.StoreError as error:
        print(
            f"{name} could not be loaded ({error}). Random weights take its place: what is drawn shows how decoding works "
            "and says nothing about any head."
        )
        tokenizer = character_tokenizer(string.ascii_letters)
        config = dataclasses.replace(pd.PRESETS["tiny-sdar"], vocab_size=tokenizer.vocab_size)
        shape = ResidualHeadConfig.of(config)
        head = ResidualHead(shape, ResidualHeadNetwork.init_params(shape, jax.random.key(1), "normal_0.2"))
        spec = character_spec(tokenizer, "own")
        return pd.Model(config, init_params(config, jax.random.key(0)), spec, tokenizer, head=head), "chains"
    if model.family != "block_diffusion" or model.head is None:
        raise SystemExit(f"{name} has no residual head beside a model of block diffusion")
    return model, GROUND


model, ground = load(MODEL)
tokenizer, width = model.tokenizer, model.config.block


def prompt_of():
    """The text to continue."""
    if PROMPT:
        return PROMPT
    if ground == "words":
        return problem(0, 0, "test", 3).prompt
    law = Followers()
    return "".join(string.ascii_letters[symbol] for symbol in law.draw(1, [0, 3])[0, :width])


text = prompt_of()
given = tokenizer.encode(text)
if model.token_spec.bos is not None:
    given = [model.token_spec.bos, *given]
start = -(-len(given) // width) * width + BLOCK * width  # where the shown block begins
print(text)

# %% [markdown]
# ## Three ways through the block
#
# | | what a call is followed by |
# |---|---|
# | alone | nothing: one position a call |
# | no head | the network's *own* scores, taken $K$ times more as they are: the next surest positions, unseen by each other |
# | with its head | $K$ steps of the head: each corrects the scores for what has been revealed, then reveals the surest position |
#
# The second is the rival that any head has to beat: it costs nothing and saves as many calls. All three reveal one position a
# step (`rule` "static"). Stores and prompts have calls of their own here, which are left out.


# %%
def watch(decoder):
    """Decodes up to the end of the shown block, and keeps who revealed what of it."""
    plain = dataclasses.replace(decoder, fuse_store=False, fuse_prompt=False)
    prepared = (
        {"network": model.params, "head": model.head.params} if plain.further_networks else model.params
    )
    bound = plain.bind(model.network, start + 2 * width, model.token_spec)
    request = pd.make_request([given], max_new_tokens=start + width - len(given), seed=0)
    knobs = plain.Knobs(temperature=TEMPERATURE)
    most = (start // width + 2) * (width + 1)
    _, info = pd.trace(bound, bound.prepare(prepared), request, knobs, n=most)
    where, tokens, scores = (np.asarray(getattr(info, name))[:, 0] for name in ("where", "tokens", "scores"))
    if where.ndim == 2:  # no rounds of a head
        where, tokens, scores = where[:, None], tokens[:, None], scores[:, None]
    calls = np.flatnonzero((np.asarray(info.at)[:, 0] == start) & np.asarray(info.reads)[:, 0])
    events = []
    for call, i in enumerate(calls):
        for turn in range(where.shape[1]):
            for p in np.flatnonzero(where[i, turn]):
                events.append(
                    SimpleNamespace(
                        call=call,
                        turn=turn,
                        position=int(p),
                        token=int(tokens[i, turn, p]),
                        confidence=float(scores[i, turn, p]),
                    )
                )
    calls = 1 + max((event.call for event in events), default=-1)
    return SimpleNamespace(events=events, calls=calls, rounds=where.shape[1])


decoders = {
    "alone": pd.BlockDenoising(rule="static"),
    "no head": pd.Residual(head="zero", head_steps=STEPS, rule="static"),
    "with its head": pd.Residual(head=model.head.network, head_steps=STEPS, rule="static"),
}
runs = {name: watch(decoder) for name, decoder in decoders.items()}


# %%
def spelled(token):
    """A token as short text, line breaks made visible."""
    shown = tokenizer.decode([token], skip_special=True).replace("\n", "\\n").strip()
    return shown[:7] if shown else "_"


def who(event):
    """What chose a token."""
    return "network" if event.turn == 0 else "afterwards"


for name, run in runs.items():
    print(f"{name}: {len(run.events)} positions in {run.calls} calls")
    for event in run.events:
        print(
            f"  call {event.call + 1}, step {event.turn}: position {start + event.position}, "
            f"{spelled(event.token)!r} at {event.confidence:.2f}"
        )


# %%
def keep(figure, name):
    """Writes a figure, if a folder for figures is set."""
    if FIGURES:
        Path(FIGURES).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(FIGURES) / f"residual_{name}.png", dpi=90)


# %% [markdown]
# ## The map
#
# Each line is a call, each column a position of the block. Blue is what the network chose in that call, orange what was revealed
# after it without another one; a number is the probability that the chosen token had then. Tokens of earlier lines stay, in grey.

# %%
COLOURS = {"network": "#A6CEE3", "afterwards": "#FDD49E", "before": "#DDDDDD", "masked": "#F7F7F7"}
MEANINGS = {
    "network": "revealed by the network",
    "afterwards": "revealed after the call",
    "before": "revealed before",
    "masked": "masked",
}


def draw_map(axis, run):
    """The block after each call."""
    known = {}
    for call in range(run.calls):
        fresh = {event.position: event for event in run.events if event.call == call}
        for p in range(width):
            kind = who(fresh[p]) if p in fresh else "before" if p in known else "masked"
            axis.add_patch(Rectangle((p - 0.48, call - 0.46), 0.96, 0.92, facecolor=COLOURS[kind]))
            if p in fresh:
                label = f"{spelled(fresh[p].token)}\n{fresh[p].confidence:.2f}"
                axis.text(p, call, label, ha="center", va="center", fontsize=7)
            elif p in known:
                axis.text(p, call, spelled(known[p]), ha="center", va="center", fontsize=7, color="0.4")
        known |= {p: event.token for p, event in fresh.items()}
    axis.set_xlim(-0.5, width - 0.5)
    axis.set_ylim(max(run.calls, 1) - 0.5, -0.5)
    axis.set_xticks(range(width), range(start, start + width))
    axis.set_yticks(range(run.calls), range(1, run.calls + 1))
    axis.set_ylabel("call")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


lines = [max(run.calls, 1) for run in runs.values()]
figure, axes = plt.subplots(
    len(runs), 1, figsize=(1.5 + 0.8 * width, 2 + 0.5 * sum(lines)), height_ratios=lines, layout="constrained"
)
for axis, (name, run) in zip(axes, runs.items(), strict=True):
    draw_map(axis, run)
    axis.set_title(name, fontsize=11)
axes[-1].set_xlabel("position")
handles = [Patch(facecolor=COLOURS[kind], label=said) for kind, said in MEANINGS.items()]
figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
keep(figure, "map")

# %% [markdown]
# ## How sure each step was
#
# Confidences in the order of reveals. A head that has learned something is surer in its steps than the network's stale scores
# are, *and* its tokens agree with those that the network would have chosen by itself. The second half is what counts: to be sure
# is easy.

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
for colour, (name, run) in zip(("#999999", "#FDAE6B", "#5B9BD5"), runs.items(), strict=True):
    axis.plot(
        range(1, len(run.events) + 1), [e.confidence for e in run.events], "o-", color=colour, label=name
    )
axis.set_xlabel("reveal")
axis.set_ylabel("probability of the token")
axis.set_ylim(0, 1.05)
axis.grid(alpha=0.3)
axis.legend()
keep(figure, "confidence")

alone = {event.position: event.token for event in runs["alone"].events}
agreeing = {
    name: sum(alone.get(event.position) == event.token for event in run.events) for name, run in runs.items()
}
for name, same in agreeing.items():
    print(
        f"{name}: {same} of {len(runs[name].events)} tokens are those of the network alone, {runs[name].calls} calls"
    )

# %% [markdown]
# ## What to try
#
# - `RESIDUAL_GROUND=chains RESIDUAL_TEMPERATURE=1 RESIDUAL_MODEL=runs/chains-head/model`: a language in which each symbol allows
#   two followers, so that every token depends on its neighbours, and stale scores go wrong at once.
# - `RESIDUAL_STEPS=4`: the head's sums go further astray with each step.
# - `pd.ResidualSpeculative(candidates=3)` lets the head draft and the network verify: its text is that of the network alone,
#   token for token. `python -m experiments.block_diffusion.study speculation` counts its calls.
