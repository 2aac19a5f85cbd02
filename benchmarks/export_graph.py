"""Exports the portable graph of a target in true size, and measures time and memory.

    .venv/bin/python benchmarks/export_graph.py llama-3.3-70b

The geometry is one of ``synth``'s; no weights are created or read. Prints one line of JSON: CPU and
wall seconds, peak memory, and the number of attention layers in the graph.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from specbuild.builder.backends.cpu.backend import CPU
from specbuild.builder.engine.sizes import compute_engine_sizes
from specbuild.builder.families.eagle3.checkpoint import default_aux_layers
from specbuild.builder.graphs import target_graph
from specbuild.builder.options import BuildOptions
from specbuild.builder.synth.geometry import named_geometry

ATTENTIONS = ("PagedTreeAttention", "MlaAttention")


def peak_gigabytes() -> float:
    """Return the peak memory of this process; getrusage's value includes the parent's."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1e6 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Run the requested export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("geometry")
    geometry = parser.parse_args().geometry
    target = named_geometry(geometry).target
    options = BuildOptions(model=Path("model"), output=Path("engine"))
    engine_sizes = compute_engine_sizes(options, CPU.sizes, target, {})
    processor_s, clock_s = time.process_time(), time.perf_counter()
    model = target_graph(target, engine_sizes, default_aux_layers(target.layers), torch.bfloat16)
    print(json.dumps({
        "geometry": geometry,
        "processor_s": round(time.process_time() - processor_s, 1),
        "clock_s": round(time.perf_counter() - clock_s, 1),
        "gigabytes": round(peak_gigabytes(), 3),
        "nodes": len(model.graph),
        "attentions": sum(node.op_type in ATTENTIONS for node in model.graph),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
