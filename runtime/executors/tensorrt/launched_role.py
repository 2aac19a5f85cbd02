"""A role of a few ops, whose launches are replayed without an engine. Pure data.

Sampling, expansion, selection, acceptance and commits are one kernel or a few, so TensorRT would
have nothing to compile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from specbuild.runtime.engine_dir.strict_json import from_json, to_json
from specbuild.runtime.errors import OutdatedEngineError, SpecbuildError
from specbuild.runtime.executors.tensorrt.plugin_record import (
    FIELD_NAMES,
    PluginRecord,
    read_fields,
    write_fields,
)


@dataclass(frozen=True)
class RoleCall:
    """One op: the number of its record, and the ports or weights of its tensors, by name."""

    record: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class LaunchedRole:
    """Calls in order. Bucket i of every record is for profile i of the role."""

    records: tuple[PluginRecord, ...]
    cubins: Mapping[str, bytes]
    calls: tuple[RoleCall, ...]


@dataclass(frozen=True)
class _RoleFile:
    """The file: the records as the fields of plugins."""

    records: tuple[dict[str, str], ...]
    calls: tuple[RoleCall, ...]


def launched_role_bytes(role: LaunchedRole) -> bytes:
    """Return the role as a file."""
    fields = [write_fields(record, role.cubins) for record in role.records]
    texts = tuple({name: data.decode() for name, data in each.items()} for each in fields)
    return json.dumps(to_json(_RoleFile(texts, role.calls)), separators=(",", ":")).encode() + b"\n"


def read_launched_role(data: bytes, where: str, profiles: int) -> LaunchedRole:
    """Return the role in a file. Raises EngineFileError if it is invalid."""
    try:
        file = from_json(_RoleFile, json.loads(data), where)
    except (SpecbuildError, ValueError, RecursionError) as error:
        raise OutdatedEngineError(str(error)) from error
    records: list[PluginRecord] = []
    cubins: dict[str, bytes] = {}
    for texts in file.records:
        record, code = read_fields({n: t.encode() for n, t in texts.items() if n in FIELD_NAMES})
        records.append(record)
        cubins |= code
    problem = next(_problems(records, file.calls, profiles), None)
    if problem is not None:
        raise OutdatedEngineError(f"{where}: {problem}")
    return LaunchedRole(tuple(records), cubins, file.calls)


def _problems(
    records: Sequence[PluginRecord], calls: Sequence[RoleCall], profiles: int
) -> Iterator[str]:
    for record in records:
        if len(record.buckets) != profiles:
            yield f"{record.name} has launches for {len(record.buckets)} of {profiles} profiles"
    for call in calls:
        if not 0 <= call.record < len(records):
            yield f"a call names record {call.record} of {len(records)}"
        elif len(call.tensors) != len(records[call.record].tensors):
            yield f"a call of {records[call.record].name} has {len(call.tensors)} tensors"
