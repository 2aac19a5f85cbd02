"""The faults: a file, a text that it has once, its replacement, and the tests that must fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUNTIME = "tests/unit/runtime"
KERNELS = "tests/ops/test_kernels.py"


@dataclass(frozen=True)
class Mutation:
    """One fault. ``tests`` are pytest's arguments, at least one of which fails with the fault."""

    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """Return the mutated file of this tree. ValueError unless the text occurs exactly once."""
        source = (root / self.file).read_text(encoding="utf-8")
        if source.count(self.text) != 1:
            raise ValueError(f"{self.file} has {self.text!r} {source.count(self.text)} times")
        return source.replace(self.text, self.replacement)


def _runtime(*names: str) -> tuple[str, ...]:
    return tuple(f"{RUNTIME}/test_{name}.py" for name in names)


def _kernels(op: str) -> tuple[str, ...]:
    return (KERNELS, "-k", f"reference and {op} and not tactics")


_POOL, _TREE = "runtime/cache/page_pool.py", "runtime/cache/prefix_tree.py"
_SUFFIXES, _DRAFTS = "runtime/draft/suffix_tree.py", "runtime/draft/tree.py"
_STATIC, _CHANCES = "runtime/draft/static_tree.py", "runtime/draft/acceptance.py"
_EMISSION, _PHILOX = "runtime/decode/emission.py", "plugins_cuda/_device/philox.cuh"
_ACCEPT = "plugins_cuda/tree_accept/kernel.cu"
_PREFIX = _runtime("kv_pool", "prefix_model", "prefix", "prefix_tree")

MUTATIONS = (
    # Cache.
    Mutation(_POOL, "candidates.popitem(last=False)", "candidates.popitem(last=True)", _PREFIX),
    Mutation(
        _POOL,
        "self._cached[_EVICT_FIRST] or self._cached[_EVICT_LAST]",
        "self._cached[_EVICT_LAST] or self._cached[_EVICT_FIRST]",
        _PREFIX,
    ),
    Mutation(
        _POOL,
        "self._extra_holders[page] = sharers - 1",
        "self._extra_holders[page] = sharers",
        _PREFIX,
    ),
    Mutation(_POOL, "self._unreserved -= len(held)", "self._unreserved -= 0", _PREFIX),
    Mutation(
        _TREE,
        "(page_index + 1) * self._page_size + self._lookahead\n",
        "(page_index + 1) * self._page_size\n",
        _runtime("prefix_model", "prefix"),
    ),
    Mutation(
        _TREE,
        "while not entry.num_pages and not entry.children:",
        "while not entry.num_pages:",
        _runtime("prefix_model", "prefix_tree"),
    ),
    Mutation(
        _TREE,
        "or one.salt != other.salt or",
        "or",
        _runtime("prefix_model", "prefix", "scheduler"),
    ),
    Mutation(
        "runtime/cache/resume_points.py",
        "if not self._points_of_page[page]:",
        "if self._points_of_page[page]:",
        _runtime("prefix_model", "prefix"),
    ),
    Mutation(
        "runtime/cache/layout.py",
        "return -(-slots_per_sequence(limits) // self.group.page_size)",
        "return slots_per_sequence(limits) // self.group.page_size",
        _runtime("kv_layout"),
    ),
    # Draft.
    Mutation(
        _SUFFIXES,
        "if child.count >= max_count and token != END:",
        "if child.count > max_count and token != END:",
        _runtime("suffix_tree", "suffix"),
    ),
    Mutation(
        _SUFFIXES,
        "child.count -= 1",
        "child.count -= 0",
        _runtime("suffix_tree"),
    ),
    Mutation(_DRAFTS, 'bitorder="little"', 'bitorder="big"', _runtime("drafting", "static_tree")),
    Mutation(_DRAFTS, "(self.depths <= bound)", "(self.depths < bound)", _runtime("drafting")),
    Mutation(
        _DRAFTS,
        "np.tri(nodes + 1, dtype=bool)",
        "np.tri(nodes + 1, k=-1, dtype=bool)",
        _runtime("drafting", "generate"),
    ),
    Mutation(
        _STATIC,
        "self.parents[:i].count(p)",
        "self.parents[: i + 1].count(p)",
        _runtime("static_tree"),
    ),
    Mutation(
        _STATIC,
        "mask[slot] |= mask[parent]",
        "mask[slot, parent] = True",
        _runtime("static_tree"),
    ),
    Mutation(
        _CHANCES,
        "(hits + weight * prior) / (trials + weight)",
        "(hits + prior) / (trials + weight)",
        _runtime("policy", "learning_policy"),
    ),
    Mutation(
        _CHANCES,
        "cumulative *= probability",
        "cumulative = probability",
        _runtime("policy", "learning_policy"),
    ),
    # Decode.
    Mutation(
        _EMISSION,
        "tokens[num_replayed:], max(0, accepted - num_replayed)",
        "tokens[num_replayed:], accepted",
        _runtime("emission"),
    ),
    Mutation(
        _EMISSION,
        "events[0].cached_tokens = sequence",
        "events[-1].cached_tokens = sequence",
        _runtime("emission"),
    ),
    Mutation(
        _EMISSION,
        "replay_until=max(preempted.num_tokens, preempted.replay_until)",
        "replay_until=preempted.num_tokens",
        _runtime("on_demand"),
    ),
    Mutation(
        "runtime/decode/request_queue.py",
        "if count < MAX_OVERTAKES:",
        "if count <= MAX_OVERTAKES:",
        _runtime("urgency", "scheduler"),
    ),
    Mutation(
        "runtime/sampling.py",
        "min(self.temperature * log(self.min_p), -2e-38)",
        "min(log(self.min_p), -2e-38)",
        _runtime("logit_changes", "logit_processor_steps"),
    ),
    # Kernels.
    Mutation(
        "plugins_cuda/kv_commit/kernel.cu",
        "pool[vector_of(from, head, i % kVectors)]",
        "pool[vector_of(from, head, 0)]",
        _kernels("KvCommit"),
    ),
    Mutation(
        "plugins_cuda/kv_write/kernel.cu",
        "slot % Config::kPageSize;",
        "(slot + 1) % Config::kPageSize;",
        _kernels("KvWrite"),
    ),
    Mutation(
        "plugins_cuda/embed/kernel.cu",
        "index % Config::kVectors * 8",
        "index % Config::kVectors * 4",
        _kernels("Embed"),
    ),
    Mutation(
        _ACCEPT,
        "next_token[b] = chosen[node];",
        "next_token[b] = chosen[0];",
        _kernels("TreeAccept"),
    ),
    Mutation(_ACCEPT, "(steps < depth)", "(steps < depth - 1)", _kernels("TreeAccept")),
    Mutation(_PHILOX, "round < 10", "round < 9", _kernels("Choose")),
    Mutation(_PHILOX, "+ 0.5f)", "+ 0.25f)", _kernels("Choose")),
)
