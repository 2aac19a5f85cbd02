"""How a request's tokens are chosen from the target's logits."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real

import numpy as np

from specbuild.runtime.errors import RequestError

TEMPERATURES = (1e-6, 1e6)
MAX_SEED = 2**31 - 1


def whole_number(name: str, value: object) -> int:
    """``value`` as an int; RequestError where it is no whole number."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"{name} is {value!r}, must be a whole number") from None


@dataclass(frozen=True)
class SamplingParams:
    """Temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 keep every token.

    The noise of a sampled token belongs to ``seed`` and its position
    (docs/developers/contracts.md#accepting).
    Raises RequestError where a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise RequestError(f"{name} is {value!r}, must be a number")
        least, most = TEMPERATURES
        # 0, or what a division of fp32 logits survives; not a number is neither
        if not (self.temperature == 0 or least <= self.temperature <= most):
            raise RequestError(
                f"temperature is {self.temperature}, must be 0 or between {least:g} and {most:g}"
            )
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}, must be above 0 and at most 1")
        if not 0 <= whole_number("top_k", self.top_k) < 2**31:
            raise RequestError(f"top_k is {self.top_k}, must be 0 (keep all) or above")
        if not 0 <= whole_number("seed", self.seed) <= MAX_SEED:
            raise RequestError(f"seed is {self.seed}, must lie between 0 and {MAX_SEED}")


def samples(params: Iterable[SamplingParams]) -> bool:
    """Whether a token is drawn: some temperature is above 0."""
    return any(p.temperature > 0 for p in params)


def needs_full_logits(params: Iterable[SamplingParams]) -> bool:
    """Whether the logits must be there as a whole: only top-k and top-p ask for that."""
    return any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params)


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
        "seed": per_row([p.seed for p in params], np.int32),
    }
