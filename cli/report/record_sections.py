"""The sections of a report from records; without a record, a section names its command."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from specbuild.cli.anatomy.groups import folded
from specbuild.cli.anatomy.tables import step_title
from specbuild.cli.bench.modes.report import ModesReport
from specbuild.cli.bench.modes.show import modes_tables
from specbuild.cli.bench.pair_table import bench_table
from specbuild.cli.bench.pairs import BenchReport
from specbuild.cli.bench.report import LayerLaunch, Phase, SweepReport
from specbuild.cli.bench.server.report import LoadReport
from specbuild.cli.bench.server.show import load_table, load_text
from specbuild.cli.bench.suite.report import SuiteReport
from specbuild.cli.bench.suite.table import suite_table
from specbuild.cli.bench.table import sweep_tables
from specbuild.cli.commands.verify import verify_tables
from specbuild.cli.compare.report import Comparison
from specbuild.cli.estimate.report import EstimateReport
from specbuild.cli.estimate.show import estimate_tables, estimate_text
from specbuild.cli.report.axis import axis_of
from specbuild.cli.report.charts import Bar, Line, bars, lines, row
from specbuild.cli.report.markup import Section, converted, figure, paragraph
from specbuild.cli.report.records import Record, of_kind, verifications
from specbuild.cli.tables.comparison_table import comparison_tables
from specbuild.cli.tables.run_table import run_table
from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.measure.anatomy import StepAnatomy
from specbuild.runtime.records import RunRecord

# The number of steps in the chart; the table has all of them.
_MAX_BARS = 12


def roofline_section(records: Sequence[Record]) -> Section:
    """Return measured phases and the bytes that each must read."""
    body = "".join(
        _roofline(record, sweep) for record, sweep in of_kind(records, SweepReport) if sweep.phases
    )
    return _filled("roofline", "Roofline", body, "bench sweep ENGINE decode,verify,prefill")


def timeline_section(records: Sequence[Record]) -> Section:
    """Return the launches of one layer, in order."""
    body = ""
    for record, sweep in of_kind(records, SweepReport):
        steps: dict[tuple[str, int], list[LayerLaunch]] = defaultdict(list)
        for launch in sweep.timeline:
            steps[launch.step, launch.batch].append(launch)
        for (step, batch), launches in steps.items():
            caption = (
                f"Layer {launches[0].layer} of a step of {batch} with {step} ({sweep.engine} on "
                f"{sweep.gpu}): time added by each launch."
            )
            drawn = [
                Bar(
                    f"{each_launch.op} ({each_launch.kernel})",
                    each_launch.added_s,
                    f"{1e6 * each_launch.added_s:.2f} µs",
                )
                for each_launch in launches
            ]
            body += figure(row(drawn), caption, source=record.file)
        body += "".join(_layers(record, sweep, step) for step in sweep.anatomies)
    return _filled("timeline", "A layer's launches", body, "bench sweep ENGINE anatomy")


def _layers(record: Record, sweep: SweepReport, step: StepAnatomy) -> str:
    """Return a layer of each kind, by the mean time that its launches add to the step."""
    drawn = ""
    for group in folded(step):
        if not group.is_layers:
            continue
        launches = [
            Bar(
                f"{each_launch.launch.op} ({each_launch.launch.kernel})",
                added_s,
                f"{1e6 * added_s:.2f} µs",
            )
            for each_launch in group.rows
            if (added_s := each_launch.added_s) is not None
        ]
        engine = f"{sweep.engine} on {sweep.gpu}"
        caption = f"{step_title(step)}; {group.title} ({engine}): mean time added by each launch."
        drawn += figure(row(launches), caption, source=record.file)
    return drawn


def speed_section(records: Sequence[Record]) -> Section:
    """Return sweeps, prompts, suites and servers, as their commands show them."""
    body = ""
    for record, sweep in of_kind(records, SweepReport):
        body += figure(
            converted(sweep_tables(sweep)), f"{sweep.engine} on {sweep.gpu}.", source=record.file
        )
    for record, report in of_kind(records, BenchReport):
        caption = f"{report.max_new_tokens} greedy tokens; draft: {report.draft}."
        body += figure(converted(bench_table(report)), caption, source=record.file)
    for record, suite in of_kind(records, SuiteReport):
        body += figure(converted(suite_table(suite)), f"On {suite.device}.", source=record.file)
    for record, load in of_kind(records, LoadReport):
        body += figure(converted(load_table(load)), f"{load_text(load)}.", source=record.file)
    for record, modes in of_kind(records, ModesReport):
        caption = f"Modes of {modes.model} on {modes.device}."
        body += figure(converted(modes_tables(modes)), caption, source=record.file)
    for record, estimate in of_kind(records, EstimateReport):
        body += figure(
            converted(estimate_tables(estimate)), f"{estimate_text(estimate)}.", source=record.file
        )
    runs = of_kind(records, RunRecord)
    for file in dict.fromkeys(record.file for record, _ in runs):
        table = run_table([run for record, run in runs if record.file == file])
        body += figure(converted(table), "", source=file)
    return _filled("speed", "Speed", body, "bench pairs ENGINE --prompts FILE")


def cost_curves(records: Sequence[Record]) -> list[str]:
    """Return the cost tables of machines without step programs, as curves."""
    found = []
    for record, costs in of_kind(records, CostTable):
        target = Line(
            "without draft",
            [(float(n), 1e3 * s) for n, s in zip(costs.target_rows, costs.target_s, strict=True)],
        )
        chains = [
            (float(depth + 1), 1e3 * (costs.step_s(depth + 1) + costs.chain_s(depth)))
            for depth in range(1, len(costs.draft_s) + 1)
        ]
        drawn = [target, Line("with a chain of this many rows", chains)]
        points = [point for line in drawn for point in line.points]
        across = axis_of("rows per step", [a for a, _ in points])
        up = axis_of("ms/step", [b for _, b in points])
        sure = "" if costs.sure else " Other processes disturbed these measurements."
        found.append(figure(lines(drawn, across, up), f"One sequence.{sure}", source=record.file))
    return found


def costs_section(own_costs: Sequence[str], records: Sequence[Record], *, on_gpu: bool) -> Section:
    """Return measured costs; ``own_costs`` is the table of the engine itself."""
    body = "".join([*own_costs, *cost_curves(records)])
    remedy = (
        "specbuild tune measures them"
        if on_gpu
        else "pass the cost-*.json file that a run writes to the cache directory"
    )
    lacking = f"No step times: {remedy}."
    return Section("costs", "Step times", body or paragraph(lacking, kind="none"))


def acceptance_section(records: Sequence[Record]) -> Section:
    """Return the acceptance rates of the first, second, … draft token of a step."""
    body = ""
    for record, report in of_kind(records, BenchReport):
        lines_of = [Line(s.name, _per_position(s.acceptance_histogram)) for s in report.sets]
        body += _acceptance([line for line in lines_of if line.points], record)
    runs: dict[str, list[tuple[Record, RunRecord]]] = defaultdict(list)
    for record, run in of_kind(records, RunRecord):
        runs[record.file].append((record, run))
    for found in runs.values():
        histograms = [run.stats.acceptance_histogram for _, run in found]
        summed = [sum(column) for column in zip_longest(*histograms, fillvalue=0)]
        points = _per_position(summed)
        body += _acceptance([Line("all requests", points)] if points else [], found[0][0])
    return _filled("acceptance", "Acceptance", body, "bench pairs ENGINE --prompts FILE")


def fidelity_section(records: Sequence[Record]) -> Section:
    """Return the comparison with another engine of the model, and with the checkpoint."""
    body = ""
    for record, found in of_kind(records, Comparison):
        points = [((b.first + b.last) / 2, b.divergence) for b in found.by_position]
        drawn = lines(
            [Line("KL divergence", points)],
            axis_of("position (tokens)", [a for a, _ in points]),
            axis_of("nats/token", [b for _, b in points]),
        )
        sides = f"{found.other.path} compared with {found.reference.path}."
        body += figure(converted(comparison_tables(found)), sides, source=record.file)
        body += figure(drawn, "", source=record.file)
    for record, report in verifications(records):
        caption = "Reference: Hugging Face transformers and PyTorch."
        body += figure(converted(verify_tables(report)), caption, source=record.file)
    return _filled("fidelity", "Fidelity", body, "compare ENGINE OTHER --text FILE")


def _roofline(record: Record, sweep: SweepReport) -> str:
    phases = [phase for phase in sweep.phases if phase.operations_per_s and phase.bytes_total]
    where = f"{sweep.engine} on {sweep.gpu}"
    body = ""
    if phases:
        body += figure(_points(sweep, phases), f"{where}; both axes are logarithmic.",
                       source=record.file)  # fmt: skip
    if sweep.ceiling_bytes_per_s is not None and phases:
        ceiling = sweep.ceiling_bytes_per_s
        drawn = [
            Bar(
                f"{p.sweep}: {p.name}, batch {p.batch}, context {p.context:.0f}",
                p.time_s,
                f"{1e6 * p.time_s:.0f} µs",
                floor=p.bytes_total / ceiling,
            )
            for p in phases[:_MAX_BARS]
        ]
        omitted = len(phases) - len(drawn)
        more = f" {omitted} more are in the table of phases." if omitted else ""
        caption = (
            f"Measured times; dashes mark the time of a streaming read of the same bytes.{more}"
        )
        body += figure(bars(drawn), caption, source=record.file)
    return body


def _points(sweep: SweepReport, phases: Sequence[Phase]) -> str:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for phase in phases:
        intensity = phase.operations / phase.bytes_total
        points[phase.sweep].append((intensity, (phase.operations_per_s or 0.0) / 1e12))
    across = [a for found in points.values() for a, _ in found]
    up = [b for found in points.values() for _, b in found]
    drawn = [Line(name, found, joined=False) for name, found in points.items()]
    if sweep.ceiling_bytes_per_s is not None:
        ends = (min(across), max(across))
        roof = [(end, sweep.ceiling_bytes_per_s * end / 1e12) for end in ends]
        up += [b for _, b in roof]
        drawn.append(Line(f"streaming read, {sweep.ceiling_bytes_per_s / 1e12:.2f} TB/s", roof))
    return lines(
        drawn,
        axis_of("operations per byte read", across, logarithmic=True),
        axis_of("TFLOP/s", up, logarithmic=True),
    )


def _per_position(histogram: Sequence[int]) -> list[tuple[float, float]]:
    """Return the share of steps that accept more than i draft tokens, by position from 1."""
    steps = sum(histogram)
    return [(float(i), sum(histogram[i:]) / steps) for i in range(1, len(histogram)) if steps]


def _acceptance(drawn: Sequence[Line], record: Record) -> str:
    if not drawn:
        return ""
    across = axis_of("draft position", [a for line in drawn for a, _ in line.points])
    up = axis_of("share of steps", [1.0])
    caption = "Share of steps that accepted the draft token at this position."
    return figure(lines(drawn, across, up), caption, source=record.file)


def _filled(anchor: str, title: str, body: str, command: str) -> Section:
    """Return the section, or the command whose record would fill it."""
    lacking = f"No record. Create one with: specbuild {command} --json > FILE"
    return Section(anchor, title, body or paragraph(lacking, kind="none"))
