"""Suffix decoding in the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from specbuild.runtime.engine_dir.drafters.record import Facts, HostRecord

_MAX_DEPTH = 1024
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SuffixRecord(HostRecord):
    """Suffix decoding: finds earlier occurrences of the last tokens and proposes what followed.

    A match has fewer than ``cache_max_depth`` tokens, a proposal at most ``max_tokens``. A token is
    proposed if its estimated acceptance probability is at least ``min_token_prob``. The drafter
    stores up to ``cached_tokens`` tokens of earlier requests.
    """

    FEATURE: ClassVar[str] = "suffix"
    kind: Literal["suffix"] = "suffix"
    cache_max_depth: int = 24
    max_tokens: int = 24
    min_token_prob: float = 0.1
    cached_tokens: int = 32768

    def problem(self) -> str | None:
        """See :class:`HostRecord`."""
        if not 2 <= self.cache_max_depth <= _MAX_DEPTH:
            return f"cache_max_depth is {self.cache_max_depth}, must be 2 to {_MAX_DEPTH}"
        if not 0 <= self.min_token_prob <= 1 or not 0 <= self.cached_tokens <= _MAX_TOKENS:
            return (
                f"min_token_prob is {self.min_token_prob}, must be 0 to 1; "
                f"cached_tokens is {self.cached_tokens}, must be 0 to {_MAX_TOKENS}"
            )
        return None

    def facts(self) -> Facts:
        """See :class:`DrafterRecord`."""
        probability = f"with an acceptance probability of at least {self.min_token_prob:g}"
        return (
            ("matches", f"fewer than {self.cache_max_depth} tokens"),
            ("proposes", f"up to {self.max_tokens} tokens, {probability}"),
            ("stores", f"{self.cached_tokens} tokens of earlier requests"),
        )
