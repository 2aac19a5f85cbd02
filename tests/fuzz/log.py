"""The log of a run, a line of JSON for each mutant, and the table at its end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fuzz.verdicts import FINDING, VERDICTS

Row = dict[str, Any]


def rows_of(log: Path) -> list[Row]:
    """The rows of a log, none where there is no log; a last line that was cut is left out."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def append(log: Path, row: Row) -> None:
    """Adds a row."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def summary(rows: Iterable[Row]) -> str:
    """Kinds by verdicts, with the longest time and the most memory of each."""
    rows = list(rows)
    heads = ("kind", "mutants", *VERDICTS, "most s", "most MiB")
    lines = [heads]
    for kind in (*sorted({r.get("kind", "?") for r in rows}), "all"):
        these = [r for r in rows if kind in (r.get("kind", "?"), "all")]
        counts = Counter(r["verdict"] for r in these)
        most_s = max((r["seconds"] for r in these), default=0)
        most_mib = max((r.get("mib", 0) for r in these), default=0)
        numbers = (len(these), *(counts[v] for v in VERDICTS), f"{most_s:.1f}", most_mib)
        lines.append((kind, *map(str, numbers)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )


def finding_lines(rows: Iterable[Row], command: str) -> list[str]:
    """What was found, each with the command that shows it again."""
    return [
        f"{row.get('kind', '?')} {row.get('file', '')} ({row.get('change', '')}): {row['reason']}\n"
        f"  {command} --seed {row['seed']} --mutants 1"
        for row in rows
        if row["verdict"] == FINDING
    ]
