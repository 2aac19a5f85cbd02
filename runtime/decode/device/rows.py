"""Which sequence stands in which row of the state that a device keeps between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbuild.runtime.decode.device.adjusted_rows import CHANGES, COLUMNS, adjusts, done_port
from specbuild.runtime.engine_dir.plan import ADJUSTED_DONE
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
_LATER = ("floor", ADJUSTED_DONE, CHANGES)
VIEWS = ("verified_len", "view_blocks", "summarised", "budget", "buffered_tokens")
PARTIAL_TABLE = "partial_table."
# What the device keeps of a sequence beside its page tables.
SEQUENCE_PORTS = (*_SCALARS, *PENDING)
_NO_TOKEN = -1


class DeviceRows:
    """Sequences in rows 0, 1, …, without gaps. A row that none uses is done and has length 0.

    Every change is queued behind the steps that were started, whose results therefore belong to
    the sequences of before.
    """

    def __init__(self, executor: DeviceExecutor, groups: Sequence[str]) -> None:
        self._executor = executor
        self._groups = tuple(groups)
        self._tables = tuple(f"{PAGE_TABLE}{group}" for group in groups)
        self.drafted = executor.port(PENDING[0]) is not None
        views = executor.port(VIEWS[0]) is not None
        # An engine that was built without them lacks these ports.
        self._later = tuple(name for name in _LATER if executor.port(name) is not None)
        self._columns = (
            *_SCALARS,
            *self._later,
            *self._tables,
            *(PENDING if self.drafted else ()),
            *((*VIEWS, *_partial_tables(executor)) if views else ()),
        )
        self._ends: frozenset[int] = frozenset()
        self.sequences: list[SequenceState] = []

    def clear(self, eos_token_ids: Sequence[int]) -> None:
        """Empties every row.

        The device stops at as many of the model's ends of sequence as its port holds; the host
        knows them all.
        """
        self.sequences.clear()
        done, eos = self._executor.port("done"), self._executor.port("eos_ids")
        assert done is not None and eos is not None
        self._free(0, done.shape[0])
        ids = np.full(eos.shape, _NO_TOKEN, np.int32)
        kept = list(eos_token_ids)[: len(ids)]
        ids[: len(kept)] = kept
        self._executor.write("eos_ids", ids)
        self._ends = frozenset(kept)

    def ends_behind(self, sequence: SequenceState, tokens: Sequence[int]) -> bool:
        """Whether steps pass a sequence over behind one that gave it these tokens."""
        ends = not sequence.request.params.ignore_eos and tokens[-1] in self._ends
        return ends or len(tokens) == sequence.wanted

    def row_of(self, sequence: SequenceState) -> int:
        """Where a sequence stands."""
        return next(i for i, other in enumerate(self.sequences) if other is sequence)

    def admit(self, sequence: SequenceState) -> None:
        """Gives a sequence the next row. Until :meth:`begin` steps pass it over."""
        self.sequences.append(sequence)
        self.write_tables(sequence, self._groups)

    def write_tables(self, sequence: SequenceState, groups: Sequence[str]) -> None:
        """Writes the pages that a sequence holds in some groups into its row."""
        row = self.row_of(sequence)
        for group in groups:
            pages = sequence.pages[group].table
            self._executor.write(f"{PAGE_TABLE}{group}", pages[None], row=row)

    def pass_over(self, sequence: SequenceState, *, done: bool) -> None:
        """Whether steps leave a sequence's row as it is."""
        self._executor.fill(done_port(sequence), int(done), row=self.row_of(sequence))

    def part(self, sequence: SequenceState, *, apart: bool) -> None:
        """From the next launch on steps of the other kind decode a sequence, if any."""
        executor, row, sequence.apart = self._executor, self.row_of(sequence), apart
        if apart:
            executor.fill("done", 1, row=row)
            executor.fill(ADJUSTED_DONE, int(sequence.paused), row=row)
        else:
            # What its output ends with is known on the device first.
            executor.copy(ADJUSTED_DONE, row, "done", row)
            executor.fill(ADJUSTED_DONE, 1, row=row)

    def go_back(self, sequence: SequenceState, length: int, root: int, waiting: int | None) -> None:
        """The state of a sequence is that of before: ``root`` behind ``length`` tokens.

        The first ``waiting`` of those that wait for the draft still do; None: none is to know.
        """
        values = {"length": length, "root": root}
        if waiting is not None:
            values["pending_count"] = waiting
        for name, value in values.items():
            self._executor.fill(name, value, row=self.row_of(sequence))

    def prompt_ends(self, row: int) -> None:
        """Right behind the launch that ends a row's prompt: keeps what the next would overwrite."""
        if self.drafted:
            self._executor.copy("prefill.last_captured", row, "pending_captured", row)

    def begin(self, sequence: SequenceState, token: int) -> int:
        """Prefill gave a sequence its first token: steps decode it from now on, in this row."""
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
        if self.drafted:
            # The prompt's last row waits for the draft until the token behind it is known.
            values |= {"pending_count": 1, "pending_tokens": token}
        for name, value in (values | {done_port(sequence): 0}).items():
            executor.fill(name, value, row=row)
        return row

    def remove(self, sequence: SequenceState) -> None:
        """Frees a sequence's row; the last sequence moves there."""
        row, last = self.row_of(sequence), len(self.sequences) - 1
        if row != last:
            changing = COLUMNS if adjusts(self.sequences[last]) else ()
            for column in (*self._columns, *changing):
                self._executor.copy(column, last, column, row)
            self.sequences[row] = self.sequences[last]
        self.sequences.pop()
        self._free(last, 1)

    def _free(self, row: int, count: int) -> None:
        for name in ("done", *(n for n in self._later if n == ADJUSTED_DONE)):
            self._executor.fill(name, 1, row=row, rows=count)
        empty = ["length", *self._tables, *(PENDING[:1] if self.drafted else ())]
        # Whoever stands here next may end its prompt in a launch behind which logits are changed.
        empty += [name for name in self._later if name == CHANGES]
        for name in empty:
            self._executor.fill(name, 0, row=row, rows=count)


def _partial_tables(executor: DeviceExecutor) -> tuple[str, ...]:
    """The ports of the layers' partial tables (SpecPV)."""
    names = [port.name for port in executor.plan.ports]
    return tuple(name for name in names if name.startswith(PARTIAL_TABLE))
