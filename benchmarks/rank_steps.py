"""Measures a rank's step and its bytes: an engine of several ranks on one GPU.

    python benchmarks/rank_steps.py ONE RANKS [--batch 1] [--context 1000] [--json FILE]

ONE is an engine for one GPU, RANKS the same model built with --tensor-parallel. The first rank of
RANKS is its own peer (loopback): it has the shapes and launches of one of several GPUs, and waits
for no other. The part of a layer's time that is not that of its bytes hardly shrinks with more
ranks, so it limits the gain of several GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from specbuild.cli.bench.sweep import ceiling_of
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.executors.cuda.loading import open_executor
from specbuild.runtime.measure.anatomy import StepAnatomy
from specbuild.runtime.measure.benchmark_batch import benchmark_batch
from specbuild.runtime.measure.step_timing import measure_anatomy


def opened(directory: Path) -> Engine:
    """Load the engine, or its first rank alone."""
    manifest = read_manifest(directory)
    executor = open_executor(directory, manifest, readers=8, loopback=True)
    return Engine(manifest, executor)


def described(step: StepAnatomy) -> dict[str, Any]:
    """Return the microseconds of a step and of a middle layer, by op, and the layer's bytes."""
    assert step.step_s is not None and step.bytes_per_s is not None
    layers: dict[int, list[Any]] = defaultdict(list)
    for launch in step.launches:
        if launch.layer is not None and launch.section == "target":
            layers[launch.layer].append(launch)
    inner = list(layers.values())[1:-1] or list(layers.values())
    added = [1e6 * sum(launch.added_s for launch in layer) for layer in inner]
    nbytes = [sum(launch.bytes_read for launch in layer) for layer in inner]
    by_op: dict[str, float] = defaultdict(float)
    for layer in inner:
        for launch in layer:
            by_op[launch.kernel.partition(":")[2]] += 1e6 * launch.added_s / len(inner)
    bytes_us = 1e6 * sum(nbytes) / len(nbytes) / step.bytes_per_s
    layer_us = sum(added) / len(added)
    return {
        "step_us": 1e6 * step.step_s, "layers": len(layers), "layer_us": layer_us,
        "layer_us_median": median(added), "layer_bytes_us": bytes_us,
        "layer_other_us": layer_us - bytes_us, "by_kernel_us": dict(by_op),
    }  # fmt: skip


def measured(directory: Path, batch: int, context: int) -> dict[str, Any]:
    """Return the program of a step without a draft."""
    engine = opened(directory)
    ceiling = ceiling_of(engine)
    with benchmark_batch(engine, batch=batch, context=context, shape=None) as placed:
        step = measure_anatomy(engine, placed, None, draft="none", bytes_per_s=ceiling)
        result = described(step)
    engine.executor.close()
    return result | {"ranks": engine.manifest.ranks, "read_tb_s": ceiling / 1e12}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engines", type=Path, nargs="+")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {}
    for batch in args.batch or [1]:
        for directory in args.engines:
            result = measured(directory, batch, args.context)
            record[f"{directory.name}, batch {batch}"] = result
            print(f"{directory.name}, batch {batch}:", json.dumps(result), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
