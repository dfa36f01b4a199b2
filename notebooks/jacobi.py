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
# # How a text settles
#
# A causal language model usually writes one token a call, although one call can look at many positions. **Jacobi
# decoding** uses that: it guesses a whole block of tokens, asks the model in one call what it would say at every position
# of the block, keeps what agrees, and takes the answers as its next guesses. Each call is an *iteration*, each guess of
# the block an *iterate*. After at most as many iterations as tokens the block is what the model would have written one by
# one.
#
# A plain model gains little: after a wrong token it says nonsense. A model that was *distilled* on its own iterates
# has learned to say the right thing after wrong tokens. This notebook draws both, as figure 2 of Jacobi Forcing does.
# It needs two causal models of one task and no accelerator. Run it as a notebook
# (`jupytext --to notebook --execute notebooks/jacobi.py`) or as a script (`python notebooks/jacobi.py`).

# %%
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch, Rectangle

import paradec_jax as pd
from experiments.tasks import build_tokenizer, token_spec
from paradec_jax.data.problems import encode_prompts
from experiments.tasks import word_problems
from paradec_jax.families import init_params

# %% [markdown]
# What can be set from outside: the two models (folders, or names of bundled models), the size of a block, how many
# tokens to write, how many problems to count over, and whether (and under which folder) to keep the figures.

# %% tags=["parameters"]
BEFORE = os.environ.get("JACOBI_BEFORE", "tiny-causal")  # the model as it was
AFTER = os.environ.get("JACOBI_AFTER", "tiny-jacobi")  # the same model, distilled
BLOCK = int(os.environ.get("JACOBI_BLOCK", "16"))  # n, tokens of a block
TOKENS = int(os.environ.get("JACOBI_TOKENS", "160"))  # tokens to write, at most
SHOWN = int(os.environ.get("JACOBI_SHOWN", "24"))  # positions of the map
PROBLEMS = int(os.environ.get("JACOBI_PROBLEMS", "32"))  # problems of the histogram; the first one is drawn
FIGURES = os.environ.get("JACOBI_FIGURES", "")  # a folder; nothing is written when empty


# %%
def load(name):
    """A causal model, or random weights and a sentence that says so."""
    try:
        model = pd.load(name)
    except pd.StoreError as error:
        print(
            f"{name} could not be loaded ({error}). Random weights take its place: what is drawn for it shows how "
            "the decoder works and says nothing about any training."
        )
        config = pd.PRESETS["tiny-causal"]
        return pd.Model(config, init_params(config, jax.random.key(0)), token_spec(), build_tokenizer())
    if model.family != "causal":
        raise SystemExit(f"{name} is of family {model.family}; Jacobi decoding needs a causal model")
    return model


names = {"before": Path(BEFORE).name, "after": Path(AFTER).name}
models = {"before": load(BEFORE), "after": load(AFTER)}
problems = word_problems(PROBLEMS, seed=3, steps=(2, 3))
print(problems[0].prompt)


# %% [markdown]
# ## The rule
#
# Let $x$ be the newest committed token and $d_1 \ldots d_{n-1}$ guesses of those after it. One call gives the
# model's own choice $g_i$ after every token it was fed:
#
# $$ g_0 = \arg\max p(\cdot \mid \ldots, x), \qquad g_i = \arg\max p(\cdot \mid \ldots, x, d_1 \ldots d_i). $$
#
# 1. *Accept.* $m$ is the number of leading guesses with $d_{i+1} = g_i$. Each of them follows from tokens that are
#    right, so it is right.
# 2. *Commit* $g_0 \ldots g_m$, which are $m + 1$ tokens: the **fast-forward count** of this iteration.
# 3. *Draft.* $g_{m+1}, g_{m+2}, \ldots$ are the new guesses.
#
# A guess may be right before its turn, after another one that is still wrong. If it then stays right until it is
# committed, it is **stationary**, and neighbours of that kind are a stationary $n$-gram. A plain model has few of
# them; they are what distillation teaches, and what lets one iteration commit many tokens at once. The rule is that of
# `paradec_jax/decode/causal/jacobi.py`, with blocks that are finished before the next one begins.


# %%
def watch(model):
    """Decodes all problems and lines up the iterates of each with positions of its text."""
    tokens, lengths = encode_prompts(model.tokenizer, problems, spec=model.token_spec)
    request = pd.make_request(tokens, lengths, max_new_tokens=TOKENS, stop=model.token_spec.stop)
    decoder = pd.Jacobi(block=BLOCK, greedy=True)
    decoder = decoder.bind(model.network, tokens.shape[1] + TOKENS, model.token_spec)
    params = decoder.prepare(model.params)
    states = []
    for state, _ in pd.stream(decoder, params, request):
        fields = state.rows.length, decoder.drafts(state), state.window_end
        states.append([np.asarray(field) for field in fields])
    decoded = decoder.finish(state)
    length, draft, window_end = (np.stack(field) for field in zip(*states, strict=True))
    one_by_one = pd.AutoRegressive(greedy=True).bind(model.network, decoder.size, model.token_spec)
    alone = pd.run(one_by_one, params, request)
    texts = decoded.completions()
    return SimpleNamespace(
        rows=[iterates(texts[i], lengths[i], length[:, i], draft[:, i], window_end[:, i]) for i in range(PROBLEMS)],
        calls=np.asarray(decoded.network_calls),
        same=texts == alone.completions(),
    )


# %% [markdown]
# Positions are counted from the first token after the prompt. Iteration 0 is the call that reads the prompt: it
# commits one token and gives the first guesses. For each text:
#
# - `boundary[t]`: tokens committed after iteration $t$.
# - `seen[t, p]`: the token at position $p$ after iteration $t$, committed or guessed, or $-1$ beyond the block.
# - `in_line[t, p]`: a right guess with nothing wrong before it, to be accepted in the next iteration.
# - `stationary[t, p]`: a right guess after a wrong one, which stays right until it is committed.


# %%
def iterates(text, start, length, draft, window_end):
    """What became of every position of one text in every iteration."""
    final, count = np.asarray(text), len(text)
    last = int(np.argmax(length == start + count))  # the iteration of the last token
    boundary = length[: last + 1] - start
    seen = np.full((last + 1, count), -1)
    for t in range(last + 1):
        seen[t, : boundary[t]] = final[: boundary[t]]
        front = min(window_end[t] - start, count)
        if t < last:
            seen[t, boundary[t] : front] = draft[t, : max(front - boundary[t], 0)]
    committed = np.arange(count) < boundary[:, None]
    right = seen == final
    in_line = np.cumprod(right, axis=1).astype(bool) & ~committed
    stays = np.cumprod(right[::-1], axis=0)[::-1].astype(bool)  # right from here on
    return SimpleNamespace(
        final=final,
        boundary=boundary,
        seen=seen,
        committed=committed,
        in_line=in_line,
        stationary=stays & ~in_line & ~committed,
        counts=np.diff(boundary),
    )


runs = {name: watch(model) for name, model in models.items()}
for name, run in runs.items():
    row = run.rows[0]
    print(f"{name}: {models[name].tokenizer.decode(row.final.tolist(), skip_special=True)!r}")
    print(f"{len(row.final)} tokens in {len(row.boundary)} calls; all texts as one by one: {run.same}")


# %%
def keep(figure, name):
    """Writes a figure, if a folder for figures is set."""
    if FIGURES:
        Path(FIGURES).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(FIGURES) / f"jacobi_{name}.png", dpi=90)


# %% [markdown]
# ## The map
#
# Each line is an iteration, each column a position. Read a column from top to bottom: guesses change, then the token
# is committed. Dark blue are the tokens that this very iteration committed: the longer the bar, the fewer the lines.
# Framed are stationary guesses, right although something before them is wrong.

# %%
COLOURS = {
    "new": "#5B9BD5",
    "committed": "#C6DCEF",
    "in_line": "#D9F0D3",
    "stationary": "#7FBF7B",
    "wrong": "#FBD7C8",
}
MEANINGS = {
    "new": "committed in this iteration",
    "committed": "committed before",
    "in_line": "right, next in line",
    "stationary": "stationary: right after a wrong one, to the end",
    "wrong": "wrong, or right by accident",
}


def kind_of(row, t, p):
    """What position p is in iteration t, or None where it holds nothing."""
    if row.committed[t, p]:
        return "committed" if t and row.committed[t - 1, p] else "new"
    if row.seen[t, p] < 0:
        return None
    if row.in_line[t, p]:
        return "in_line"
    return "stationary" if row.stationary[t, p] else "wrong"


def spelled(model, token):
    """A token as short text: line breaks made visible, the stop token named, single bytes as a question mark."""
    if int(token) in model.token_spec.stop:
        return "end"
    text = model.tokenizer.decode([int(token)]).strip(" ").replace("\n", "\\n") or "_"
    return text[:6] if text.isascii() and text.isprintable() else "?"


def draw_map(axis, model, row, positions):
    """Guesses against iterations and positions, until the first `positions` tokens are committed."""
    positions = min(positions, len(row.final))
    lines = int(np.argmax(row.boundary >= positions)) + 1
    for t in range(lines):
        for p in range(positions):
            kind = kind_of(row, t, p)
            if kind is None:
                continue
            edge = "#1B7837" if kind == "stationary" else "white"
            axis.add_patch(
                Rectangle((p - 0.48, t - 0.46), 0.96, 0.92, facecolor=COLOURS[kind], edgecolor=edge, lw=1.2)
            )
            axis.text(p, t, spelled(model, row.seen[t, p]), ha="center", va="center", fontsize=7)
    for border in range(BLOCK, positions, BLOCK):
        axis.axvline(border - 0.5, color="0.3", lw=1)
    axis.set_xlim(-0.5, positions - 0.5)
    axis.set_xlabel("position after the prompt (lines: borders of blocks)")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return lines


figure, axes = plt.subplots(1, 2, figsize=(2 + 0.84 * SHOWN, 1), sharey=True, layout="constrained")
lines = max(
    draw_map(axis, models[name], run.rows[0], SHOWN)
    for axis, (name, run) in zip(axes, runs.items(), strict=True)
)
figure.set_figheight(1.9 + 0.26 * lines)
for axis, (name, run) in zip(axes, runs.items(), strict=True):
    axis.set_ylim(lines - 0.5, -0.5)
    told = f"{len(run.rows[0].final)} tokens in {len(run.rows[0].boundary)} calls"
    axis.set_title(f"{name} ({names[name]}): {told}", fontsize=11)
axes[0].set_ylabel("iteration")
handles = [Patch(facecolor=COLOURS[kind], label=text) for kind, text in MEANINGS.items()]
figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
keep(figure, "map")

# %% [markdown]
# ## Fast-forward counts
#
# How many tokens one iteration commits, over all problems. A count of 1 is a step of one-by-one decoding. The mean is
# what a decoder gains as long as a call over a block costs no more than one over a token (the part
# "calls" of `experiments/systems/report.py` measures that).

# %%
counts = {name: np.concatenate([row.counts for row in run.rows]) for name, run in runs.items()}
most = max(max(found, default=1) for found in counts.values())
figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
for shift, colour, (name, found) in zip((-0.2, 0.2), ("#999999", "#5B9BD5"), counts.items(), strict=True):
    shares = 100 * np.bincount(found, minlength=most + 1)[1:] / max(len(found), 1)
    mean = np.mean(found) if len(found) else float("nan")
    axis.bar(np.arange(1, most + 1) + shift, shares, 0.4, color=colour, label=f"{name} ({names[name]}): mean {mean:.2f}")
axis.set_xlabel("fast-forward count (tokens committed in an iteration)")
axis.set_ylabel("iterations (%)")
axis.xaxis.get_major_locator().set_params(integer=True)
axis.grid(axis="y", alpha=0.3)
axis.legend()
keep(figure, "counts")


# %% [markdown]
# And the stationary guesses: how many there are in an iteration on average, how many tokens were stationary at some time
# before they were committed, and the longest stationary $n$-gram.


# %%
def longest(flags):
    """Length of the longest run of true values along the last axis."""
    best = run = 0
    for value in np.pad(flags, ((0, 0), (0, 1))).ravel():
        run = run + 1 if value else 0
        best = max(best, run)
    return best


for name, run in runs.items():
    cells = sum(row.stationary.sum() for row in run.rows)
    iterations = sum(len(row.counts) for row in run.rows)
    tokens = sum(len(row.final) for row in run.rows)
    ever = sum(row.stationary.any(axis=0).sum() for row in run.rows)
    print(
        f"{name}: {cells / max(iterations, 1):.2f} stationary guesses an iteration; {ever} of {tokens} tokens were "
        f"stationary; longest n-gram {max(longest(row.stationary) for row in run.rows)}"
    )

# %% [markdown]
# ## What to try
#
# - `JACOBI_BLOCK=32`: larger blocks have more room for stationary guesses, and cost more a call.
# - `pd.Jacobi(block=16, running=True)`: the window is filled up after every iteration instead of shrinking.
# - `candidates=4`: the draft and three other guesses of its first token are verified in the same call.
# - `pd.Jacobi(blocks=2)`: the next block is drafted while this one is verified.
