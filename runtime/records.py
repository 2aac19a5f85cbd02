"""The JSON objects of the command line: a prompt line in, a result line out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["length", "eos", "stop"]


@dataclass(frozen=True)
class PromptRecord:
    """One line of ``--prompts``: exactly one of ``prompt_ids`` and ``prompt``."""

    id: str
    prompt_ids: tuple[int, ...] | None = None
    prompt: str | None = None


@dataclass(frozen=True)
class RunStats:
    """Statistics of one request.

    ``steps`` counts target passes after prefill; ``mean_acceptance_length`` the tokens those
    passes emitted, per pass (1.0 without a draft); ``acceptance_histogram[a]`` the steps with a
    accepted drafts; ``acceptance_per_position[i]`` the share of steps with more than i.
    """

    prompt_tokens: int
    output_tokens: int
    steps: int
    mean_acceptance_length: float
    acceptance_histogram: tuple[int, ...]
    acceptance_per_position: tuple[float, ...]
    ttft_s: float
    tpot_s: float | None
    output_tokens_per_s: float


@dataclass(frozen=True)
class RunRecord:
    """One line of ``run --json``. ``text`` is None on an engine without a tokenizer."""

    id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    stats: RunStats
    logprobs: tuple[float, ...] | None = None
