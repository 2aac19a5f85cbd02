"""The parameters of a request: how its tokens are sampled, and what is generated."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import log
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from specbuild.runtime.errors import RequestError
from specbuild.runtime.parameters import (
    Parameter,
    Range,
    check_ranges,
    declared_parameters,
    whole_number,
)

if TYPE_CHECKING:
    # Imported by what needs arrays: command lines and manifests are read without numpy.
    import numpy as np

# The ranges of a signed and of an unsigned 64-bit integer, as clients send them.
MIN_SEED = -(2**63)
MAX_SEED = 2**64 - 1
# The op Choose takes seeds from 0 to this one.
MAX_NOISE_SEED = 2**31 - 1
# 2^32 divided by the golden ratio: neighbours lie far apart.
_CHOICE_STEP = 0x9E3779B1
MAX_BIASES = 1024
Biases = Mapping[int, float] | tuple[tuple[int, float], ...]
# No temperature makes it infinite, and no noise lifts it over a logit of a model.
MASKED = -1e30


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from the target's logits, in vLLM's order of operations.

    1. Tokens outside of ``allowed_token_ids`` are masked; an empty list allows all. ``logit_bias``
       is added: a mapping of token ids to -100 … 100, of 1024 at most.
    2. Tokens that end the output are masked while it has fewer than ``min_tokens``
       (GenerateParams).
    3. ``repetition_penalty`` r: logits of tokens in the prompt or the output are divided by r if
       they are positive, else multiplied by r; 1 changes nothing.
    4. ``frequency_penalty`` times a token's count in the output is subtracted from its logit, then
       ``presence_penalty`` once from each token of the output; both are -2 … 2.
    5. Temperature: 0 takes the most likely token now. Otherwise logits are divided by it.
    6. ``min_p`` keeps the tokens whose probability is at least ``min_p`` times the largest.
    7. ``top_k`` keeps the K most likely of these, 0: all. ``top_p`` keeps the smallest set of the
       most likely ones whose probabilities sum to P, 1: all. One of the remaining tokens is drawn.

    The noise depends on ``noise_seed`` and the position alone, so a draft does not change the
    tokens (docs/developers/contracts.md#accepting). Log-probabilities are those of the logits
    before all these steps.
    Raises RequestError if a value is out of range.
    """

    temperature: Annotated[
        float,
        Parameter(
            help="Sampling temperature; 0 is greedy.", metavar="T",
            range=Range(1e-6, 1e6, allows_zero=True),
            server_default=1.0, model_default=True, in_api=True,
        ),
    ] = 0.0  # fmt: skip
    top_p: Annotated[
        float,
        Parameter(
            help="Sample from the most likely tokens whose probabilities sum to P.", metavar="P",
            range=Range(0, 1, excludes_minimum=True), model_default=True, in_api=True,
        ),
    ] = 1.0  # fmt: skip
    top_k: Annotated[
        int,
        Parameter(
            help="Sample from the K most likely tokens; 0 uses all.", metavar="K",
            range=Range(0, 2**31 - 1), aliases={-1: 0}, model_default=True, in_api=True,
        ),
    ] = 0  # fmt: skip
    seed: Annotated[
        int,
        Parameter(
            help="Random seed; prompt i, counted from 0, uses S + i.", metavar="S",
            range=Range(MIN_SEED, MAX_SEED, text="-2^63 to 2^64 - 1"), in_api=True,
        ),
    ] = 0  # fmt: skip
    min_p: Annotated[
        float,
        Parameter(
            help="Drop tokens less likely than P times the most likely one.", metavar="P",
            range=Range(0, 1), model_default=True, in_api=True,
        ),
    ] = 0.0  # fmt: skip
    presence_penalty: Annotated[
        float,
        Parameter(
            help="Subtract from the logits of tokens already generated.", metavar="X",
            range=Range(-2, 2), in_api=True,
        ),
    ] = 0.0  # fmt: skip
    frequency_penalty: Annotated[
        float,
        Parameter(
            help="Subtract from a token's logit for each time it was generated.", metavar="X",
            range=Range(-2, 2), in_api=True,
        ),
    ] = 0.0  # fmt: skip
    repetition_penalty: Annotated[
        float,
        Parameter(
            help="Divide the logits of tokens that already occurred.", metavar="X",
            range=Range(0, 100, excludes_minimum=True), model_default=True, in_api=True,
        ),
    ] = 1.0  # fmt: skip
    logit_bias: Annotated[Biases, Parameter(json_type=dict[int, float], in_api=True)] = ()
    allowed_token_ids: Annotated[tuple[int, ...], Parameter(in_api=True)] = ()

    def __post_init__(self) -> None:
        check_ranges(self)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))

    @cached_property
    def noise_seed(self) -> int:
        """The seed of the noise, 0 to 2^31 - 1, as kernels take it.

        Seeds in this range are used unchanged. Others are hashed to 31 bits, so two of them may
        share their noise.
        """
        if 0 <= self.seed <= MAX_NOISE_SEED:
            return int(self.seed)
        digest = blake2b(int(self.seed).to_bytes(9, "little", signed=True), digest_size=8).digest()
        return int.from_bytes(digest, "little") % (MAX_NOISE_SEED + 1)

    @property
    def cuts(self) -> bool:
        """Whether only some of the tokens may be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def floor(self) -> float:
        """How far below the largest logit ``min_p`` allows a token to be, at most 0; 0: no limit.

        p_v >= min_p · p_max after temperature, restated for the logits before it.
        """
        if self.min_p == 0 or self.temperature == 0:
            return 0.0
        # Of min_p 1 too it is below 0, by less than moves a logit.
        return min(self.temperature * log(self.min_p), -2e-38)

    @cached_property
    def bias_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """``logit_bias`` as token ids [n], int64, and their biases [n], fp32."""
        import numpy as np

        ids, biases = zip(*self.logit_bias, strict=True) if self.logit_bias else ((), ())
        return np.array(ids, np.int64), np.array(biases, np.float32)

    def bias_row(self, vocab: int) -> np.ndarray:
        """Return what step 1 adds to a row of logits: fp32 [vocab]."""
        import numpy as np

        ids, biases = self.bias_arrays
        row = np.full(vocab, MASKED if self.allowed_token_ids else 0, np.float32)
        row[list(self.allowed_token_ids)] = 0
        row[ids] += biases
        return row


class ChooseInput(NamedTuple):
    """An input [R] of the op Choose, and the attribute of SamplingParams that it holds.

    ``neutral`` is the value of rows without a sequence.
    """

    dtype: Literal["float32", "int32"]
    attribute: str
    neutral: float


# Ports of graphs and plans for sampling have these names on every backend. The host's role
# `choose` has no `floor`: numpy applies min_p to the logits before it.
CHOOSE_INPUTS = {
    "temperature": ChooseInput("float32", "temperature", 0),
    "top_k": ChooseInput("int32", "top_k", 0),
    "top_p": ChooseInput("float32", "top_p", 1),
    "seed": ChooseInput("int32", "noise_seed", 0),
    "floor": ChooseInput("float32", "floor", 0),
}
HOST_CHOOSE_INPUTS = tuple(name for name in CHOOSE_INPUTS if name != "floor")


def _pairs(biases: Biases) -> tuple[tuple[int, float], ...]:
    return tuple(biases.items() if isinstance(biases, Mapping) else biases)


def _biases(biases: Biases) -> tuple[tuple[int, float], ...]:
    """Return biases in order of their token ids. RequestError if one is invalid."""

    def error(problem: str) -> RequestError:
        return RequestError(f"logit_bias {problem}", field="logit_bias")

    try:
        pairs = _pairs(biases)
        ids = [whole_number("a token id of logit_bias", t, field="logit_bias") for t, _ in pairs]
    except (TypeError, ValueError):
        raise error("must map token ids to numbers") from None
    if len(pairs) > MAX_BIASES:
        raise error(f"has {len(pairs)} tokens, may have {MAX_BIASES}")
    for token, (_, bias) in zip(ids, pairs, strict=True):
        if not isinstance(bias, Real) or not -100 <= bias <= 100:
            raise error(f"of token {token} is {bias!r}, must be -100 to 100")
    if len(set(ids)) < len(ids):
        raise error("names a token twice")
    return tuple(sorted((i, float(pair[1])) for i, pair in zip(ids, pairs, strict=True)))


def _allowed(ids: Any) -> tuple[int, ...]:
    """Return token ids in ascending order. RequestError if it is no list of token ids."""
    if isinstance(ids, str | Mapping) or not isinstance(ids, Iterable):
        raise RequestError(
            f"allowed_token_ids is {ids!r}, must be token ids", field="allowed_token_ids"
        )
    name = "a token id of allowed_token_ids"
    return tuple(sorted({whole_number(name, i, field="allowed_token_ids") for i in ids}))


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice ``index`` of a request, in the same range as the request's seed.

    That is ``seed + index * 0x9E3779B1``, modulo 2^31 for seeds below that, else modulo the size
    of the range of all seeds. Choice 0 has the seed itself.
    """
    is_small = 0 <= seed <= MAX_NOISE_SEED
    minimum, maximum = (0, MAX_NOISE_SEED) if is_small else (MIN_SEED, MAX_SEED)
    return minimum + (seed - minimum + index * _CHOICE_STEP) % (maximum - minimum + 1)


def served_sampling(values: Mapping[str, Any], model_defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling of a request to a server, from its decoded JSON values by name.

    A parameter that is absent or null has the model's default, else the server's. A request without
    a seed gets a random one. Names of no sampling parameter are ignored.
    Raises RequestError if a value is out of range.
    """
    declared = declared_parameters(SamplingParams)
    sampling: dict[str, Any] = {
        name: parameter.declaration.server_default
        for name, parameter in declared.items()
        if parameter.declaration.server_default is not None
    }
    sampling |= model_defaults
    # Not the module secrets, whose import takes 5 ms of every command.
    sampling["seed"] = int.from_bytes(os.urandom(4), "little") & MAX_NOISE_SEED
    sampling |= {
        name: parameter.resolve(values[name])
        for name, parameter in declared.items()
        if values.get(name) is not None
    }
    return SamplingParams(**sampling)


@lru_cache(maxsize=256)
def sampling_feeds(
    params: tuple[SamplingParams, ...], rows: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Return the inputs [R] of the host's role ``choose``; sequence b has ``rows[b]`` rows.

    The arrays are read-only, and the same objects for the same arguments.
    """
    import numpy as np

    feeds = {}
    for name in HOST_CHOOSE_INPUTS:
        values = [getattr(p, CHOOSE_INPUTS[name].attribute) for p in params]
        feeds[name] = np.repeat(np.array(values, CHOOSE_INPUTS[name].dtype), rows)
        feeds[name].setflags(write=False)
    return feeds
