"""Measures time and correctness of RankSum alone, on the GPUs of one host, optionally with NCCL.

    python benchmarks/exchange.py [--ranks 2] [--seconds 20] [--nccl] [--shapes] [--json FILE]
    python benchmarks/exchange.py --one-gpu

Each GPU runs a graph of exchanges with programmatic launches, as in a step. Their sums are compared
with torch, bit for bit and between ranks. Then rounds with values derived from the round numbers
run for ``--seconds``, each after a random wait on either rank, and once across the wrap-around of
the numbers; the GPU checks every sum. ``--shapes`` also times other grids.

``--one-gpu`` measures as much as possible on a single GPU. All ranks run on it without programmatic
launches, since waiting launches would occupy what another rank needs. Times are those of a rank
that is its own peer, with programmatic launches: all except the transfer between GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, required
from specbuild.plugins_cuda.launches import Kernel
from specbuild.plugins_cuda.rank_sum.rounds import (
    MAX_CTAS,
    ROUND_ROWS,
    Cut,
    cut_of,
    exchange_rounds,
)
from specbuild.runtime.executors.cuda.driver import DriverGpu, open_gpu
from specbuild.runtime.executors.cuda.gpu import Handle, LaunchConfig

WIDTH, IN_GRAPH, LIMIT_MS = 2880, 64, 2000
ROWS = (1, 4, 8, 16, 64, 256)
WORDS, MAX_ROWS = ROUND_ROWS * WIDTH, 700
PEERS = 7
ADVANCE = Kernel("rank_advance", "advance_rounds")
SHARES = [(threads, pairs) for threads in (64, 128, 256, 512, 1024) for pairs in (1, 2, 4)]


@dataclass
class Rank:
    """One GPU with an inbox, a stream and loaded kernels."""

    gpu: DriverGpu
    number: int
    ranks: int
    early: bool = True
    stream: Handle = field(init=False)

    def __post_init__(self) -> None:
        self.gpu.use()
        self.stream = self.gpu.new_stream()
        self.inbox_bytes = 2 * (self.ranks - 1) * WORDS * 8
        self.inbox = self.gpu.allocate(self.inbox_bytes)
        self.state = self.gpu.allocate(512)
        self.wrong = self.gpu.allocate(512)
        self.fault = self.gpu.allocate_host(512)
        self.fault.view[:] = 0
        self._staging = self.gpu.allocate_host(MAX_ROWS * WIDTH * 4)
        self._alive: list[Any] = []
        self._functions: dict[Kernel, Handle] = {}
        self.reset(0)

    def reset(self, epoch: int) -> None:
        """Clear the inboxes and the count of rounds."""
        self.gpu.use()
        self.gpu.fill(self.inbox, 0, self.inbox_bytes // 4, self.stream)
        self.gpu.fill(self.wrong, 0, 1, self.stream)
        self.gpu.fill(self.state, epoch, 1, self.stream)
        self.gpu.fill(self.state + 4, LIMIT_MS, 1, self.stream)
        self.gpu.synchronize(self.stream)

    def upload(self, address: int, values: np.ndarray) -> None:
        """Wait until the values have arrived."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self.gpu.use()
        self._staging.view[: len(data)] = data
        self.gpu.upload(address, self._staging.address, len(data), self.stream)
        self.gpu.synchronize(self.stream)

    def download(self, address: int, nbytes: int) -> np.ndarray:
        """Return uint8 [nbytes] after all queued work."""
        self.gpu.use()
        self.gpu.download(self._staging.address, address, nbytes, self.stream)
        self.gpu.synchronize(self.stream)
        return self._staging.view[:nbytes].copy()

    def load(self, compiled: Any) -> None:
        """Load every kernel before anything runs."""
        self.gpu.use()
        modules: dict[str, Handle] = {}
        for kernel, entry in compiled.kernels.items():
            if entry.cubin not in modules:
                data = compiled.files[entry.cubin]
                modules[entry.cubin] = self.gpu.load_module(data, entry.cubin)
            self._functions[kernel] = self.gpu.function(modules[entry.cubin], entry.entry)

    def launch(self, kernel: Kernel, ctas: int, threads: int, arguments: Sequence[int]) -> Any:
        """Return a launch; arguments are addresses and numbers, each in the first bytes of 8."""
        values = np.array([a & (1 << 64) - 1 for a in arguments], np.uint64)
        pointers = values.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)
        self._alive += [values, pointers]
        return LaunchConfig(
            self._functions[kernel], (ctas, 1, 1), threads, 0, self.early, pointers.ctypes.data
        )

    def graph(self, launches: Sequence[LaunchConfig]) -> Handle:
        """Record launches as a graph."""
        self.gpu.use()
        recording = self.gpu.new_stream()
        self.gpu.begin_capture(recording)
        for config in launches:
            self.gpu.launch(config, recording)
        return self.gpu.end_capture(recording)


def rank_sum(ranks: int, cut: Cut) -> Kernel:
    """Return the kernel of a grid."""
    constants = {"RANKS": ranks, "WIDTH": WIDTH, "WORDS": WORDS, "ROWS": ROUND_ROWS}
    constants |= {"THREADS": cut.threads, "PAIRS": cut.pairs}
    return Kernel("rank_sum", "rank_sum", tuple(constants.items()), hot=False)


def drawing(ranks: int, entry: str) -> Kernel:
    """Return kernels of exchange_rounds.cu."""
    constants = (("RANKS", ranks),)
    return Kernel("_device", entry, constants, file="exchange_rounds.cu", hot=False)


def exchange(
    world: Sequence[Rank], rank: Rank, cut: Cut, places: dict[str, int], *, rows: int, index: int
) -> LaunchConfig:
    """Return a launch of RankSum; ``places`` has partial, bias, residual and y."""
    behind = [world[(rank.number + k) % len(world)].inbox for k in range(1, rank.ranks)]
    arguments = [
        places["partial"], places.get("bias", 0), places.get("residual", 0), rank.inbox,
        *behind, *[0] * (PEERS - len(behind)), rank.state, rank.fault.device_address,
        places["y"], rows, rank.number, index,
    ]  # fmt: skip
    return rank.launch(rank_sum(rank.ranks, cut), cut.ctas, cut.threads, arguments)


def compared(world: Sequence[Rank], rows: int, rng: np.random.Generator) -> None:
    """Compare one exchange, with a bias and a residual, with torch. Raises if a bit differs."""
    import torch

    shape = (rows, WIDTH)
    partials = [rng.standard_normal(shape, np.float32) for _ in world]
    bias, residual = (torch.randn(s).bfloat16() for s in ((WIDTH,), shape))
    total = torch.from_numpy(partials[0])
    for partial in partials[1:]:
        total = total + torch.from_numpy(partial)
    expected = residual + (total + bias.float()).bfloat16()
    graphs, places, rounds = [], [], exchange_rounds(rows)
    for rank, partial in zip(world, partials, strict=True):
        rank.gpu.use()
        place = {
            "partial": rank.gpu.allocate(rows * WIDTH * 4), "bias": rank.gpu.allocate(WIDTH * 2),
            "residual": rank.gpu.allocate(rows * WIDTH * 2),
            "y": rank.gpu.allocate(rows * WIDTH * 2),
        }  # fmt: skip
        rank.upload(place["partial"], partial)
        rank.upload(place["bias"], bias.view(torch.int16).numpy())
        rank.upload(place["residual"], residual.view(torch.int16).numpy())
        places.append(place)
    for rank, place in zip(world, places, strict=True):
        launch = exchange(world, rank, cut_of(rows, WIDTH, len(world)), place, rows=rows, index=0)
        graphs.append(rank.graph([launch, rank.launch(ADVANCE, 1, 1, [rank.state, rounds])]))
    run(world, graphs)
    for rank, place in zip(world, places, strict=True):
        result = torch.from_numpy(rank.download(place["y"], rows * WIDTH * 2).view(np.int16))
        same = result.reshape(shape) == expected.view(torch.int16)
        assert same.all(), f"{rows} rows: rank {rank.number}: {int((~same).sum())} differ"


def run(world: Sequence[Rank], graphs: Sequence[Handle], times: int = 1) -> float:
    """Run every rank's graph repeatedly; return the seconds of rank 0 from first to last."""
    world[0].gpu.use()
    first, last = (world[0].gpu.new_event(timed=True) for _ in range(2))
    for i in range(times):
        for rank, graph in zip(world, graphs, strict=True):
            rank.gpu.use()
            if rank.number == 0 and i == min(2, times - 1):
                rank.gpu.record(first, rank.stream)
            rank.gpu.launch_graph(graph, rank.stream)
    world[0].gpu.use()
    world[0].gpu.record(last, world[0].stream)
    for rank in world:
        rank.gpu.use()
        rank.gpu.synchronize(rank.stream)
        assert not rank.fault.view[:4].any(), rank.fault.view.view(np.int32)[:5]
    world[0].gpu.use()
    return world[0].gpu.elapsed_s(first, last) / max(1, times - min(2, times - 1))


def timed(world: Sequence[Rank], rows: int, cut: Cut, repeats: int) -> float:
    """Return the microseconds of one exchange in a graph of many."""
    graphs = []
    for rank in world:
        rank.gpu.use()
        place = {
            "partial": rank.gpu.allocate(rows * WIDTH * 4),
            "y": rank.gpu.allocate(rows * WIDTH * 2),
        }
        values = np.random.default_rng(rank.number).standard_normal((rows, WIDTH), np.float32)
        rank.upload(place["partial"], values)
        launches = [exchange(world, rank, cut, place, rows=rows, index=i) for i in range(IN_GRAPH)]
        launches.append(rank.launch(ADVANCE, 1, 1, [rank.state, IN_GRAPH]))
        graphs.append(rank.graph(launches))
    return min(run(world, graphs, repeats) for _ in range(3)) / IN_GRAPH * 1e6


def soaked(world: Sequence[Rank], rows: int, seconds: float, longest_ns: int) -> int:
    """Return the rounds checked in this time; raises if an element is wrong."""
    ranks, count, graphs = len(world), rows * WIDTH, []
    ctas = min(60, -(-count // 256))
    for rank in world:
        rank.gpu.use()
        place = {"partial": rank.gpu.allocate(count * 4), "y": rank.gpu.allocate(count * 2)}
        launches = []
        for i in range(IN_GRAPH):
            drawn = [place["partial"], rank.state, count, rank.number, i, longest_ns]
            launches.append(rank.launch(drawing(ranks, "draw_values"), ctas, 256, drawn))
            cut = cut_of(rows, WIDTH, ranks)
            launches.append(exchange(world, rank, cut, place, rows=rows, index=i))
            stored = [place["y"], rank.state, rank.wrong, count, i]
            launches.append(rank.launch(drawing(ranks, "count_wrong"), ctas, 256, stored))
        launches.append(rank.launch(ADVANCE, 1, 1, [rank.state, IN_GRAPH]))
        graphs.append(rank.graph(launches))
    rounds, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        run(world, graphs, 50)
        rounds += 50 * IN_GRAPH
    for rank in world:
        wrong = int(rank.download(rank.wrong, 4).view(np.int32)[0])
        assert wrong == 0, f"{rows} rows, rank {rank.number}: {wrong} elements are wrong"
    return rounds


def cuts(rows: int, ranks: int) -> Iterator[Cut]:
    """Run all measurements."""
    pairs = rows * WIDTH // 2
    for threads, each in SHARES:
        ctas = -(-pairs // (threads * each))
        if each * ranks <= 8 and ctas <= MAX_CTAS and threads * (ctas - 1) < pairs:
            yield Cut(ctas, threads, each)


def nccl_rank(rank: int, ranks: int, port: int, result: Any) -> None:
    """Time all-reduces of bf16 and fp32 in a graph, as one of the processes."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks)
    for dtype in (torch.bfloat16, torch.float32):
        for rows in ROWS:
            x = torch.randn(rows, WIDTH, device="cuda").to(dtype)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    dist.all_reduce(x)
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(IN_GRAPH):
                    dist.all_reduce(x)
            times = []
            for _ in range(3):
                graph.replay()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                for _ in range(20):
                    graph.replay()
                last.record()
                torch.cuda.synchronize()
                times.append(first.elapsed_time(last) * 1000 / 20 / IN_GRAPH)
            if rank == 0:
                name = str(dtype).removeprefix("torch.")
                print(f"NCCL {name} {rows:4d} rows: {min(times):7.2f} us", flush=True)
                result[f"{name} {rows}"] = min(times)
    dist.destroy_process_group()


def nccl(ranks: int) -> dict[str, float]:
    """Return the microseconds of NCCL's all-reduce in a graph, by type and rows."""
    from torch import multiprocessing
    from torch.multiprocessing.spawn import spawn

    result = multiprocessing.Manager().dict()
    spawn(nccl_rank, (ranks, 29533, result), nprocs=ranks)
    return dict(result)


def store(record: dict[str, Any], path: Path | None) -> None:
    """Write the results so far."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20, help="of checked rounds")
    parser.add_argument("--nccl", action="store_true", help="time NCCL's all-reduce, at the end")
    parser.add_argument("--shapes", action="store_true", help="time other cuts")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks: int = options.ranks
    record: dict[str, Any] = {"ranks": ranks, "width": WIDTH, "in_graph": IN_GRAPH}
    requested = {rows: {cut_of(rows, WIDTH, ranks)} for rows in ROWS}
    if options.shapes:
        requested = {rows: cached | set(cuts(rows, ranks)) for rows, cached in requested.items()}
    kernels = [rank_sum(ranks, cut) for several in requested.values() for cut in several]
    kernels += [ADVANCE, drawing(ranks, "draw_values"), drawing(ranks, "count_wrong")]
    compiled = required(Compiler("sm_90a").compile(kernels, lambda: None))
    world = [
        Rank(open_gpu(0 if options.one_gpu else i), i, ranks, early=not options.one_gpu)
        for i in range(ranks)
    ]
    record["gpus"] = [rank.gpu.facts.name for rank in world]
    record["driver"] = world[0].gpu.facts.driver_version
    for rank in world:
        for peer in world:
            if peer is not rank and not options.one_gpu:
                assert rank.gpu.reaches(peer.gpu), f"{rank.number} does not reach {peer.number}"
                rank.gpu.reach(peer.gpu)
        rank.load(compiled)
    print(record["gpus"], flush=True)
    rng = np.random.default_rng(7)
    for rows in (*ROWS, 3, 255, 257, MAX_ROWS):
        compared(world, rows, rng)
    print("bits equal torch's on every rank", flush=True)
    record["rank_sum_us"] = times = {}
    timed_world = world
    if options.one_gpu:
        timed_world = [Rank(world[0].gpu, 0, ranks)]
        timed_world[0].load(compiled)
    for rows, several in requested.items():
        own = cut_of(rows, WIDTH, ranks)
        for cut in sorted(several, key=lambda c: (c != own, c.threads, c.pairs)):
            times[f"{rows} rows, {cut.ctas}x{cut.threads}x{cut.pairs}"] = time_us = timed(
                timed_world, rows, cut, 30
            )
            chosen = " (chosen)" if cut == own else ""
            print(f"{rows:4d} rows {cut}: {time_us:7.2f} us{chosen}", flush=True)
    record["rounds"] = checked = {}
    for name, rows, longest_ns, epoch, share in (
        ("as fast as they go", 1, 0, 0, 0.3),
        ("delays up to 4 us", 1, 4000, 0, 0.2),
        ("delays up to 20 us, 8 rows", 8, 20_000, 0, 0.1),
        ("64 rows", 64, 3000, 0, 0.1),
        ("256 rows", 256, 3000, 0, 0.1),
        ("over 2^31", 1, 2000, 2**31 - 5000, 0.1),
        ("over 2^32", 1, 2000, 2**32 - 5000, 0.1),
    ):
        for rank in world:
            rank.reset(epoch)
        checked[name] = soaked(world, rows, options.seconds * share, longest_ns)
        print(f"{name}: {checked[name]} rounds, no element wrong", flush=True)
    store(record, options.json)
    if options.nccl:
        record["nccl_us"] = nccl(ranks)
        store(record, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
