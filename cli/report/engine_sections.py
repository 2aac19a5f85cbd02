"""The sections of a report from an engine's own files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import version

from specbuild.cli.report.axis import axis_of
from specbuild.cli.report.charts import Bar, Line, bars, lines
from specbuild.cli.report.engine_facts import EngineFacts
from specbuild.cli.report.markup import Section, converted, figure, paragraph, table
from specbuild.cli.report.records import Record
from specbuild.cli.tables.build_facts import (
    REPORT_FILE,
    quantized_table,
    refused_table,
    source_types_table,
)
from specbuild.cli.tables.cache_tables import cache_tables
from specbuild.cli.tables.engine_table import (
    draft_table,
    engine_table,
    memory_table,
    parts_table,
    roles_table,
    target_table,
)
from specbuild.cli.tables.plan_tables import plan_tables
from specbuild.cli.tables.step_cost_table import StepCostFacts, step_cost_table
from specbuild.cli.tables.tensorrt_tables import tensorrt_tables
from specbuild.cli.terminal.console import size_text
from specbuild.plugins_cuda.dispatch import Table
from specbuild.plugins_cuda.mla_attention import dispatch as latents
from specbuild.plugins_cuda.paged_tree_attention import dispatch as attention
from specbuild.runtime.draft.device_costs import STEP_COSTS_FILE
from specbuild.runtime.engine_dir.manifest import MANIFEST_FILE, DraftShape

# The rules that select among several kernels, by the op's folder.
_DISPATCH: dict[str, Table[object]] = {
    "paged_tree_attention": attention.TABLE,  # type: ignore[dict-item]
    "mla_attention": latents.TABLE,  # type: ignore[dict-item]
}
_CURVES = 6


def geometry_section(facts: EngineFacts) -> Section:
    """Return the engine's limits, target and draft."""
    manifest = facts.manifest
    engine_tables = [engine_table(manifest), target_table(manifest.target)]
    engine_tables += [draft_table(model.geometry) for model in manifest.models]
    body = "".join(figure(converted(each), "", source=MANIFEST_FILE) for each in engine_tables)
    return Section("geometry", "Geometry", body)


def memory_section(facts: EngineFacts) -> Section:
    """Return files, and the memory of weights, caches and outputs."""
    manifest, memory = facts.manifest, facts.memory
    parts = {"weights": memory.weights_bytes}
    parts |= {f"KV cache, {group}": size for group, size in memory.kv_bytes.items()}
    parts |= {f"states, {group}": size for group, size in memory.state_bytes.items()}
    parts["outputs"] = memory.outputs_bytes
    drawn = bars([Bar(name, float(size), size_text(size)) for name, size in parts.items()])
    caption = f"{size_text(memory.total_bytes)} in total, predicted."
    tables = (
        memory_table(memory),
        cache_tables(manifest, memory, facts.capacity),
        parts_table(manifest),
    )
    body = figure(drawn, caption, source=MANIFEST_FILE)
    body += "".join(figure(converted(each), "", source=MANIFEST_FILE) for each in tables)
    return Section("memory", "Sizes and memory", body)


def kernels_section(facts: EngineFacts) -> Section:
    """Return the kernels, and the reasons for their selection."""
    title = "Graphs" if facts.plan is None else "Kernels"
    return Section("kernels", title, "".join(_kernels(facts)))


def _kernels(facts: EngineFacts) -> Iterator[str]:
    manifest, build = facts.manifest, facts.build
    if facts.plan is not None:
        yield figure(converted(plan_tables(facts.plan)), "", source="plan.json")
        reasons = list(_reasons(kernel.name for kernel in facts.plan.kernels))
        if reasons:
            title = "selection of attention kernels"
            yield figure(table(title, ("kernel", "condition", "reason"), reasons), "",
                         source="dispatch tables of the ops")  # fmt: skip
    if build.tactics is not None:
        tactics = build.tactics
        rows_text = (
            f"{tactics.tuned_launches} of {tactics.launches} launches with variants use the one "
            f"that was fastest on {tactics.device} ({tactics.file})."
        )
        yield figure(paragraph(rows_text), "", source=REPORT_FILE)
    if manifest.tensorrt is not None:
        drawn = converted(tensorrt_tables(manifest, manifest.tensorrt))
        yield figure(drawn, "", source=MANIFEST_FILE)
    if build.refused:
        yield figure(converted(refused_table(build.refused)), "", source=REPORT_FILE)
    if build.source_types:
        yield figure(converted(source_types_table(build)), "", source=REPORT_FILE)
    if manifest.quantized is not None:
        yield figure(converted(quantized_table(manifest.quantized)), "", source=MANIFEST_FILE)
    if manifest.roles:
        yield figure(converted(roles_table(manifest)), "", source=MANIFEST_FILE)
    if build.passes:
        rows = [(p.role, p.name, str(p.applied), str(p.nodes)) for p in build.passes if p.applied]
        headings = ("graph", "pass", "applied", "remaining nodes")
        yield figure(table("graph passes", headings, rows), "", source=REPORT_FILE)


def _reasons(kernels: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Return the rules of ops with several kernels that name one of these."""
    files = {name.partition(":")[0] for name in kernels}
    for op, rules in _DISPATCH.items():
        for rule in rules:
            for file in sorted(f"{op}/{kernel}" for kernel in rule.kernels):
                if file in files:
                    rows_text = {"rows": rule.rows, "context": rule.context, "width": rule.width,
                            "pages": rule.pages}  # fmt: skip
                    runs_for = "; ".join(
                        f"{name}: {text}" for name, text in rows_text.items() if text
                    )
                    yield file, runs_for or "all other cases", rule.why


def costs_figures(costs: StepCostFacts | None, default: DraftShape | None) -> list[str]:
    """Return measured steps without a draft and with the default one, by context, and a table.

    With several draft models there is one curve for each.
    """
    if costs is None:
        return []
    draft_names = ["none"]
    if default is not None:
        draft_names.append(f"{default.draft_top_k}x{default.draft_depth}x{default.draft_tokens}")
    measured = dict.fromkeys(row.draft for row in costs.rows)
    drawn = [
        figure(_cost_curves(costs, draft), _cost_caption(draft), source=STEP_COSTS_FILE)
        for shape in draft_names
        for draft in measured
        if draft.partition(" of ")[0] == shape
    ]
    return [*drawn, figure(converted(step_cost_table(costs)), "", source=STEP_COSTS_FILE)]


def _cost_caption(draft: str) -> str:
    return "Steps without a draft." if draft == "none" else f"Steps with the draft {draft}."


def _cost_curves(costs: StepCostFacts, draft: str) -> str:
    points: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in costs.rows:
        if row.draft == draft:
            points[row.batch].append((float(row.context), 1e3 * row.step_s))
    batches = sorted(points)
    # If there are more batches than colours, some between the first and the last are shown.
    if len(batches) > _CURVES:
        last = len(batches) - 1
        batches = [batches[round(i * last / (_CURVES - 1))] for i in range(_CURVES)]
    drawn = [Line(f"batch {batch}", points[batch]) for batch in batches]
    across = axis_of("tokens per sequence", [a for line in drawn for a, _ in line.points])
    up = axis_of("ms/step", [b for line in drawn for _, b in line.points])
    return lines(drawn, across, up)


def provenance_section(facts: EngineFacts, records: list[Record]) -> Section:
    """Return the sources of the engine and of every record."""
    manifest = facts.manifest
    rows = [
        ("engine", facts.name),
        ("built by", f"specbuild {manifest.specbuild_version}"),
        ("format", str(manifest.format_version)),
        ("features", ", ".join(manifest.features) or "none"),
        ("manifest, SHA-256", facts.digest),
        ("signature", facts.signature),
        ("this page", f"specbuild {version('specbuild')}; weights were not read"),
    ]
    if manifest.tensorrt is not None:
        rows.append((manifest.tensorrt.library, manifest.tensorrt.version))
    if facts.build.tactics is not None:
        rows.append(("tactics", f"{facts.build.tactics.file}, {facts.build.tactics.device}"))
    body = figure(table("", (), rows), "", source=MANIFEST_FILE)
    if records:
        sources = dict.fromkeys((r.file, r.command, r.sha256) for r in records)
        body += table("records", ("file", "written by specbuild", "SHA-256"), sources)
    files = [(name, f"{f.bytes}", f.xxh3_128) for name, f in manifest.files.items()]
    body += figure(table("files", ("file", "bytes", "XXH3-128"), files), "", source=MANIFEST_FILE)
    return Section("provenance", "Provenance", body)
