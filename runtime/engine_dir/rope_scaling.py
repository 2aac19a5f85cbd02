"""Scalings that extend a rotary embedding beyond the trained positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071); cos and sin are multiplied by ``attention_factor``."""

    kind: Literal["yarn"] = "yarn"
    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = False
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: only frequencies with long wavelengths change."""

    kind: Literal["llama3"] = "llama3"
    factor: float
    original_max_positions: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Every frequency is divided by ``factor``."""

    FEATURE: ClassVar[str] = "linear_rope"
    kind: Literal["linear"] = "linear"
    factor: float


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """RoPE uses only the first ``share`` of the frequencies, divided by ``factor`` (Gemma 4)."""

    FEATURE: ClassVar[str] = "proportional_rope"
    kind: Literal["proportional"] = "proportional"
    factor: float
    share: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """NTK-aware: a larger theta for sequences beyond the original context.

    Theta depends on the ``longest`` sequence of an engine; 0 is within the original context.
    """

    FEATURE: ClassVar[str] = "dynamic_rope"
    kind: Literal["dynamic"] = "dynamic"
    factor: float
    original_max_positions: int
    longest: int = 0


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): every frequency has its own divisor.

    The divisors are ``long_factors`` if the ``longest`` sequence of an engine exceeds the original
    context, else ``short_factors``. Cos and sin are multiplied by ``attention_factor``.
    """

    FEATURE: ClassVar[str] = "longrope"
    kind: Literal["longrope"] = "longrope"
    original_max_positions: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float
    longest: int = 0

    @property
    def factors(self) -> tuple[float, ...]:
        """The divisors of this engine."""
        within = self.longest <= self.original_max_positions
        return self.short_factors if within else self.long_factors


# Scalings that depend on the maximum sequence length.
ByLength: TypeAlias = DynamicScaling | LongRopeScaling
RopeScaling: TypeAlias = (
    YarnScaling | Llama3Scaling | LinearScaling | ProportionalScaling | ByLength
)
