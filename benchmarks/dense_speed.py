"""Speed of dense Llama and Qwen3 geometries on a GPU: steps, prompts and drafts against their
bytes.

Weights are random (``specbuild synth``), and all layers share the stored weights of one. The sweeps
of each geometry (``specbuild bench sweep``) run in a separate process, with a streaming read.
Prints a table and writes all reports of the sweeps as JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GEOMETRIES = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-8b")
# A chain; synth sets its acceptance at each position.
_DEPTH, _CONTEXT, _PROMPT = 3, 1000, 8192
_LIMITS = (
    f"--max-seq-len {_PROMPT + 256} --max-batch-size 16 --draft-top-k 1 --draft-depth {_DEPTH} "
    f"--draft-tokens {_DEPTH} --prompts 16"
)
_EXAMPLES = """examples:
  python benchmarks/dense_speed.py out --geometry llama-3.1-8b
  python benchmarks/dense_speed.py out --sweep decode --build="--weights-dtype fp8"
"""


def main() -> int:
    """Build and measure each geometry; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="takes engines, and GEOMETRY.json of each")
    parser.add_argument("--geometry", action="append", help="one of synth's (three dense ones)")
    parser.add_argument("--sweep", default="decode,spec,prefill", help="phases (%(default)s)")
    parser.add_argument("--batch", type=int, action="append", help="sequences (1 and 16)")
    parser.add_argument("--limit-s", type=int, default=30, help="seconds for a part (30)")
    parser.add_argument("--tune-s", type=int, help="seconds of tune, then all sweeps again (none)")
    parser.add_argument("--keep", action="store_true", help="leave the engines there")
    parser.add_argument("--build", default="", metavar="OPTIONS", help="further ones of synth")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in args.geometry or GEOMETRIES:
        try:
            reports, build_s = measured(name, args)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {' '.join(error.cmd[3:5])} failed: {error.stderr[-800:]}", flush=True)
            failed = True
            continue
        for when, report in reports.items():
            (args.folder / f"{name}{when}.json").write_text(json.dumps(report))
            title = f"{name}{when}: {report['gpu']}, built in {build_s:.0f} s"
            print(f"{title} {args.build}", *lines(report), sep="\n", flush=True)
    return int(failed)


def measured(name: str, args: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], float]:
    """Return the sweeps of one geometry, before and after tuning, and the duration of its build."""
    engine, started = args.folder / f"{name}-engine", time.monotonic()
    options = f"--geometry {name} --draft --unique-layers 1 --backend cuda --gpu sm_90a {_LIMITS}"
    _specbuild(
        ["synth", *options.split(), *shlex.split(args.build), "--engine", str(engine), "--force"]
    )
    build_s = time.monotonic() - started
    reports = {"": swept(engine, args)}
    if args.tune_s is not None:
        file = ["--output", str(args.folder / f"{name}.tactics.json"), "--skip-costs"]
        _specbuild(["tune", str(engine), "--seconds", str(args.tune_s), *file])
        reports["-tuned"] = swept(engine, args)
    if not args.keep:
        shutil.rmtree(engine)
    return reports, build_s


def swept(engine: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the output of ``bench sweep --json`` for an engine."""
    batches = [f"--batch={batch}" for batch in args.batch or (1, 16)]
    sweep = [str(engine), args.sweep, "--context", str(_CONTEXT), "--context", str(_PROMPT)]
    limit = ["--time-limit-s", str(args.limit_s), "--json"]
    result: dict[str, Any] = json.loads(_specbuild(["bench", "sweep", *sweep, *batches, *limit]))
    return result


def lines(report: dict[str, Any]) -> list[str]:
    """Return the table of a report."""
    result = [f"  streaming read {report['ceiling_bytes_per_s'] / 1e12:.2f} TB/s"]
    for phase in report["phases"]:
        share, rate = phase["share_of_ceiling"], phase["operations_per_s"]
        result.append(
            f"  {phase['sweep']:<8} {phase['name']:<14} batch {phase['batch']:<3} context "
            f"{phase['context']:<7.0f} {1e3 * phase['time_s']:8.3f} ms  "
            f"{phase['batch'] / phase['time_s']:8.1f} tok/s  "
            f"{100 * (share or 0):5.1f} % of the read  {(rate or 0) / 1e12:6.1f} TFLOP/s"
        )
    for row in report["decoding"]:
        result.append(
            f"  {row['draft']:<22} batch {row['batch']:<3} {row['tokens_per_s']:8.1f} tok/s  "
            f"{row['ratio']:.2f} times no draft  {row['mean_acceptance_length']:.2f} tokens a step"
            + ("" if row["same_tokens"] else "  OTHER TOKENS")
        )
    return [*result, *(f"  left out: {why}" for why in report["left_out"])]


def _specbuild(words: list[str]) -> str:
    command = [sys.executable, "-m", "specbuild.cli.main", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
