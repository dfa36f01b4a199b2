"""`paradec bench`: the speed of decoding with random weights."""

import dataclasses
from typing import Any, Literal

import jax

from paradec_jax import facts
from paradec_jax.cli.output import JsonPath, check_json, progress, write_json
from paradec_jax.cli.tables import print_bench, print_block_calls
from paradec_jax.config import ResidualHeadConfig, TokenSpec
from paradec_jax.decode import AutoRegressive, BlockDenoising, Jacobi, Masked, Static
from paradec_jax.families import PRESETS, init_params, network_of
from paradec_jax.timing.bench import Limits, bench, limits_of, paced_wavefront
from paradec_jax.timing.block_calls import block_calls

# What the options of one kind of model are where they are left out; another kind refuses them.
DEFAULTS: dict[str, dict[str, Any]] = {
    "recurrent models": {"recurrence": None, "inner_recurrence": (1, 2, 4)},
    "causal models": {"block": (16, 64)},
    "denoisers": {"steps": (64, 16)},
    "block diffusion": {"block_length": None, "candidates": (2, 3, 4), "head_layers": 3},
}
LEAST = {"candidates": 2, "tokens": 2}  # of the other numbers it is 1


def bench_command(
    preset: str = "tiny-recurrent",
    recurrence: int | None = None,
    inner_recurrence: tuple[int, ...] | None = None,
    block: tuple[int, ...] | None = None,
    steps: tuple[int, ...] | None = None,
    block_length: int | None = None,
    candidates: tuple[int, ...] | None = None,
    head_layers: int | None = None,
    batch: tuple[int, ...] = (1,),
    context: int = 64,
    tokens: int = 64,
    dtype: Literal["preset", "float32", "bfloat16"] = "preset",
    passes: int = 5,
    seed: int = 0,
    json: JsonPath = None,
) -> int:
    """Times decoding with random weights and says how close it comes to the device's limits.

    For each batch size: static decoding, then, for a recurrent model, a wavefront that gives every token at least
    as many recurrences and commits one token a step whatever the weights are, and for a causal model Jacobi
    decoding, which with random weights commits one or two tokens a step. For a denoiser its sampler over so many
    steps of a canvas that holds context and tokens. For a model of block diffusion static decoding, one and two
    tokens a step, and each kind of call in a table of its own: narrow, wide, of a residual head, verifying so many
    candidates. Speed-ups refer to the first row of a batch size.

    Args:
      preset: shape of the model.
      recurrence: recurrences a token of a recurrent model; the preset's default if left out.
      inner_recurrence: recurrences of a wavefront's step, one row each (recurrent models; 1 2 4 if left out).
      block: tokens of a Jacobi window, one row each (causal models; 16 64 if left out).
      steps: steps of the sampler, one row each (denoisers; 64 16 if left out).
      block_length: tokens of a block (block diffusion; the preset's if left out).
      candidates: states that a call verifies, two rows each (block diffusion; 2 3 4 if left out).
      head_layers: layers of the residual head (block diffusion; 3 if left out).
      batch: batch sizes.
      context: prompt tokens of each row.
      tokens: tokens to generate in each row.
      dtype: of weights and activations.
      passes: timings, of which the median counts.
      seed: of weights and prompts.
      json: print nothing but a list of JSON objects; with a PATH, write the list there as well as printing
        the table.
    """
    given = {
        "recurrence": recurrence,
        "inner_recurrence": inner_recurrence,
        "block": block,
        "steps": steps,
        "block_length": block_length,
        "candidates": candidates,
        "head_layers": head_layers,
    }
    if preset not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}, not {preset}")
    _check_numbers(given | {"batch": batch, "context": context, "tokens": tokens, "passes": passes})
    check_json(json)
    config = PRESETS[preset]
    if dtype != "preset":
        config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    own = _own_options(preset, config, given)
    if own.get("block_length") is not None:
        config = dataclasses.replace(config, block=own["block_length"])
    network = network_of(config)
    # Of block diffusion, kinds of calls are timed on two blocks after whole ones.
    room = max(tokens, 2 * network.block - context % network.block) if "candidates" in own else tokens
    if context + room > config.max_length:
        raise ValueError(
            f"--context {context} and {room} positions after it (--tokens {tokens}) are more than the "
            f"{config.max_length} positions of {preset}"
        )
    head = ResidualHeadConfig.of(config, own["head_layers"]) if "head_layers" in own else None
    decoders = decoders_of(network, own)
    rows: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    with progress() as report:
        params = init_params(config, jax.random.key(seed))
        device = limits_of(network, params)
        cases = [(size, *named) for size in batch for named in decoders]
        for done, (size, name, label, (decoder, knobs)) in enumerate(cases):
            report("benchmarks", done, len(cases))
            options = {"batch": size, "context": context, "tokens": tokens, "passes": passes, "seed": seed}
            row = bench(network, params, decoder, knobs, **options, device=device)
            rows.append(
                {"preset": preset, "family": config.family} | row | {"decoder": name, "settings": label}
            )
        if head is not None:
            asked = {"context": context, "passes": passes, "candidates": own["candidates"]}
            for size in batch:
                found = calls_of(network, params, head, seed, device, asked | {"batch": size})
                calls += [{"preset": preset, "family": config.family} | row for row in found]
        report("benchmarks", len(cases), len(cases))
    if json is not None:
        made = facts.facts() | {"dtypes": facts.dtypes(params)}
        write_json([row | {"seed": seed, "facts": made} for row in (*rows, *calls)], json)
    if json != "-":
        print_bench(rows)
        if calls:
            print_block_calls(calls)
    return 0


def _check_numbers(given: dict[str, Any]) -> None:
    """Raises ValueError for a number below its least."""
    for name, value in given.items():
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        least = LEAST.get(name, 1)
        if value is not None and min(numbers, default=0) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")


def _own_options(preset: str, config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options of this kind of model, as given or by default.

    Raises:
      ValueError: one of another kind.
    """
    network = network_of(config)
    kind = {"full": "denoisers", "block": "block diffusion"}.get(network.visibility, "causal models")
    kind = "recurrent models" if "recurrences" in network.counters else kind
    for other, options in DEFAULTS.items():
        for name in options:
            if other != kind and given[name] is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} {given[name]} is for {other}, and {preset} is of another kind"
                )
    return {
        name: left_out if given[name] is None else given[name] for name, left_out in DEFAULTS[kind].items()
    }


def decoders_of(network: Any, options: dict[str, Any]) -> list[tuple[str, str, tuple[Any, Any]]]:
    """Name, label, and decoder with its knobs, the baseline first."""
    if "recurrence" in options:
        count = network.recurrence if options["recurrence"] is None else options["recurrence"]
        static = ("autoregressive", f"r {count}", (Static(recurrence=count, greedy=True), None))
        waves = [
            ("wavefront", f"inner r {n}", paced_wavefront(count, n)) for n in options["inner_recurrence"]
        ]
        return [static, *waves]
    if "block" in options:
        windows = [
            ("jacobi", f"block {n}", (Jacobi(block=n, running=True, greedy=True), None))
            for n in options["block"]
        ]
        return [("autoregressive", "", (AutoRegressive(greedy=True), None)), *windows]
    spec = TokenSpec(mask=network.vocab_size - 1, alignment="own")
    if "steps" in options:
        masked = Masked(spec=spec)
        return [("masked", f"{n} steps", (masked, masked.Knobs(steps=n))) for n in options["steps"]]
    block = BlockDenoising(rule="static", greedy=True, spec=spec)
    return [
        ("block", f"{n} steps of {network.block}", (block, block.Knobs(steps=n)))
        for n in dict.fromkeys((network.block, -(-network.block // 2)))
    ]


def calls_of(
    network: Any, params: Any, shape: ResidualHeadConfig, seed: int, device: Limits, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every kind of call of a network that sees in blocks, with a residual head of random weights."""
    head, own = network_of(shape), init_params(shape, jax.random.key(seed + 1))
    both = {"network": network.prepare(params), "head": head.prepare(own)}
    return block_calls(network, head, both, device, **options)
