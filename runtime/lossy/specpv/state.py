"""SpecPV: decides when a step verifies over a partial view of the cache, and when over all.

Positions [0, L) of a sequence are committed. Those below ``global_verified_len`` have exact keys
and values in every layer, from prefill or a full step. The others, the buffered tokens, come from
partial steps, which attend to a part of the context. A full step re-verifies them together with the
tree, over the full cache, and selects a new view.

A view consists of the sink, the selected blocks, and everything after the last summarised block.
Nothing here depends on how the tree was drafted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from specbuild.runtime.engine_dir.manifest import SpecPv
from specbuild.runtime.records import SpecPvStats

_LOG = logging.getLogger(__name__)

# ``auto`` retrieves this share of the longest context, at least this number of tokens.
CONTEXT_SHARE = 16
MIN_BUDGET_TOKENS = 512

Reason = Literal[
    "partial",
    "switched off",
    "below the threshold",
    "no view yet",
    "refresh interval",
    "buffer is full",
    "invariant",
]


@dataclass(frozen=True)
class ViewGeometry:
    """The sizes of a view in pages. ``deepest`` is the maximum number of tokens that a step
    commits.
    """

    config: SpecPv
    page_size: int
    deepest: int

    @property
    def block_pages(self) -> int:
        """The number of pages of a block."""
        return self.config.block_size // self.page_size

    @property
    def sink_pages(self) -> int:
        """The number of pages of the sink."""
        return self.config.n_sink_blocks * self.block_pages

    @property
    def sink_tokens(self) -> int:
        """The number of tokens of the sink."""
        return self.config.n_sink_blocks * self.config.block_size

    @property
    def tail_tokens(self) -> int:
        """The maximum number of tokens after the last summarised block.

        They are the window and an incomplete block at the selection of the view, the tokens that
        this step commits, and the buffer.
        """
        config = self.config
        window = (config.n_window_blocks + 1) * config.block_size - 1
        return window + self.deepest + config.n_spec_tokens_buf

    @property
    def entries(self) -> int:
        """The number of pages of the largest view."""
        retrieved = self.config.n_retrieval_blocks * self.block_pages
        return self.sink_pages + retrieved + -(-self.tail_tokens // self.page_size)

    def summarised_blocks(self, length: int) -> int:
        """Return the number of complete blocks between sink and window of a context."""
        whole = max(0, length - self.sink_tokens) // self.config.block_size
        return max(0, whole - self.config.n_window_blocks)

    def tail_start(self, blocks: int) -> int:
        """Return the position after the last of ``blocks`` summarised blocks."""
        return self.sink_tokens + blocks * self.config.block_size


@dataclass(frozen=True)
class StepChoice:
    """How one sequence takes part in a step.

    Positions ``chain_start`` … L − 1 are re-verified before the tree; a partial step has none.
    ``blocks`` is the number of blocks that the step summarises and selects from, None if it selects
    no view. ``broken`` names the invariants that prevented a partial step.
    """

    partial: bool
    chain_start: int
    blocks: int | None
    reason: Reason
    broken: tuple[str, ...] = ()


@dataclass
class SpecPvCounters:
    """Counts of a request's SpecPV steps.

    ``rechecked_tokens`` counts tokens of partial steps that full steps re-verified.
    ``agreed_tokens`` counts those that the full step, given the same previous tokens, sampled too.
    ``agreement_per_interval`` has this share for each full step.
    """

    retrieval_blocks: int = 0
    retrieval_reason: str | None = None
    partial_steps: int = 0
    full_steps: int = 0
    rechecked_tokens: int = 0
    agreed_tokens: int = 0
    invariant_failures: int = 0
    agreement_per_interval: list[float] = field(default_factory=list)
    full_step_reasons: dict[str, int] = field(default_factory=dict)

    def recheck(self, tokens: int, agreed: int) -> None:
        """Count the tokens that a full step re-verified."""
        self.rechecked_tokens += tokens
        self.agreed_tokens += agreed
        if tokens:
            self.agreement_per_interval.append(agreed / tokens)

    def stats(self) -> SpecPvStats:
        """Return the statistics so far."""
        tokens = self.rechecked_tokens
        counts = vars(self) | {
            "agreement_per_interval": tuple(self.agreement_per_interval),
            "full_step_reasons": dict(self.full_step_reasons),
        }
        return SpecPvStats(agreement=self.agreed_tokens / tokens if tokens else None, **counts)


class SequenceView:
    """The exact, summarised and selected parts of one sequence.

    ``verified_len[i]`` is the number of leading tokens whose keys and values are exact in the i-th
    full-attention layer. ``budget`` limits the selected blocks; 0 allows no partial step.
    """

    def __init__(self, geometry: ViewGeometry, *, layers: int, budget: int) -> None:
        self.geometry = geometry
        self.budget = budget
        self.verified_len = [0] * layers
        self.summarised_blocks = 0
        self.selected_blocks: int | None = None
        self.selected_len = 0
        self.partial_steps = 0
        self.counters = SpecPvCounters(retrieval_blocks=budget)

    @property
    def global_verified_len(self) -> int:
        """The number of leading tokens that are exact in every layer."""
        return min(self.verified_len)

    @property
    def retrieved_pages(self) -> int:
        """The number of pages of the selected blocks."""
        return min(self.budget, self.selected_blocks or 0) * self.geometry.block_pages

    @property
    def tail_start(self) -> int:
        """The position from which the view is contiguous."""
        return self.geometry.tail_start(self.selected_blocks or 0)

    @property
    def hidden_tokens(self) -> int:
        """The number of positions before the tail that the view omits: position − view slot."""
        blocks = self.selected_blocks or 0
        return (blocks - min(self.budget, blocks)) * self.geometry.config.block_size

    def choose(self, length: int, tree: int) -> StepChoice:
        """Decide how a tree of ``tree`` nodes below its root is verified after ``length``."""
        reason = self._reason(length, tree)
        if reason == "partial":
            return StepChoice(True, length, None, reason)
        broken: tuple[str, ...] = ()
        if reason == "invariant":
            self.counters.invariant_failures += 1
            broken = self.violations(length, tree)
        start = min(self.global_verified_len, length)
        return StepChoice(False, start, self.blocks_at(length), reason, broken)

    def blocks_at(self, length: int) -> int | None:
        """Return the number of blocks from which a full step selects a view, or None."""
        views = self._enabled and length > self.geometry.config.partial_threshold
        return self.geometry.summarised_blocks(length) if views else None

    @property
    def _enabled(self) -> bool:
        return self.budget > 0 and self.geometry.config.full_refresh_interval > 0

    def _reason(self, length: int, tree: int) -> Reason:
        config = self.geometry.config
        if not self._enabled:
            return "switched off"
        if length <= config.partial_threshold:
            return "below the threshold"
        if self.selected_blocks is None:
            return "no view yet"
        if self.partial_steps >= config.full_refresh_interval:
            return "refresh interval"
        if length - self.global_verified_len + tree + 1 > config.n_spec_tokens_buf:
            return "buffer is full"
        return "invariant" if self.violations(length, tree) else "partial"

    def violations(self, length: int, tree: int) -> tuple[str, ...]:
        """Return the invariants that a partial step would violate; empty unless there is a bug."""
        blocks, geometry = self.selected_blocks, self.geometry
        if blocks is None:
            return ("no view",)
        pages = -(-(length + tree + 1 - self.hidden_tokens) // geometry.page_size)
        checks = {
            "layers disagree": len(set(self.verified_len)) == 1,
            "verified past the end": self.global_verified_len <= length,
            "view of tokens that are not exact": self.selected_len <= self.global_verified_len,
            "blocks past the context": self.tail_start
            <= max(self.selected_len, geometry.sink_tokens),
            "tokens between blocks and window": blocks
            == geometry.summarised_blocks(self.selected_len),
            "blocks without summaries": blocks <= self.summarised_blocks,
            "view overflows": pages <= geometry.entries,
        }
        return tuple(name for name, holds in checks.items() if not holds)

    def prefilled(self, length: int) -> None:
        """Record that the first ``length`` tokens, the prompt, are exact."""
        self.verified_len = [length] * len(self.verified_len)

    def committed(self, choice: StepChoice, before: int, after: int) -> None:
        """Record that a step moved the committed length from ``before`` to ``after``."""
        if choice.partial:
            self.partial_steps += 1
            self.counters.partial_steps += 1
            return
        self.counters.full_steps += 1
        reasons = self.counters.full_step_reasons
        reasons[choice.reason] = reasons.get(choice.reason, 0) + 1
        self.verified_len = [after] * len(self.verified_len)
        self.partial_steps = 0
        self.selected_blocks = choice.blocks
        if choice.blocks is not None:
            self.selected_len = before
            self.summarised_blocks = max(self.summarised_blocks, choice.blocks)

    def log_fallback(self, choice: StepChoice, request: str, length: int) -> None:
        """Log a full step of a sequence with views, for debugging."""
        if choice.partial or choice.reason in ("switched off", "below the threshold"):
            return
        why = ": ".join((choice.reason, *filter(None, (", ".join(choice.broken),))))
        _LOG.debug("[SpecPV] fallback: %s (prompt %r, %d tokens)", why, request, length)


def automatic_budget(config: SpecPv, prompt_tokens: int, new_tokens: int) -> tuple[int, str]:
    """Return the number of blocks to retrieve for a request, and the reason.

    This is a sixteenth of the longest context, at least 512 tokens (the budget must cover the
    blocks of several heads), and at most the engine's number.
    """
    longest = prompt_tokens + new_tokens
    tokens = max(MIN_BUDGET_TOKENS, -(-longest // CONTEXT_SHARE))
    blocks = min(-(-tokens // config.block_size), config.n_retrieval_blocks)
    return blocks, f"{blocks} blocks of {config.block_size} for up to {longest} tokens"
