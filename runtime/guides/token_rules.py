"""Rules that refuse single tokens: bad words and the budget of reasoning, with or without a guide.

A rule is a guide for the decoding loop. It decides about each token from the tokens before it, so
drafts stay active as with other guides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specbuild.runtime.guides.grammar import CheckedTokens, Grammar, GuideState, TokenMask
from specbuild.runtime.guides.reasoning_budget import ReasoningBudget
from specbuild.runtime.guides.remote import RemoteGrammar


@dataclass(frozen=True)
class RuledGrammar:
    """A grammar, or any text if that is None, with rules for a vocabulary of ``vocab`` tokens.

    The tokens of ``bad_sequences`` never follow each other in an output. ``budget`` limits the
    tokens of reasoning.
    """

    grammar: Grammar | RemoteGrammar | None
    vocab: int
    bad_sequences: Sequence[tuple[int, ...]] = ()
    budget: ReasoningBudget | None = None

    def begin(self) -> RuledState:
        """Return the state of an output without tokens."""
        return RuledState(self, None if self.grammar is None else self.grammar.begin())

    def refused(self, output: np.ndarray) -> set[int]:
        """Return the tokens that must not follow ``output``, int32 [n]."""
        refused = set()
        for *before, last in self.bad_sequences:
            start = len(output) - len(before)
            if start >= 0 and output[start:].tolist() == before:
                refused.add(last)
        token = None if self.budget is None else self.budget.refused(output)
        return refused if token is None else refused | {token}

    def refuses(self, output: np.ndarray, token: int) -> bool:
        """Return whether a token must not follow ``output``."""
        sequences = [bad for bad in self.bad_sequences if bad[-1] == token]
        return token in replace(self, bad_sequences=sequences).refused(output)

    def forced(self, output: np.ndarray) -> int | None:
        """Return the token that the budget of reasoning requires next; None if there is none."""
        return None if self.budget is None else self.budget.forced(output)


class RuledState(GuideState):
    """A :class:`GuideState` of a grammar's ``inner`` state, whose masks lack refused tokens."""

    def __init__(self, rules: RuledGrammar, inner: GuideState | None) -> None:
        self._rules = rules
        self._inner = inner
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        """Why there are no more masks, or None."""
        return self._failure or (None if self._inner is None else self._inner.failure)

    @property
    def stays_here(self) -> bool:
        """Whether tokens are checked while later steps run."""
        return self._inner is None or self._inner.stays_here

    @stays_here.setter
    def stays_here(self, value: bool) -> None:
        if self._inner is not None:
            self._inner.stays_here = value

    @property
    def is_remote(self) -> bool:
        """Whether another process computes the grammar's masks."""
        return self._inner is not None and self._inner.is_remote

    def mask(self, output: np.ndarray) -> TokenMask | None:
        """Return the mask after ``output``; None if the output is complete or the guide failed."""
        allowed = self._inner_mask(output)
        if allowed is None:
            return None
        forced = self._rules.forced(output)
        if forced is not None:
            is_allowed = allowed[forced]
            allowed[:] = False
            allowed[forced] = is_allowed
        allowed[list(self._rules.refused(output))] = False
        if not allowed.any():
            self._failure = "bad_words or the budget of reasoning leave no token"
            return None
        return TokenMask(np.packbits(allowed, bitorder="little").tobytes())

    def _inner_mask(self, output: np.ndarray) -> np.ndarray | None:
        """Return the tokens that the grammar allows, bool [V]; None if it has no mask."""
        size = self._rules.vocab
        if self.failure is not None:
            return None
        if self._inner is None:
            return np.ones(size, bool)
        mask = self._inner.mask(output)
        if mask is None:
            return None
        bits = np.frombuffer(mask.bits, np.uint8)
        return np.unpackbits(bits, count=size, bitorder="little").astype(bool)

    def allows(self, output: np.ndarray, token: int) -> bool | None:
        """Return whether :meth:`mask` allows a token; None if there is no mask."""
        allows = True if self._inner is None else self._inner.allows(output, token)
        if not allows:
            return allows
        forced = self._rules.forced(output)
        return forced in (None, token) and not self._rules.refuses(output, token)

    def check(self, output: np.ndarray, tokens: Sequence[int]) -> CheckedTokens:
        """Check tokens that follow ``output``, up to the first one that :meth:`allows` refuses."""
        is_only: list[bool] = []
        is_refused, after = False, output
        for token in tokens:
            allows = self.allows(after, token)
            if allows is None:
                break
            is_only.append(bool(self.forced(after)))
            is_refused = not allows
            if is_refused:
                break
            after = np.append(after, np.int32(token))
        is_complete = self.failure is None and self.complete(after)
        num_allowed = len(after) - len(output)
        return CheckedTokens(num_allowed, is_refused, is_complete, is_only, self.forced(after))

    def complete(self, output: np.ndarray) -> bool:
        """Return whether no token may continue ``output``."""
        return self._inner is not None and self._inner.complete(output)

    def forced(self, output: np.ndarray) -> list[int]:
        """Return tokens that must follow ``output``."""
        token = self._rules.forced(output)
        if token is not None:
            return [token]
        return [] if self._inner is None else self._inner.forced(output)

    def prepare(self, output: np.ndarray) -> None:
        """Request the grammar's mask after ``output`` in advance."""
        if self._inner is not None:
            self._inner.prepare(output)

    def ready(self, output: np.ndarray, timeout_s: float = 0) -> bool:
        """Return whether the mask after ``output`` is available."""
        return self._inner is None or self._inner.ready(output, timeout_s)

    def close(self) -> None:
        """End the grammar's process, if it has one."""
        if self._inner is not None:
            self._inner.close()
