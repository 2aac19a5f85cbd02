"""Times attention over cached keys and values, or latents, at real geometry on a GPU.

    python benchmarks/latent_attention.py [--contexts 8192,32768,131072] [--batches 1,8]
        [--rows 1,4] [--forms plain,codes,view,512,256,absorbed] [--windows 0] [--page 64]
        [--heads 64x8x64] [--prompt] [--capacity N] [--tactics] [--tflops T] [--json FILE]

It uses one layer of GPT-OSS-20B geometry, or with ``--heads`` a number of query heads, of KV heads
and a width (32x8x128 is Llama-3.1-8B). Forms are keys and values (``plain``), the same in fp8
(``codes``), the same through a page table per KV head over half of the pages (``view``: a partial
view of SpecPV, whose engines have pages of 16), a latent of a given width with rebuilt keys, or
absorbed MLA with 64 heads over 512 + 64 values. ``rows`` are rows of a sequence: up to 8 of a
chain, after re-verified tokens (``--forms plain --rows 52``); with ``--prompt`` they are a chunk of
a prompt. ``--capacity`` is the number of slots of a page table, for engines with longer contexts,
which select kernels by it. Calls alternate over copies of the caches, so that nothing is in L2. The
floor is the larger of two times: of the bytes, at the rate of a streaming read of 8 GiB, and of the
operations, at the rate of cuBLAS's bf16 product of two random 8192 × 8192 matrices. Both rates are
measured in the same process. ``--tflops`` replaces the second (the data sheet of an H200 has 989,
which no product reaches).
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernels import gpu_description, stream_ceiling

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.plugins_cuda.launches import (
    Lowering,
    LoweringRequest,
    Phase,
    Tactic,
    Target,
    TensorInfo,
)
from specbuild.plugins_cuda.opspec import OpSpec
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError

LAUNCHES = 24
ROTATED_BYTES = 800 << 20
MAX_BYTES = 48 << 30
MATMUL_SIZE, MATMULS = 8192, 20
RANK, ROPE = 512, 64
CHAIN = 8  # nodes of a tree, after committed rows


def matmul_rate() -> float:
    """Return the operations per second of a large bf16 matrix product, by torch."""
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(a)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(2 * MATMULS):
        if repeat == MATMULS:
            begin.record()
        torch.matmul(a, b, out=product)
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1e3 / MATMULS
    return float(2 * MATMUL_SIZE**3 / seconds)


@dataclass(frozen=True)
class Heads:
    """Query heads, KV heads, and their width."""

    q: int = 64
    kv: int = 8
    width: int = 64


@dataclass(frozen=True)
class Work:
    """One launch: ``rows`` of each of ``batch`` sequences after ``context`` tokens."""

    form: str
    batch: int
    context: int
    rows: int
    window: int = 0
    page: int = 64
    capacity: int = 0
    heads: Heads = Heads()
    prompt: bool = False

    @property
    def op(self) -> OpSpec:
        return op_named("PagedTreeAttention" if self.has_keys else "MlaAttention")

    @property
    def has_keys(self) -> bool:
        """Whether keys and values are cached, not a latent."""
        return self.form in ("plain", "codes", "view")

    @property
    def cached_dtype(self) -> str:
        """The bytes of a value in the pools."""
        return "uint8" if self.form == "codes" else "bfloat16"

    @property
    def tables(self) -> int:
        """The number of page tables of a sequence."""
        return self.heads.kv if self.form == "view" else 1

    @property
    def used_pages(self) -> int:
        """The number of used pages of a table."""
        return -(-(self.context + self.rows) // self.page)

    @property
    def table_pages(self) -> int:
        """The number of pages of a table."""
        return max(self.used_pages, -(-self.capacity // self.page))

    @property
    def sequence_pages(self) -> int:
        """The number of pages among which a sequence's tables select."""
        return self.used_pages * min(self.tables, 2)

    @property
    def entry(self) -> int:
        """The number of cached values per token."""
        if self.has_keys:
            return 2 * self.heads.kv * self.heads.width
        return RANK + ROPE if self.form == "absorbed" else int(self.form)

    @property
    def tokens_read(self) -> int:
        """The bytes of one sequence."""
        tokens = self.context + self.rows
        return min(tokens, self.window - 1 + self.rows) if self.window else tokens

    def request(self, tactic: Tactic) -> LoweringRequest:
        """Return the request that the op lowers."""
        attributes = {"scale": self.heads.width**-0.5, "window": self.window}
        phase: Phase = "prefill" if self.prompt else "decode"
        return LoweringRequest(self.tensors(), attributes, phase, Target(), dict(tactic))

    def lowering(self, tactic: Tactic) -> Lowering:
        """Return its launches; SpecbuildError if no kernel supports it."""
        assert self.op.lower is not None
        return self.op.lower(self.request(tactic))

    @property
    def bytes_read(self) -> int:
        weights = sum(info.nbytes for name, info in self.tensors().items() if name.startswith("w_"))
        value = ITEM_BYTES[self.cached_dtype]
        return weights + value * self.batch * self.tokens_read * self.entry

    @property
    def operations(self) -> int:
        """Return operations: scores and sums per row and token, rebuilt keys per token."""
        width = self.heads.width
        cached = dict.fromkeys(("plain", "codes", "view"), 4 * width)
        cached |= {"absorbed": 2 * (2 * RANK + ROPE)}
        per_row = self.heads.q * cached.get(self.form, 2 * (width + self.entry))
        shared = 0 if self.form in cached else 2 * self.entry * self.heads.kv * width
        # A row of a prompt's chunk attends to those before it.
        seen = self.tokens_read - (self.rows - 1) / 2 * self.prompt
        return int(self.batch * (self.rows * seen * per_row + self.tokens_read * shared))

    def tensors(self) -> dict[str, TensorInfo]:
        """Return every tensor of the op."""
        q_heads, kv_heads, width = self.heads.q, self.heads.kv, self.heads.width
        pool_pages = 1 + self.batch * self.sequence_pages
        total = self.batch * self.rows
        positions = max(self.context + self.rows, self.capacity)

        def half(*shape: int) -> TensorInfo:
            return TensorInfo(shape, "bfloat16")

        created: dict[str, TensorInfo] = {"q": half(total, q_heads, width)}
        if self.has_keys:
            pool = TensorInfo((pool_pages, kv_heads, self.page, width), self.cached_dtype)
            created |= {"k_pool": pool, "v_pool": pool}
        else:
            created["c_pool"] = half(pool_pages, 1, self.page, self.entry)
        if self.form == "absorbed":
            created["q"] = half(total, q_heads, self.entry)
            created["w_v"] = half(RANK, q_heads, width)
        elif not self.has_keys:
            created |= {name: half(self.entry, kv_heads, width) for name in ("w_k", "w_v")}
            created |= {name: half(kv_heads, width) for name in ("b_k", "b_v")}
            table = TensorInfo((positions, width // 2), "float32")
            created |= {"cos": table, "sin": table}
        created |= {
            "page_table": TensorInfo((self.batch, self.tables, self.table_pages), "int32"),
            "row_start": TensorInfo((self.batch + 1,), "int32"),
            "row_slot": TensorInfo((total,), "int32"),
            "tree_start": TensorInfo((self.batch,), "int32"),
            "ancestor_bits": TensorInfo((total, 1), "int32"),
            "attended": half(total, q_heads, width),
        }
        if self.form != "absorbed":
            created["sinks"] = TensorInfo((q_heads,), "float32")
        order = [tensor.name for tensor in (*self.op.inputs, *self.op.outputs)]
        return {name: created[name] for name in order if name in created}

    def integers(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return pages in random order; a sequence's last rows are a chain's nodes."""
        row = np.arange(self.batch * self.rows) % self.rows
        committed = self.rows if self.prompt else max(self.rows - CHAIN, 0)
        node = np.maximum(row - committed, -1)
        pages = 1 + rng.permutation(self.batch * self.sequence_pages).astype(np.int32)
        chosen = [
            [rng.permutation(own)[: self.used_pages] for _ in range(self.tables)]
            for own in np.split(pages, self.batch)
        ]
        unused = (0, self.table_pages - self.used_pages)
        return {
            "page_table": np.pad(np.array(chosen, np.int32), ((0, 0), (0, 0), unused)),
            "row_start": (np.arange(self.batch + 1) * self.rows).astype(np.int32),
            "row_slot": (self.context + row).astype(np.int32),
            "tree_start": np.full(self.batch, self.context + committed, np.int32),
            "ancestor_bits": ((1 << (node + 1)) - 1).astype(np.int32)[:, None],
        }


class Bench:
    """The GPU, its streaming read, and noise for tensors."""

    def __init__(self) -> None:
        self.runner = OpRunner(Compiler("sm_90a"))
        self.ceiling = stream_ceiling(self.runner)
        noise = np.random.default_rng(1).standard_normal(32 << 20, np.float32)
        codes = noise.view(np.uint8)
        self._noise = {
            "float32": noise,
            "uint8": codes & np.uint8(0xBF),  # below 2, and no NaN
            "bfloat16": (noise.view(np.uint32) >> 16).astype(np.uint16),
        }

    def time_us(self, work: Work, lowering: Lowering) -> float:
        """Return the microseconds of a call in a graph of many; SpecbuildError if memory is
        exceeded.
        """
        tensors = work.tensors()
        pools = {name for name in tensors if name.endswith("_pool")}
        size = sum(tensors[name].nbytes for name in pools)
        scratch = sum(workspace.nbytes for workspace in lowering.workspaces)
        if 2 * size + scratch > MAX_BYTES:
            raise SpecbuildError(
                f"{2 * size + scratch >> 30} GiB are more than the benchmark takes"
            )
        copies = max(2, min(LAUNCHES, -(-ROTATED_BYTES // size)))
        shared = self._place({n: i for n, i in tensors.items() if n not in pools}, work)
        for workspace in lowering.workspaces:
            shared[workspace.name] = self.runner.allocate(workspace.nbytes)
            if workspace.zeroed:
                self.runner.upload(shared[workspace.name], np.zeros(workspace.nbytes, np.uint8))
        places = [self._place({n: tensors[n] for n in pools}, work) for _ in range(copies)]
        calls = [(lowering, {**shared, **p}) for p in places * -(-LAUNCHES // copies)]
        try:
            return 1e6 * self.runner.time_s(calls, replays=8) / len(calls)
        finally:
            for place in (shared, *places):
                for pointer in place.values():
                    self.runner.free(pointer)

    def _place(self, tensors: Mapping[str, TensorInfo], work: Work) -> dict[str, int]:
        integers = work.integers(np.random.default_rng(2))
        place = {}
        for name, info in tensors.items():
            place[name] = self.runner.allocate(info.nbytes)
            if name in integers:
                self.runner.upload(place[name], integers[name])
                continue
            values = self._noise[info.dtype]
            if name in ("w_k", "w_v"):
                small = np.float32(0.04) * self._noise["float32"][: prod(info.shape)]
                values = (small.view(np.uint32) >> 16).astype(np.uint16)
            if name in ("cos", "sin"):
                values = np.cos(values[: prod(info.shape)])
            for offset in range(0, info.nbytes, values.nbytes):
                count = min(values.nbytes, info.nbytes - offset) // values.itemsize
                self.runner.upload(place[name] + offset, values[:count])
        return place


def main() -> None:
    """Print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="8192,32768,131072")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--forms", default="plain,512,256,absorbed")
    parser.add_argument("--windows", default="0", help="0 is none; 128 for sliding layers")
    parser.add_argument("--page", type=int, default=64, help="tokens in a page")
    parser.add_argument("--heads", default="64x8x64", help="query heads x KV heads x their width")
    parser.add_argument("--prompt", action="store_true", help="rows are a chunk of a prompt")
    parser.add_argument("--capacity", type=int, default=0, help="slots of a page table, at least")
    parser.add_argument("--tactics", action="store_true", help="every tactic, not the default only")
    parser.add_argument("--tflops", type=float, help="instead of the measured rate")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    rate = 1e12 * options.tflops if options.tflops else matmul_rate()
    bench = Bench()
    print(f"streaming read {bench.ceiling / 1e12:.3f} TB/s, matmul {rate / 1e12:.0f} TFLOP/s")
    rows: list[dict[str, Any]] = []
    heads = Heads(*map(int, options.heads.split("x")))
    grid = [
        Work(
            form,
            int(batch),
            int(context),
            int(count),
            int(window),
            options.page,
            options.capacity,
            heads,
            options.prompt,
        )
        for form in options.forms.split(",")
        for window in options.windows.split(",")
        for batch in options.batches.split(",")
        for context in options.contexts.split(",")
        for count in options.rows.split(",")
    ]
    for work in grid:
        tactics = (
            work.op.tactics(work.request({})) if options.tactics and work.op.tactics else ({},)
        )
        for tactic in tactics:
            name = (
                f"{work.form:8s} window {work.window:3d} page {work.page:2d} batch {work.batch} "
                f"context {work.context:6d} rows {work.rows}"
            )
            try:
                took = bench.time_us(work, work.lowering(tactic))
            except SpecbuildError as refusal:
                print(f"{name} {dict(tactic)}: refused ({refusal})")
                continue
            by_bytes = 1e6 * work.bytes_read / bench.ceiling
            by_operations = 1e6 * work.operations / rate
            share = max(by_bytes, by_operations) / took
            rows.append({"form": work.form, "heads": options.heads, "prompt": work.prompt,
                         "window": work.window, "batch": work.batch,
                         "context": work.context, "rows": work.rows, "page": work.page,
                         "capacity": work.capacity,
                         "tactic": dict(tactic), "time_us": took, "bytes": work.bytes_read,
                         "operations": work.operations, "byte_floor_us": by_bytes,
                         "operation_floor_us": by_operations,
                         "of_floor": share})  # fmt: skip
            print(
                f"{name}  {took:8.2f} us  floors {by_bytes:7.2f} (bytes) {by_operations:7.2f} "
                f"(operations) us  {100 * share:5.1f} %  {dict(tactic) or ''}",
                flush=True,
            )
    if options.json:
        record = {"date": datetime.date.today().isoformat(), **gpu_description(),
                  "ceiling_bytes_per_s": bench.ceiling, "tflops": rate / 1e12,
                  "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
