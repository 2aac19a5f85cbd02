"""Measures the prefix cache's own time for one long prompt, without an engine: one JSON line.

The caches have a group without a window, one with a window of 128, and a draft's; pages have 16
tokens, and the prompt is prefilled in launches of several rows. Times are in milliseconds: the
minimum of each call over the rounds, summed, which excludes other work of the machine.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from time import perf_counter

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixCache
from specbuild.runtime.engine_dir.manifest import CacheGroup, Limits
from specbuild.runtime.request import GenerateParams, Request

_PAGE_SIZE, _TARGET = 16, ("full", "sliding")


class _Clock:
    """The minimum time of each call, by name."""

    def __init__(self) -> None:
        self._least: dict[str, dict[int, float]] = defaultdict(dict)
        self._calls: dict[str, int] = {}

    def begin(self) -> None:
        """Start another round of the same calls."""
        self._calls = defaultdict(int)

    def add(self, name: str, started_s: float) -> None:
        """End a call now."""
        took_ms = 1e3 * (perf_counter() - started_s)
        call = self._calls[name]
        self._calls[name] += 1
        self._least[name][call] = min(took_ms, self._least[name].get(call, took_ms))

    def sums(self) -> dict[str, float]:
        """Return milliseconds by name."""
        return {name: round(sum(calls.values()), 3) for name, calls in self._least.items()}


class _Caches:
    """Return pools for a few prompts of ``tokens`` tokens, and the prefix cache."""

    def __init__(self, tokens: int, rows: int) -> None:
        self._tokens, self._rows = tokens, rows
        limits = Limits(tokens + 64, 4, rows, 3, 3, 8)
        whole = 4 * (tokens // _PAGE_SIZE + 8)
        window = 4 * ((127 + rows) // _PAGE_SIZE + 2)
        groups = [
            CacheGroup(name, (0,), 2, 32, 32, _PAGE_SIZE, pages, width, "float32", ("pages",))
            for name, pages, width in (
                ("full", whole, 0),
                ("sliding", window, 128),
                ("draft", whole, 0),
            )
        ]
        self._kv = KvPools(groups, limits)
        self.cache = PrefixCache(groups, self._kv, drafts=True)

    def read(self, prompt_ids: tuple[int, ...], clock: _Clock) -> int:
        """Run a prompt from look-up to its end; return the number of cached tokens."""
        clock.begin()
        started_s = perf_counter()
        ids = Request("a", prompt_ids, GenerateParams(), 16).ids
        clock.add("request", started_s)
        started_s = perf_counter()
        prefix = self.cache.begin(ids, None)
        match = self.cache.match(prefix, drafts=["draft"])
        clock.add("look-up", started_s)
        requested = self._kv.pages_needed(len(ids) + 16)
        started_s = perf_counter()
        pages = self._kv.admit(requested, match.shared)
        self.cache.admitted(prefix, match, was_preempted=False)
        clock.add("admission", started_s)
        for end in range(match.tokens + self._rows, len(ids) + self._rows, self._rows):
            done = min(end, len(ids))
            draft = self.cache.num_draft_tokens(prefix, done + 1)
            for names, length in ((_TARGET, done), (("draft",), min(done, draft))):
                for name in names:
                    pages[name].append(length - pages[name].length)
                started_s = perf_counter()
                self.cache.publish(
                    prefix,
                    pages,
                    ids,
                    length=length,
                    num_tokens=len(ids),
                    draft="draft" if "draft" in names else None,
                )
                clock.add("insert", started_s)
                for name in names:
                    pages[name].commit(length)
        started_s = perf_counter()
        self._kv.release(pages)
        clock.add("release", started_s)
        return match.tokens


def main() -> None:
    """Measure new prompts, and then the last of them again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000, help="of the prompt (100000)")
    parser.add_argument("--rows", type=int, default=2048, help="of a launch (2048)")
    parser.add_argument("--rounds", type=int, default=15, help="of each (15)")
    args = parser.parse_args()
    caches, random = _Caches(args.tokens, args.rows), np.random.default_rng(0)
    cold, hit = _Clock(), _Clock()
    for _ in range(args.rounds):
        ids = tuple(random.integers(0, 200_000, args.tokens).tolist())
        if caches.read(ids, cold):
            raise SystemExit("a new prompt was found")
    for _ in range(args.rounds):
        if caches.read(ids, hit) <= args.tokens - 2 * _PAGE_SIZE:
            raise SystemExit("the last prompt was not found")
    caches.cache.check_integrity()
    print(json.dumps({"tokens": args.tokens, "cold_ms": cold.sums(), "hit_ms": hit.sums()}))


if __name__ == "__main__":
    main()
