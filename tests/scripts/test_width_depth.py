"""The counts of width against depth are sums over masks and over XLA's operations; the scripts run at toy size."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stubs import tiny_network, tiny_params

from experiments.recurrent_depth import serial_steps, width_depth, work
from experiments.recurrent_depth.copies import kv_share, no_share
from experiments.recurrent_depth.step_trace import Schedule, schedule
from experiments.replicas import ReleasedWavefront
from paradec_jax import make_request, stream
from paradec_jax.families import PRESETS, parameter_shapes
from paradec_jax.nn import masks
from paradec_jax.nn.attention import attend
from paradec_jax.nn.cache import KV

TINY, LARGE = PRESETS["tiny-recurrent"], PRESETS["huginn-0125"]
MASKS = {
    "depth": lambda n, s: masks.causal(n),
    "no_share": no_share,
    "kv_share": kv_share,
}
SIZES = [(1, 1), (1, 4), (5, 1), (5, 3), (3, 8)]


# Counts


@pytest.mark.parametrize("variant", work.VARIANTS)
@pytest.mark.parametrize(("tokens", "factor"), SIZES)
def test_pairs_are_the_sum_of_the_mask(variant, tokens, factor):
    mask = np.asarray(MASKS[variant](tokens, factor))
    assert work.positions_at_once(variant, tokens, factor) == len(mask)
    assert work.pairs_at_once(variant, tokens, factor) == mask.sum()


@pytest.mark.parametrize("variant", work.VARIANTS)
@pytest.mark.parametrize("recurrence", [1, 3])
def test_costs_are_sums_over_layers(variant, recurrence):
    tokens, factor = 5, 3
    mask = np.asarray(MASKS[variant](tokens, factor))
    positions = len(mask)
    linear = pairs = dense = layers = 0
    core = [*["core"] * TINY.core_layers, "adapter"]
    order = ["layer"] * TINY.prelude_layers
    order += core * (recurrence * factor if variant == "depth" else recurrence) + ["layer"] * TINY.coda_layers
    d, f = TINY.width, TINY.feed_forward
    for part in order:
        shapes = [(2 * d, d)] if part == "adapter" else [(d, 3 * d), (d, d), (d, 2 * f), (f, d)]
        linear += positions * sum(2 * a * b for a, b in shapes)
        if part != "adapter":
            layers, pairs, dense = layers + 1, pairs + int(mask.sum()), dense + mask.size
    cost = work.prefill(TINY, variant, tokens, factor, recurrence)
    head = TINY.head_dim * TINY.heads
    stored = TINY.prelude_layers + TINY.core_layers + TINY.coda_layers
    copies = positions // tokens
    needed = int(
        mask[-copies:, :copies].any(axis=0).sum()
    )  # copies of the first token that the last one sees
    assert cost == work.Cost(
        positions=positions,
        layers=layers,
        linear=linear + 2 * d * TINY.vocab_size,
        pairs=pairs,
        attention=4 * head * pairs,
        dense=4 * head * dense,
        kept=stored * tokens * needed,
    )
    assert cost.total == cost.linear + cost.attention
    assert cost.parallelism == cost.total / layers


@pytest.mark.parametrize("config", [TINY, LARGE])
@pytest.mark.parametrize("tokens", [2, 7, 64, 1024])
@pytest.mark.parametrize("factor", [2, 3, 8])
def test_depth_costs_least_and_no_share_most(config, tokens, factor):
    depth, apart, shared = (work.prefill(config, v, tokens, factor) for v in work.VARIANTS)
    assert depth.total < shared.total < apart.total
    assert depth.linear < shared.linear == apart.linear
    # In one core layer, s passes against one, products cost the same.
    deep, full, shared = (work.operations_at_once(config, v, tokens, factor) for v in work.VARIANTS)
    assert factor * deep[0] == full[0] == shared[0]
    assert factor * deep[1] < shared[1] < full[1]
    pairs = work.pair_attention(config)
    assert shared[1] - factor * deep[1] == pairs * tokens * factor * (factor - 1) // 2
    assert full[1] - shared[1] == pairs * tokens * (tokens - 1) * factor * (factor - 1) // 2


@pytest.mark.parametrize("variant", ["no_share", "kv_share"])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_parallelism_of_width(variant, factor):
    capacity = 256
    lengths = (1, 2, 5, 20, 31, 32, 33, 63, 64, 65, 127, 128, 200, 255, 256, 400, 599)
    curve = [work.width_over_depth(TINY, variant, n, factor, capacity) for n in lengths]
    free = [ratio.attention for ratio in curve]
    assert {ratio.products for ratio in curve} == {factor}
    assert free[0] == factor * (factor + 1) / 2
    if variant == "no_share":  # rises to s^2 and stays below it
        assert free == sorted(free) and 0.9 * factor**2 < free[-1] < factor**2
    else:  # falls to s
        assert free == sorted(free, reverse=True) and factor < free[-1] < 1.1 * factor
    # On the device: s times as fast until width fills it; from where depth fills it too, by their work.
    full, filled = (work.filling_lengths(TINY, v, factor, capacity) for v in (variant, "depth"))
    assert full[0] == capacity // factor and filled[0] == capacity and full[1] < filled[1]
    for n, ratio in zip(lengths, curve, strict=True):
        if n < min(full):
            assert (ratio.products_achieved, ratio.attention_achieved) == (ratio.products, ratio.attention)
            assert ratio.speedup == factor
        if n >= max(filled):
            deep, wide = (sum(work.operations_at_once(TINY, v, n, factor)) for v in ("depth", variant))
            assert (ratio.products_achieved, ratio.attention_achieved) == (1, 1)
            assert ratio.speedup == pytest.approx(factor * deep / wide) and ratio.speedup < 1


def test_filling_lengths_are_the_first_that_fill():
    for variant in work.VARIANTS:
        for stage, n in enumerate(work.filling_lengths(TINY, variant, 4, 100)):
            limit = 100 * work.layer_linear(TINY)
            assert work.operations_at_once(TINY, variant, n, 4)[stage] >= limit
            assert work.operations_at_once(TINY, variant, n - 1, 4)[stage] < limit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("wide", 4, 2), "variant must be one of depth"),
        (("depth", 0, 2), "tokens"),
        (("depth", 4, 0), "factor"),
        (("depth", 4, 2, 0), "recurrence"),
    ],
)
def test_impossible_prefills(arguments, message):
    with pytest.raises(ValueError, match=message):
        work.prefill(TINY, *arguments)


# The scaled prefill


def test_depth_is_recurrence_and_no_share_a_longer_prompt():
    network, short = tiny_network(), jnp.array([[3, 1, 4], [1, 5, 9]])
    doubled = jnp.repeat(short, 2, axis=1)
    positions = jnp.broadcast_to(jnp.arange(6), doubled.shape)
    state = network.initial_state(jax.random.split(jax.random.key(3), doubled.shape))

    def read(*arguments):
        reader = jax.jit(lambda params, *x: width_depth.read_wide(network, params, *x, *arguments)[0])
        return lambda tokens: reader(tiny_params(), tokens, state)

    forward = jax.jit(lambda p: network.at(2).forward_from(p, doubled, positions, state)[0].hidden)
    want = forward(tiny_params())
    np.testing.assert_allclose(read("depth", 2)(doubled), want, atol=1e-5)
    np.testing.assert_allclose(read("no_share", 2, 2, False)(short), want[:, 1::2], atol=1e-5)
    assert jnp.abs(read("no_share", 2, 2, True)(short) - want[:, 1::2]).max() > 1e-4


def test_gathered_keys_give_what_the_mask_gives():
    tokens, copies = 5, 3
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 2, tokens * copies, 4))
    keys = KV(k.swapaxes(-1, -2), v)
    want = attend(q, keys, kv_share(tokens, copies))
    np.testing.assert_allclose(width_depth.gathered_kv_share(q, keys, copies), want, atol=1e-5)
    assert jnp.abs(want - attend(q, keys, no_share(tokens, copies))).max() > 1e-2


def test_xla_counts_the_same_operations():
    network = tiny_network(width=64, heads=2, feed_forward=128, core_layers=1)
    params = parameter_shapes(network.config)
    prompt = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    for variant in work.VARIANTS:
        cost = work.prefill(network.config, variant, 32, 2)
        state = jax.ShapeDtypeStruct((1, cost.positions, 64), jnp.float32)

        def call(params, prompt, state, variant=variant):
            hidden, window = width_depth.read_wide(network, params, prompt, state, variant, 2)
            return network.logits(params, hidden[:, -1:]), window

        counted = jax.jit(call).lower(params, prompt, state).cost_analysis()["flops"]
        assert 1 < counted / (cost.linear + cost.dense) < 1.1  # norms, rotations and softmax besides


# Decoding


def test_depths_follow_from_the_counters():
    steps = Schedule(
        recurrences=(2, 2, 2, 2), positions=(1, 2, 2, 3), tokens=(0, 1, 0, 2), calls=(1, 1, 1, 1)
    )
    assert steps.depths == [4, 6, 4]
    assert [steps.until(n) for n in (1, 2, 3)] == [2, 4, 4]
    with pytest.raises(ValueError, match="from 1 to the 3 committed"):
        steps.until(4)


def test_the_wave_is_as_deep_as_late_and_wider(tmp_path):
    r, new, path = 2, 4, tmp_path / "new" / "steps.json"
    serial_steps.main(serial_steps.Options("test-recurrent", r, new, path))
    sequential, *waves = json.loads(path.read_text())["rows"]
    assert (sequential["depth"], sequential["serial_first"], sequential["serial_all"]) == ([r], r, new * r)
    assert set(sequential["in_flight"]) == {1}
    assert [(row["decoder"], row["inner_recurrence"]) for row in waves[::2]] == [
        ("wavefront", 1),
        ("wavefront", 2),
    ]
    for row in waves:
        inner = row["inner_recurrence"]
        depth = r if row["decoder"] == "wavefront" else (r // inner + 2) * inner
        width = depth // inner
        assert (row["depth"], row["serial_first"]) == ([depth], depth)
        assert row["serial_all"] == depth + (new - 1) * inner
        ramp = [min(step, width) for step in range(1, width + new)]
        assert row["in_flight"] == ramp and row["in_flight_first_token"] == width
        assert row["core_positions"] == inner * sum(ramp)
        # Prelude and coda in every call: two layers here, and two of the core.
        assert row["layers_first"] == 2 * width + 2 * depth


def test_the_released_schedule_does_not_depend_on_weights():
    decoder = ReleasedWavefront(inner_recurrence=2, window=5, recurrence=4, rule="fixed", greedy=True)
    decoder, length = decoder.bind(tiny_network(recurrence=4), 12), 3
    request = make_request(np.ones((1, length), np.int32), max_new_tokens=6)
    found = schedule(decoder, tiny_params(), request)
    assert found.positions == (1, 2, 3, 4, 4, 4, 4, 4) and found.tokens == (0, 0, 0, 1, 1, 1, 1, 1)
    *_, (last, _) = stream(decoder, tiny_params(), request)
    seen, start = np.asarray(last.seen)[0], int(last.wave.start[0])
    assert found.depths[1:] == seen[length + 1 : start].tolist() == [8] * 4


# The scripts

TOY = {
    "preset": "test-recurrent",
    "tokens": (4, 6),
    "factors": (2,),
    "capacity": 8,
}


def test_script(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figures" / "toy.png"
    options = width_depth.Options(**TOY, out=tmp_path / "new" / "toy.json", figure=path)
    width_depth.main(options)
    result = json.loads(options.out.read_text())
    rows = {(row["tokens"], row["variant"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"]) == 2 * 3 and {row["factor"] for row in result["curves"]} == {2}
    assert rows[4, "depth"]["total"] < rows[4, "kv_share"]["total"] < rows[4, "no_share"]["total"]
    figure = width_depth.plot(options, result, width_depth._pyplot())
    work_lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    assert (work_lines["no_share, s = 2"][1:] > work_lines["kv_share, s = 2"][1:]).all()
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (width_depth.Options, {"preset": "huge"}, "preset must be one of huginn-0125"),
        (width_depth.Options, {"factors": ()}, "factors must be one or more"),
        (width_depth.Options, {"tokens": (4, 0)}, "tokens must be one or more"),
        (serial_steps.Options, {"preset": "huge"}, "preset must be one of huginn-0125"),
        (serial_steps.Options, {"recurrence": 0}, "recurrence must be at least 1"),
    ],
)
def test_impossible_options(options, change, message):
    with pytest.raises(ValueError, match=message):
        options(**change)
