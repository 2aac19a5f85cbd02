"""Models that depend on visible tokens only, caches as dictionaries, and plain decoding.

A row of these models computes its context from the cache entries that the visibility rule permits.
A wrong slot, mask, position, parent or feature therefore changes its output, or is detected at
once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

Tokens = tuple[int, ...]
Pool = dict[int, object]
FEATURES = 8
GARBAGE = 77


def digest(kind: str, context: Tokens) -> bytes:
    return blake2b(repr((kind, context)).encode(), digest_size=FEATURES).digest()


def features(kind: str, context: Tokens) -> np.ndarray:
    """Return integers up to 255, which bf16 represents exactly."""
    return np.frombuffer(digest(kind, context), np.uint8).astype(np.float32)


@dataclass(frozen=True)
class World:
    """A target with ``vocab`` ids, and a draft with some of them that often agrees with it."""

    seed: int
    vocab: int = 40
    draft_vocab: int = 16
    agreement: float = 0.75

    @property
    def draft_ids(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        return np.sort(rng.choice(self.vocab, self.draft_vocab, replace=False)).astype(np.int32)

    def _rng(self, kind: str, context: Tokens) -> np.random.Generator:
        return np.random.default_rng([self.seed, *digest(kind, context)])

    def next_token(self, context: Tokens) -> int:
        """Return the target's next token; the draft has most of these."""
        rng = self._rng("target", context)
        return int(rng.choice(self.draft_ids) if rng.random() < 0.9 else rng.integers(self.vocab))

    def logprob(self, context: Tokens) -> float:
        return -float(self._rng("logprob", context).random())

    def draft_logits(self, context: Tokens) -> np.ndarray:
        """Return logits over draft ids after ``context``."""
        rng = self._rng("draft", context)
        logits = 2 * rng.standard_normal(self.draft_vocab)
        agree = self.draft_ids == self.next_token(context)
        if rng.random() < self.agreement:
            logits[agree] += 5
        return logits.astype(np.float32)


def visible(slot: int, tree_start: int, words: np.ndarray) -> list[int]:
    """Return the view slots visible to a row (docs/developers/contracts.md#visible-keys)."""
    chain = range(min(slot + 1, tree_start))
    tree = [j for j in range(32 * len(words)) if int(words[j // 32]) >> (j % 32) & 1]
    return [*chain, *(tree_start + j for j in tree)]


def place(table: np.ndarray, slot: int, page_size: int) -> int:
    return int(table[slot // page_size]) * page_size + slot % page_size


def best_first(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@dataclass
class Candidate:
    """A node of a draft tree: its token's context, its score, its parent's index in the pool."""

    context: Tokens
    score: float
    parent: int


def grow(world: World, context: Tokens, top_k: int, depth: int) -> list[Candidate]:
    """Return the candidates of a tree below ``context`` (section "Drafting a tree")."""
    pool: list[Candidate] = []
    frontier = [(-1, Candidate(context, 0.0, -1))]
    for _ in range(depth):
        level: list[Candidate] = []
        for index, node in frontier:
            logits = [float(x) for x in world.draft_logits(node.context)]
            total = math.log(sum(math.exp(x) for x in logits))
            for child in best_first(logits)[:top_k]:
                token = int(world.draft_ids[child])
                score = node.score + logits[child] - total
                level.append(Candidate((*node.context, token), score, index))
        best = best_first([node.score for node in level])[:top_k]
        frontier = [(len(pool) + i, level[i]) for i in best]
        pool += level
    return pool


@dataclass
class Sequence:
    """A sequence in plain lists: all known tokens, the last of which is the root."""

    world: World
    all_tokens: list[int]
    limit: int
    eos: frozenset[int]
    done: bool = False
    emitted: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.all_tokens) - 1

    def step(self, shape: tuple[int, int, int] | None) -> tuple[list[int], int]:
        """Run one step with a tree of (top_k, depth, nodes), or with the root alone.

        Return the emitted tokens and the number of accepted draft tokens.
        """
        if self.done:
            return [], 0
        context = tuple(self.all_tokens)
        capacity = self.limit - len(context)
        drafted: set[Tokens] = set()
        if shape is not None:
            top_k, depth, nodes = shape
            pool = grow(self.world, context, top_k, depth)
            kept = best_first([node.score for node in pool])[:nodes]
            drafted = {pool[i].context for i in kept}
            drafted = {c for c in drafted if len(c) - len(context) < capacity}
        tokens = [self.world.next_token(context)]
        while (*context, *tokens) in drafted:
            tokens.append(self.world.next_token((*context, *tokens)))
        accepted = len(tokens) - 1
        for i, token in enumerate(tokens):
            if token in self.eos:
                tokens, self.done = tokens[: i + 1], True
        tokens = tokens[:capacity]
        self.all_tokens += tokens
        self.emitted += tokens
        self.done |= len(self.all_tokens) >= self.limit
        return tokens, min(accepted, len(tokens))
