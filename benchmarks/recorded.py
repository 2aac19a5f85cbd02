"""Values of the records in benchmarks/results, and tables of them as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DECODING = "h200-2026-11-23/20b-spec.json"
PREFILL = "h200-2026-11-26/20b-prefill.json"


def record(path: str) -> Any:
    """The JSON record at ``path`` below benchmarks/results."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def date_of(path: str) -> str:
    result = re.search(r"\d{4}-\d\d-\d\d", path)
    assert result, f"no date in the name of {path}"
    return result[0]


def phase_of(path: str, name: str, batch: int, context: int = 0) -> dict[str, Any]:
    """The one phase of a sweep with this name and batch, and this context within 1 %."""
    phases = [
        phase
        for phase in record(path)["phases"]
        if (phase["name"], phase["batch"]) == (name, batch)
        and (not context or abs(phase["context"] / context - 1) < 0.01)
    ]
    assert len(phases) == 1, f"{path} has {len(phases)} phases {name!r}, batch {batch}"
    return dict(phases[0])


def decoding(batch: int, draft: str) -> dict[str, Any]:
    rows = record(DECODING)["decoding"]
    return dict(next(row for row in rows if (row["batch"], row["draft"]) == (batch, draft)))


def markdown(header: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
