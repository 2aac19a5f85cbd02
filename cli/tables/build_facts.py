"""Facts of the build report: omitted kernels, and the types of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.quantized import QuantizedProducts
from specbuild.runtime.engine_dir.strict_json import from_json, parsed
from specbuild.runtime.errors import OutdatedEngineError, SpecbuildError

if TYPE_CHECKING:
    from rich.table import Table

REPORT_FILE = "build_report.json"
FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class PassFacts:
    """The number of changes of a pass in the graph of a role, and of the remaining nodes."""

    role: str
    name: str
    applied: int
    nodes: int


@dataclass(frozen=True)
class TacticFacts:
    """The number of launches with variants that run a measured one, with its file and GPU."""

    file: str
    device: str
    launches: int
    tuned_launches: int


@dataclass(frozen=True)
class BuildFacts:
    """Facts of a build. ``refused`` has the reasons why kernels and sizes were replaced.

    ``source_types`` counts the types of the tensors of a GGUF file or a quantized checkpoint, by
    their kind. ``quantization`` has the checkpoint's scheme and the handling of activations. With
    ``tactics`` None, kernels have their default variants.
    """

    refused: tuple[str, ...] = ()
    source_types: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    quantization: Mapping[str, str] = field(default_factory=dict)
    passes: tuple[PassFacts, ...] = ()
    tactics: TacticFacts | None = None

    def named(self) -> dict[str, object]:
        """Return the additions of ``inspect --json`` to the manifest; absent facts are omitted."""
        facts = {
            "refused_kernels": list(self.refused),
            "source_types": self.source_types,
            "quantization": self.quantization,
        }
        return {name: value for name, value in facts.items() if value}


def build_facts(engine: Path, manifest: Manifest) -> BuildFacts:
    """Return the facts of the build report, if it exists. Raises EngineFileError."""
    if REPORT_FILE not in manifest.files:
        return BuildFacts()
    data = bytes(read_file(engine, manifest, REPORT_FILE))
    try:
        report = parsed(data)
        cuda = report.get("cuda") or {}
        spilling = cuda.get("left_out", ())
        reasons = tuple(str(entry["reason"]) for entry in (*report.get("refused", ()), *spilling))
        types = {
            str(kind): {str(name): int(count) for name, count in counts.items()}
            for kind, counts in report.get("source_types", {}).items()
        }
        passes = tuple(_of(PassFacts, entry) for entry in report.get("passes", ()))
        tactics = cuda.get("tactics")
        quantization = {str(k): str(v) for k, v in (report.get("quantization") or {}).items()}
        return BuildFacts(
            reasons, types, quantization, passes, tactics and _of(TacticFacts, tactics)
        )
    except (ValueError, KeyError, TypeError, AttributeError, SpecbuildError) as error:
        raise OutdatedEngineError(
            f"{engine}: {REPORT_FILE} is no build report ({error!r})"
        ) from error


def _of(kind: type[FactsT], entry: Mapping[str, object]) -> FactsT:
    """Return a dataclass of some of an object's keys."""
    values = {f.name: entry[f.name] for f in fields(kind)}  # type: ignore[arg-type]
    return from_json(kind, values, REPORT_FILE)


def build_tables(manifest: Manifest, built: BuildFacts) -> Iterator[Table]:
    """Return the types of a GGUF file, the forms of quantized weights, and the omitted kernels."""
    if built.source_types:
        yield source_types_table(built)
    if manifest.quantized is not None:
        yield quantized_table(manifest.quantized)
    if built.refused:
        yield refused_table(built.refused)


def source_types_table(built: BuildFacts) -> Table:
    """Return the scheme, and a row for each kind of tensor with its types and their counts."""
    from specbuild.cli.terminal.console import fact_table

    table = fact_table("tensor types of the checkpoint")
    for name, text in built.quantization.items():
        table.add_row(name, text)
    for kind, counts in built.source_types.items():
        table.add_row(kind, ", ".join(f"{name} × {count}" for name, count in counts.items()))
    return table


def quantized_table(quantized: QuantizedProducts) -> Table:
    """Return a row for each type of quantized weights: their number and storage."""
    from specbuild.cli.terminal.console import fact_table

    table = fact_table(f"quantized weights, {quantized.math} math")
    for form in quantized.forms:
        stored = f"{form.bits} bits, a scale for {form.block} values"
        if form.dequantized is not None:
            to = "bf16" if quantized.math == "bf16" else "fp32"
            stored = f"dequantized to {to}: {form.dequantized}"
        table.add_row(f"{form.type} × {form.weights}", stored)
    return table


def refused_table(reasons: tuple[str, ...]) -> Table:
    """Return a row for each reason."""
    from specbuild.cli.terminal.console import fact_table

    table = fact_table("omitted kernels")
    for reason in reasons:
        table.add_row("kernel", reason)
    return table
