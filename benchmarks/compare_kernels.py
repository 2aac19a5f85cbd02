"""Proves that two versions of specbuild launch the same machine code, kernel by kernel.

It is for changes of kernel sources that must not change kernels. ``kernel_requests.py`` lists the
requests to ops: of engines of the matrix, of included tactics, of the cases of their tests. Both
versions lower every request and compile its launches, with NVRTC and without a GPU. Launches are
paired by request and order; a pair is

- of the ``same source``: both give the compiler the same text, except for file names and comments;
- ``identical``: instructions, their relocations, the launch attributes (registers, stack, barriers,
  parameters), shared memory, and the loaded constants are equal byte for byte
  (``builder/backends/cuda/compile/machine_code.py``);
- ``changed``: some are not. Names of symbols, debug frames and constants that no instruction loads
  may differ;
- ``new`` or ``gone``: only one version has it;
- a ``problem``: a version does not compile;
- ``left``: there was no time for it.

The launch parameters (grid, block, shared memory, arguments) are compared too.
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
    """Two kernels: digests of the compiler's input, and entries."""

    old: str
    new: str
    old_entry: str
    new_entry: str


@dataclass(frozen=True)
class Verdict:
    """The result of a pair: its state, the old machine code, and the differences."""

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
        """Whether all of it is the same."""
        return not self.lines

    def count(self, op: str, state: str, code: str = "") -> None:
        """Count one more launch of an op."""
        self.states.setdefault(op, Counter())[state] += 1
        if code:
            self.codes.setdefault(op, set()).add(code)


class Cubins:
    """Return machine code by the content that a listing names, and the entry."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._codes = cache(self._read)

    def code(self, cubin: str, entry: str) -> MachineCode:
        """Return the kernel of a launch."""
        return self._codes(cubin)[entry]

    def _read(self, name: str) -> dict[str, MachineCode]:
        return machine_code((self._folder / name).read_bytes(), name)


def judged(pair: Pair, old: Mapping[str, str], new: Mapping[str, str], cubins: Cubins) -> Verdict:
    """Compare the results of compiling both."""
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
    """Compare two listings of the same requests."""
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
    """Return what must be compared for two launches."""
    return Pair(one["source"], other["source"], one["entry"], other["entry"])


def pairs(
    old: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]], *, same: bool
) -> list[Pair]:
    """Return the kernels of two listings, each once, alternating over files and entries.

    With ``same``, also those with equal compiler input.
    """
    by_kernel: dict[str, dict[Pair, None]] = {}
    for before, after in zip(old, new, strict=True):
        launches = (listing.get("launches", []) for listing in (before, after))
        for one, other in zip(*launches, strict=False):
            pair = pair_of(one, other)
            if same or pair.old != pair.new or pair.old_entry != pair.new_entry:
                by_kernel.setdefault(one["kernel"], {})[pair] = None
    interleaved = chain.from_iterable(zip_longest(*by_kernel.values()))
    return list(dict.fromkeys(pair for pair in interleaved if pair is not None))


def compiled(
    listings: Sequence[Listing], requested: Sequence[Pair], seconds: float | None
) -> Iterator[tuple[Pair, Mapping[str, str], Mapping[str, str]]]:
    """Yield each pair with both compilation results, as soon as they are known."""
    results: SimpleQueue[tuple[int, str, Mapping[str, str] | None, str]] = SimpleQueue()

    def read(version: int) -> None:
        sources = list(dict.fromkeys(pair[version] for pair in requested))
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
        for pair in requested:
            if pair[version] == source and pair[1 - version] in codes[1 - version]:
                yield pair, codes[0][pair.old], codes[1][pair.new]


def recorded(record: Path | None) -> dict[Pair, Verdict]:
    """Return the results in a file of earlier runs, without an incomplete last line."""
    if record is None or not record.is_file():
        return {}
    text = record.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        record.write_text(whole)
    read = (json.loads(line) for line in whole.splitlines())
    return {Pair(*pair): Verdict(**verdict) for pair, verdict in read}


def compared(args: argparse.Namespace, requests: Path, folder: Path) -> Comparison:
    """List, compile and compare; results are stored in ``args.record``."""
    versions = (("old", args.old), ("new", args.new))
    begun = [Listing(version, requests, args, folder / name) for name, version in versions]
    old, new = (each.launches() for each in begun)
    cached = {} if args.afresh else recorded(args.record)
    every = pairs(old, new, same=args.afresh)
    requested = [pair for pair in every if pair not in cached]
    print(f"{len(every)} pairs to compare, {len(every) - len(requested)} known", file=sys.stderr)
    cubins = Cubins(args.store / "cubins")
    with (args.record or folder / "record.jsonl").open("a") as record:
        for pair, one, other in compiled(begun, requested, args.seconds):
            cached[pair] = judged(pair, one, other, cubins)
            print(json.dumps([pair, asdict(cached[pair])]), file=record, flush=True)
            if len(cached) % 100 == 0:
                print(f"  {len(cached)} compared", file=sys.stderr, flush=True)
    return compare(json.loads(requests.read_text()), old, new, cached)


def table(result: Comparison) -> Iterator[str]:
    """Return the launches of every op by state."""
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
    """Print the differences and a table of comparisons; return the exit code."""
    args = parsed()
    requests = json.loads(args.requests.read_text())
    selected = [r for r in requests if not args.only or r["op"] in args.only][:: args.every]
    if not selected:
        print(f"{args.requests} has no request of {', '.join(args.only)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        args.store = (args.store or Path(folder) / "store").resolve()
        requested = Path(folder) / "requests.json"
        requested.write_text(json.dumps(selected))
        try:
            result = compared(args, requested, Path(folder))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    for line, count in result.lines.most_common(args.most):
        print(f"{line} ({count} launches)")
    if len(result.lines) > args.most:
        print(f"and {len(result.lines) - args.most} more lines")
    print(*table(result), sep="\n")
    print(f"{len(selected)} requests; {result.launched_otherwise} launched otherwise")
    return int(not result.equal)


if __name__ == "__main__":
    sys.exit(main())
