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
- ``new`` or ``gone``: only one version has it.

How a launch is made (grid, block, shared memory, arguments) is compared too.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from specbuild.builder.backends.cuda.compile.machine_code import MachineCode, machine_code

BENCHMARKS = Path(__file__).parent
PACKAGES = ("builder", "plugins_cuda", "runtime", "cli")
STATES = ("same source", "identical", "changed", "new", "gone", "problem")
HELP = """examples:
  python benchmarks/kernel_requests.py requests.json
  python benchmarks/compare_kernels.py main . --requests requests.json --store kernels
  python benchmarks/compare_kernels.py v0.1 v0.2 --requests requests.json --only RmsMoe Linear

A version is a folder with a checkout, or a revision of the repository that this script lies in.
What both versions give the compiler is not compiled, unless --afresh is given, and with --store
nothing is compiled twice. Exit code: 0 where every pair is the same and launched alike, 1 where
something differs, 2 for a wrong command."""


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
    """Machine code by the content and the entry that a listing names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._codes = cache(self._read)

    def code(self, launch: Mapping[str, Any]) -> MachineCode:
        """What a launch of a listing runs."""
        return self._codes(launch["cubin"])[launch["entry"]]

    def _read(self, name: str) -> dict[str, MachineCode]:
        return machine_code((self._folder / name).read_bytes(), name)


def compare(
    requests: list[dict[str, Any]], old: list[Any], new: list[Any], cubins: Cubins
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
            _pair(result, op, cubins, one, other)
        for state, some, others in (("gone", *launches), ("new", *reversed(launches))):
            for launch in some[len(others) :]:
                result.count(op, state)
                result.lines[f"{op}: {state}: {launch['kernel']}"] += 1
    return result


def _pair(
    result: Comparison, op: str, cubins: Cubins, one: Mapping[str, Any], other: Mapping[str, Any]
) -> None:
    name = one["kernel"]
    if other["kernel"] != name:
        name += f" → {other['kernel']}"
    for key, value in one["launch"].items():
        if other["launch"][key] != value:
            result.launched_otherwise += 1
            result.lines[f"{op}: {name}: launched with another {key}"] += 1
    if "cubin" not in one and one["source"] == other["source"]:
        result.count(op, "same source", one["source"])
        return
    problems = [launch.get("problem") for launch in (one, other)]
    if any(problems):
        # A kernel that spills where no build takes it is compared by what the compiler says.
        same = problems[0] == problems[1]
        result.count(op, "problem")
        if not same:
            result.lines[f"{op}: {name}: {problems[0]} → {problems[1]}"] += 1
        return
    before, after = (cubins.code(launch) for launch in (one, other))
    if before.digest == after.digest:
        result.count(op, "identical", before.digest)
        return
    result.count(op, "changed", before.digest)
    parts = [
        part
        for part in sorted(before.parts.keys() | after.parts.keys())
        if before.parts.get(part) != after.parts.get(part)
    ]
    result.lines[f"{op}: {name}: changed in {', '.join(parts)}"] += 1


def checkout(version: str, folder: Path) -> Path:
    """The folder of a version: itself, or the files of a revision written to ``folder``."""
    if (Path(version) / "plugins_cuda").is_dir():
        return Path(version).resolve()
    command = ["git", "archive", version, *PACKAGES]
    archive = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, check=False)
    if archive.returncode != 0:
        raise ValueError(f"{version} is neither a checkout nor a revision: {archive.stderr!r}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def packages(tree: Path, folder: Path) -> Path:
    """A folder for Python's path, in which specbuild is that of ``tree``."""
    inside = folder / "specbuild"
    inside.mkdir(parents=True)
    for package in PACKAGES:
        (inside / package).symlink_to(tree / package)
    for file in (tree / "cli" / "specbuild").glob("*.py"):
        (inside / file.name).symlink_to(file)
    return folder


class Listing:
    """A process that lists what a version launches for requests."""

    def __init__(
        self, version: str, requests: Path, asked: argparse.Namespace, folder: Path
    ) -> None:
        path = packages(checkout(version, folder / "files"), folder / "packages")
        self._output = folder / "listing.json"
        command = [sys.executable, str(BENCHMARKS / "kernel_listing.py"), str(requests)]
        command += [str(self._output), "--store", str(asked.store), "--jobs", str(asked.jobs)]
        command += ["--afresh"] if asked.afresh else []
        found = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": found},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def sources(self) -> set[str]:
        """Digests of what the version gives the compiler."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError("what is above ended a listing")
        return set(json.loads(line))

    def launches(self, common: Path) -> list[Any]:
        """The listing; ``common`` holds digests of what is not to be compiled."""
        self._process.communicate(f"{common}\n")
        if self._process.returncode != 0:
            raise ValueError("what is above ended a listing")
        return list(json.loads(self._output.read_text()))


def listings(wanted: Path, asked: argparse.Namespace, folder: Path) -> list[list[Any]]:
    """What both versions launch."""
    begun = [
        Listing(version, wanted, asked, folder / name)
        for name, version in (("old", asked.old), ("new", asked.new))
    ]
    old, new = (each.sources() for each in begun)
    common = folder / "common.json"
    common.write_text(json.dumps([] if asked.afresh else sorted(old & new)))
    print(f"{len(old)} and {len(new)} sources, {len(old & new)} of both", file=sys.stderr)
    return [each.launches(common) for each in begun]


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
    parser.add_argument("--afresh", action="store_true", help="compile all of it, stored or not")
    parser.add_argument("--jobs", metavar="N", type=int, default=2, help="compilations at once (2)")
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
            old, new = listings(wanted, asked, Path(folder))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        result = compare(kept, old, new, Cubins(asked.store / "cubins"))
    for line, count in result.lines.most_common(asked.most):
        print(f"{line} ({count} launches)")
    if len(result.lines) > asked.most:
        print(f"and {len(result.lines) - asked.most} more lines")
    print(*table(result), sep="\n")
    print(f"{len(kept)} requests; {result.launched_otherwise} launched otherwise")
    return int(not result.equal)


if __name__ == "__main__":
    sys.exit(main())
