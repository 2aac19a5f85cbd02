"""Times LazyGatedDelta at the sizes of Qwen3.5-27B and 35B-A3B, as launches of a CUDA graph.

    python benchmarks/gated_delta.py [--json FILE]

Each launch of a graph has its own pools, as layers have, so that states are read from memory.
Steps are timed with every tactic, prompts row by row and in chunks.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.plugins_cuda.launches import LoweringRequest, Phase, Tactic, Target, TensorInfo
from specbuild.plugins_cuda.lazy_gated_delta.op import OP

VALUE_HEADS = {"27B": 48, "35B-A3B": 32}
KEY_HEADS, WIDTH, TAPS, NODES = 16, 128, 4, 8
TACTICS: tuple[Tactic, ...] = tuple({"ctas": c, "warms": w} for c in (1, 2) for w in (0, 1))
POOLS = ("tail_pool", "state_pool", "factor_pool")
# Pools larger than this do not stay in the L2 cache.
POOL_BYTES = 256 << 20
Shapes = dict[str, tuple[tuple[int, ...], str]]


def shapes_of(value_heads: int, batch: int, rows: int) -> Shapes:
    """Return shape and type of every tensor of a launch."""
    keys, values = KEY_HEADS * WIDTH, value_heads * WIDTH
    channels, total = 2 * keys + values, batch * rows
    return {
        "rows": ((total, channels + values + 2 * value_heads), "bfloat16"),
        "conv_weight": ((channels, 1, TAPS), "bfloat16"),
        "decay_scale": ((value_heads,), "float32"),
        "dt_bias": ((value_heads,), "float32"),
        "norm": ((WIDTH,), "bfloat16"),
        "positions": ((total,), "int32"),
        "row_start": ((batch + 1,), "int32"),
        "ancestor_bits": ((total, 1), "int32"),
        "state_slot": ((batch,), "int32"),
        "replay_path": ((batch, NODES), "int32"),
        "replay_count": ((batch,), "int32"),
        "tail_pool": ((batch, TAPS - 1 + NODES, channels), "bfloat16"),
        "state_pool": ((batch, value_heads, WIDTH, WIDTH), "float32"),
        "factor_pool": ((batch, NODES, values + keys + value_heads), "float32"),
        "output": ((total, values), "bfloat16"),
    }


def data_of(
    shapes: Shapes, batch: int, rows: int, committed: int, *, is_prompt: bool
) -> dict[str, np.ndarray]:
    """Fill tensors: consecutive chains, and random numbers small enough to stay finite."""
    drawn = np.random.default_rng(0)
    total = batch * rows
    chains = np.tile((2 << np.arange(rows % 32)) - 1, batch)[:, None] if not is_prompt else None
    arrays = {
        "positions": np.arange(total) if is_prompt else np.full(total, 5),
        "row_start": np.arange(batch + 1) * rows,
        "ancestor_bits": np.zeros((total, 1)) if chains is None else chains,
        "state_slot": np.arange(batch),
        "replay_path": np.tile(np.arange(NODES), (batch, 1)),
        "replay_count": np.full(batch, committed),
    }
    result: dict[str, np.ndarray] = {n: array.astype(np.int32) for n, array in arrays.items()}
    for name, (shape, dtype) in shapes.items():
        if name not in result and name != "output":
            values = drawn.standard_normal(shape, np.float32) * 0.1
            values = -abs(values) if name == "decay_scale" else values
            is_half = dtype == "bfloat16"
            result[name] = (values.view(np.uint32) >> 16).astype(np.uint16) if is_half else values
    return result


def time_us(
    runner: OpRunner,
    value_heads: int,
    batch: int,
    rows: int,
    committed: int,
    *,
    is_prompt: bool = False,
    phase: Phase = "decode",
    tactic: Tactic | None = None,
) -> float:
    """Return the microseconds of a launch, which replays ``committed`` rows of the last one.

    Prompts in the ``phase`` prefill are computed in chunks.
    """
    shapes = shapes_of(value_heads, batch, rows)
    tensors = {name: TensorInfo(*shape) for name, shape in shapes.items()}
    attributes = {"key_heads": KEY_HEADS, "eps": 1e-6, "stores": int(is_prompt)}
    assert OP.lower is not None
    lowering = OP.lower(LoweringRequest(tensors, attributes, phase, Target(), tactic or {}))
    data = data_of(shapes, batch, rows, committed, is_prompt=is_prompt)
    size = sum(tensors[name].nbytes for name in POOLS)
    copies = min(max(2, -(-POOL_BYTES // size)), 48)
    shared = {n: runner.allocate(i.nbytes) for n, i in tensors.items() if n not in POOLS}
    for workspace in lowering.workspaces:
        shared[workspace.name] = runner.allocate(workspace.nbytes)
        runner.upload(shared[workspace.name], np.zeros(workspace.nbytes, np.uint8))
    pools = [{n: runner.allocate(tensors[n].nbytes) for n in POOLS} for _ in range(copies)]
    for name, array in data.items():
        for place in [shared] if name in shared else pools:
            runner.upload(place[name], array)
    seconds = runner.time_s([(lowering, shared | each) for each in pools])
    for pointer in (*shared.values(), *(p for each in pools for p in each.values())):
        runner.free(pointer)
    return seconds / copies * 1e6


def main() -> None:
    """Print a table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runner = OpRunner(Compiler("sm_90a"))
    result = []
    print(runner.device_name)
    print("model     batch  rows  committed  tactic                       µs  state GB/s")
    for (model, heads), batch, rows, tactic in product(
        VALUE_HEADS.items(), (1, 4, 16, 64), (1, 2, 4, 8), TACTICS
    ):
        committed = min(rows, 3)
        us = time_us(runner, heads, batch, rows, committed, tactic=tactic)
        speed = 8e-3 * batch * heads * WIDTH * WIDTH / us
        result.append(
            {"model": model, "batch": batch, "rows": rows, "committed": committed, "us": us}
            | {"tactic": dict(tactic)}
        )
        print(
            f"{model:9} {batch:5} {rows:5} {committed:10}  {dict(tactic)!s:24}",
            f"{us:8.2f} {speed:11.0f}",
            flush=True,
        )
    prompts: tuple[Phase, ...] = ("decode", "prefill")
    for (model, heads), rows, phase in product(VALUE_HEADS.items(), (2048, 8192), prompts):
        us = time_us(runner, heads, 1, rows, 0, is_prompt=True, phase=phase)
        form = "in chunks" if phase == "prefill" else "row by row"
        result.append({"model": model, "batch": 1, "rows": rows, "prompt": form, "us": us})
        print(f"{model:9} prompt of {rows} rows {form:10} {us:10.1f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
