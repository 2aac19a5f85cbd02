"""Regression test of one GPU: measures the README's GPU rows and compares them with the last
record.

It first builds missing engines: GPT-OSS 20B geometry, with a draft that is right with probability
0.7, and 120B geometry, for steps and for prompts. Then each round measures every row once: steps
and decoding at batch 1, 16 and 64, prompts, the first token of a fresh process, and the cost of
temperature, min_p, top_k and top_p in drafted steps. The figure of a row is the median of the
rounds, with its share of the streaming read in the same process. Rows that changed by more than 2 %
are listed; with --check the exit code is then 1, also if a row fails. A row whose rounds overlap
with those of the record is listed as unsure and does not fail.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from threading import Timer
from typing import Any

from gpu_engines import ENGINES, build_engines, last_words, say, write_read_kernel
from gpu_record import READ, TOLERANCE, Row, card_file, compared, fails, summary, table
from gpu_rows import SIZES

from specbuild.cli.bench.runs import time_fresh_process
from specbuild.runtime.engine_dir.files import read_manifest

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "bench-gpu"
WORKER = Path(__file__).with_name("gpu_rows.py")
# The time limit of a row in a worker, including the loading of its engine.
ROW_LIMIT_S = 90.0
_EXAMPLES = """examples:
  make bench-gpu
  python benchmarks/bench_gpu.py --check --output out/now.json
  python benchmarks/bench_gpu.py --against out/before.json --rounds 3 --only "20B step"
"""


@dataclass
class Session:
    """The measured rows and engines, and the results so far.

    ``engines`` are directories by label; ``rows`` are all rows by name, in the order of the table.
    """

    engines: Mapping[str, Path]
    rows: dict[str, Row]
    read_kernel: Path | None = None
    worker: Path = WORKER
    row_limit_s: float = ROW_LIMIT_S
    fresh_process: Callable[[Path, int], float] = time_fresh_process
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rounds: int = 0

    def measure(self, rounds: int, budget_s: float, save: Callable[[], None]) -> None:
        """Measure all rows round by round, and call ``save`` after each engine.

        The first round is always complete. A further one that would end after ``budget_s`` is
        dropped with all later ones, and noted.
        """
        started_s, longest_s = time.monotonic(), 0.0
        for number in range(rounds):
            round_s = time.monotonic()
            if number and round_s - started_s + longest_s > budget_s:
                self.notes.append(
                    f"{rounds - number} of {rounds} rounds were dropped: {longest_s:.0f} s each, "
                    f"the budget is {budget_s:.0f} s"
                )
                break
            for label in self.engines:
                engine_s = time.monotonic()
                self.measure_engine(label)
                say(f"round {number + 1} of {rounds}, {label}: {time.monotonic() - engine_s:.0f} s")
                save()
            self.rounds += 1
            longest_s = max(longest_s, time.monotonic() - round_s)

    def measure_engine(self, label: str) -> None:
        """Measure one engine's rows once, without those that failed before."""
        load = self.rows.get(load_name(label))
        mine = [row.name for row in self.rows.values() if row.name.startswith(f"{label} ")]
        pending = [name for name in mine if self.rows[name].error is None and name != READ]
        if load is not None:
            pending = [name for name in pending if name != load.name]
        while pending:
            before = len(pending)
            pending = self._run_worker(label, pending)
            if len(pending) == before:
                break
        if load is not None and load.error is None:
            self._load(label, load)

    def _load(self, label: str, row: Row) -> None:
        directory = self.engines[label]
        try:
            time_s = self.fresh_process(directory, read_manifest(directory).target.vocab)
        except Exception as error:
            row.error = f"{type(error).__name__}: {error}"
            return
        read, weights = self.rows.get(READ), self.facts.get(f"{label} weights_bytes")
        share = None
        if read is not None and read.values and weights:
            share = weights / time_s / (read.median * 1e12)
        row.add({"value": time_s, "unit": "s", "share": share})

    def _run_worker(self, label: str, names: Sequence[str]) -> list[str]:
        """Run one process for the named rows; return those that it did not reach.

        If it reaches none of them, all fail.
        """
        command = [sys.executable, str(self.worker), str(self.engines[label]), "--label", label]
        if self.read_kernel is not None:
            command += ["--read-kernel", str(self.read_kernel)]
        command += [f"--row={name}" for name in names]
        pending, current = list(names), None
        errors = self.engines[label].with_suffix(".log")
        with errors.open("w", encoding="utf-8") as log:
            for message in _messages(command, log, self.row_limit_s):
                current = message.get("begins", current)
                self._take(label, message)
                if message.get("row") in pending:
                    pending.remove(message["row"])
                    current = None
        reason = last_words(errors) or f"the process ended or was silent for {self.row_limit_s} s"
        if current in pending:
            self.rows[current].error = reason
            pending.remove(current)
        elif len(pending) == len(names):
            for name in names:
                self.rows[name].error = f"no row was measured: {reason}"
            return []
        return pending

    def _take(self, label: str, message: Mapping[str, Any]) -> None:
        if "gpu" in message:
            self.facts |= {"gpu": message["gpu"], "cuda": message["cuda"]}
            self.facts[f"{label} weights_bytes"] = message["weights_bytes"]
        row = self.rows.get(message.get("row", ""))
        if row is None:
            return
        if "error" in message:
            row.error = message["error"]
            say(f"{row.name}: {row.error}")
        else:
            row.add(message)


def load_name(label: str) -> str:
    """Return the row of an engine's start."""
    return f"{label} first token of a fresh process"


def planned_rows(engines: Sequence[str], only: Sequence[str]) -> dict[str, Row]:
    """Return the rows of these engines, by name; with ``only``, those with one of its texts."""
    names = [READ]
    for label in engines:
        drafts = "--draft " in f"{ENGINES[label]} "
        names += SIZES[label].names(label, drafts=drafts)
        names += [load_name(label)] if SIZES[label].batches else []
    selected = [n for n in names if n == READ or not only or any(text in n for text in only)]
    return {name: Row(name) for name in selected}


def _messages(command: Sequence[str], log: Any, limit_s: float) -> Any:
    """Yield the JSON lines of a process, which is killed after ``limit_s`` without output."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        timer = Timer(limit_s, process.kill)
        timer.start()
        try:
            for line in process.stdout:
                timer.cancel()
                timer = Timer(limit_s, process.kill)
                timer.start()
                with suppress(json.JSONDecodeError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        yield message
            # Its device memory is free after it ends.
            process.wait()
        finally:
            timer.cancel()
            process.kill()


def record_of(session: Session, settings: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Return the record: the machine, versions and command, then every row."""
    return {
        "command": shlex.join(["python", "benchmarks/bench_gpu.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": session.facts.get("gpu", "unknown"),
        "cuda": session.facts.get("cuda", "unknown"),
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "versions": _versions(),
        "settings": dict(settings),
        "rounds": session.rounds,
        "seconds": round(seconds, 1),
        "notes": session.notes,
        "rows": [row.to_json() for row in session.rows.values()],
    }


def _versions() -> str:
    result = [f"Python {platform.python_version()}"]
    for package in ("nvidia-cuda-nvrtc", "cuda-bindings", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            result.append(f"{package} {metadata.version(package)}")
    commit = _output(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    return ", ".join([*result, f"specbuild {commit}"])


def _output(command: Sequence[str]) -> str:
    """Return the first line that a command prints; ``unknown`` if it cannot run."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"
    return "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, measure, store and compare; the exit code is 1 if a check fails."""
    options = _parser().parse_args(arguments)
    folder = options.engines
    folder.mkdir(parents=True, exist_ok=True)
    labels = options.geometry or list(ENGINES)
    settings = {
        label: f"{ENGINES[label]}; context {SIZES[label].context}, {SIZES[label].tokens} tokens"
        for label in labels
    }
    engines = {label: (folder / label).resolve() for label in labels}
    failed = build_engines(engines)
    session = Session(
        {label: path for label, path in engines.items() if label not in failed},
        planned_rows(labels, options.only),
    )
    for label, reason in failed.items():
        for name in (name for name in session.rows if name.startswith(f"{label} ")):
            session.rows[name].error = reason
    session.read_kernel, note = write_read_kernel(folder)
    session.notes += [note] if note else []
    started_s = time.monotonic()
    output = options.output or folder / "record.json"

    def save() -> None:
        result = record_of(session, settings, time.monotonic() - started_s)
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    session.measure(options.rounds, options.budget_s, save)
    save()
    return conclude(session, settings, output, options)


def conclude(
    session: Session, settings: Mapping[str, str], output: Path, options: argparse.Namespace
) -> int:
    """Print the comparison with the last record of this card; store the new one on request."""
    stored = RECORDS / card_file(session.facts.get("gpu", "unknown"))
    against = options.against or stored
    record = json.loads(against.read_text(encoding="utf-8")) if against.is_file() else None
    rows = list(session.rows.values())
    changes = compared(rows, settings, record, options.tolerance)
    if options.only or options.geometry:
        changes = [change for change in changes if change.verdict != "missing"]
    print(f"{session.facts.get('gpu', 'no GPU')}, {session.rounds} rounds, written to {output}")
    for line in table(changes, record and record.get("date", "an unknown date")):
        print(line)
    for line in (*session.notes, *summary(changes, options.tolerance)):
        print(line)
    if record is None:
        print(f"{against} does not exist: run with --record to store one")
    failed = [row.name for row in rows if row.error is not None or not row.values]
    if options.record and not failed:
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_bytes(output.read_bytes())
        print(f"stored as {stored}")
    elif options.record:
        print("not stored: a record needs every row")
    return int(len(failed) == len(rows) or (options.check and fails(changes)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 where a row moved")
    parser.add_argument("--record", action="store_true", help="store the result as the card's")
    parser.add_argument("--output", type=Path, help="file of the result (ENGINES/record.json)")
    parser.add_argument("--against", type=Path, help="record to compare with (the card's last one)")
    parser.add_argument(
        "--engines", type=Path, default=ROOT / "out" / "bench-gpu", help="folder of the engines"
    )
    parser.add_argument("--geometry", action="append", choices=ENGINES, help="engines (all)")
    parser.add_argument("--only", action="append", default=[], help="rows with this text (all)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of a row (5)")
    parser.add_argument(
        "--budget-s", type=float, default=300.0, help="seconds of measuring: drops rounds (300)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="relative change that counts (0.02)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
