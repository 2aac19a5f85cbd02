"""The prefix cache against its rules by brute force, with pages that record their tokens.

The model knows what a reader of the pages would know: the tokens of each cached page. It searches
for the longest prefix from the longest down.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specbuild.runtime.cache.page_pool import OnEvict, PagePool
from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import MatchResult, PrefixCache, SequencePrefix
from specbuild.runtime.cache.sequence_pages import AheadPages, SequencePages
from specbuild.runtime.engine_dir.cache_groups import tree_slots
from specbuild.runtime.engine_dir.manifest import CacheGroup, Limits

SIZE, WINDOWS = 2, {"full": 0, "sliding": 5, "draft": 0, "dflash": 0}
DRAFTS = ("draft", "dflash")
LIMITS = Limits(24, 3, 4, 1, 1, 1)
# The tokens up to a page's end, and with drafts the one behind it; and the salt.
Made = tuple[tuple[int, ...], str | None]

prompts = st.builds(
    lambda begin, shared, rest: [*[begin] * shared, *rest],
    st.sampled_from([0, 1]),
    st.integers(4, 14),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)


@dataclass(eq=False)
class Running:
    """A sequence, and the length of its caches."""

    ids: np.ndarray
    prompt: int
    prefix: SequencePrefix
    pages: dict[str, SequencePages]
    drafted: tuple[str, ...]
    known: int = 0
    length: int = 0
    published: dict[str, int] = field(default_factory=dict)


class PrefixModel(RuleBasedStateMachine):
    """Sequences start, prefill, decode and end in any order, with few pages."""

    @initialize(
        generated=st.booleans(),
        most=st.sampled_from([(16, 11), (30, 11), (60, 16)]),
        drafts=st.integers(0, 2),
        ahead=st.booleans(),
    )
    def begin(self, generated: bool, most: tuple[int, int], drafts: int, ahead: bool) -> None:
        names = ["full", "sliding", *DRAFTS[:drafts]]
        groups = [
            CacheGroup(name, (0,), 1, 1, 1, SIZE, pages, WINDOWS[name], "float32", ("pages",))
            for name in names
            for pages in (most[WINDOWS[name] > 0],)
        ]
        self.drafts, self.generated = drafts > 0, generated
        self.models = DRAFTS[:drafts]
        self.kv, self.ahead = KvPools(groups, LIMITS, ahead=ahead), ahead
        self.cache = PrefixCache(groups, self.kv, drafts=drafts > 0, publish_generated=generated)
        for allocator, pool in enumerate(self.cache._pools):
            pool.on_evict = self._leaves_first(allocator, pool)
        self.running: list[Running] = []
        # Who wrote each place of a pool, and which of its positions that is.
        self.written: dict[tuple[str, int], tuple[Running, int]] = {}

    def _leaves_first(self, allocator: int, pool: PagePool) -> OnEvict:
        """Check that a page is evicted before its parents, except where windows advance."""
        evicted = pool.on_evict
        assert evicted is not None

        def leaf(page: int) -> None:
            if not WINDOWS[pool.name]:
                assert not pool.count_unheld(self.cache._tree.children_of(allocator, page))
            evicted(page)

        return leaf

    @rule(
        ids=prompts, salt=st.sampled_from([None, None, "a"]), asked=st.sets(st.sampled_from(DRAFTS))
    )
    def arrives(self, ids: list[int], salt: str | None, asked: set[str]) -> None:
        drafted = tuple(name for name in self.models if name in asked)
        prefix = self.cache.begin(np.array(ids, np.int32), salt)
        match = self.cache.match(prefix, drafts=drafted)
        assert match.tokens == self._longest(ids, salt, drafted)
        self._holds_these(match, ids, salt)
        wanted = self.kv.pages_needed(24)
        if len(self.running) == 3 or not self.kv.can_admit(
            self.kv.pages_to_reserve(wanted, match.shared)
        ):
            return
        pages = self.kv.admit(wanted, match.shared)
        self.cache.admitted(prefix, match, was_preempted=False)
        array = np.zeros(24, np.int32)
        array[: len(ids)] = ids
        self.running.append(
            Running(array, len(ids), prefix, pages, drafted, len(ids), match.tokens)
        )

    @rule(which=st.integers(0, 2), turns=st.integers(1, 9), token=st.integers(0, 2))
    def goes_on(self, which: int, turns: int, token: int) -> None:
        for _ in range(turns if which < len(self.running) else 0):
            self._turn(self.running[which], token)

    def _turn(self, sequence: Running, token: int) -> None:
        """Run a chunk of the prompt, or one more token."""
        if sequence.length == sequence.prompt and sequence.known == sequence.prompt:
            sequence.ids[sequence.known], sequence.known = token, sequence.known + 1
        end = min(sequence.length + 4, sequence.known)
        if sequence.length >= sequence.prompt:
            if sequence.known == 24:
                return
            end = sequence.length + 1
            sequence.ids[sequence.known], sequence.known = token, sequence.known + 1
        for name in ("full", "sliding"):
            self._fill(sequence, name, end)
        sequence.length = end
        self._publish(sequence, end)
        for name in ("full", "sliding"):
            sequence.pages[name].commit(end)
        wanted = self.cache.num_draft_tokens(sequence.prefix, end + 1)
        end = min(end, wanted, sequence.known - 1)
        for name in sequence.drafted:
            if end > sequence.pages[name].length:
                self._fill(sequence, name, end)
                self._publish(sequence, end, draft=name)
                sequence.pages[name].commit(end)

    @rule(which=st.integers(0, 2))
    def ends(self, which: int) -> None:
        if which < len(self.running):
            self.kv.release(self.running.pop(which).pages)

    @invariant()
    def pages_are_kept_in_the_tree(self) -> None:
        if hasattr(self, "cache"):
            self.cache._tree.check_integrity()
            for ends in self.cache._resume_points.values():
                ends.check_integrity()
            if not self.running:
                self.cache.check_integrity()

    def _fill(self, sequence: Running, name: str, end: int) -> None:
        """Write positions from the committed length on, as a launch does.

        A launch that is queued ahead also writes its tree, which the next one overwrites.
        """
        holder = sequence.pages[name]
        first = holder.length
        if isinstance(holder, AheadPages):
            tree = min(end + tree_slots(name, LIMITS), len(holder.slots))
            holder.ensure(tree)
            for position in range(end, tree):
                self.written[name, int(holder.slots[position])] = (sequence, -1)
        else:
            holder.append(end - first)
        for position in range(first, end):
            self.written[name, int(holder.slots[position])] = (sequence, position)

    def _publish(self, sequence: Running, length: int, *, draft: str | None = None) -> None:
        names = [draft] if draft else ["full", "sliding"]
        before = {name: self._made(name) for name in names}
        self.cache.publish(
            sequence.prefix,
            sequence.pages,
            sequence.ids,
            length=length,
            num_tokens=sequence.known,
            draft=draft,
        )
        most = sequence.known if self.generated else sequence.prompt
        end = min(length, most - 1) // SIZE
        for name in names:
            first = max(sequence.published.get(name, 0), sequence.pages[name].first_page)
            made = {self._made_of(sequence, page) for page in range(first, end)}
            assert before[name] | made <= self._made(name)
            sequence.published[name] = max(end, sequence.published.get(name, 0))

    def _made_of(self, sequence: Running, page: int) -> Made:
        end = (page + 1) * SIZE + self.drafts
        return tuple(sequence.ids[:end].tolist()), sequence.prefix.salt

    def _made(self, name: str) -> set[Made]:
        """Return the tokens of a group's cached pages, by their writer."""
        pages = self.cache._tree.cached_pages(self.cache._names.index(name)).tolist()
        made = []
        for page in pages:
            writers = [self.written[name, page * SIZE + place] for place in range(SIZE)]
            of = {self._made_of(sequence, position // SIZE) for sequence, position in writers}
            assert len(of) == 1 and [position % SIZE for _, position in writers] == [0, 1]
            made += of
        assert len(made) == len(set(made)), "two pages are kept for the same tokens"
        return set(made)

    def _longest(self, ids: list[int], salt: str | None, drafted: tuple[str, ...]) -> int:
        """Apply the rules: return the cached length of a prompt without its last token."""
        seen = [n for n in self.cache._names if n in drafted or n not in DRAFTS]
        made = {name: self._made(name) for name in seen}
        for count in range((len(ids) - 1) // SIZE, 0, -1):
            first = {
                name: count * SIZE - WINDOWS[name] + 1 if WINDOWS[name] else 0 for name in made
            }
            wanted = [
                (name, (tuple(ids[: (page + 1) * SIZE + self.drafts]), salt))
                for name in made
                for page in range(max(0, first[name]) // SIZE, count)
            ]
            if all(tokens in made[name] for name, tokens in wanted):
                return count * SIZE
        return 0

    def _holds_these(self, match: MatchResult, ids: list[int], salt: str | None) -> None:
        """Check that shared pages have the prompt's own tokens."""
        for name, shared in match.shared.items():
            for index, page in enumerate(shared.pages, shared.first):
                sequence, position = self.written[name, page * SIZE]
                assert position == index * SIZE
                end = (index + 1) * SIZE + self.drafts
                assert self._made_of(sequence, index) == (tuple(ids[:end]), salt)


PrefixModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPrefixModel = PrefixModel.TestCase
