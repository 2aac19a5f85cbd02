"""The pages of sequences whose launches are queued ahead, and their entries in the prefix cache.

All launches and table writes run on one stream, in the order in which they are queued. So the pages
of a prefill launch are published when it is queued: a sequence that reuses them is queued later. A
step's number of tokens is known when it is received. Its pages are published then.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.runtime.cache.sequence_pages import AheadPages
from specbuild.runtime.cache.state_snapshots import StateSnapshots
from specbuild.runtime.decode.device.rows import DeviceRows
from specbuild.runtime.engine_dir.cache_groups import allocators, tree_slots
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.request import SequenceState


class DevicePages:
    """Allocates, publishes and frees pages around each launch, and writes the page tables.

    ``snapshots`` are those of recurrent states, whose copies are queued on the same stream.
    """

    def __init__(
        self, rows: DeviceRows, manifest: Manifest, snapshots: StateSnapshots | None = None
    ) -> None:
        self._rows = rows
        self._snapshots = snapshots
        self._shared = allocators(manifest.cache_groups)
        self._windows = [group.name for group in manifest.cache_groups if group.window]
        limits, specpv = manifest.limits, manifest.specpv
        self._tree = {name: tree_slots(name, limits) for name in self._shared}
        self._drafts = tuple(name for name in self._shared if name in DRAFT_GROUPS)
        # A step ingests the accepted tokens of a host chain into the drafts' caches.
        longest = max((d.max_tokens for d in manifest.host_drafters), default=0)
        for name in self._drafts:
            self._tree[name] = max(self._tree[name], longest)
        # Later steps write to the pages that a SpecPV view names, so all are allocated at once.
        self._allocates_all = specpv is not None
        # Number of tokens that a step may compute again, in the target's caches and in a draft's.
        self._max_reverified = 0 if specpv is None else specpv.n_spec_tokens_buf
        self._max_pending = limits.draft_depth + 1

    def admit(self, sequence: SequenceState) -> None:
        """Give a sequence the next row, and the state of its snapshot if it has one."""
        self._rows.admit(sequence)
        if self._snapshots is not None:
            self._snapshots.restore(sequence.pages)

    def before_prefill(self, sequence: SequenceState, end: int) -> None:
        """Allocate pages for a prefill launch up to position ``end``."""
        for name in self._shared:
            pages = sequence.pages[name]
            allocates_all = self._allocates_all and not pages.window
            max_slots = (pages.reserved + pages.shared) * pages.page_size
            self._ensure_pages(sequence, name, max_slots if allocates_all else end)

    def after_prefill(self, sequence: SequenceState) -> None:
        """Publish the pages of a queued prefill launch, and the state after it if one is due."""
        if self._snapshots is not None and sequence.prefix is not None:
            self._snapshots.capture(
                sequence.pages, sequence.length, len(sequence.request.prompt_ids)
            )
        self._publish(sequence, pending=0)
        self._free_unused(sequence)

    def before_step(self, sequences: Sequence[SequenceState], max_unread: int) -> None:
        """Allocate pages for a step; each step in flight emits at most ``max_unread`` tokens."""
        for sequence in sequences:
            num_tokens = sequence.num_tokens + sequence.steps_in_flight * max_unread
            length = min(num_tokens, sequence.max_tokens) - 1
            if length > sequence.covered_length:
                self._cover(sequence, length)

    def _cover(self, sequence: SequenceState, length: int) -> None:
        """Allocate pages for a step that writes from position ``length`` on."""
        for name in self._shared:
            self._ensure_pages(sequence, name, length + self._tree[name])
        pages = sequence.pages
        sequence.covered_length = min(
            pages[name].end_page * pages[name].page_size - tree for name, tree in self._tree.items()
        )

    def after_step(self, sequence: SequenceState, pending: int) -> None:
        """Publish the pages of a received step; the draft lacks the last ``pending`` tokens."""
        if sequence.prefix is not None and sequence.prefix.cache.publish_generated:
            self._publish(sequence, pending)
        if self._windows and sequence.length >= sequence.next_freed_length:
            self._free_unused(sequence)

    def _ensure_pages(self, sequence: SequenceState, name: str, end: int) -> None:
        pages = sequence.pages[name]
        assert isinstance(pages, AheadPages)
        if pages.ensure(end):
            self._rows.write_tables(sequence, self._shared[name])

    def _publish(self, sequence: SequenceState, pending: int) -> None:
        """Publish filled pages. Called before pages are freed."""
        sequence.publish(sequence.length)
        for name in self._drafts:
            sequence.publish(max(sequence.length - pending, 0), draft=name)

    def _free_unused(self, sequence: SequenceState) -> None:
        """Free the pages that lie before the windows of all later launches."""
        length, prompt = sequence.length, len(sequence.request.prompt_ids)
        for name in self._windows:
            draft = name in self._drafts
            max_rerun = self._max_pending if draft else self._max_reverified
            oldest = max(min(length, prompt - draft), length - max_rerun)
            sequence.pages[name].commit(length, reverified=oldest)
        if self._windows:
            sequence.next_freed_length = min(
                [sequence.pages[name].next_freed_length for name in self._windows]
            )
