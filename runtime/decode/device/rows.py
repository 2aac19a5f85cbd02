"""Assigns sequences to the rows of the state that a device keeps between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.runtime.cache.state_paths import StateSlot
from specbuild.runtime.decode.device.processor_rows import (
    CHANGES,
    COLUMNS,
    TOP_COUNT,
    done_port,
    unmasked_changes,
    uses_processor_steps,
)
from specbuild.runtime.draft.static_tree import PlacedTree
from specbuild.runtime.engine_dir.manifest import STATE_GROUP
from specbuild.runtime.engine_dir.plan import ADJUSTED_DONE, TREE_FORM
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.request import SequenceState
from specbuild.runtime.sampling import CHOOSE_INPUTS

PAGE_TABLE = "page_table."
PENDING = ("pending_count", "pending_tokens", "pending_captured")
_SCALARS = (
    "length",
    "root",
    "limit",
    "done",
    "ignore_eos",
    *(name for name in CHOOSE_INPUTS if name != "floor"),
)
_OPTIONAL = ("floor", ADJUSTED_DONE, CHANGES, TOP_COUNT)
# Of recurrent states: the slot, and the rows of the last step that the next launch applies.
STATES = ("state_slot", "replay_path", "replay_count")
VIEWS = ("verified_len", "view_blocks", "summarised", "budget", "buffered_tokens")
PARTIAL_TABLE = "partial_table."
# Device state of a sequence besides its page tables.
SEQUENCE_PORTS = (*_SCALARS, *PENDING)
_NO_TOKEN = -1


class DeviceRows:
    """Sequences in rows 0, 1, …, without gaps. An unused row is done and has length 0.

    Changes are queued after the steps in flight, whose results belong to the earlier assignment.
    """

    def __init__(self, executor: DeviceExecutor, groups: Sequence[str]) -> None:
        self._executor = executor
        self._groups = tuple(groups)
        self._tables = tuple(f"{PAGE_TABLE}{group}" for group in groups)
        self.has_draft = executor.port(PENDING[0]) is not None
        pending = executor.port(PENDING[1])
        # Capacity of the draft's buffer of pending tokens.
        self.max_pending = 0 if pending is None else pending.shape[1]
        views = executor.port(VIEWS[0]) is not None
        self.has_states = executor.port(STATES[0]) is not None
        # Engines that were built without these features lack the ports.
        self._optional = tuple(name for name in _OPTIONAL if executor.port(name) is not None)
        self._columns = (
            *_SCALARS,
            *self._optional,
            *self._tables,
            *(PENDING if self.has_draft else ()),
            *((*VIEWS, *_partial_tables(executor)) if views else ()),
            *(STATES if self.has_states else ()),
        )
        self._device_eos: frozenset[int] = frozenset()
        self.sequences: list[SequenceState] = []

    def clear(self, eos_token_ids: Sequence[int], tree: PlacedTree | None = None) -> None:
        """Clear every row, and write the end-of-sequence tokens and the form of draft trees.

        ``tree`` has this form; None for trees by the draft's scores.

        The device stops at as many of them as its port holds. The host checks all of them.
        """
        self.sequences.clear()
        done, eos = self._executor.port("done"), self._executor.port("eos_ids")
        assert done is not None and eos is not None
        self._free(0, done.shape[0])
        ids = np.full(eos.shape, _NO_TOKEN, np.int32)
        device_eos = list(eos_token_ids)[: len(ids)]
        ids[: len(device_eos)] = device_eos
        self._executor.write("eos_ids", ids)
        port = self._executor.port(TREE_FORM)
        if port is not None:
            scores = np.zeros(port.shape, np.float32)
            if tree is not None:
                scores[: len(tree.form)] = tree.form
            self._executor.write(TREE_FORM, scores)
        self._device_eos = frozenset(device_eos)

    def ends_with(self, sequence: SequenceState, tokens: Sequence[int]) -> bool:
        """Return whether later steps skip a sequence after these tokens."""
        is_end = not sequence.request.params.ignore_eos and tokens[-1] in self._device_eos
        return is_end or len(tokens) == sequence.tokens_left

    def row_of(self, sequence: SequenceState) -> int:
        """Return the row of a sequence."""
        return self.sequences.index(sequence)

    def admit(self, sequence: SequenceState) -> None:
        """Give a sequence the next row. Steps skip it until :meth:`begin`."""
        self.sequences.append(sequence)
        self.write_tables(sequence, self._groups)
        if self.has_states:
            holder = sequence.pages[STATE_GROUP]
            assert isinstance(holder, StateSlot)
            # Entry s − 1 of the pools is slot s: the empty one has no memory on a device.
            row = self.row_of(sequence)
            self._executor.fill(STATES[0], holder.slot - 1, row=row)
            # A state that is restored from a snapshot is complete.
            self._executor.fill(STATES[2], 0, row=row)

    def write_tables(self, sequence: SequenceState, groups: Sequence[str]) -> None:
        """Write a sequence's pages of these groups into its row."""
        row = self.row_of(sequence)
        for group in groups:
            pages = sequence.pages[group].table
            self._executor.write(f"{PAGE_TABLE}{group}", pages[None], row=row)

    def set_done(self, sequence: SequenceState, *, done: bool) -> None:
        """Exclude a sequence from steps, or include it again.

        A sequence that needs a mask is included by the step that masks it.
        """
        if not sequence.needs_mask:
            self._executor.fill(done_port(sequence), int(done), row=self.row_of(sequence))

    def set_step_kind(self, sequence: SequenceState, *, uses_logit_processor: bool) -> None:
        """Let logit-processor steps or ordinary steps decode a sequence from the next launch on."""
        executor, row = self._executor, self.row_of(sequence)
        sequence.uses_logit_processor = uses_logit_processor
        if uses_logit_processor:
            executor.fill("done", 1, row=row)
            executor.fill(ADJUSTED_DONE, int(sequence.paused), row=row)
        else:
            # Steps with full logits apply a mask that is still there.
            executor.fill(CHANGES, unmasked_changes(sequence), row=row)
            # Copied on the device, which knows before the host whether the output has ended.
            executor.copy(ADJUSTED_DONE, row, "done", row)
            executor.fill(ADJUSTED_DONE, 1, row=row)

    def set_needs_mask(self, sequence: SequenceState, *, needs_mask: bool) -> None:
        """Exclude a sequence from steps without a mask from the next launch on, or include it.

        No step that counts is in flight when it is included. It has not ended, so it is not done.
        """
        sequence.needs_mask = needs_mask
        self._executor.fill("done", int(needs_mask or sequence.paused), row=self.row_of(sequence))

    def roll_back(
        self, sequence: SequenceState, length: int, root: int, pending: int | None
    ) -> None:
        """Restore an earlier state of a sequence: ``length`` committed tokens, then ``root``.

        The first ``pending`` tokens in the draft's buffer stay there; None for no draft.
        """
        values = {"length": length, "root": root}
        if pending is not None:
            values["pending_count"] = pending
        for name, value in values.items():
            self._executor.fill(name, value, row=self.row_of(sequence))

    def save_last_aux_hidden(self, row: int) -> None:
        """Save the aux hidden states of a finished prompt; the next launch overwrites them."""
        if self.has_draft:
            self._executor.copy("prefill.last_captured", row, "pending_captured", row)

    def begin(self, sequence: SequenceState, token: int) -> int:
        """Start to decode a sequence with its first token; return its row."""
        executor, row, request = self._executor, self.row_of(sequence), sequence.request
        sampling = request.params.sampling
        values = {
            "length": len(request.prompt_ids),
            "root": token,
            "limit": len(request.prompt_ids) + request.token_budget,
            "ignore_eos": int(request.params.ignore_eos),
        }
        for name, choose_input in CHOOSE_INPUTS.items():
            if name in self._columns:
                values[name] = getattr(sampling, choose_input.attribute)
        if self.has_draft:
            # The draft ingests the prompt's last row together with the first token.
            values |= {"pending_count": 1, "pending_tokens": token}
        for name, value in (values | {done_port(sequence): 0}).items():
            executor.fill(name, value, row=row)
        return row

    def remove(self, sequence: SequenceState) -> None:
        """Free the row of a sequence and move the last sequence there."""
        row, last = self.row_of(sequence), len(self.sequences) - 1
        if row != last:
            processor_columns = COLUMNS if uses_processor_steps(self.sequences[last]) else ()
            for column in (*self._columns, *processor_columns):
                self._executor.copy(column, last, column, row)
            self.sequences[row] = self.sequences[last]
        self.sequences.pop()
        self._free(last, 1)

    def _free(self, row: int, count: int) -> None:
        for name in ("done", *(n for n in self._optional if n == ADJUSTED_DONE)):
            self._executor.fill(name, 1, row=row, rows=count)
        empty = ["length", *self._tables, *(PENDING[:1] if self.has_draft else ())]
        # The next sequence in this row may have no logit processors.
        empty += [name for name in self._optional if name in (CHANGES, TOP_COUNT)]
        for name in empty:
            self._executor.fill(name, 0, row=row, rows=count)


def _partial_tables(executor: DeviceExecutor) -> tuple[str, ...]:
    """Return the ports of the layers' partial tables (SpecPV)."""
    names = [port.name for port in executor.plan.ports]
    return tuple(name for name in names if name.startswith(PARTIAL_TABLE))
