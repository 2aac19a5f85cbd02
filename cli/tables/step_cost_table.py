"""The step times of an engine and the bytes that each step must read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from specbuild.runtime.draft.device_costs import (
    ShapeCosts,
    StepCosts,
    programs_digest,
    read_step_costs,
)
from specbuild.runtime.draft.draft_models import shape_text
from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import Plan, Program, ProgramEntry
from specbuild.runtime.executors.cuda.program_file import read_program
from specbuild.runtime.measure.byte_floor import EngineTraffic, Work, engine_traffic


@dataclass(frozen=True)
class StepCostRow:
    """A step of ``batch`` sequences of ``context`` tokens; the target runs ``tokens`` of each.

    ``floor_bytes`` are the bytes that the step must read, with the experts of random routing.
    """

    batch: int
    draft: str
    tokens: int
    context: int
    step_s: float
    target_s: float
    draft_s: float
    floor_bytes: float

    @property
    def floor_bytes_per_s(self) -> float:
        """The byte floor per second: the bandwidth that the step uses."""
        return self.floor_bytes / self.step_s


@dataclass(frozen=True)
class StepCostFacts:
    """The table of an engine; ``current`` if it was measured with the current programs."""

    gpu: str
    method: str
    current: bool
    rows: tuple[StepCostRow, ...]


def step_cost_facts(directory: Path, manifest: Manifest, plan: Plan) -> StepCostFacts | None:
    """Return the table, or None without measurements. EngineFileError if a file is damaged."""
    costs = read_step_costs(directory, manifest)
    if costs is None:
        return None

    def read(entry: ProgramEntry) -> Program:
        return read_program(bytes(read_file(directory, manifest, entry.file)), entry)

    return facts_of(costs, engine_traffic(plan, read), programs_digest(manifest))


def facts_of(costs: StepCosts, traffic: EngineTraffic, digest: str) -> StepCostFacts:
    """Return the table's points, by batch, draft and context."""
    rows = tuple(row for entry in costs.steps for row in _rows(entry, traffic))
    return StepCostFacts(costs.gpu, costs.method, costs.programs == digest, rows)


def step_cost_table(facts: StepCostFacts) -> Table:
    """Return times in ms, the minimum bytes in GB, and these bytes per second."""
    stale = (
        ""
        if facts.current
        else "; outdated, because the engine's programs changed: run specbuild tune"
    )
    table = Table(title=f"steps on {facts.gpu}{stale}", title_justify="left")
    table.add_column("sequences", justify="right")
    table.add_column("draft")
    for column in ("context", "step ms", "target ms", "draft ms", "min GB", "TB/s"):
        table.add_column(column, justify="right")
    for row in facts.rows:
        times = (f"{1e3 * t:.3f}" for t in (row.step_s, row.target_s, row.draft_s))
        floor = (f"{row.floor_bytes / 1e9:.2f}", f"{row.floor_bytes_per_s / 1e12:.2f}")
        table.add_row(str(row.batch), row.draft, str(row.context), *times, *floor)
    return table


def _rows(entry: ShapeCosts, traffic: EngineTraffic) -> Iterator[StepCostRow]:
    shape = entry.shape
    name = "none" if shape is None else shape_text(shape)
    if entry.host_proposal:
        name = f"suffix, {entry.draft_tokens}"
    tokens = entry.draft_tokens + 1
    for context, step_s, draft_s in zip(entry.contexts, entry.step_s, entry.draft_s, strict=True):
        work = Work(entry.batch * tokens, entry.batch, context)
        depth = 0 if entry.host_proposal else entry.draft_depth
        floor = traffic.of(entry.drafter).step(work, top_k=entry.draft_top_k, depth=depth)
        yield StepCostRow(
            batch=entry.batch,
            draft=name,
            tokens=tokens,
            context=context,
            step_s=step_s,
            target_s=step_s - draft_s,
            draft_s=draft_s,
            floor_bytes=floor.total,
        )
