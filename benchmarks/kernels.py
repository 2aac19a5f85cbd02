"""Times every op's kernels at real geometry on a GPU, against the bytes that they must move.

    python benchmarks/kernels.py [--ops RmsMoe,Linear] [--tactics] [--json FILE]

Each case runs in one CUDA graph of many launches that alternate over copies of the tensors, so that
nothing is in the L2 cache, with and without programmatic launches. The ceiling is a streaming read
of 8 GiB in the same process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tuning.kernel_case import (
    GPU_ONLY,
    KernelCase,
    bits,
    cases_for,
    kernel_case,
    kernel_ops,
    phases_of,
)
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.plugins_cuda.launches import Kernel, Lowering, OpLaunch, Target
from specbuild.plugins_cuda.moe.op import route
from specbuild.runtime.errors import SpecbuildError

STREAM_BYTES = 8 << 30
ROTATED_BYTES = 600 << 20
LAUNCHES = 40


def stream_ceiling(runner: OpRunner) -> float:
    """Return the bytes per second of a plain streaming read."""
    data, checksum = runner.allocate(STREAM_BYTES), runner.allocate(16)
    noise = np.random.default_rng(0).integers(0, 255, 256 << 20, dtype=np.uint8)
    for offset in range(0, STREAM_BYTES, noise.nbytes):
        runner.upload(data + offset, noise)
    launch = OpLaunch(
        Kernel("_device", "stream_read", file="stream_read.cu"),
        (runner.multiprocessors, 1, 1), 1024, 0, ("data", "checksum", STREAM_BYTES // 16),
        programmatic=False,
    )  # fmt: skip
    place = {"data": data, "checksum": checksum}
    seconds = runner.time_s([(Lowering((launch,)), place)])
    runner.free(data)
    runner.free(checksum)
    return STREAM_BYTES / seconds


def bytes_moved(drawn: KernelCase) -> int:
    """Return the minimum bytes of one call: every tensor once, caches and experts as used."""
    sizes = {name: bits(tensor).nbytes for name, tensor in drawn.inputs.items()}
    outputs = {
        name: bits(tensor).nbytes
        for name, tensor in drawn.outputs.items()
        if name not in dict(drawn.op.aliases)
    }
    for name in ("table", "cos", "sin", "k_pool", "v_pool", "pools"):
        sizes.pop(name, None)
    if drawn.op.name == "RmsMoe":
        share = _experts_used(drawn) / drawn.inputs["gate_up_bias"].shape[0]
        for name in ("gate_up", "gate_up_bias", "down", "down_bias"):
            sizes[name] = int(sizes[name] * share)
    if drawn.op.name == "PagedTreeAttention":
        pool = drawn.inputs["k_pool"]
        window = int(drawn.case.attributes.get("window", 0))
        row_start = drawn.inputs["row_start"]
        slots = 0
        for b in range(len(row_start) - 1):
            rows = drawn.inputs["row_slot"][row_start[b] : row_start[b + 1]]
            if len(rows):
                stored = int(rows.max()) + 1
                slots += min(stored, window + len(rows)) if window else stored
        sizes["k_pool"] = 2 * slots * pool.shape[1] * pool.shape[3] * 2
    return sum(sizes.values()) + sum(outputs.values())


def _experts_used(drawn: KernelCase) -> int:
    x, norm = drawn.inputs["x"].float(), drawn.inputs["norm"].float()
    normed = x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
    logits = normed @ drawn.inputs["router_weight"].float().T + drawn.inputs["router_bias"].float()
    live = int(drawn.inputs["row_start"][-1])
    attributes = drawn.case.attributes
    # The last rows of the router may be gates of shared experts.
    logits = logits[:, : len(drawn.inputs["gate_up_bias"]) - int(attributes["shared"])]
    named = ("top_k", "gating", "groups", "groups_chosen", "group_score")
    choice = {name: attributes[name] for name in named}
    weights = route(logits[:live], choice_bias=drawn.inputs.get("choice_bias"), **choice)
    return int((weights > 0).any(0).sum()) + int(attributes["shared"])


def time_case(runner: OpRunner, drawn: KernelCase, lowering: Lowering) -> dict[str, Any]:
    """Return the seconds of one call, with and without programmatic launches."""
    inputs = {name: bits(tensor) for name, tensor in drawn.inputs.items()}
    aliased = dict(drawn.op.aliases)
    outputs = {n: bits(t) for n, t in drawn.outputs.items() if n not in aliased}
    one = sum(a.nbytes for a in inputs.values())
    copies = max(2, min(LAUNCHES, -(-ROTATED_BYTES // max(one, 1))))
    places = []
    for _ in range(copies):
        place = {name: runner.allocate(array.nbytes) for name, array in inputs.items()}
        for name, array in inputs.items():
            runner.upload(place[name], array)
        place |= {name: runner.allocate(array.nbytes) for name, array in outputs.items()}
        for workspace in lowering.workspaces:
            place[workspace.name] = runner.allocate(workspace.nbytes)
            runner.upload(place[workspace.name], np.zeros(workspace.nbytes, np.uint8))
        places.append(place)
    work = [(lowering, {**p, **_aliases(p, aliased)}) for p in places * -(-LAUNCHES // copies)]
    plain = runner.time_s(work, programmatic=False) / len(work)
    pdl = runner.time_s(work) / len(work)
    for place in places:
        for pointer in place.values():
            runner.free(pointer)
    return {"plain_us": plain * 1e6, "pdl_us": pdl * 1e6}


def _prefixes(runner: OpRunner, drawn: KernelCase, lowering: Lowering) -> list[float]:
    """Return the microseconds of the first launch, the first two, …: differences are launches."""
    counts = range(1, len(lowering.launches))
    parts = [replace(lowering, launches=lowering.launches[:count]) for count in counts]
    return [round(time_case(runner, drawn, part)["pdl_us"], 2) for part in parts]


def _aliases(place: Mapping[str, int], aliased: Mapping[str, str]) -> dict[str, int]:
    return {output: place[source] for output, source in aliased.items()}


def gpu_description() -> dict[str, str]:
    """Return the GPU and its driver, as nvidia-smi names them; the first of several."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    name, driver = output.splitlines()[0].split(",")
    return {"gpu": name.strip(), "driver": driver.strip()}


def main() -> None:
    """Print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="", help="comma-separated op names; all by default")
    parser.add_argument("--tactics", action="store_true", help="every tactic, not the default only")
    parser.add_argument("--phase", default="", help="decode or prefill; both by default")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--prefixes", action="store_true", help="also the first launches alone, one more each time"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    runner = OpRunner(Compiler("sm_90a"))
    ceiling = stream_ceiling(runner)
    print(f"streaming read: {ceiling / 1e12:.3f} TB/s")
    chosen = set(filter(None, options.ops.split(",")))
    rows = []
    for op in kernel_ops():
        if chosen and op.name not in chosen:
            continue
        for phase in phases_of(op):
            if options.phase not in ("", phase):
                continue
            for case in cases_for(op, phase, gpu=True):
                if not case.name.startswith(GPU_ONLY) or options.cases not in case.name:
                    continue
                drawn = kernel_case(op, case)
                request = drawn.request(phase, Target())
                tactics = op.tactics(request) if options.tactics and op.tactics else ({},)
                for tactic in tactics:
                    try:
                        lowering = drawn.lowering(phase, Target(), tactic)
                        runner.prepare([lowering])
                    except SpecbuildError as refusal:
                        print(f"{op.name} {case.name} {dict(tactic)}: refused ({refusal})")
                        continue
                    figures = time_case(runner, drawn, lowering)
                    if options.prefixes and len(lowering.launches) > 1:
                        figures["prefixes"] = _prefixes(runner, drawn, lowering)
                    moved = bytes_moved(drawn)
                    best = min(figures["plain_us"], figures["pdl_us"])
                    share = moved / (best * 1e-6) / ceiling
                    rows.append({"op": op.name, "phase": phase, "case": case.name,
                                 "tactic": dict(tactic), "bytes": moved, "of_ceiling": share,
                                 **figures})  # fmt: skip
                    print(
                        f"{op.name:18s} {phase:7s} {case.name[len(GPU_ONLY) :]:44s} "
                        f"{moved / 1e6:8.2f} MB  plain {figures['plain_us']:8.2f} us  "
                        f"pdl {figures['pdl_us']:8.2f} us  {100 * share:5.1f} %"
                        f"  {dict(tactic) or ''} {figures.get('prefixes', '')}",
                        flush=True,
                    )
    if options.json:
        record = {"date": datetime.date.today().isoformat(), **gpu_description(),
                  "ceiling_bytes_per_s": ceiling, "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
