"""Proves that two builds of specbuild write the same engines: graphs, machine code, weights, plans.

It is for changes that only move code. ``benchmarks/build_engines.py`` builds a matrix of engines
with the version before and with the version after; this script then holds one against the other:

- every file is the same byte for byte, but for those named below;
- cubins are compared by content, their names are digests of kernel sources: the same set of
  contents, and every kernel that a launch names has the same code, entry, registers and memory;
- ``plan.json`` and its programs are the same but for the names of programs, buffers, ops and
  kernels and the traffic that ops declare: so are grids, blocks, shared memory, arguments, offsets;
- so are the records that stand for TensorRT's engines (``tensorrt_stand_in.py``) and the
  ``.launches.json`` beside them; engines of the real TensorRT differ from build to build;
- how ``manifest.json`` and ``build_report.json`` differ is printed, and is no failure.
"""

from __future__ import annotations

import argparse
import base64
import filecmp
import hashlib
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = """examples:
  python benchmarks/compare_engines.py before/example-cuda-draft after/example-cuda-draft
  python benchmarks/compare_engines.py before after
  python benchmarks/compare_engines.py before after --allow plan.ports.name --most 100

A field is named by the kind of its document (plan, program, launches, engine) and the keys that
lead to it, without positions in lists; what lies below it is left out too. Exit code: 0 where
nothing differs, 1 where something does, 2 where there is nothing to compare."""

# Names, and what ops say of their traffic: all that may differ within plans.
LEFT_OUT = (
    "plan.buffers.name",
    "plan.kernels.name",
    "plan.programs.name",
    "plan.programs.file",
    "program.ops.op",
    "program.ops.bytes",
    "program.ops.operations",
    "program.ops.traffic",
    "launches.records.record.kernels.name",
    "engine.nodes.attributes.record.kernels.name",
)
KINDS = ("plan", "program", "launches", "engine")
MANIFEST, REPORT, PLAN = "manifest.json", "build_report.json", "plan.json"
TOLD, UNREAD = (MANIFEST, REPORT), "manifest.sha256"
_RECORD_HEAD = 64  # bytes in front of a record, as in front of a TensorRT-RTX engine
ABSENT = object()
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Difference:
    """Where two documents differ, and what stands there; ``ABSENT`` where nothing does."""

    path: Place
    old: Any
    new: Any

    @property
    def field(self) -> str:
        """The place by its keys alone."""
        return ".".join(part for part in self.path if isinstance(part, str))

    def __str__(self) -> str:
        """The whole place: ``plan.kernels[3].registers: 18 → 20``."""
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path)
        return f"{where[1:]}: {_short(self.old)} → {_short(self.new)}"


def _short(value: Any) -> str:
    text = "absent" if value is ABSENT else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def differences(old: Any, new: Any, path: Place) -> Iterator[Difference]:
    """Every place where two JSON values differ; lists of unlike lengths as far as both go."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield Difference((*path, "length"), len(old), len(new))
        for index, pair in enumerate(zip(old, new, strict=False)):
            yield from differences(*pair, (*path, index))
    elif type(old) is not type(new) or old != new:  # 1, 1.0 and true are three things
        yield Difference(path, old, new)


@dataclass
class Comparison:
    """What was compared of one engine, what differs, and what may."""

    name: str
    left_out: tuple[str, ...]
    wrong: list[str] = field(default_factory=list)
    told: list[Difference] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def hold(self, old: Any, new: Any, kind: str, file: str) -> None:
        """Compares two documents, but for the fields that are left out."""
        for found in differences(old, new, (kind,)):
            if not any(f"{found.field}.".startswith(f"{name}.") for name in self.left_out):
                self.wrong.append(f"{file}: {found}")


class EngineFiles:
    """The files of an engine directory by what they are; machine code by its digest."""

    def __init__(self, folder: Path) -> None:
        files = (path for path in folder.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix() for path in files}
        cubins = sorted(name for name in names if name.endswith(".cubin"))
        self.codes = {name: _digest((folder / name).read_bytes()) for name in cubins}
        self.plan: dict[str, Any] = {"kernels": [], "programs": []}
        if PLAN in names:
            self.plan = json.loads((folder / PLAN).read_bytes())
            _name_code(self.plan["kernels"], self.codes)
        self.programs = [folder / entry["file"] for entry in self.plan["programs"]]
        listed = {entry["file"] for entry in self.plan["programs"]}
        # What is compared byte for byte.
        self.others = names - set(cubins) - listed - {PLAN, UNREAD, *TOLD}


def _name_code(kernels: Iterable[dict[str, Any]], codes: dict[str, str]) -> None:
    """Puts the digest of its machine code in the place of each kernel's cubin file."""
    for kernel in kernels:
        if kernel["cubin"] not in codes:
            raise ValueError(f"kernel {kernel['name']} is in {kernel['cubin']}, which is missing")
        kernel["cubin"] = codes[kernel["cubin"]]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _opened(value: Any) -> Any:
    """A document with the fields of plugins read: their description, and cubins by content."""
    if isinstance(value, list):
        return [_opened(item) for item in value]
    if not isinstance(value, dict):
        return value
    rest = {key: _opened(item) for key, item in value.items()}
    if not {"description", "cubins"} <= value.keys():
        return rest
    record, packed = json.loads(rest.pop("description")), json.loads(rest.pop("cubins"))
    codes = {n: _digest(zlib.decompress(base64.b85decode(text))) for n, text in packed.items()}
    _name_code(record["kernels"], codes)
    return rest | {"record": record, "codes": sorted(set(codes.values()))}


def _document(path: Path) -> tuple[str, Any] | None:
    """A file that is no plan but may differ in names: its kind and its content."""
    if path.name.endswith(".launches.json"):
        return "launches", _opened(json.loads(path.read_bytes()))
    if path.suffix == ".engine":
        record = path.read_bytes()[_RECORD_HEAD:]
        if record.startswith(b"{"):
            return "engine", _opened(json.loads(record))
    return None


def compare_engine(name: str, old: Path, new: Path, left_out: tuple[str, ...]) -> Comparison:
    """Holds one engine directory against another."""
    if not (new / MANIFEST).is_file():
        raise ValueError(f"{new} is not an engine")
    result = Comparison(name, left_out)
    before, after = EngineFiles(old), EngineFiles(new)
    _compare_plans(result, before, after)
    _compare_codes(result, before, after)
    for file in sorted(before.others & after.others):
        _compare_files(result, file, old / file, new / file)
    for file in sorted(before.others ^ after.others):
        result.wrong.append(f"{file}: only in the {'old' if file in before.others else 'new'}")
    for file in TOLD:
        one, other = (_read_json(folder / file) for folder in (old, new))
        result.told += differences(one, other, (file.removesuffix(".json"),))
    return result


def _read_json(path: Path) -> Any:
    return json.loads(path.read_bytes()) if path.is_file() else ABSENT


def _compare_files(result: Comparison, file: str, old: Path, new: Path) -> None:
    result.counts["files"] += 1
    result.counts["bytes"] += old.stat().st_size
    if filecmp.cmp(old, new, shallow=False):
        return
    one, other = (_document(path) for path in (old, new))
    if one is not None and other is not None:
        result.hold(one[1], other[1], one[0], file)
    else:
        sizes = " and ".join(f"{path.stat().st_size:,}" for path in (old, new))
        result.wrong.append(f"{file}: its bytes differ ({sizes} of them)")


def _compare_plans(result: Comparison, before: EngineFiles, after: EngineFiles) -> None:
    result.hold(before.plan, after.plan, "plan", PLAN)
    result.counts["launches"] = sum(entry["launches"] for entry in before.plan["programs"])
    for one, other in zip(before.programs, after.programs, strict=False):
        result.counts["programs"] += 1
        missing = [str(file) for file in (one, other) if not file.is_file()]
        if missing:
            result.wrong.append(f"{one.name}: there is no {' and no '.join(missing)}")
        elif not filecmp.cmp(one, other, shallow=False):
            result.hold(_read_json(one), _read_json(other), "program", one.name)


def _compare_codes(result: Comparison, before: EngineFiles, after: EngineFiles) -> None:
    old, new = set(before.codes.values()), set(after.codes.values())
    result.counts["cubins"] = len(old)
    for side, gone, held in (("old", old - new, before), ("new", new - old, after)):
        for file, code in held.codes.items():
            kernels = {k["name"] for k in held.plan["kernels"] if k["cubin"] == code}
            if code in gone:
                names = ", ".join(sorted(kernels)) or "named by no plan"
                result.wrong.append(f"{file} ({names}): its code is only in the {side}")


def compare(old: Path, new: Path, left_out: tuple[str, ...]) -> list[Comparison]:
    """Two engines, or those of two folders by name. ValueError where a folder has none."""
    if (old / MANIFEST).is_file():
        return [compare_engine(new.name, old, new, left_out)]
    before, after = (
        {manifest.parent.name: manifest.parent for manifest in folder.glob(f"*/{MANIFEST}")}
        for folder in (old, new)
    )
    for folder, engines in ((old, before), (new, after)):
        if not engines:
            raise ValueError(f"{folder} is neither an engine nor a folder of engines")
    results = []
    for name in sorted(before.keys() & after.keys()):
        results.append(compare_engine(name, before[name], after[name], left_out))
    for name in sorted(before.keys() ^ after.keys()):
        side = "old" if name in before else "new"
        results.append(Comparison(name, left_out, [f"the engine is only in the {side}"]))
    return results


def _table(results: Iterable[Comparison]) -> Iterator[str]:
    columns = ("files", "bytes", "cubins", "programs", "launches")
    yield f"{'engine':<30}" + "".join(f"{column:>14}" for column in columns)
    for result in results:
        verdict = f"{len(result.wrong)} differences" if result.wrong else "equal"
        counts = "".join(f"{result.counts[column]:>14,}" for column in columns)
        yield f"{result.name:<30}{counts}  {verdict}"


def _told(result: Comparison) -> list[str]:
    """The differences that are no failure, by their document and its first key."""
    groups: dict[str, list[Difference]] = {}
    for found in result.told:
        groups.setdefault(".".join(found.field.split(".")[:2]), []).append(found)
    return [f"{name}: {len(group)} differences, first {group[0]}" for name, group in groups.items()]


def main() -> int:
    """Prints what differs and a table of what was compared; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="an engine directory, or a folder of them")
    parser.add_argument("new", type=Path, help="what must equal it")
    parser.add_argument(
        "--allow", metavar="FIELD", nargs="+", default=[], help="more fields that may differ"
    )
    parser.add_argument(
        "--most", metavar="N", type=int, default=20, help="lines printed of an engine (20)"
    )
    asked = parser.parse_args()
    for name in asked.allow:
        if name.partition(".")[0] not in KINDS or "." not in name:
            parser.error(f"--allow {name}: a field begins with one of {'., '.join(KINDS)}.")
    try:
        results = compare(asked.old, asked.new, (*LEFT_OUT, *asked.allow))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for result in results:
        for title, lines in (("DIFFERS", result.wrong), ("may differ", _told(result))):
            if lines:
                print(f"{result.name}: {title}", *lines[: asked.most], sep="\n  ")
            if len(lines) > asked.most:
                print(f"  and {len(lines) - asked.most} more")
    print("left out:", ", ".join((*LEFT_OUT, *asked.allow)))
    print(*_table(results), sep="\n")
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
