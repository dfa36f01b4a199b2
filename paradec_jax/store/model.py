"""A model in memory: shape, parameters and the facts of its checkpoint, perhaps with a residual
head or a drafter.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from paradec_jax.config import DraftConfig, ModelConfig, ResidualHeadConfig, TokenSpec
from paradec_jax.decode.machine import RepetitionKnobs, as_arrays
from paradec_jax.families import network_of
from paradec_jax.records import record
from paradec_jax.text.tokenizer import Tokenizer

PARAM_DTYPES = ("float32", "bfloat16")  # of parameters
# Fields of a generation_config.json that no decoder applies, which is said where they change a
# text.
OTHERS = [
    "typical_p",
    "num_beams",
    "no_repeat_ngram_size",
    "penalty_alpha",
    "encoder_repetition_penalty",
]


def sampling_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling that a generation_config.json says, with the defaults of transformers 5 where it
    samples.

    Fields of `OTHERS` are in it too.

    Raises:
      ValueError: a value that cannot be, naming the field.
    """
    values: dict[str, Any] = {"repetition_penalty": 1.0}
    if fields.get("do_sample"):
        values |= {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    values = {name: fields.get(name, usual) for name, usual in values.items()}
    values["top_k"] = values.get("top_k") or None  # 0 keeps all there
    as_arrays(RepetitionKnobs(**values))
    if values["repetition_penalty"] == 1:  # which changes nothing, and would be computed
        del values["repetition_penalty"]
    changed = {name: x for name, x in values.items() if x != getattr(RepetitionKnobs, name)}
    return changed | {name: fields[name] for name in OTHERS if fields.get(name) not in (None, 0, 1)}


@record
class Part:
    """A network's shape and its parameters: a model, or what stands beside one.

    Attributes:
      config: the shape.
      params: nested dict of arrays.
    """

    config: Any
    params: Mapping[str, Any]

    @functools.cached_property
    def network(self) -> Any:
        """The network as decoders see it."""
        return network_of(self.config)


@record
class ResidualHead(Part):
    """A residual head and the network that it belongs to.

    Attributes:
      backbone: fingerprint of the network that it was trained on; None for the one that it lies
        beside.
    """

    config: ResidualHeadConfig
    backbone: str | None = None


@record
class Drafter(Part):
    """Masks, adapters of their rows and a sampler head, which draft what a model will say."""

    config: DraftConfig


@record
class Model(Part):
    """A network's shape, its parameters and the facts of its checkpoint.

    Attributes:
      token_spec: special tokens of the checkpoint.
      tokenizer: text to ids and back, or None.
      chat_template: what makes a text of messages (`paradec_jax.text.chat.conversation`), or None.
      special_tokens: texts that the template knows by name, such as "bos_token", besides those of
        the ids.
      head: what corrects the network's scores between its calls, or None.
      drafter: what drafts the tokens to come, or None; it lies in a folder of its own.
      sampling: fields of `RepetitionKnobs` and of `OTHERS` by name, for answers to conversations
        where the caller gives no knobs.
      decoder: the decoder that suits the model, as a command line names it ("jacobi --block 8
        --running"), or None.
    """

    config: ModelConfig
    token_spec: TokenSpec
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    head: ResidualHead | None = None
    drafter: Drafter | None = None
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
    decoder: str | None = None

    @property
    def family(self) -> str:
        """Name of the model family."""
        return self.config.family

    @functools.cached_property
    def prepared(self) -> Any:
        """The network's parameters as decoding wants them (`Network.prepare`), laid out once and
        kept with the model.

        What is cast or laid out otherwise is a copy beside `params`; the rest is shared.
        """
        return self.network.prepare(self.params)
