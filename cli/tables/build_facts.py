"""What the build report says of an engine: the kernels that gave way to others, GGUF's types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.quantized import QuantizedProducts
from specbuild.runtime.engine_dir.strict_json import from_json, parsed
from specbuild.runtime.errors import EngineFileError, SpecbuildError

if TYPE_CHECKING:
    from rich.table import Table

REPORT_FILE = "build_report.json"
FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class PassFacts:
    """How often a pass changed the graph of a role, and the nodes that it left."""

    role: str
    name: str
    applied: int
    nodes: int


@dataclass(frozen=True)
class TacticFacts:
    """How many launches with variants run one that was measured, by which file, on which GPU."""

    file: str
    device: str
    launches: int
    tuned_launches: int


@dataclass(frozen=True)
class BuildFacts:
    """``refused`` are the reasons why kernels and sizes gave way to others.

    ``source_types`` counts the types of the tensors of a GGUF file or a quantized checkpoint, by
    their kind. ``quantization`` has the checkpoint's scheme and what becomes of activations.
    ``tactics`` None: kernels have their default variants.
    """

    refused: tuple[str, ...] = ()
    source_types: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    quantization: Mapping[str, str] = field(default_factory=dict)
    passes: tuple[PassFacts, ...] = ()
    tactics: TacticFacts | None = None

    def named(self) -> dict[str, object]:
        """Return what ``inspect --json`` adds to the manifest; absent facts are left out."""
        facts = {
            "refused_kernels": list(self.refused),
            "source_types": self.source_types,
            "quantization": self.quantization,
        }
        return {name: value for name, value in facts.items() if value}


def build_facts(engine: Path, manifest: Manifest) -> BuildFacts:
    """What the build report says, nothing where there is none. Raises EngineFileError."""
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
        raise EngineFileError(
            f"{engine}: {REPORT_FILE} is no build report ({error!r}); build the engine again"
        ) from error


def _of(kind: type[FactsT], entry: Mapping[str, object]) -> FactsT:
    """A dataclass of some of an object's keys."""
    values = {f.name: entry[f.name] for f in fields(kind)}  # type: ignore[arg-type]
    return from_json(kind, values, REPORT_FILE)


def build_tables(manifest: Manifest, built: BuildFacts) -> Iterator[Table]:
    """The types of a GGUF file, the forms of quantized weights, and the omitted kernels."""
    if built.source_types:
        yield source_types_table(built)
    if manifest.quantized is not None:
        yield quantized_table(manifest.quantized)
    if built.refused:
        yield refused_table(built.refused)


def source_types_table(built: BuildFacts) -> Table:
    """The scheme, and a row for each kind of tensor with its types and how many have each."""
    from specbuild.cli.terminal.console import fact_table

    table = fact_table("tensor types of the checkpoint")
    for name, text in built.quantization.items():
        table.add_row(name, text)
    for kind, counts in built.source_types.items():
        table.add_row(kind, ", ".join(f"{name} × {count}" for name, count in counts.items()))
    return table


def quantized_table(quantized: QuantizedProducts) -> Table:
    """A row for each type of quantized weights: how many there are, and how they are stored."""
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
    """A row for each reason."""
    from specbuild.cli.terminal.console import fact_table

    table = fact_table("omitted kernels")
    for reason in reasons:
        table.add_row("kernel", reason)
    return table
