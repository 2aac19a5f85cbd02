"""How a rotary embedding reaches beyond the positions that it was trained on."""

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
    """Llama 3.1's: only frequencies whose waves are long against the original context change."""

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
    """Only the first ``share`` of the frequencies turn, divided by ``factor`` (Gemma 4)."""

    FEATURE: ClassVar[str] = "proportional_rope"
    kind: Literal["proportional"] = "proportional"
    factor: float
    share: float


RopeScaling: TypeAlias = YarnScaling | Llama3Scaling | LinearScaling | ProportionalScaling
