"""What a request gave, as ``run --json`` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# ``guide_failed``: its grammar met a limit, or no token of the model's continues the output.
FinishReason = Literal["length", "eos", "stop", "abort", "deadline", "guide_failed"]


@dataclass(frozen=True)
class SpecPvStats:
    """How lossy verification over partial views was; ``retrieval_blocks`` is the budget.

    ``retrieval_reason`` is the reason where the budget was left to the ``auto`` rule.
    Of the ``rechecked_tokens`` that partial steps emitted, a full step given the same tokens
    before them chose ``agreed_tokens`` too; ``agreement_per_interval`` is the share for each full
    step that looked. A GPU looks at a sample of them. ``invariant_failures`` counts steps that
    were full because the state of the view contradicted itself; ``full_step_reasons`` counts full
    steps by the reason why they were no partial ones.
    """

    retrieval_blocks: int
    partial_steps: int
    full_steps: int
    rechecked_tokens: int
    agreed_tokens: int
    agreement: float | None
    invariant_failures: int
    agreement_per_interval: tuple[float, ...]
    retrieval_reason: str | None = None
    full_step_reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DsaStats:
    """How lossy attention to chosen tokens was; ``top_k`` is how many a row chooses.

    ``narrowed_steps`` emitted what sparse attention gave; ``checked_steps`` ran whole too, and
    emitted that; ``fallback_steps`` attended to everything because checks agreed too little. Of
    the ``checked_tokens`` sparse attention sampled ``agreed_tokens`` too; drafts accepted in
    checks by either are ``accepted_narrowed`` and ``accepted_whole``. ``broken_lists`` of slots,
    in ``broken_launches``, broke an invariant and gave way to everything.
    """

    top_k: int
    narrowed_steps: int
    checked_steps: int
    fallback_steps: int
    checked_tokens: int
    agreed_tokens: int
    agreement: float | None
    accepted_narrowed: int
    accepted_whole: int
    broken_launches: int
    broken_lists: int


@dataclass(frozen=True)
class RunStats:
    """Statistics of one request.

    ``steps`` counts target passes after prefill, and ``mean_acceptance_length`` the tokens that a
    pass emits on average (1.0 without a draft). ``acceptance_histogram[a]`` counts the steps with
    a accepted draft tokens, and ``acceptance_per_position[i]`` is the share of steps with more
    than i. ``proposed_tokens`` counts the verified draft tokens. ``preemptions`` counts how often
    the request was preempted, and ``paused_steps`` the steps of others while it waited for pages.
    ``cached_tokens`` counts the prompt's tokens that were in the prefix cache. ``specpv`` is None
    if no step could use a partial view, and ``dsa`` if no row could attend to selected tokens.
    ``masked_tokens`` counts the tokens that a guide changed, or that masked steps of a device
    selected; None without a guide.
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
    preemptions: int = 0
    paused_steps: int = 0
    cached_tokens: int = 0
    proposed_tokens: int = 0
    specpv: SpecPvStats | None = None
    dsa: DsaStats | None = None
    masked_tokens: int | None = None


@dataclass(frozen=True)
class RunRecord:
    """One line of ``run --json``. ``text`` is None on an engine without a tokenizer.

    ``top_logprobs`` has (token id, log-probability) of the most likely tokens for each output
    token; None if they were not requested.
    """

    id: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    stats: RunStats
    logprobs: tuple[float | None, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
