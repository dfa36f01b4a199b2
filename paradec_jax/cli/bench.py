"""`paradec bench`: the speed of decoding with random weights."""

import dataclasses
from typing import Any, Literal

import jax

from paradec_jax import facts
from paradec_jax.cli.output import JsonPath, check_json, progress, write_json
from paradec_jax.cli.tables import print_bench, print_block_calls
from paradec_jax.config import BlockDiffusionConfig, ResidualHeadConfig, TokenSpec
from paradec_jax.decode import AutoRegressive, BlockDenoising, Jacobi, Masked, Static
from paradec_jax.families import PRESETS, init_params, network_of
from paradec_jax.timing.bench import Limits, bench, limits_of, paced_wavefront
from paradec_jax.timing.block_calls import block_calls


def bench_command(
    preset: str = "tiny-recurrent",
    recurrence: int | None = None,
    inner_recurrence: tuple[int, ...] = (1, 2, 4),
    block: tuple[int, ...] = (16, 64),
    steps: tuple[int, ...] = (64, 16),
    block_length: int | None = None,
    candidates: tuple[int, ...] = (2, 3, 4),
    head_layers: int = 3,
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
      recurrence: recurrences a token; the preset's default if left out.
      inner_recurrence: recurrences of a wavefront's step, one row each.
      block: tokens of a Jacobi window, one row each (causal models).
      steps: steps of the sampler, one row each (denoisers).
      block_length: tokens of a block; the preset's if left out (block diffusion).
      candidates: states that a call verifies, two rows each (block diffusion).
      head_layers: layers of the residual head (block diffusion).
      batch: batch sizes.
      context: prompt tokens of each row.
      tokens: tokens to generate in each row.
      dtype: of weights and activations.
      passes: timings, of which the median counts.
      seed: of weights and prompts.
      json: print nothing but a list of JSON objects; with a PATH, write the list there as well as printing
        the table.
    """
    if preset not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}, not {preset}")
    for name, values in (
        ("batch", batch),
        ("inner-recurrence", inner_recurrence),
        ("block", block),
        ("steps", steps),
        ("passes", (passes,)),
        ("context", (context,)),
        ("recurrence", (1 if recurrence is None else recurrence,)),
        ("block-length", (1 if block_length is None else block_length,)),
        ("candidates", candidates),
    ):
        if min(values, default=0) < 1:
            raise ValueError(f"--{name} must be at least 1, not {values}")
    if tokens < 2:
        raise ValueError(f"--tokens must be at least 2, not {tokens}")
    check_json(json)
    config = PRESETS[preset]
    if dtype != "preset":
        config = dataclasses.replace(config, dtype=dtype, param_dtype=dtype)
    if isinstance(config, BlockDiffusionConfig):
        config = dataclasses.replace(config, block=config.block if block_length is None else block_length)
    elif block_length is not None:
        raise ValueError(
            f"--block-length {block_length} is for block diffusion, and {preset} is of another kind"
        )
    if context + tokens > config.max_length:
        raise ValueError(
            f"--context {context} and --tokens {tokens} are more than the {config.max_length} positions of {preset}"
        )
    network = network_of(config)
    decoders: list[tuple[str, str, tuple[Any, Any]]]
    if "recurrences" in network.counters:
        count = network.recurrence if recurrence is None else recurrence
        decoders = [("autoregressive", f"r {count}", (Static(recurrence=count, greedy=True), None))]
        decoders += [("wavefront", f"inner r {n}", paced_wavefront(count, n)) for n in inner_recurrence]
    elif recurrence is not None:
        raise ValueError(
            f"--recurrence {recurrence} is for recurrent models, and {preset} is of another kind"
        )
    elif network.visibility == "full":
        mask = TokenSpec(mask=config.vocab_size - 1, alignment="own")
        decoders = [("masked", f"{n} steps", (Masked(spec=mask), Masked.Knobs(steps=n))) for n in steps]
    elif network.visibility == "block":
        static = BlockDenoising(
            rule="static", greedy=True, spec=TokenSpec(mask=config.vocab_size - 1, alignment="own")
        )
        decoders = [
            ("block", f"{n} steps of {network.block}", (static, static.Knobs(steps=n)))
            for n in dict.fromkeys((network.block, -(-network.block // 2)))
        ]
    else:
        decoders = [("autoregressive", "", (AutoRegressive(greedy=True), None))]
        decoders += [
            ("jacobi", f"block {n}", (Jacobi(block=n, running=True, greedy=True), None)) for n in block
        ]
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
        if network.visibility == "block":
            for size in batch:
                asked: dict[str, Any] = {
                    "batch": size,
                    "context": context,
                    "passes": passes,
                    "candidates": candidates,
                }
                found = calls_of(network, params, head_layers, seed, device, asked)
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


def calls_of(
    network: Any, params: Any, layers: int, seed: int, device: Limits, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every kind of call of a network that sees in blocks, with a residual head of random weights."""
    shape = ResidualHeadConfig.of(network.config, layers)
    head, own = network_of(shape), init_params(shape, jax.random.key(seed + 1))
    both = {"network": network.prepare(params), "head": head.prepare(own)}
    return block_calls(network, head, both, device, **options)
