"""The first section of a report: the result of the records, in sentences and bars of tokens/s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from specbuild.cli.bench.pairs import BenchReport, SetReport, set_title
from specbuild.cli.bench.report import SweepReport
from specbuild.cli.bench.server.report import LoadReport
from specbuild.cli.bench.suite.report import SuiteReport
from specbuild.cli.compare.report import Comparison
from specbuild.cli.report.charts import Bar, bars
from specbuild.cli.report.markup import Section, figure, paragraph
from specbuild.cli.report.records import Record, of_kind, verifications
from specbuild.runtime.records import RunRecord

# A ratio of medians within this distance of 1 is no difference.
_SAME_SPEED = 0.03
_MAX_BARS = 8


def result_section(records: Sequence[Record], *, has_draft: bool) -> Section:
    """Return the verdict of the records; without records, the command that measures the engine."""
    body = "".join(paragraph(text, kind="verdict") for text in _verdicts(records))
    body += "".join(_speed_bars(records))
    if not body:
        draft = "with and without the draft" if has_draft else "in tokens/s"
        body = paragraph(
            f"No speed was measured. specbuild bench pairs ENGINE --prompts FILE --json > "
            f"speed.json measures it {draft}; specbuild report ENGINE speed.json shows the result.",
            kind="none",
        )
    return Section("result", "Result", body)


def _verdicts(records: Sequence[Record]) -> Iterator[str]:
    for _, report in of_kind(records, BenchReport):
        yield from _of_pairs(report)
    for _, sweep in of_kind(records, SweepReport):
        yield from _of_sweep(sweep)
    runs = [run for _, run in of_kind(records, RunRecord)]
    if runs:
        speed = median(run.stats.output_tokens_per_s for run in runs)
        steps = median(run.stats.mean_acceptance_length for run in runs)
        yield f"{_count(len(runs), 'request')}: {speed:.1f} tokens/s, {steps:.2f} tokens/step."
    for _, load in of_kind(records, LoadReport):
        ttft = "" if load.ttft_s is None else f", TTFT {1e3 * load.ttft_s.p50:.0f} ms (median)"
        failed = f"; {_count(load.errors, 'request')} failed" if load.errors else ""
        yield (
            f"Server: {load.output_tokens_per_s:.0f} tokens/s for "
            f"{_count(load.requests, 'request')}{ttft}{failed}."
        )
    for _, suite in of_kind(records, SuiteReport):
        passed = sum(scenario.verdict == "passed" for scenario in suite.scenarios)
        yield f"Suite {suite.suite}: {passed} of {_count(len(suite.scenarios), 'scenario')} passed."
    for _, found in of_kind(records, Comparison):
        agreement = 100 * found.fidelity.agreement
        yield f"Compared with {found.reference.path}: {agreement:.2f} % same most likely token."
    for _, verification in verifications(records):
        verdict = "passed" if verification.passed else "failed"
        yield f"Verification against the checkpoint {verdict}."


def _of_pairs(report: BenchReport) -> Iterator[str]:
    pairs = sum(len(entry.pairs) for entry in report.sets)
    if report.ratio is None:
        speed = median(entry.without_draft_tokens_per_s for entry in report.sets)
        yield f"{speed:.1f} tokens/s without a draft (median of {_count(pairs, 'prompt')})."
        return
    if abs(report.ratio - 1) <= _SAME_SPEED:
        text = "The draft does not change the speed"
    elif report.ratio > 1:
        text = f"The draft makes decoding {report.ratio:.2f} times as fast"
    else:
        text = f"The draft makes decoding slower: {report.ratio:.2f} times the speed"
    same = sum(entry.same_output for entry in report.sets)
    outputs = "every output is" if same == pairs else f"{same} of {pairs} outputs are"
    yield f"{text} (median of {_count(pairs, 'pair')}); {outputs} the same as without it."


def _of_sweep(sweep: SweepReport) -> Iterator[str]:
    speeds = [(p.tokens_per_s, p) for p in sweep.phases if p.tokens_per_s and p.sweep != "prefill"]
    if speeds:
        best, phase = max(speeds, key=lambda found: found[0])
        sequences = _count(phase.batch, "sequence")
        yield f"Up to {best:.0f} tokens/s on {sweep.gpu}: {sequences}, {phase.name}."


def _speed_bars(records: Sequence[Record]) -> Iterator[str]:
    for record, report in of_kind(records, BenchReport):
        drawn = [bar for entry in report.sets for bar in _of_set(entry, report)]
        yield figure(bars(drawn), "Tokens/s, medians, greedy decoding.", source=record.file)
    for record, sweep in of_kind(records, SweepReport):
        drawn = [
            Bar(
                f"{phase.name}, {_count(phase.batch, 'sequence')}",
                phase.tokens_per_s,
                f"{phase.tokens_per_s:.0f} tokens/s",
            )
            for phase in sweep.phases
            if phase.tokens_per_s and phase.sweep != "prefill"
        ]
        if drawn:
            num_omitted = len(drawn) - _MAX_BARS
            more = f" {num_omitted} more are in the table of phases." if num_omitted > 0 else ""
            caption = f"Tokens/s of {sweep.engine} on {sweep.gpu}.{more}"
            yield figure(bars(drawn[:_MAX_BARS]), caption, source=record.file)


def _of_set(entry: SetReport, report: BenchReport) -> Iterator[Bar]:
    title = set_title(entry, report)
    plain, drafted = entry.without_draft_tokens_per_s, entry.with_draft_tokens_per_s
    yield Bar(f"without draft, {title}", plain, f"{plain:.1f}", colour="soft")
    if drafted is not None:
        gain = "" if entry.ratio is None else f" ({entry.ratio:.2f}×)"
        yield Bar(f"with draft, {title}", drafted, f"{drafted:.1f}{gain}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
