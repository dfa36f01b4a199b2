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
# # How a wavefront writes
#
# A language model with *recurrent depth* thinks in loops. A **prelude** turns a token into a vector $e$. A **core**
# refines a latent state $s$ as often as one likes, and a **coda** reads the state out as scores of the next token:
#
# $$ e = \mathrm{prelude}(x), \qquad s \leftarrow \mathrm{core}(s, e) \ \text{ repeated, from a random } s, \qquad
#    \text{scores} = \mathrm{coda}(s). $$
#
# Usually one token is finished before the next one starts: $r$ recurrences, one token, again $r$ recurrences. But
# after a few of them the core has often said nearly all it has to say. A **wavefront** does not wait for the rest. It
# starts the next position on a guess, while the one before it is still being refined.
#
# This notebook watches it do so. It needs the bundled model and no accelerator. It can be run as a notebook
# (`jupytext --to notebook --execute notebooks/wavefront.py`) or as a script (`python notebooks/wavefront.py`).

# %%
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch, Rectangle

import paradec_jax as pd

# %% [markdown]
# Four things can be set from outside: how many tokens to write, how wide the wave may be, and whether (and under
# which folder) to keep the figures as PNG files.

# %% tags=["parameters"]
TOKENS = int(os.environ.get("WAVEFRONT_TOKENS", "64"))  # tokens to write, at most
WIDTH = int(os.environ.get("WAVEFRONT_WIDTH", "8"))  # W, positions that the wave may hold
SHOWN = int(os.environ.get("WAVEFRONT_SHOWN", "20"))  # positions of the map of tokens
FIGURES = os.environ.get("WAVEFRONT_FIGURES", "")  # a folder; nothing is written when empty


# %% [markdown]
# ## The rule
#
# The wave is a window of $w$ positions. Slot $0$ holds the newest token that is committed for good. Every later slot
# holds a **candidate**: what its left neighbour predicts at the moment. One step does five things.
#
# 1. *Condition.* The prelude reads the candidates. Its output is averaged over steps with momentum $\eta$:
#    $e_i \leftarrow (1 - \eta)\, e_i^{\text{new}} + \eta\, e_i^{\text{old}}$.
# 2. *Refine.* All states of the window do $r'$ recurrences: $s_i \leftarrow \mathrm{core}(s_i, e_i)$.
# 3. *Predict.* The coda reads every state. Slot $i$ predicts the token of slot $i + 1$, and that becomes its
#    candidate.
# 4. *Commit.* The relative change of a state in this step is
#    $$ \delta_i = \frac{\lVert s_i - s_i^{\text{before}} \rVert}{\lVert s_i \rVert}. $$
#    A slot has *converged* when $\delta_i < \varepsilon$. The predictions of slots $0 \ldots k - 1$ are committed,
#    where $k$ is the largest number for which all these slots have converged **and** each of their candidates is
#    still the one that its neighbour predicts. So nothing is committed after something that still moves.
# 5. *Advance.* The window moves on by $k$ positions, and one new position joins after the others, with a random state.
#
# If $k = 1$ in every step, a token costs one network call of $r'$ recurrences, whatever depth a position needs.
# The rule is that of `paradec_jax/decode/recurrent/wavefront.py`; it follows Algorithm 2 and Eq. 3 of arXiv 2510.14961.

# %%
model = pd.load("tiny-recurrent")
decoder = pd.Wavefront(inner_recurrence=1, window=WIDTH, prefill_recurrence=16, greedy=True)
EPSILON = 0.01
knobs = pd.Wavefront.Knobs(exit_threshold=EPSILON, momentum=0.0)

question = (
    "Question: Zoe has 47 plums. Zoe gives away 30 plums. Zoe finds 14 more plums. Zoe is 33 years old. "
    "How many plums does Zoe have?\nAnswer:\n"
)
prompt = [model.token_spec.bos, *model.tokenizer.encode(question)]
request = pd.make_request([prompt], max_new_tokens=TOKENS, stop=model.token_spec.stop)
decoder = decoder.bind(model.network, len(prompt) + TOKENS, model.token_spec)
params = decoder.prepare(model.params)


# %% [markdown]
# `trace` does a fixed number of steps and keeps whatever a function takes of the state after each of them and of
# what the step says of itself. The steps stay one compiled loop; the record has one axis more, the steps. A row that has stopped does not
# move, so it does no harm to ask for more steps than are needed.


# %%
def record(state, info):
    """What the figures need of one step: rows, then the window."""
    return {
        "tokens": state.rows.tokens,
        "length": state.rows.length,
        "candidates": state.wave.tokens,
        "active": state.wave.active,
        "distance": info.distance,
    }


# %% [markdown]
# From here on, positions are counted from the first token after the prompt, and steps from 1. Row 0 is the moment
# before the first step: reading the prompt has committed one token, and a wave with a headway has its random ones.
#
# - `boundary[t]`: tokens committed after step $t$.
# - `front[t]`: positions that hold a token after step $t$, committed or candidate. The window begins with the newest
#   committed token, so $\text{front} = \text{boundary} + w - 1$.
# - `seen[t, p]`: the token at position $p$ after step $t$, or $-1$.
# - `distance[t, p]`: $\delta$ of the state of position $p$ in step $t$.


# %%
def watch(decoder, knobs):
    """Traces one decoding and lines its steps up with positions of the text."""
    n = TOKENS + 2 * WIDTH
    before = jax.jit(decoder.init)(params, request, decoder.knobs(knobs)).wave
    decoded, steps = pd.trace(decoder, params, request, knobs, n=n, record=record)
    steps = {name: np.asarray(values)[:, 0] for name, values in steps.items()}  # the only row of the batch
    start, end = len(prompt), int(decoded.lengths[0])
    count, last = end - start, int(np.argmax(steps["length"] == end)) + 1  # the step of the last token

    boundary = np.concatenate([[1], steps["length"][:last] - start])
    active = np.concatenate([before.active, steps["active"][:last]])
    candidates = np.concatenate([before.tokens, steps["candidates"]])
    front = boundary + active - 1
    front[-1] = boundary[-1]  # a row that has stopped needs its candidates no longer
    front = np.minimum(front, count)
    final = np.asarray(decoded.tokens)[0, start:end]
    seen, distance = np.full((last + 1, count), -1), np.full((last + 1, count), np.nan)
    for t in range(last + 1):
        seen[t, boundary[t] : front[t]] = candidates[t, 1 : 1 + front[t] - boundary[t]]
    seen[0, 0] = final[0]
    for t in range(1, last + 1):
        seen[t, : boundary[t]] = steps["tokens"][t - 1, start : start + boundary[t]]
        window = steps["distance"][t - 1]  # of the slots before the window moved on
        slots = np.arange(len(window)) + boundary[t - 1] - 1
        inside = np.isfinite(window) & (slots < count)
        distance[t, slots[inside]] = window[inside]
    return SimpleNamespace(
        decoded=decoded, final=final, boundary=boundary, front=front, seen=seen, distance=distance
    )


wave = watch(decoder, knobs)
count, last = len(wave.final), len(wave.boundary) - 1
print(model.tokenizer.decode(wave.final.tolist(), skip_special=True))
print(f"{count} tokens in {int(wave.decoded.network_calls[0])} network calls, of which {last} were steps")


# %%
def keep(figure, name):
    """Writes a figure, if a folder for figures is set."""
    if FIGURES:
        Path(FIGURES).mkdir(parents=True, exist_ok=True)
        figure.savefig(Path(FIGURES) / f"wavefront_{name}.png", dpi=90)


# %% [markdown]
# ## Tokens: first guessed, then settled, then committed
#
# Each line below is a step, each column a position of the text. Read a column from top to bottom: a position is
# empty, then a candidate appears in it, the candidate may change, at last it is committed and never changes again.
# The diagonal band between the white and the blue region *is* the wave.

# %%
COLOURS = {"new": "#FDD49E", "changed": "#F4795B", "stable": "#FFF3B0", "committed": "#A6CEE3"}
MEANINGS = {
    "new": "candidate, new",
    "changed": "candidate, changed",
    "stable": "candidate, as before",
    "committed": "committed",
}


def spelled(token):
    """A token as short text: line breaks made visible, the stop token named, single bytes as a question mark."""
    if int(token) in model.token_spec.stop:
        return "end"
    text = model.tokenizer.decode([int(token)]).strip(" ").replace("\n", "\\n") or "_"
    return text if text.isascii() and text.isprintable() else "?"


def kind_of(wave, t, p):
    """What has become of position p in step t."""
    if p < wave.boundary[t]:
        return "committed"
    if t == 0 or wave.seen[t - 1, p] < 0:
        return "new"
    return "stable" if wave.seen[t, p] == wave.seen[t - 1, p] else "changed"


def draw_tokens(wave, positions):
    """Candidates against steps and positions, until the first `positions` tokens are committed."""
    rows = int(np.argmax(wave.boundary >= positions)) + 1
    figure, axis = plt.subplots(figsize=(1.4 + 0.6 * positions, 1.4 + 0.29 * rows))
    for t in range(rows):
        for p in range(min(positions, wave.front[t])):
            colour = COLOURS[kind_of(wave, t, p)]
            axis.add_patch(Rectangle((p - 0.5, t - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            axis.text(p, t, spelled(wave.seen[t, p]), ha="center", va="center", fontsize=10)
    axis.set_xlim(-0.5, positions - 0.5)
    axis.set_ylim(rows - 0.5, -0.5)
    axis.set_xticks(range(0, positions, 2))
    axis.set_yticks(range(0, rows, 2))
    axis.set_xlabel("position after the prompt", fontsize=11)
    axis.set_ylabel("step", fontsize=11)
    handles = [Patch(facecolor=COLOURS[kind], label=text) for kind, text in MEANINGS.items()]
    axis.legend(handles=handles, loc="upper right", fontsize=11)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


figure = draw_tokens(wave, min(SHOWN, count))
keep(figure, "tokens")

# %% [markdown]
# How often is a candidate wrong? A position counts as *revised* when it ever held another candidate than the token
# that was committed there.


# %%
def revised(wave):
    """Positions that once held something else than their final token."""
    return np.flatnonzero(np.any((wave.seen >= 0) & (wave.seen != wave.final), axis=0))


print(f"{len(revised(wave))} of {count} positions were revised: {revised(wave).tolist()}")

# %% [markdown]
# ## A wave that guesses wildly
#
# This small model is sure of itself: one recurrence on top of a well-settled past is enough for a candidate to be
# right. To see candidates change, let *two* positions join in every step (`headway=2`). Nothing predicts the second
# one yet, so it starts from a random token, and everything it computes from that is of no use.

# %%
hasty = watch(dataclasses.replace(decoder, headway=2), knobs)
figure = draw_tokens(hasty, min(SHOWN, len(hasty.final)))
keep(figure, "headway")
print(f"{len(revised(hasty))} of {len(hasty.final)} positions were revised, {len(hasty.boundary) - 1} steps")
print("the same text" if np.array_equal(hasty.final, wave.final) else "another text")

# %% [markdown]
# Wrong candidates do no harm. A state that was computed from a wrong token does not count as settled, because the
# rule asks whether its token is still the one that its neighbour predicts. They cost work and nothing else.

# %% [markdown]
# ## The boundary and the front
#
# The lower line is the boundary of what is committed, the upper one the front of the wave. Their distance is the
# number of candidates in flight. The slope of the boundary is the speed: tokens a step. With one new position a step
# it cannot stay above 1. Where the boundary is flat, the oldest position of the wave still moves, and where the front
# is flat as well, the wave is full and stands.

# %%
figure, axis = plt.subplots(figsize=(7.5, 4.8))
at = np.arange(last + 1)
axis.fill_between(at, wave.boundary, wave.front, step="post", color="#FFE08A", label="candidates in flight")
axis.step(at, wave.front, where="post", color="#D55E00", label="front of the wave")
axis.step(at, wave.boundary, where="post", color="#0072B2", label="committed")
slope, height = np.polyfit(at, wave.boundary, 1)
axis.plot(at, height + slope * at, ls="--", lw=1.2, color="black", label=f"slope {slope:.2f} tokens a step")
axis.set_xlabel("step")
axis.set_ylabel("tokens after the prompt")
axis.set_xlim(0, last)
axis.set_ylim(0, count * 1.05)
axis.grid(alpha=0.3)
axis.legend(loc="upper left")
figure.tight_layout()
keep(figure, "front")

# %% [markdown]
# ## How long a settled candidate has to wait
#
# A candidate that already has its final value is not committed at once: the state that predicts it must stop moving
# first, and so must all states before. The bars count the steps from the first time a position held its final token
# to its commitment. Long bars are the price of caution: $\varepsilon$ is the dial between speed and accuracy.
#
# Below them stands what the rule looks at: the change $\delta$ of every state in every step, on a logarithmic scale.
# The state of position $p$ predicts the token of position $p + 1$. It is computed anew until that token is committed,
# which is where the line runs. Every cell that touches the line from above has fallen below $\varepsilon$.

# %%
arrived = np.argmax(wave.seen == wave.final, axis=0)
committed = np.argmax(np.arange(count) < wave.boundary[:, None], axis=0)
waits = committed - arrived

figure, (upper, lower) = plt.subplots(
    2, 1, figsize=(9, 8.4), sharex=True, height_ratios=(1, 2.6), layout="constrained"
)
upper.bar(np.arange(count), waits, color="#0072B2", width=0.8)
upper.set_ylabel("steps from final value\nto commitment")
upper.yaxis.get_major_locator().set_params(integer=True)
upper.grid(axis="y", alpha=0.3)
moved = wave.distance[wave.distance > 0]
scale = LogNorm(max(float(moved.min()), 1e-5), float(moved.max()))
image = lower.imshow(wave.distance, aspect="auto", interpolation="nearest", cmap="viridis", norm=scale)
lower.step(wave.boundary - 1.5, at + 0.5, where="pre", color="#D55E00", lw=1.6, label="next token committed")
lower.set_xlim(-0.5, count - 0.5)
lower.set_ylim(last + 0.5, 0.5)
lower.set_xlabel("position after the prompt")
lower.set_ylabel("step")
lower.legend(loc="upper right")
label = f"relative change $\\delta$ of the state; white mark: $\\varepsilon$ = {EPSILON}"
bar = figure.colorbar(image, ax=lower, orientation="horizontal", aspect=45, pad=0.03, label=label)
bar.ax.axvline(EPSILON, color="white", lw=3)
keep(figure, "stability")

print(f"median wait {np.median(waits):.0f} steps, longest {waits.max()}")

# %% [markdown]
# ## Is it the same text?
#
# A wave that guesses could write something else than a patient decoder. Here is static decoding with 16 recurrences
# for every token, from the same initial states.

# %%
patient = pd.Static(recurrence=16, greedy=True)
patient = patient.bind(model.network, len(prompt) + TOKENS, model.token_spec)
static = pd.run(patient, params, request)
same = static.completions()[0] == wave.final.tolist()
print("the same text" if same else "another text")
depths = [int(decoded.counts["recurrences"][0]) for decoded in (static, wave.decoded)]
print(f"recurrences one after the other: {depths[0]} static, {depths[1]} in the wave")

# %% [markdown]
# ## What to try
#
# - `exit_threshold=0.1`: positions are committed earlier, the wave becomes narrow, the bars shrink. At some point the
#   text changes.
# - `momentum=0.1` (the paper's default) or `noise=0.2`: two ways to keep a wave from freezing around wrong guesses.
# - `experiments.replicas.ReleasedWavefront`: the sampler as its authors released it. It commits up to the *last* converged slot,
#   whether those before it have converged or not.
