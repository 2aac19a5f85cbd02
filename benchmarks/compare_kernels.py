"""Proves that two versions of specbuild launch the same machine code, kernel by kernel.

It is for changes of kernels' sources that must not change kernels. ``kernel_requests.py`` lists
what is asked of the ops: by engines of the matrix, by shipped tactics, by the cases of their tests.
Both versions lower every request and compile what it launches, by NVRTC and without a GPU. Launches
are paired by request and order; a pair is

- of the ``same source``: both give the compiler the same text, names of files and comments aside;
- ``identical``: instructions, their relocations, the notes that a driver launches by (registers,
  stack, barriers, parameters), shared memory, and the constants that are loaded are equal, byte for
  byte (``builder/backends/cuda/compile/machine_code.py``);
- ``changed``: some are not. Names of symbols, debug frames and constants that no instruction loads
  may differ;
- ``new`` or ``gone``: only one version has it;
- a ``problem``: a version does not compile;
- ``left``: there was no time for it.

How a launch is made (grid, block, shared memory, arguments) is compared too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from kernel_versions import Listing

from specbuild.builder.backends.cuda.compile.machine_code import MachineCode, machine_code

STATES = ("same source", "identical", "changed", "new", "gone", "problem", "left")
HELP = """examples:
  python benchmarks/kernel_requests.py requests.json
  python benchmarks/compare_kernels.py main . --requests requests.json --store kernels --jobs 16
  python benchmarks/compare_kernels.py main . --requests requests.json --record pairs.jsonl
  python benchmarks/compare_kernels.py v0.1 v0.2 --requests requests.json --only RmsMoe Linear

A version is a folder with a checkout, or a revision of the repository that this script lies in.
What both versions give the compiler is not compiled, unless --afresh is given. With --store nothing
is compiled twice; with --record nothing is compared twice, wherever the file is taken. Kernels of
every file come first, so a run that --seconds ends has seen something of each. Exit code: 0 where
every pair is the same and launched alike, 1 where something differs or is left, 2 for a wrong
command."""


class Pair(NamedTuple):
    """Two kernels: digests of what the compiler is given, and entries."""

    old: str
    new: str
    old_entry: str
    new_entry: str


@dataclass(frozen=True)
class Verdict:
    """What comparing a pair gave: its state, the old machine code, and what differs."""

    state: str
    code: str = ""
    said: str = ""


@dataclass
class Comparison:
    """Launches by op and state, and a line for each kind of difference."""

    states: dict[str, Counter[str]] = field(default_factory=dict)
    codes: dict[str, set[str]] = field(default_factory=dict)
    lines: Counter[str] = field(default_factory=Counter)
    launched_otherwise: int = 0

    @property
    def equal(self) -> bool:
        """Whether all of it is."""
        return not self.lines

    def count(self, op: str, state: str, code: str = "") -> None:
        """One more launch of an op."""
        self.states.setdefault(op, Counter())[state] += 1
        if code:
            self.codes.setdefault(op, set()).add(code)


class Cubins:
    """Machine code by the content that a listing names, and the entry."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._codes = cache(self._read)

    def code(self, cubin: str, entry: str) -> MachineCode:
        """What a launch runs."""
        return self._codes(cubin)[entry]

    def _read(self, name: str) -> dict[str, MachineCode]:
        return machine_code((self._folder / name).read_bytes(), name)


def judged(pair: Pair, old: Mapping[str, str], new: Mapping[str, str], cubins: Cubins) -> Verdict:
    """Compares what compiling both gave."""
    problems = [code.get("problem") for code in (old, new)]
    if any(problems):
        said = "" if problems[0] == problems[1] else f"{problems[0]} → {problems[1]}"
        return Verdict("problem", said=said)
    before = cubins.code(old["cubin"], pair.old_entry)
    after = cubins.code(new["cubin"], pair.new_entry)
    if before.digest == after.digest:
        return Verdict("identical", before.digest)
    parts = [
        part
        for part in sorted(before.parts.keys() | after.parts.keys())
        if before.parts.get(part) != after.parts.get(part)
    ]
    return Verdict("changed", before.digest, f"changed in {', '.join(parts)}")


def compare(
    requests: Sequence[Mapping[str, Any]],
    old: Sequence[Mapping[str, Any]],
    new: Sequence[Mapping[str, Any]],
    verdicts: Mapping[Pair, Verdict],
) -> Comparison:
    """Holds two listings of the same requests against each other."""
    result = Comparison()
    for request, before, after in zip(requests, old, new, strict=True):
        op = request["op"]
        launches = [listing.get("launches", []) for listing in (before, after)]
        if before.get("refused") != after.get("refused") and not all(launches):
            for version, listing in (("old", before), ("new", after)):
                if "refused" in listing:
                    result.lines[f"{op}: the {version} version refuses: {listing['refused']}"] += 1
        for one, other in zip(*launches, strict=False):
            _count_pair(result, op, one, other, verdicts)
        for state, some, others in (("gone", *launches), ("new", *reversed(launches))):
            for launch in some[len(others) :]:
                result.count(op, state)
                result.lines[f"{op}: {state}: {launch['kernel']}"] += 1
    return result


def _count_pair(
    result: Comparison,
    op: str,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    verdicts: Mapping[Pair, Verdict],
) -> None:
    name = one["kernel"]
    if other["kernel"] != name:
        name += f" → {other['kernel']}"
    for key, value in one["launch"].items():
        if other["launch"][key] != value:
            result.launched_otherwise += 1
            result.lines[f"{op}: {name}: launched with another {key}"] += 1
    pair = pair_of(one, other)
    verdict = verdicts.get(pair)
    if verdict is None:
        same = pair.old == pair.new and pair.old_entry == pair.new_entry
        verdict = Verdict("same source", pair.old) if same else Verdict("left", said="left")
    result.count(op, verdict.state, verdict.code)
    if verdict.said:
        result.lines[f"{op}: {name}: {verdict.said}"] += 1


def pair_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> Pair:
    """What must be compared for two launches."""
    return Pair(one["source"], other["source"], one["entry"], other["entry"])


def pairs(
    old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]], *, same: bool
) -> list[Pair]:
    """What two listings launch, each once, in turn of each file and entry.

    ``same``: with what is the same for the compiler.
    """
    by_kernel: dict[str, dict[Pair, None]] = {}
    for before, after in zip(old, new, strict=True):
        launches = (listing.get("launches", []) for listing in (before, after))
        for one, other in zip(*launches, strict=False):
            pair = pair_of(one, other)
            if same or pair.old != pair.new or pair.old_entry != pair.new_entry:
                by_kernel.setdefault(one["kernel"], {})[pair] = None
    in_turn = chain.from_iterable(zip_longest(*by_kernel.values()))
    return list(dict.fromkeys(pair for pair in in_turn if pair is not None))


def compiled(
    listings: Sequence[Listing], wanted: Sequence[Pair], seconds: float | None
) -> Iterator[tuple[Pair, Mapping[str, str], Mapping[str, str]]]:
    """Each pair with what compiling both gave, as soon as it is known."""
    results: SimpleQueue[tuple[int, str, Mapping[str, str] | None, str]] = SimpleQueue()

    def read(version: int) -> None:
        sources = list(dict.fromkeys(pair[version] for pair in wanted))
        failure = ""
        try:
            for source, code in listings[version].compiled(sources, seconds):
                results.put((version, source, code, ""))
        except ValueError as error:
            failure = str(error)
        results.put((version, "", None, failure))

    threads = [threading.Thread(target=read, args=(version,)) for version in range(2)]
    for thread in threads:
        thread.start()
    codes: tuple[dict[str, Mapping[str, str]], ...] = ({}, {})
    ended = 0
    while ended < 2:
        version, source, code, failure = results.get()
        if failure:
            raise ValueError(failure)
        if code is None:
            ended += 1
            continue
        codes[version][source] = code
        for pair in wanted:
            if pair[version] == source and pair[1 - version] in codes[1 - version]:
                yield pair, codes[0][pair.old], codes[1][pair.new]


def recorded(record: Path | None) -> dict[Pair, Verdict]:
    """What a file of earlier runs says; a line that a stopped run left unfinished is cut off."""
    if record is None or not record.is_file():
        return {}
    text = record.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        record.write_text(whole)
    read = (json.loads(line) for line in whole.splitlines())
    return {Pair(*pair): Verdict(**verdict) for pair, verdict in read}


def compared(asked: argparse.Namespace, requests: Path, folder: Path) -> Comparison:
    """Lists, compiles and compares; what is known by then is in ``asked.record``."""
    versions = (("old", asked.old), ("new", asked.new))
    begun = [Listing(version, requests, asked, folder / name) for name, version in versions]
    old, new = (each.launches() for each in begun)
    known = {} if asked.afresh else recorded(asked.record)
    every = pairs(old, new, same=asked.afresh)
    wanted = [pair for pair in every if pair not in known]
    print(f"{len(every)} pairs to compare, {len(every) - len(wanted)} known", file=sys.stderr)
    cubins = Cubins(asked.store / "cubins")
    with (asked.record or folder / "record.jsonl").open("a") as record:
        for pair, one, other in compiled(begun, wanted, asked.seconds):
            known[pair] = judged(pair, one, other, cubins)
            print(json.dumps([pair, asdict(known[pair])]), file=record, flush=True)
            if len(known) % 100 == 0:
                print(f"  {len(known)} compared", file=sys.stderr, flush=True)
    return compare(json.loads(requests.read_text()), old, new, known)


def table(result: Comparison) -> Iterator[str]:
    """Launches of every op by state."""
    yield f"{'op':<24}" + "".join(f"{state:>12}" for state in STATES) + f"{'distinct':>11}"
    totals: Counter[str] = Counter()
    for op, states in sorted(result.states.items()):
        totals += states
        counts = "".join(f"{states[state]:>12,}" for state in STATES)
        yield f"{op:<24}{counts}{len(result.codes.get(op, ())):>11,}"
    distinct = len(set().union(*result.codes.values()))
    yield f"{'all':<24}" + "".join(f"{totals[s]:>12,}" for s in STATES) + f"{distinct:>11,}"


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a checkout or a revision")
    parser.add_argument("new", help="what must launch the same")
    parser.add_argument("--requests", type=Path, required=True, help="of kernel_requests.py")
    parser.add_argument("--only", metavar="OP", nargs="+", default=[], help="requests of these ops")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="one request in N")
    parser.add_argument("--store", metavar="DIR", type=Path, help="keep machine code there")
    parser.add_argument(
        "--record", metavar="FILE", type=Path, help="append what was compared, and go on from it"
    )
    parser.add_argument("--afresh", action="store_true", help="compile all, kept or not")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="processes (2)")
    parser.add_argument("--seconds", metavar="S", type=float, help="begin no compilation after")
    parser.add_argument("--most", metavar="N", type=int, default=40, help="lines printed (40)")
    return parser.parse_args()


def main() -> int:
    """Prints what differs and a table of what was compared; the exit code."""
    asked = parsed()
    requests = json.loads(asked.requests.read_text())
    kept = [r for r in requests if not asked.only or r["op"] in asked.only][:: asked.every]
    if not kept:
        print(f"{asked.requests} has no request of {', '.join(asked.only)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        asked.store = (asked.store or Path(folder) / "store").resolve()
        wanted = Path(folder) / "requests.json"
        wanted.write_text(json.dumps(kept))
        try:
            result = compared(asked, wanted, Path(folder))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    for line, count in result.lines.most_common(asked.most):
        print(f"{line} ({count} launches)")
    if len(result.lines) > asked.most:
        print(f"and {len(result.lines) - asked.most} more lines")
    print(*table(result), sep="\n")
    print(f"{len(kept)} requests; {result.launched_otherwise} launched otherwise")
    return int(not result.equal)


if __name__ == "__main__":
    sys.exit(main())
