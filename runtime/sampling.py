"""How a request's tokens are chosen from the target's logits."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import log
from numbers import Real

import numpy as np

from specbuild.runtime.errors import RequestError

TEMPERATURES = (1e-6, 1e6)
# Those of a signed and of an unsigned 64-bit integer, as clients send them.
MIN_SEED = -(2**63)
MAX_SEED = 2**64 - 1
# The op Choose takes seeds from 0 to this one.
MAX_NOISE_SEED = 2**31 - 1
# 2^32 divided by the golden ratio: neighbours lie far apart.
_CHOICE_STEP = 0x9E3779B1
MOST_BIASES = 1024
MOST_REPETITION_PENALTY = 100.0
Biases = Mapping[int, float] | tuple[tuple[int, float], ...]
# No temperature makes it infinite, and no noise lifts it over a logit of a model.
MASKED = np.float32(-1e30)
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


def whole_number(name: str, value: object) -> int:
    """``value`` as an int; RequestError where it is no whole number."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"{name} is {value!r}, must be a whole number") from None


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from the target's logits, in vLLM's order of operations.

    1. ``logit_bias`` is added: a mapping of token ids to -100 … 100, of 1024 at most.
    2. Ends of the output are masked while it has fewer than ``min_tokens`` (GenerateParams).
    3. ``repetition_penalty`` r: logits of tokens that stand in the prompt or the output are divided
       by r where they are positive, and multiplied by it where not; 1 changes nothing.
    4. ``frequency_penalty`` times their number in the output is subtracted, then
       ``presence_penalty`` once from each token that the output has; both -2 … 2.
    5. Temperature: 0 takes the likeliest now. Otherwise logits are divided by it.
    6. ``min_p`` keeps the tokens that are at least so likely, relative to the likeliest.
    7. ``top_k`` keeps the K likeliest of these, 0: all. ``top_p`` keeps the smallest head of the
       rest that reaches P, 1: all. One of what is left is drawn.

    Whatever a row keeps, its noise belongs to ``noise_seed`` and its position: with a draft the
    tokens are those of decoding without one (docs/developers/contracts.md#accepting).
    Log-probabilities are those of the logits before all this.
    Raises RequestError where a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Biases = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", *_PENALTIES):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise RequestError(f"{name} is {value!r}, must be a number", field=name)
        least, most = TEMPERATURES
        # 0, or what a division of fp32 logits survives; not a number is neither
        if not (self.temperature == 0 or least <= self.temperature <= most):
            raise _out_of(self, "temperature", f"0 or between {least:g} and {most:g}")
        if not 0 < self.top_p <= 1:
            raise _out_of(self, "top_p", "above 0 and at most 1")
        if not 0 <= whole_number("top_k", self.top_k) < 2**31:
            raise _out_of(self, "top_k", "0 (keep all) or above")
        if not MIN_SEED <= whole_number("seed", self.seed) <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}, must be -2^63 to 2^64 - 1", field="seed")
        if not 0 <= self.min_p <= 1:
            raise _out_of(self, "min_p", "0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise _out_of(self, name, "-2 to 2")
        if not 0 < self.repetition_penalty <= MOST_REPETITION_PENALTY:
            raise _out_of(
                self, "repetition_penalty", f"above 0 and at most {MOST_REPETITION_PENALTY:g}"
            )
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @cached_property
    def noise_seed(self) -> int:
        """The seed of the noise, 0 to 2^31 - 1, as kernels take it.

        Seeds of this range stand for themselves. Others are hashed to 31 bits, so two of them may
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
    def floor(self) -> np.float32:
        """How far below the largest logit a token may be by ``min_p``, at most 0; 0: any may.

        p_v >= min_p · p_max after temperature, said of the logits before it.
        """
        if self.min_p == 0 or self.temperature == 0:
            return np.float32(0)
        # Of min_p 1 too it is below 0, by less than moves a logit.
        return np.float32(min(self.temperature * log(self.min_p), -2e-38))

    @cached_property
    def bias_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """``logit_bias`` as token ids [n], int64, and their biases [n], fp32."""
        pairs = tuple(
            self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        )
        ids, biases = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(ids, np.int64), np.array(biases, np.float32)


def _out_of(params: SamplingParams, name: str, allowed: str) -> RequestError:
    return RequestError(f"{name} is {getattr(params, name)}, must be {allowed}", field=name)


def _pairs(biases: Biases) -> Sequence[tuple[int, float]]:
    return tuple(biases.items() if isinstance(biases, Mapping) else biases)


def _biases(given: Biases) -> tuple[tuple[int, float], ...]:
    """Biases in order of their ids. RequestError where they are none."""

    def wrong(why: str) -> RequestError:
        return RequestError(f"logit_bias {why}", field="logit_bias")

    try:
        pairs = _pairs(given)
        ids = [whole_number("a token id of logit_bias", token) for token, _ in pairs]
    except (TypeError, ValueError):
        raise wrong("must map token ids to numbers") from None
    if len(pairs) > MOST_BIASES:
        raise wrong(f"has {len(pairs)} tokens, may have {MOST_BIASES}")
    for token, (_, bias) in zip(ids, pairs, strict=True):
        if not isinstance(bias, int | float | np.floating) or not -100 <= bias <= 100:
            raise wrong(f"of token {token} is {bias!r}, must be -100 to 100")
    if len(set(ids)) < len(ids):
        raise wrong("names a token twice")
    return tuple(sorted((i, float(pair[1])) for i, pair in zip(ids, pairs, strict=True)))


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice ``index`` of a request, in the same range as the request's seed.

    That is ``seed + index * 0x9E3779B1``, modulo 2^31 for seeds below that, else modulo the size
    of the range of all seeds. Choice 0 has the seed itself.
    """
    is_small = 0 <= seed <= MAX_NOISE_SEED
    least, most = (0, MAX_NOISE_SEED) if is_small else (MIN_SEED, MAX_SEED)
    return least + (seed - least + index * _CHOICE_STEP) % (most - least + 1)


def samples(params: Iterable[SamplingParams]) -> bool:
    """Whether a token is drawn: some temperature is above 0."""
    return any(p.temperature > 0 for p in params)


@lru_cache(maxsize=256)
def sampling_feeds(
    params: tuple[SamplingParams, ...], rows: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Choose's temperature, top_k, top_p and seed [R], where sequence b has ``rows[b]`` rows.

    The arrays are read-only and the same ones for the same arguments.
    """

    def per_row(values: list[float], dtype: type[np.generic]) -> np.ndarray:
        array = np.repeat(np.array(values, dtype), rows)
        array.setflags(write=False)
        return array

    return {
        "temperature": per_row([p.temperature for p in params], np.float32),
        "top_k": per_row([p.top_k for p in params], np.int32),
        "top_p": per_row([p.top_p for p in params], np.float32),
        "seed": per_row([p.noise_seed for p in params], np.int32),
    }
