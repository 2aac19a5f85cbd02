"""Records of ``bench_gpu.py``: rows of several rounds, and what moved between two records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

TOLERANCE = 0.02
# Cards of one kind differ by 3 % in memory bandwidth.
READ_TOLERANCE = 0.05
READ = "streaming read"
# Units in which more is better; in all others less is better.
RATES = ("tokens/s", "TB/s")
# Verdicts that fail a check.
FAILING = ("slower", "faster", "failed", "missing")


@dataclass
class Row:
    """One figure, once per round: ``values`` in ``unit``, ``shares`` of the streaming read.

    ``follows_read``: the time is mostly that of reading memory. ``detail`` is that of the last
    round. ``error`` is why the row was not measured completely.
    """

    name: str
    unit: str = ""
    values: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    follows_read: bool = False
    detail: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def median(self) -> float:
        """The figure of the row."""
        return median(self.values)

    @property
    def share(self) -> float | None:
        """The median share of the streaming read, or None."""
        return median(self.shares) if self.shares else None

    @property
    def spread(self) -> float:
        """The range of the values, relative to their median."""
        return (max(self.values) - min(self.values)) / self.median

    def middle(self) -> tuple[float, float]:
        """The range of the values, without lowest and highest if there are at least four."""
        inner = sorted(self.values)[1:-1] if len(self.values) >= 4 else self.values
        return min(inner), max(inner)

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a round's measurement, as ``gpu_rows.py`` prints it."""
        self.unit, self.follows_read = message["unit"], message.get("follows_read", False)
        self.values.append(float(message["value"]))
        if message.get("share") is not None:
            self.shares.append(float(message["share"]))
        self.detail = message.get("detail", {})

    def to_json(self) -> dict[str, Any]:
        """Return the row as a record stores it; the median is first, for readers."""
        result: dict[str, Any] = {"name": self.name, "unit": self.unit}
        if self.values:
            result |= {"median": self.median, "spread": self.spread, "share": self.share}
        result |= {"values": self.values, "shares": self.shares, "follows_read": self.follows_read}
        return result | {"detail": dict(self.detail), "error": self.error}

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> Row:
        """The row that ``to_json`` stored."""
        names = ("name", "unit", "values", "shares", "follows_read", "detail", "error")
        return cls(**{name: result[name] for name in names if name in result})


@dataclass(frozen=True)
class Change:
    """A row and that of the last record. ``move`` is the relative change of its figure."""

    row: Row
    before: Row | None
    move: float | None
    verdict: str


def card_file(gpu: str) -> str:
    """The name of a card's record: ``h100-80gb-hbm3.json`` of ``NVIDIA H100 80GB HBM3``."""
    words = re.sub(r"^nvidia\s+", "", gpu.strip().lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") + ".json"


def rows_of(record: Mapping[str, Any] | None) -> dict[str, Row]:
    """The rows of a record by name."""
    result = [Row.from_json(row) for row in (record or {}).get("rows", ())]
    return {row.name: row for row in result}


def compared(
    rows: Sequence[Row],
    settings: Mapping[str, str],
    record: Mapping[str, Any] | None,
    tolerance: float = TOLERANCE,
) -> list[Change]:
    """Compare every row with that of ``record``, then list those that only the record has.

    ``settings`` has the options of each engine by its label, the first word of its rows' names.
    Rows of engines with other options than the record's are not comparable.
    """
    before = rows_of(record)
    read = _median_of(before.get(READ)), _median_of(next((r for r in rows if r.name == READ), None))
    slowdown = read[0] / read[1] if read[0] and read[1] else 1.0
    stored = (record or {}).get("settings", {})
    changes = []
    for row in rows:
        label = row.name.split()[0]
        same_settings = settings.get(label) == stored.get(label)
        changes.append(_change(row, before.get(row.name), slowdown, tolerance, same_settings))
    measured = {row.name for row in rows}
    changes += [Change(r, r, None, "missing") for r in before.values() if r.name not in measured]
    return changes


def _median_of(row: Row | None) -> float | None:
    return row.median if row is not None and row.values else None


def _change(
    row: Row, before: Row | None, slowdown: float, tolerance: float, same_settings: bool
) -> Change:
    if row.error is not None or not row.values:
        return Change(row, before, None, "failed")
    if before is None or not before.values:
        return Change(row, None, None, "new")
    if not same_settings or row.unit != before.unit:
        return Change(row, before, None, "other settings")
    ratio = row.median / before.median
    return Change(row, before, ratio - 1, _verdict(row, before, ratio, slowdown, tolerance))


def _verdict(row: Row, before: Row, ratio: float, slowdown: float, tolerance: float) -> str:
    """Return ``same``, ``slower`` or ``faster``, or ``unsure`` if the rounds of both overlap.

    A row that follows the read may change by any amount up to that of the read, since a step is
    partly reading, partly latency.
    """
    rate = row.unit in RATES
    explained = (1 / slowdown if rate else slowdown) if row.follows_read else 1.0
    low, high = min(1.0, explained), max(1.0, explained)
    tolerance = READ_TOLERANCE if row.name == READ else tolerance
    if low * (1 - tolerance) <= ratio <= high * (1 + tolerance):
        return "same"
    (minimum, maximum), (least_before, most_before) = row.middle(), before.middle()
    if minimum <= most_before * high and maximum >= least_before * low:
        return "unsure"
    return "faster" if (ratio > 1) == rate else "slower"


def table(changes: Sequence[Change], date: str | None) -> Iterator[str]:
    """Return the lines of a table: figure, spread and share of each row, the record's, the change.

    ``date`` is that of the record, None if there is none.
    """
    width = max([len(change.row.name) for change in changes], default=0)
    against = f"record of {date}" if date else "no record"
    yield f"{'row':<{width}} {'figure':>18} {'spread':>7} {'of read':>8}   {against}"
    for change in changes:
        row, before = change.row, change.before
        if change.verdict == "failed":
            yield f"{row.name:<{width}} failed: {row.error or 'not measured'}"
            continue
        if change.verdict == "missing":
            yield f"{row.name:<{width}} missing: only the record has it"
            continue
        line = f"{row.name:<{width}} {figure(row.median, row.unit):>18} {row.spread:>7.1%}"
        line += f" {'' if row.share is None else f'{row.share:.1%}':>8}"
        if before is not None:
            line += f"   {figure(before.median, before.unit):>18}"
        if change.move is not None:
            line += f" {change.move:>+7.1%}"
        yield line if change.verdict == "same" else f"{line}  {change.verdict}"


def figure(value: float, unit: str) -> str:
    """``1223.4 us``, ``0.0135 s``: four digits or more."""
    digits = 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{digits}f} {unit}"


def summary(changes: Sequence[Change], tolerance: float = TOLERANCE) -> Iterator[str]:
    """Return a line for each row that changed, failed, or is unsure."""
    for verdict in (*FAILING, "unsure", "other settings", "new"):
        names = [change.row.name for change in changes if change.verdict == verdict]
        if names:
            what = {
                "slower": f"slower by more than {tolerance:.0%}",
                "faster": f"faster by more than {tolerance:.0%}: store a new record",
                "unsure": f"moved by more than {tolerance:.0%}, but rounds overlap",
                "other settings": "not comparable: the record has another engine or unit",
                "new": "not in the record",
            }.get(verdict, verdict)
            yield f"{what}: {'; '.join(names)}"


def fails(changes: Sequence[Change]) -> bool:
    """Return whether a check of these changes fails."""
    return any(change.verdict in FAILING for change in changes)
