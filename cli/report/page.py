"""The page: its sections, with an embedded style sheet and no external resources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specbuild.cli.bench.report import SweepReport
from specbuild.cli.report import engine_sections, record_sections
from specbuild.cli.report.engine_facts import EngineFacts
from specbuild.cli.report.markup import Section, escaped
from specbuild.cli.report.records import Record, of_kind
from specbuild.cli.report.result_section import result_section
from specbuild.cli.terminal.console import size_text
from specbuild.runtime.engine_dir.manifest import Manifest

_STYLE = Path(__file__).with_name("page.css")
# Nothing may be loaded and no script may run, whatever a record contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(facts: EngineFacts, records: list[Record]) -> str:
    """Return the document; the same engine and records give the same bytes."""
    own_costs = engine_sections.costs_figures(facts.costs, facts.manifest.draft_default)
    sections = [
        result_section(records, has_draft=bool(facts.manifest.drafters)),
        engine_sections.geometry_section(facts),
        engine_sections.memory_section(facts),
        engine_sections.kernels_section(facts),
        record_sections.costs_section(own_costs, records, on_gpu=facts.plan is not None),
        *_gpu_sections(facts, records),
        record_sections.speed_section(records),
        *_draft_sections(facts, records),
        record_sections.fidelity_section(records),
        engine_sections.provenance_section(facts, records),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escaped(facts.name)}</title>
<style>
{_STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<header>
<h1>{escaped(facts.name)}</h1>
<p>{escaped(_summary(facts.manifest))}</p>
{_facts(facts)}</header>
{_contents(sections)}<main>
{"".join(map(_section, sections))}</main>
</body>
</html>
"""


def _draft_sections(facts: EngineFacts, records: list[Record]) -> list[Section]:
    return [record_sections.acceptance_section(records)] if facts.manifest.drafters else []


def _gpu_sections(facts: EngineFacts, records: list[Record]) -> list[Section]:
    """Return the sections that only GPU measurements fill; for other engines only with a record."""
    sections = [
        record_sections.roofline_section(records),
        record_sections.timeline_section(records),
    ]
    return sections if facts.plan is not None or of_kind(records, SweepReport) else []


def _summary(manifest: Manifest) -> str:
    names = [model.geometry.architecture for model in manifest.models]
    names += [f"{drafter.kind} decoding" for drafter in manifest.host_drafters]
    drafts = " and ".join(names)
    draft = f"with {drafts}" if drafts else "without a draft"
    device = "" if manifest.device == manifest.backend else f" ({manifest.device})"
    return (
        f"{manifest.target.model_type}, {draft}, for {manifest.backend}{device}; built "
        f"by specbuild {manifest.specbuild_version}"
    )


def _facts(facts: EngineFacts) -> str:
    memory, limits = facts.memory, facts.manifest.limits
    titles = {
        "layers": f"{facts.manifest.target.layers}",
        "weights": size_text(memory.weights_bytes),
        "caches": size_text(sum(memory.kv_bytes.values())),
        "max sequence length": f"{limits.max_seq_len} tokens",
        "max batch size": f"{limits.max_batch_size}",
    }
    items = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(text)}</dd></div>"
        for name, text in titles.items()
    )
    return f'<dl class="facts">{items}</dl>\n'


def _contents(sections: Sequence[Section]) -> str:
    links = "".join(f'<a href="#{s.anchor}">{escaped(s.title)}</a>' for s in sections)
    return f"<nav>{links}</nav>\n"


def _section(section: Section) -> str:
    title = f"<h2>{escaped(section.title)}</h2>"
    return f'<section id="{section.anchor}">\n{title}\n{section.body}</section>\n'
