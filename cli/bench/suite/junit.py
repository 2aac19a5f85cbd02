"""A suite's report as JUnit XML for continuous integration."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from specbuild.cli.bench.suite.report import ScenarioReport, SuiteReport


def write_junit(report: SuiteReport, file: Path) -> None:
    """Return one test case per scenario, failed if it was missed."""
    verdicts = [scenario.verdict for scenario in report.scenarios]
    suite = ElementTree.Element(
        "testsuite",
        name=report.suite,
        tests=str(len(verdicts)),
        failures=str(verdicts.count("missed")),
        skipped=str(verdicts.count("skipped")),
        errors="0",
        time=f"{sum(scenario.seconds for scenario in report.scenarios):.3f}",
    )
    for scenario in report.scenarios:
        suite.append(_case(scenario, report))
    tree = ElementTree.ElementTree(suite)
    ElementTree.indent(tree)
    tree.write(file, encoding="utf-8", xml_declaration=True)


def _case(scenario: ScenarioReport, report: SuiteReport) -> ElementTree.Element:
    case = ElementTree.Element(
        "testcase",
        classname=f"{report.suite} on {report.device}",
        name=scenario.name,
        time=f"{scenario.seconds:.3f}",
    )
    message = "; ".join(scenario.reasons)
    if scenario.verdict == "missed":
        ElementTree.SubElement(case, "failure", message=message)
    elif scenario.verdict == "skipped":
        ElementTree.SubElement(case, "skipped", message=message)
    output = ElementTree.SubElement(case, "system-out")
    speeds = ", ".join(f"{attempt.tokens_per_s:.1f}" for attempt in scenario.attempts)
    output.text = f"tokens/s: {speeds or 'not measured'}"
    return case
