"""Visibility rules of width scaling: as defined, and in the network against a slow loop."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stubs import tiny_network, tiny_params

from experiments.recurrent_depth.copies import RULES, kv_share, no_share
from paradec_jax.config import RECURRENT_PRESETS
from paradec_jax.nn import masks

CONFIG = RECURRENT_PRESETS["test-recurrent"]
TOKENS = (3, 1, 4, 1)
RECURRENCES = 2


def sees(rule: str, query: tuple[int, int], key: tuple[int, int], copies: int) -> bool:
    """The definitions, token and copy counted from 1."""
    (token, copy), (key_token, key_copy) = query, key
    if key == query:
        return True
    if key_token == token:
        return key_copy <= copy - 1
    if rule == "no_share":
        return key_token < token
    return key_token < token and key_copy == copies


def key_sets(rule: str, copies: tuple[int, ...]) -> list[list[int]]:
    """The keys of each position, where token i has `copies[i]` copies."""
    order = [(i + 1, j + 1) for i, count in enumerate(copies) for j in range(count)]
    return [
        [at for at, key in enumerate(order) if sees(rule, query, key, copies[key[0] - 1])] for query in order
    ]


def test_masks_are_as_drawn():
    assert no_share(2, 2).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]
    assert kv_share(3, 2).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 1, 0, 1, 1, 0],
        [0, 1, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("tokens", "copies"), [(1, 1), (1, 4), (4, 1), (5, 3), (3, 5)])
def test_masks_are_as_defined(rule, tokens, copies):
    mask = np.asarray(RULES[rule](tokens, copies))
    assert mask.shape == (tokens * copies,) * 2
    assert [np.flatnonzero(row).tolist() for row in mask] == key_sets(rule, (copies,) * tokens)


@pytest.mark.parametrize("rule", RULES)
def test_equivalences(rule):
    mask = functools.partial(RULES[rule], copies=3)
    np.testing.assert_array_equal(RULES[rule](5, 1), masks.causal(5))
    np.testing.assert_array_equal(mask(1), masks.causal(3))
    np.testing.assert_array_equal(mask(5)[:6, :6], mask(2))  # later tokens change nothing
    np.testing.assert_array_equal(mask(5)[2::3, 2::3], masks.causal(5))  # last copies among themselves


def test_what_tells_the_rules_apart():
    wide, narrow = np.asarray(no_share(4, 3)), np.asarray(kv_share(4, 3))
    np.testing.assert_array_equal(wide, masks.causal(12))
    hidden = wide & ~narrow
    assert not (narrow & ~wide).any()
    for query, key in np.argwhere(wide):  # hidden are exactly the other copies of earlier tokens
        assert hidden[query, key] == (key // 3 < query // 3 and key % 3 < 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("sizes", "message"), [((0, 2), "tokens"), ((2, 0), "copies")])
def test_impossible_sizes(rule, sizes, message):
    with pytest.raises(ValueError, match=f"{message} must be at least 1, not 0"):
        RULES[rule](*sizes)


# In the network


@functools.cache
def parameters():
    """Random parameters whose biases and gains are random too."""
    leaves, tree = jax.tree.flatten(tiny_params())
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(tree, [x + 0.1 * rng.normal(size=x.shape).astype(np.float32) for x in leaves])


class Reference:
    """The network one position at a time, in float64, each position with a list of the keys that it sees."""

    def __init__(self, params, positions, keys):
        self.params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.positions, self.keys = positions, keys

    def read(self, tokens, states, recurrences):
        embedding, adapter = self.params["embedding"], self.params["adapter"]
        e = self.part(
            "prelude", CONFIG.prelude_layers, [math.sqrt(CONFIG.width) * embedding[t] for t in tokens]
        )
        for _ in range(recurrences):
            joined = [np.concatenate(pair) @ adapter for pair in zip(states, e, strict=True)]
            states = self.part("core", CONFIG.core_layers, joined)
        gain = self.params["final_norm"]
        x = self.part("coda", CONFIG.coda_layers, [self.norm(s, gain) for s in states])
        return np.array([self.norm(row, gain) for row in x])

    def part(self, name, layers, x):
        for i in range(layers):
            x = self.block(self.params[f"{name}_{i}"], x)
        return x

    def block(self, p, x):
        attended = self.attention(p["attention"], [self.norm(row, p["norm_1"]) for row in x])
        x = [self.norm(a + b, p["norm_2"]) for a, b in zip(x, attended, strict=True)]
        return [self.norm(row + self.mlp(p["mlp"], self.norm(row, p["norm_3"])), p["norm_4"]) for row in x]

    def attention(self, p, x):
        q, k, v = ([np.einsum("d,dhc->hc", row, p[name]) for row in x] for name in "qkv")
        q = [self.rotate(row + p["q_bias"], at) for row, at in zip(q, self.positions, strict=True)]
        k = [self.rotate(row + p["k_bias"], at) for row, at in zip(k, self.positions, strict=True)]
        out = []
        for query, seen in zip(q, self.keys, strict=True):
            mixed = np.zeros_like(query)
            for head in range(CONFIG.heads):
                weights = np.exp([query[head] @ k[at][head] / math.sqrt(CONFIG.head_dim) for at in seen])
                mixed[head] = sum(
                    w * v[at][head] for w, at in zip(weights / weights.sum(), seen, strict=True)
                )
            out.append(np.einsum("hc,hcd->d", mixed, p["out"]))
        return out

    @staticmethod
    def rotate(x, at):
        angles = at * CONFIG.rope_base ** (-np.arange(0, CONFIG.head_dim, 2) / CONFIG.head_dim)
        turned = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)

    @staticmethod
    def norm(x, gain):
        return x / np.sqrt((x**2).mean() + CONFIG.norm_eps) * gain

    @staticmethod
    def mlp(p, x):
        gate, up = x @ p["gate"], x @ p["up"]
        return (gate / (1 + np.exp(-gate)) * up) @ p["down"]


def states(copies: tuple[int, ...]) -> list[np.ndarray]:
    """An initial state for each copy, the same however many copies other tokens have."""
    return [
        np.random.default_rng((i, j)).normal(size=CONFIG.width).astype(np.float32)
        for i, count in enumerate(copies)
        for j in range(count)
    ]


@jax.jit
def forward(params, tokens, positions, mask, state):
    network = tiny_network()
    view = network.view(positions, mask=mask)
    e, window = network.embed(params, tokens, view, network.empty_window(*tokens.shape))
    state, window = network.recur(params, state, e, view, window, RECURRENCES)
    return network.readout(params, state, view, window).hidden[0]


def wide(rule: str, copies: int, alike: bool = False) -> np.ndarray:
    """The library's forward; copies share their token's position and, if alike, the state of its first copy."""
    length = len(TOKENS)
    state = np.array(states((copies,) * length)).reshape(length, copies, -1)
    state = np.broadcast_to(state[:, :1], state.shape) if alike else state
    tokens, positions = (jnp.repeat(jnp.array([x]), copies, axis=1) for x in (TOKENS, range(length)))
    state = jnp.asarray(state.reshape(1, -1, CONFIG.width))
    return np.asarray(forward(parameters(), tokens, positions, RULES[rule](length, copies), state))


def slow(rule: str, copies: tuple[int, ...]) -> np.ndarray:
    """The reference, where token i has `copies[i]` copies."""
    order = [i for i, count in enumerate(copies) for _ in range(count)]
    reference = Reference(parameters(), order, key_sets(rule, copies))
    return reference.read([TOKENS[i] for i in order], states(copies), RECURRENCES)


@pytest.mark.parametrize("rule", RULES)
def test_the_wide_forward_equals_a_loop_over_key_sets(rule):
    got = wide(rule, 3)
    np.testing.assert_allclose(got, slow(rule, (3,) * 4), atol=2e-5)
    # What a token says does not depend on how often later ones are copied.
    np.testing.assert_allclose(got[:6], slow(rule, (3, 3, 1, 1))[:6], atol=2e-5)
    # Copies are no mere repetitions, and the other rule says something else.
    assert np.abs(got[6:8] - got[8]).max(axis=1).min() > 1e-2
    other = next(name for name in RULES if name != rule)
    assert np.abs(got[-1] - slow(other, (3,) * 4)[-1]).max() > 1e-3


def test_copies_of_one_state_differ_by_what_they_see():
    got = wide("kv_share", 3, alike=True).reshape(4, 3, -1)
    np.testing.assert_allclose(got[0], np.broadcast_to(got[0, :1], got[0].shape), atol=2e-5)
    assert np.abs(got[1:, 1:] - got[1:, :-1]).max(axis=-1).min() > 1e-4
