"""The state machine of SpecPV, with random steps over a cache that records exactness."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples

from specbuild.runtime.engine_dir.manifest import SpecPv
from specbuild.runtime.lossy.specpv.state import (
    MIN_BUDGET_TOKENS,
    SequenceView,
    StepChoice,
    ViewGeometry,
    automatic_budget,
)

LAYERS = 3


@dataclass
class Cache:
    """One sequence by position: whether its keys are exact, and the content of a view."""

    view: SequenceView
    exact: list[bool] = field(default_factory=list)
    shown: set[int] = field(default_factory=set)
    since_full: int = 0

    @property
    def length(self) -> int:
        return len(self.exact)

    def prefill(self, count: int) -> None:
        self.exact += [True] * count
        self.view.prefilled(self.length)

    def step(self, tree: int, accepted: int, chosen: list[int]) -> StepChoice:
        """Verify a tree of ``tree`` nodes, ``accepted`` of them accepted.

        ``chosen`` selects blocks.
        """
        before, view, geometry = self.length, self.view, self.view.geometry
        choice = view.choose(before, tree)
        if choice.partial:
            self._check_partial(before, tree)
            self.exact += [False] * (accepted + 1)
            self.since_full += 1
        else:
            assert choice.chain_start == view.global_verified_len
            for position in range(choice.chain_start, before):
                self.exact[position] = True
            assert all(self.exact), "a full step left something approximate"
            if choice.blocks is not None:
                whole = max(0, before - geometry.sink_tokens) // geometry.config.block_size
                assert view.summarised_blocks <= whole
                self.shown = self._choose(choice.blocks, chosen)
            self.exact += [True] * (accepted + 1)
            self.since_full = 0
        view.committed(choice, before, self.length)
        assert geometry.config.full_refresh_interval >= self.since_full
        return choice

    def _choose(self, blocks: int, chosen: list[int]) -> set[int]:
        """Return positions of the sink, of the selected blocks, and of the start of the tail.

        The blocks are before the window, so they contain only exact keys.
        """
        geometry = self.view.geometry
        size, sink = geometry.config.block_size, geometry.sink_tokens
        order = sorted(range(blocks), key=lambda b: (chosen[b % len(chosen)], b))
        taken = sorted(order[: self.view.budget])
        shown = set(range(min(sink, self.length)))
        for block in taken:
            shown |= set(range(sink + block * size, sink + (block + 1) * size))
        assert sink + blocks * size + geometry.config.n_window_blocks * size <= max(
            self.length, sink + geometry.config.n_window_blocks * size
        )
        assert all(self.exact[p] for p in shown)
        return shown | {sink + blocks * size}

    def _check_partial(self, before: int, tree: int) -> None:
        view, geometry = self.view, self.view.geometry
        config = geometry.config
        verified = self.exact.index(False) if False in self.exact else before
        assert view.global_verified_len == verified == min(view.verified_len)
        assert before > config.partial_threshold
        assert before - verified + tree + 1 <= config.n_spec_tokens_buf
        tail = max(self.shown)
        assert view.tail_start == tail
        assert tail % geometry.page_size == 0
        # The window: whole blocks before the tail are shown or were not chosen, none in between.
        assert before - tail >= config.n_window_blocks * config.block_size
        seen = len(self.shown) - 1 + before + tree + 1 - tail
        assert view.hidden_tokens == before + tree + 1 - seen
        assert -(-seen // geometry.page_size) <= geometry.entries


@st.composite
def configs(draw: st.DrawFn) -> tuple[ViewGeometry, int]:
    """Draw a geometry that a build accepts, and its largest tree."""
    pages, page_size = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    depth = draw(st.integers(0, 4))
    tree = depth + (draw(st.integers(0, 6)) if depth else 0)
    block = pages * page_size
    sink, window = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    config = SpecPv(
        block_size=block,
        n_sink_blocks=sink,
        n_retrieval_blocks=draw(st.integers(1, 4)),
        n_window_blocks=window,
        n_spec_tokens_buf=tree + 1 + depth + 1 + draw(st.integers(0, 20)),
        partial_threshold=(sink + window) * block + draw(st.integers(0, 30)),
        full_refresh_interval=draw(st.integers(0, 6)),
    )
    return ViewGeometry(config, page_size, deepest=depth + 1), tree


@examples(200)
@given(configs(), st.data())
def test_any_run_satisfies_the_invariants(
    drawn: tuple[ViewGeometry, int], data: st.DataObject
) -> None:
    geometry, largest = drawn
    budget = data.draw(st.integers(0, geometry.config.n_retrieval_blocks))
    cache = Cache(SequenceView(geometry, layers=LAYERS, budget=budget))
    for chunk in data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)):
        cache.prefill(chunk)
    partial = full = 0
    steps = st.tuples(st.integers(0, largest), st.integers(0, 9), st.integers(0, 30))
    for tree, luck, event in data.draw(st.lists(steps, max_size=40)):
        accepted = min(luck, tree, geometry.deepest - 1)
        before = cache.length
        choice = cache.step(tree, accepted, [luck, event, tree])
        partial, full = partial + choice.partial, full + (not choice.partial)
        # What is re-verified fits beside a tree.
        assert before - choice.chain_start <= geometry.config.n_spec_tokens_buf
    counters = cache.view.counters
    assert (counters.partial_steps, counters.full_steps, counters.invariant_failures) == (
        partial,
        full,
        0,
    )
    assert sum(counters.full_step_reasons.values()) == full
    if budget == 0 or geometry.config.full_refresh_interval == 0:
        assert partial == 0


def long_view(**changes: int) -> Cache:
    """Return a sequence that has just selected a view. The next step may be partial."""
    config = SpecPv(8, 1, 2, 1, 20, 24, 4)
    geometry = ViewGeometry(replace(config, **changes), 4, deepest=4)
    cache = Cache(SequenceView(geometry, layers=LAYERS, budget=2))
    cache.prefill(70)
    assert cache.step(3, 1, [0]).reason == "no view yet"
    return cache


@pytest.mark.parametrize("buffer", range(8, 21))
def test_partial_steps_fill_the_buffer_exactly(buffer: int) -> None:
    """Four tokens a step. The smallest buffer has capacity for a second step: the margin."""
    cache = long_view(n_spec_tokens_buf=buffer, full_refresh_interval=64)
    for _ in range(buffer // 4):
        assert cache.step(3, 3, [0]).partial
    assert cache.step(3, 3, [0]).reason == "buffer is full"


def test_the_refresh_interval_counts_partial_steps() -> None:
    cache = long_view(full_refresh_interval=3, n_spec_tokens_buf=64)
    reasons = [cache.step(0, 0, [0]).reason for _ in range(8)]
    assert reasons == [*["partial"] * 3, "refresh interval"] * 2


def test_short_contexts_are_verified_completely() -> None:
    cache = long_view()
    short = Cache(SequenceView(cache.view.geometry, layers=LAYERS, budget=2))
    short.prefill(23)
    choices = [short.step(0, 0, [0]) for _ in range(4)]
    assert [c.reason for c in choices] == ["below the threshold"] * 2 + ["no view yet", "partial"]
    assert [c.blocks for c in choices] == [None, None, 1, None]


def broken(cache: Cache, what: str) -> None:
    view = cache.view
    match what:
        case "layers disagree":
            view.verified_len[1] -= 5
        case "verified past the end":
            view.verified_len = [cache.length + 3] * LAYERS
        case "view of tokens that are not exact":
            view.verified_len = [cache.length - 8] * LAYERS
        case "tokens between blocks and window":
            view.selected_blocks = 4
        case "blocks without summaries":
            view.summarised_blocks = 2
        case "view overflows":
            view.geometry = replace(view.geometry, deepest=-40)


@pytest.mark.parametrize(
    "what",
    [
        "layers disagree",
        "verified past the end",
        "view of tokens that are not exact",
        "tokens between blocks and window",
        "blocks without summaries",
        "view overflows",
    ],
)
def test_a_violated_invariant_makes_the_step_full_and_is_counted(what: str) -> None:
    cache = long_view()
    cache.step(3, 3, [0])
    assert not cache.view.violations(cache.length, 3)
    broken(cache, what)
    assert what in cache.view.violations(cache.length, 3)
    choice = cache.view.choose(cache.length, 3)
    assert (choice.partial, choice.reason) == (False, "invariant")
    assert choice.chain_start <= min(*cache.view.verified_len, cache.length)
    assert choice.blocks is not None
    stats = cache.view.counters.stats()
    assert stats.invariant_failures == 1
    assert what in choice.broken
    cache.view.committed(choice, cache.length, cache.length + 1)
    assert cache.view.counters.stats().full_step_reasons["invariant"] == 1
    assert cache.view.choose(cache.length + 1, 3).partial or what == "view overflows"


def test_rechecks_are_summed_by_interval() -> None:
    counters = long_view().view.counters
    for tokens, agreed in ((4, 3), (0, 0), (6, 6)):
        counters.recheck(tokens, agreed)
    stats = counters.stats()
    assert (stats.rechecked_tokens, stats.agreed_tokens, stats.agreement) == (10, 9, 0.9)
    assert stats.agreement_per_interval == (0.75, 1.0)
    assert stats.retrieval_blocks == 2


@given(st.integers(1, 200_000), st.integers(1, 5000))
def test_the_automatic_budget_follows_the_context(prompt: int, new: int) -> None:
    config = SpecPv(16, 2, 256, 8, 64, 4096, 32)
    blocks, reason = automatic_budget(config, prompt, new)
    assert 1 <= blocks <= config.n_retrieval_blocks
    assert 16 * blocks >= min(MIN_BUDGET_TOKENS, 16 * 256, (prompt + new) // 16)
    assert automatic_budget(config, prompt + 4096, new)[0] >= blocks
    assert str(blocks) in reason and str(prompt + new) in reason


def test_the_automatic_budget_is_rounded_up_to_full_blocks() -> None:
    config = SpecPv(4, 2, 10_000, 8, 64, 4096, 32)
    assert automatic_budget(config, 16 * 1024, 0)[0] == 256
    assert automatic_budget(config, 16 * 1024, 1)[0] == 257
