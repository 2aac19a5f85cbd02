"""Proves that two builds of specbuild write the same engines: graphs, machine code, weights, plans.

It is for changes that only move code. ``benchmarks/build_engines.py`` builds a matrix of engines
with both versions; this script then compares them:

- every file is equal byte for byte, except those named below;
- cubins, named by digests of kernel sources, are compared by content: the contents are equal sets,
  and every kernel that a launch names has equal code, entry, registers and memory;
- ``plan.json`` and its programs are equal except for the names of programs, buffers, ops and
  kernels and the declared traffic: grids, blocks, shared memory, arguments and offsets are equal;
- the records for TensorRT's engines (``tensorrt_stand_in.py``) and their ``.launches.json`` are
  equal; engines of the real TensorRT differ from build to build;
- differences of ``manifest.json`` and ``build_report.json`` are printed, and are no failure.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_files import MANIFEST, PLAN, TOLD, EngineFiles, read_document, read_json

EXAMPLES = """examples:
  python benchmarks/compare_engines.py before/example-cuda-draft after/example-cuda-draft
  python benchmarks/compare_engines.py before after
  python benchmarks/compare_engines.py before after --allow plan.ports.name --most 100
  python benchmarks/compare_engines.py before after --renamed plan.programs.narrows=sparse

A field is named by the kind of its document (plan, program, launches, engine) and the keys that
lead to it, without positions in lists. What lies below an allowed field is left out too; a renamed
one is compared under its new key. Exit code: 0 where nothing differs, 1 where something does, 2
where there is nothing to compare."""

# Names, and the declared traffic of ops: the only fields that may differ within plans.
LEFT_OUT = (
    "plan.buffers.name",
    "plan.kernels.name",
    "plan.programs.name",
    "plan.programs.file",
    "program.ops.op",
    "program.ops.section",
    "program.ops.traffic",
    "program.routers",
    "launches.records.record.kernels.name",
    "engine.nodes.attributes.record.kernels.name",
)
KINDS = ("plan", "program", "launches", "engine")
ABSENT = object()
Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Difference:
    """A difference of two documents, with both values; ``ABSENT`` for a missing one."""

    path: Place
    old: Any
    new: Any

    @property
    def field(self) -> str:
        """The place by its keys only."""
        return ".".join(part for part in self.path if isinstance(part, str))

    def __str__(self) -> str:
        """The full place: ``plan.kernels[3].registers: 18 → 20``."""
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path)
        return f"{where[1:]}: {_short(self.old)} → {_short(self.new)}"


def _short(value: Any) -> str:
    text = "absent" if value is ABSENT else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def differences(old: Any, new: Any, path: Place) -> Iterator[Difference]:
    """Yield all differences of two JSON values; of lists up to the shorter one's length."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield Difference((*path, "length"), len(old), len(new))
        for index, pair in enumerate(zip(old, new, strict=False)):
            yield from differences(*pair, (*path, index))
    elif type(old) is not type(new) or old != new:  # 1, 1.0 and true are different
        yield Difference(path, old, new)


def with_new_keys(value: Any, place: str, renamed: Mapping[str, str]) -> Any:
    """Return a JSON value with the keys of some fields replaced."""
    if isinstance(value, list):
        return [with_new_keys(item, place, renamed) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: f"{place}.{key}" for key in value}
    return {
        renamed.get(fields[key], key): with_new_keys(item, fields[key], renamed)
        for key, item in value.items()
    }


@dataclass(frozen=True)
class Rules:
    """Fields that may differ, and the new keys of fields."""

    left_out: tuple[str, ...] = LEFT_OUT
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Comparison:
    """The comparison of one engine: compared files, differences, and permitted differences."""

    name: str
    rules: Rules
    wrong: list[str] = field(default_factory=list)
    notes: list[Difference] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)

    def hold(self, old: Any, new: Any, kind: str, file: str) -> None:
        """Compare two documents, except for the omitted fields."""
        for difference in differences(with_new_keys(old, kind, self.rules.renamed), new, (kind,)):
            if not any(
                f"{difference.field}.".startswith(f"{name}.") for name in self.rules.left_out
            ):
                self.wrong.append(f"{file}: {difference}")
                self.fields[difference.field] += 1


def compare_engine(name: str, old: Path, new: Path, rules: Rules) -> Comparison:
    """Compare two engine directories."""
    if not (new / MANIFEST).is_file():
        raise ValueError(f"{new} is not an engine")
    result = Comparison(name, rules)
    before, after = EngineFiles(old), EngineFiles(new)
    _compare_plans(result, before, after)
    _compare_codes(result, before, after)
    for file in sorted(before.others & after.others):
        _compare_files(result, file, old / file, new / file)
    for file in sorted(before.others ^ after.others):
        result.wrong.append(f"{file}: only in the {'old' if file in before.others else 'new'}")
    for file in TOLD:
        one, other = (read_json(folder / file) for folder in (old, new))
        result.notes += differences(one, other, (file.removesuffix(".json"),))
    return result


def _compare_files(result: Comparison, file: str, old: Path, new: Path) -> None:
    result.counts["files"] += 1
    result.counts["bytes"] += old.stat().st_size
    if filecmp.cmp(old, new, shallow=False):
        return
    one, other = (read_document(path) for path in (old, new))
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
            result.hold(read_json(one), read_json(other), "program", one.name)


def _compare_codes(result: Comparison, before: EngineFiles, after: EngineFiles) -> None:
    old, new = set(before.codes.values()), set(after.codes.values())
    result.counts["cubins"] = len(old)
    for side, gone, stored in (("old", old - new, before), ("new", new - old, after)):
        for file, code in stored.codes.items():
            kernels = {k["name"] for k in stored.plan["kernels"] if k["cubin"] == code}
            if code in gone:
                names = ", ".join(sorted(kernels)) or "named by no plan"
                result.wrong.append(f"{file} ({names}): its code is only in the {side}")


def compare(old: Path, new: Path, rules: Rules) -> list[Comparison]:
    """Return two engines, or those of two folders by name. ValueError if a folder has none."""
    if (old / MANIFEST).is_file():
        return [compare_engine(new.name, old, new, rules)]
    before, after = (
        {manifest.parent.name: manifest.parent for manifest in folder.glob(f"*/{MANIFEST}")}
        for folder in (old, new)
    )
    for folder, engines in ((old, before), (new, after)):
        if not engines:
            raise ValueError(f"{folder} is neither an engine nor a folder of engines")
    results = []
    for name in sorted(before.keys() & after.keys()):
        results.append(compare_engine(name, before[name], after[name], rules))
    for name in sorted(before.keys() ^ after.keys()):
        side = "old" if name in before else "new"
        results.append(Comparison(name, rules, [f"the engine is only in the {side}"]))
    return results


def _table(results: Iterable[Comparison]) -> Iterator[str]:
    columns = ("files", "bytes", "cubins", "programs", "launches")
    yield f"{'engine':<30}" + "".join(f"{column:>14}" for column in columns)
    for result in results:
        verdict = f"{len(result.wrong)} differences" if result.wrong else "equal"
        counts = "".join(f"{result.counts[column]:>14,}" for column in columns)
        yield f"{result.name:<30}{counts}  {verdict}"


def _told(result: Comparison) -> list[str]:
    """Count the permitted differences, by their document and its first key."""
    groups: dict[str, list[Difference]] = {}
    for difference in result.notes:
        groups.setdefault(".".join(difference.field.split(".")[:2]), []).append(difference)
    return [f"{name}: {len(group)} differences, first {group[0]}" for name, group in groups.items()]


def main() -> int:
    """Print the differences and a table of comparisons; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="an engine directory, or a folder of them")
    parser.add_argument("new", type=Path, help="what must equal it")
    parser.add_argument(
        "--allow", metavar="FIELD", nargs="+", default=[], help="more fields that may differ"
    )
    parser.add_argument(
        "--renamed", metavar="FIELD=KEY", nargs="+", default=[], help="fields with another key now"
    )
    parser.add_argument(
        "--most", metavar="N", type=int, default=20, help="lines printed of an engine (20)"
    )
    args = parser.parse_args()
    for name in (*args.allow, *args.renamed):
        if name.partition(".")[0] not in KINDS or "." not in name:
            parser.error(f"{name}: a field begins with one of {'., '.join(KINDS)}.")
    renamed = {field: key for field, _, key in (text.partition("=") for text in args.renamed)}
    rules = Rules((*LEFT_OUT, *args.allow), renamed)
    try:
        results = compare(args.old, args.new, rules)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for result in results:
        for title, lines in (("DIFFERS", result.wrong), ("may differ", _told(result))):
            if lines:
                print(f"{result.name}: {title}", *lines[: args.most], sep="\n  ")
            if len(lines) > args.most:
                print(f"  and {len(lines) - args.most} more")
        if len(result.wrong) > args.most:
            by_field = (f"{name} ×{count}" for name, count in result.fields.most_common())
            print(f"{result.name}: fields that differ", *by_field, sep="\n  ")
    print("left out:", ", ".join(rules.left_out))
    print("renamed:", ", ".join(args.renamed) or "nothing")
    print(*_table(results), sep="\n")
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
