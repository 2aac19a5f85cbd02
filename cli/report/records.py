"""Records for a report: outputs of other commands with ``--json``."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specbuild.cli.bench.modes.report import ModesReport
from specbuild.cli.bench.pairs import BenchReport
from specbuild.cli.bench.report import SweepReport
from specbuild.cli.bench.server.report import LoadReport
from specbuild.cli.bench.suite.report import SuiteReport
from specbuild.cli.compare.report import Comparison
from specbuild.cli.estimate.report import EstimateReport
from specbuild.runtime.draft.cost_table import CostTable
from specbuild.runtime.engine_dir.strict_json import from_json, parsed
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.records import RunRecord

if TYPE_CHECKING:
    from specbuild.builder.verify.report import VerifyReport

Kind = TypeVar("Kind")

# The outputs of commands, except for VERIFY. The keys of a record determine its kind.
KINDS: dict[type[Any], str] = {
    SweepReport: "bench sweep",
    BenchReport: "bench",
    SuiteReport: "bench suite",
    LoadReport: "bench server",
    ModesReport: "bench modes",
    Comparison: "compare",
    EstimateReport: "estimate",
    RunRecord: "run",
    CostTable: "a table of step times",
}
VERIFY, _VERIFY_KEYS = "verify", {"rows", "losslessness", "passed"}
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Record:
    """A record: the file's name, its SHA-256, and the command that printed ``value``."""

    file: str
    sha256: str
    command: str
    value: Any


def read_records(files: Sequence[Path]) -> list[Record]:
    """Return every record of these files, in order; JSON lines have one record each.

    Raises SpecbuildError for a file that cannot be read or is none of ``KINDS``.
    """
    return [record for file in files for record in _read(file)]


def of_kind(records: Sequence[Record], kind: type[Kind]) -> list[tuple[Record, Kind]]:
    """Return the records whose value is a ``kind``."""
    return [(record, record.value) for record in records if isinstance(record.value, kind)]


def verifications(records: Sequence[Record]) -> list[tuple[Record, VerifyReport]]:
    """Return the records of ``verify``."""
    return [(record, record.value) for record in records if record.command == VERIFY]


def _read(file: Path) -> list[Record]:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        data = file.read_bytes()
        decoded = _decoded(data.decode())
    except (OSError, ValueError) as error:
        raise SpecbuildError(
            f"{file} cannot be read as JSON ({error}); give what a command printed with --json"
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    return [_record(file, digest, item) for item in decoded]


def _decoded(text: str) -> list[Any]:
    """Return one value, or one per line."""
    try:
        return [parsed(text)]
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
        return [parsed(line) for line in lines]


def _record(file: Path, digest: str, decoded: Any) -> Record:
    keys = set(decoded) if isinstance(decoded, dict) else set()
    if keys == _VERIFY_KEYS:
        # Imported here because it needs torch and transformers, which no other record does.
        from specbuild.builder.verify.report import VerifyReport

        value = from_json(VerifyReport, decoded, str(file))
        return Record(file.name, digest, VERIFY, value)
    for kind, command in KINDS.items():
        fields = dataclasses.fields(kind)
        needed = {field.name for field in fields if _is_needed(field)}
        if needed <= keys <= {field.name for field in fields}:
            return Record(file.name, digest, command, from_json(kind, decoded, str(file)))
    kinds = ", ".join((*KINDS.values(), VERIFY))
    raise SpecbuildError(f"{file} is no record that a report knows: it shows those of {kinds}")


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing
