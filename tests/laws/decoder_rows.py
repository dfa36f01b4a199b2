"""A row of the tables of decoders: a decoder, the stub that it runs on, and what it costs there."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from plain_baselines import Count, drafted_count
from plain_jacobi import jacobi_count
from plain_recurrent import wavefront_count
from stubs import Spoilt, StubCausal, StubDenoiser, StubDrafter, StubNetwork

from paradec_jax.config import TokenSpec
from paradec_jax.decode import Drafted, Wavefront

SIZE, BUDGET = 20, 9
STEPS = 16  # more than any row of the table needs for BUDGET tokens
ALONE = 1_000_014  # by chance not all of the first row is committed at once
SOUND = Spoilt()
REPEATING = {"weights": (0, 0, 1, 0), "slope": 0, "constant": 0}  # the text has period 3


@dataclasses.dataclass(frozen=True)
class Row:
    """A decoder of the table.

    Attributes:
      kind, options: the decoder's class and static fields; stubs among them are further networks.
      knobs: knobs that differ from the defaults.
      stub: fields of the stub network.
      net: the stub network's class.
      recurrence: recurrences each position does at its end (the most that matter), for the expected
        tokens.
      overruns: repeats a release that cuts no commit at a budget or a stop token, so those laws
        leave it out.
      only_greedy: repeats a release that does not sample.
      batch_wide: repeats a release that calls the network for a whole batch or not at all, so that
        what a row costs depends on the others.
      count: (stub, prompt length, new tokens) -> network calls, positions, what networks declare;
        None without a formula.
      first: calls and tokens of `init`.
      most: network calls within which a row of so many new tokens ends, as the class of the decoder
        says.
    """

    kind: type
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    stub: dict[str, Any] = dataclasses.field(default_factory=dict)
    net: type = StubNetwork
    recurrence: int | None = 4
    overruns: bool = False
    only_greedy: bool = False
    batch_wide: bool = False
    count: Callable[[Any, int, int], Count] | None = None
    first: tuple[int, int] = (1, 1)
    most: Callable[[int], int] = lambda new: new + 1

    def network(self, **changes: Any) -> Any:
        return self.net(**{**self.stub, **changes})

    def decoder(self, network: Any = None, size: int = SIZE, **options: Any) -> Any:
        network = self.network() if network is None else network
        options = {**self.options, **options}
        for name in self.kind.further_networks:
            if not isinstance(options[name], str):
                probe = getattr(network, "probe", None)
                options[name] = dataclasses.replace(options[name], probe=probe)
        return self.kind(network, size, self.spec, **options)

    @property
    def spec(self) -> TokenSpec:
        """A denoiser's logits are about their own positions, and it has a mask."""
        if self.net is not StubDenoiser:
            return TokenSpec(pad=10)
        return TokenSpec(pad=9, mask=self.network().mask, alignment=self.network().alignment)

    @property
    def params(self) -> Any:
        """Those of the stubs, for each of several networks, which change nothing of what they say."""
        return self.spoilt()

    def spoilt(self, network: Spoilt = SOUND, **further: Spoilt) -> Any:
        """Parameters that change what the network says, and further ones by their fields."""
        names = self.kind.further_networks
        return {"network": network, **dict.fromkeys(names, SOUND), **further} if names else network

    def own(self, result: dict[str, Any]) -> dict[str, Any]:
        """What of a result (`results.listed`) is each row's own affair."""
        shared = ("network_calls", "positions", "head_calls") if self.batch_wide else ()
        return {name: value for name, value in result.items() if name not in shared}

    def values(self, **changes: Any) -> Any:
        if self.only_greedy:
            changes.pop("temperature", None)
        return self.kind.Knobs(**{**self.knobs, **changes})

    def expected(
        self, prompt: Sequence[int], count: int, recurrence: int | None = None
    ) -> list[int]:
        stub = self.network()
        if self.net is StubDenoiser:
            return stub.expected([*prompt, *[None] * count])[len(prompt) :]
        return stub.expected(prompt, count, recurrence or self.recurrence)


def causal_row(
    kind: type, count: Callable[..., Count] | None, stub: dict[str, Any], **options: Any
) -> Row:
    """A row on the causal stub; the options tell the calls as well."""
    options = {**options, "log_probs": True}
    return Row(
        kind, options, stub=stub, net=StubCausal, count=count and functools.partial(count, options)
    )


def jacobi_row(kind: type, *, spawn: float | None = None, **options: Any) -> Row:
    """A row of a Jacobi decoder on the causal stub; the knob tells the calls as well."""
    knobs = {} if spawn is None else {"spawn": spawn}
    row = causal_row(kind, jacobi_count, REPEATING, **options)
    count = functools.partial(jacobi_count, {**options, **knobs})
    return dataclasses.replace(row, knobs=knobs, count=count)


def drafted_row(*, errs: bool = False, **options: Any) -> Row:
    """A row of masks that are right as far as they see, and if they `errs` seldom at all positions."""
    drafter = StubDrafter(StubCausal(**REPEATING), errs=errs)
    return causal_row(Drafted, drafted_count, REPEATING, drafter=drafter, **options)


def released_row(kind: type, most: Callable[[int], int], **options: Any) -> Row:
    """A row of a released block decoder, whose first call commits nothing."""
    return Row(
        kind,
        options,
        {},
        REPEATING,
        StubCausal,
        overruns=True,
        only_greedy=True,
        first=(1, 0),
        most=most,
    )


def wave_row(
    kind: type = Wavefront,
    knobs: Any = None,
    most: int = 64,
    *,
    counted: bool = False,
    stub: Any = None,
    recurrence: int | None = 4,
    **options: Any,
) -> Row:
    """A row of a wavefront with two recurrences a call, whose positions do `most` recurrences at
    most.
    """
    return Row(
        kind,
        {"inner_recurrence": 2, **options},
        knobs or {},
        stub or {},
        recurrence=recurrence,
        count=functools.partial(wavefront_count, 2) if counted else None,
        most=lambda new: 1 + (new - 1) * math.ceil(most / 2),
    )


def masked_row(
    kind: type, count: Callable[..., Count] | None, knobs: Any = None, **options: Any
) -> Row:
    """A row on the denoiser that draws beforehand who is revealed when; so many steps that each is
    alone.
    """
    knobs = {"temperature": 0.0, **({"steps": ALONE} if knobs is None else knobs)}
    return Row(kind, options, knobs, {"sharpness": 12.0}, StubDenoiser, count=count, first=(0, 0))


def whole_batch_row(kind: type, calls: int, **options: Any) -> Row:
    """A row of a released sampler of canvases that calls its network for a whole batch, so often at
    most.
    """
    return dataclasses.replace(
        masked_row(kind, None, {}, **options), batch_wide=True, most=lambda new: calls
    )
