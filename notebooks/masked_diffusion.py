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
# # How a canvas is revealed
#
# A **masked diffusion model** writes a text in any order. It starts from a canvas of masks. A **denoiser** reads the whole
# canvas and says, for each masked position, which token it would put there. Some positions are drawn from what it says
# and stay; the others remain masked, and the denoiser is asked again. A text of $L$ tokens can be finished in $N$ calls, and
# $N$ may be much smaller than $L$.
#
# There is a price. Positions that are revealed in one call are drawn *independently* of each other: each fits what was there
# before, but nobody has checked that they fit together. Few calls, much independence, worse text.
#
# A **student** that was distilled (*self-distillation through time*) has learned to say in one call what its teacher says in two
# or more. This notebook shows teacher and student side by side. It needs two denoisers of one vocabulary and no accelerator.
# Run it as a notebook (`jupytext --to notebook --execute notebooks/masked_diffusion.py`) or as a script
# (`python notebooks/masked_diffusion.py`).

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
from paradec_jax.data.text import character_spec, character_tokenizer
from paradec_jax.families import init_params

# %% [markdown]
# What can be set from outside: the two models (folders, or names of bundled models), the number of steps, how long texts are,
# how many are drawn for the curve, and whether (and under which folder) to keep the figures.

# %% tags=["parameters"]
TEACHER = os.environ.get("MASKED_TEACHER", "tiny-mdlm")
STUDENT = os.environ.get("MASKED_STUDENT", "tiny-mdlm-distilled")  # the same model, distilled
STEPS = int(os.environ.get("MASKED_STEPS", "8"))  # N, steps of the sampler
LENGTH = int(os.environ.get("MASKED_LENGTH", "256"))  # L, tokens of a text
TEXTS = int(os.environ.get("MASKED_TEXTS", "32"))  # texts of the curve; the first one is drawn
SHOWN = int(os.environ.get("MASKED_SHOWN", "40"))  # positions of the map
FIGURES = os.environ.get("MASKED_FIGURES", "")  # a folder; nothing is written when empty


# %%
def load(name):
    """A denoiser, or random weights and a sentence that says so."""
    try:
        model = pd.load(name, dtype="float32")
    except pd.StoreError as error:
        print(
            f"{name} could not be loaded ({error}). Random weights take its place: what is drawn for it shows how "
            "the sampler works and says nothing about any training."
        )
        config = pd.PRESETS["tiny-mdlm"]
        tokenizer = character_tokenizer(string.ascii_letters + "\n !$&',-.3:;?")
        return pd.Model(config, init_params(config, jax.random.key(0)), character_spec(tokenizer, "own"), tokenizer)
    if model.family != "masked_diffusion":
        raise SystemExit(f"{name} is of family {model.family}; a canvas is revealed by a denoiser")
    return model


names = {"teacher": Path(TEACHER).name, "student": Path(STUDENT).name}
models = {"teacher": load(TEACHER), "student": load(STUDENT)}


# %% [markdown]
# ## The rule
#
# Time runs from $1$ (all masked) to $0$ (all revealed), in $N$ steps of a grid $1 = t_0 > t_1 > \ldots > t_N = 0$. In the step
# from $t$ to $s$ a position that is still masked
#
# $$ \text{is revealed with probability } \frac{t - s}{t}, \qquad \text{and then gets the token } x \sim p_\theta(x \mid \text{canvas}). $$
#
# The first half of that sentence does not ask the network anything. So *when* a position is revealed can be drawn before
# anything else: each position gets one of the $N$ steps, all equally likely. What comes out is a random partition of the canvas
# into groups, in order; a call reveals one group. A step whose group is empty needs no call, and of $N$ steps
#
# $$ N \left( 1 - \left(1 - \tfrac{1}{N}\right)^{L} \right) $$
#
# are not empty on average. This is the law of ancestral sampling in MDLM (arXiv 2406.07524), written so that every row of a batch
# keeps its own time; the file is `paradec_jax/decode/masked/masked.py`.


# %%
def record(state, info):
    """What the figures need of one call."""
    return {"tokens": state.rows.tokens, "final": state.shown}


def watch(model):
    """Draws all texts and keeps the canvas after every call."""
    decoder = dataclasses.replace(pd.Masked(), log_probs=True).bind(model.network, LENGTH, model.token_spec)
    request = pd.make_request([[]] * TEXTS, max_new_tokens=LENGTH, seed=0)
    knobs = pd.Masked.Knobs(steps=STEPS)
    params = decoder.prepare(model.params)
    decoded, calls = pd.trace(decoder, params, request, knobs, n=min(STEPS, LENGTH), record=record)
    tokens, final = np.asarray(calls["tokens"]), np.asarray(calls["final"])  # [calls, TEXTS, LENGTH]
    nothing = np.zeros_like(final[:1])
    when = np.argmax(final, axis=0)  # the call in which each position was revealed, counted from 0
    return SimpleNamespace(
        tokens=tokens,
        before=np.concatenate([nothing, final[:-1]]),
        final=final,
        when=when,
        text=np.asarray(decoded.tokens),
        log_probs=np.asarray(decoded.log_probs),
        calls=np.asarray(decoded.network_calls),
    )


runs = {name: watch(model) for name, model in models.items()}
expected = STEPS * (1 - (1 - 1 / STEPS) ** LENGTH)
for name, run in runs.items():
    text = models[name].tokenizer.decode(run.text[0].tolist(), skip_special=True)
    print(f"{name} ({names[name]}): {LENGTH} tokens in {int(run.calls[0])} calls, {expected:.1f} expected\n{text}\n")


# %%
def keep(figure, name):
    """Writes a figure, if a folder for figures is set."""
    if FIGURES:
        Path(FIGURES).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(FIGURES) / f"masked_{name}.png", dpi=90)


# %% [markdown]
# ## The map
#
# Each line is a call, each column a position. Orange is what this very call revealed, blue what stood there before, and an empty
# field is a mask. Both sides draw with the same keys, so the same positions are revealed in the same calls, only the tokens
# differ. Look at neighbours that turn orange in one line: nobody told either of them what the other would be.

# %%
COLOURS = {"new": "#FDD49E", "before": "#A6CEE3", "masked": "#F2F2F2"}
MEANINGS = {"new": "revealed in this call", "before": "revealed before", "masked": "masked"}


def kind_of(run, call, row, p):
    """What position p of a text is after a call."""
    if run.before[call, row, p]:
        return "before"
    return "new" if run.final[call, row, p] else "masked"


def spelled(model, token):
    """A token as short text, line breaks made visible."""
    text = model.tokenizer.decode([int(token)], skip_special=True).replace("\n", "\\n")
    return text[:6] if text.strip() else "_"


def draw_map(axis, model, run, positions):
    """The first positions of the first text after every call that was needed."""
    lines = int(run.calls[0])
    for call in range(lines):
        for p in range(positions):
            kind = kind_of(run, call, 0, p)
            axis.add_patch(Rectangle((p - 0.48, call - 0.46), 0.96, 0.92, facecolor=COLOURS[kind]))
            if kind != "masked":
                axis.text(p, call, spelled(model, run.tokens[call, 0, p]), ha="center", va="center", fontsize=7)
    axis.set_xlim(-0.5, positions - 0.5)
    axis.set_ylim(lines - 0.5, -0.5)
    axis.set_yticks(range(lines), range(1, lines + 1))
    axis.set_ylabel("call")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return lines


shown = min(SHOWN, LENGTH)
figure, axes = plt.subplots(2, 1, figsize=(2 + 0.28 * shown, 1), sharex=True, layout="constrained")
lines = [draw_map(axis, models[name], run, shown) for axis, (name, run) in zip(axes, runs.items(), strict=True)]
figure.set_figheight(1.8 + 0.26 * sum(lines))
for axis, name in zip(axes, runs, strict=True):
    axis.set_title(f"{name} ({names[name]})", fontsize=11)
axes[-1].set_xlabel("position")
handles = [Patch(facecolor=COLOURS[kind], label=text) for kind, text in MEANINGS.items()]
figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
keep(figure, "map")

# %% [markdown]
# ## How sure the denoiser is
#
# The mean of $-\log p$ of the tokens that a call revealed, over all texts: what each model thought of its own draws. In the first
# call nothing is known and a token is little more than a draw by frequency; in the last one all else stands already. If a
# student is surer than its teacher, its texts may also be less varied: that is the price to look for.


# %%
def surprise(run):
    """Mean -log p of the tokens that were revealed in each call; NaN where none was."""
    found = []
    for call in range(len(run.final)):
        new = run.final[call] & ~run.before[call]
        found.append(float(-run.log_probs[new].mean()) if new.any() else float("nan"))
    return np.asarray(found)


surprises = {name: surprise(run) for name, run in runs.items()}
figure, axis = plt.subplots(figsize=(6.5, 3.8), layout="constrained")
for colour, (name, found) in zip(("#999999", "#5B9BD5"), surprises.items(), strict=True):
    axis.plot(np.arange(1, len(found) + 1), found, "o-", color=colour, label=f"{name} ({names[name]})")
axis.set_xlabel("call")
axis.set_ylabel("nats a token")
axis.xaxis.get_major_locator().set_params(integer=True)
axis.grid(alpha=0.3)
axis.legend()
keep(figure, "surprise")

# %% [markdown]
# ## Fewer and more calls
#
# The beginnings of texts of both models at several numbers of steps, from the same keys. The number of steps is traced: all
# of these run in one compiled program.


# %%
def written(model, steps):
    """A text and the calls that it took."""
    decoder = pd.Masked().bind(model.network, LENGTH, model.token_spec)
    request = pd.make_request([[]], max_new_tokens=LENGTH, seed=1)
    decoded = pd.run(decoder, decoder.prepare(model.params), request, pd.Masked.Knobs(steps=steps))
    return model.tokenizer.decode(decoded.completions()[0], skip_special=True), int(decoded.network_calls[0])


table = {(name, steps): written(model, steps) for steps in (4, 16, 64) for name, model in models.items()}
for (name, steps), (text, calls) in table.items():
    print(f"{name}, {steps} steps, {calls} calls: {text[:72]!r}")

# %% [markdown]
# ## Gaps
#
# A canvas may hold tokens that are given, anywhere. What stands after a gap is read like what stands before it.

# %%
pieces = ["To be, ", 12, " question."]
try:
    filled = pd.infill(models["student"], pieces, knobs=pd.Masked.Knobs(steps=STEPS), seed=0).text[0]
except ValueError as error:  # a vocabulary without these characters
    filled = None
    print(f"these pieces cannot be filled: {error}")
else:
    print(filled)

# %% [markdown]
# ## What to try
#
# - `MASKED_STEPS=64`: with more steps than the text has tokens nearly every call reveals one position, and nothing is independent.
# - `pd.Masked(order="confidence")` reveals the surest positions first. It changes the law: texts become more ordinary.
# - `pd.Masked.Knobs(temperature=0.8)`: the rival that nobody shows. `python -m experiments.masked_diffusion.study frontier` draws
#   perplexity against entropy for both.
