"""Several fake GPUs that run one engine. No call may wait while their queues differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_gpu import HOPPER, FakeGpu, FakeKernel
from toy_device import ToyDevice
from toy_plan import cuda_manifest, plan_file, toy_plan

from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.plan import (
    EXCHANGE_EPOCH,
    EXCHANGE_FAULT,
    EXCHANGE_LIMIT,
    Buffer,
    Plan,
    Port,
)
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.executors.cuda.gpu import GpuFacts
from specbuild.runtime.executors.cuda.ranked import RankedExecutor

# Calls that wait, or may wait, for a GPU's kernels.
BLOCKING = (
    "allocate", "release", "allocate_host", "release_host", "load_module", "end_capture",
    "release_graph", "synchronize", "wait",
)  # fmt: skip
# All calls to a GPU.
CALLS = (*BLOCKING, "use", "fill", "upload", "download", "copy", "record", "launch",
         "launch_graph", "begin_capture", "function", "set_shared", "new_stream", "new_event",
         "reach", "free_bytes")  # fmt: skip
LOST = "CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)"


class RankGpu(FakeGpu):
    """One GPU of several. From call number ``fails_at`` on, every call fails.

    If a peer has failed, or has not received the same work, this GPU's kernels wait until they time
    out: they fill ``fault`` and are lost.
    """

    def __init__(
        self, world: list[RankGpu], kernels: dict[str, FakeKernel], facts: GpuFacts = HOPPER
    ) -> None:
        super().__init__(kernels, facts)
        self.number = len(world)
        self._next += self.number << 40
        self.world = world
        self.reached: list[RankGpu] = []
        self.calls = self.queued = 0
        self.fails_at: int | None = None
        self.fault: np.ndarray | None = None
        self.unreachable = False
        world.append(self)
        for name in CALLS:
            setattr(self, name, self._checked(name, getattr(self, name)))

    @property
    def failed(self) -> bool:
        return self.fails_at is not None and self.calls >= self.fails_at

    def reaches(self, peer: RankGpu) -> bool:
        return not (self.unreachable or peer.unreachable)

    def reach(self, peer: RankGpu) -> None:
        self.reached.append(peer)

    def launch_graph(self, graph: Any, stream: Any) -> None:
        super().launch_graph(graph, stream)
        self.queued += 1

    def _checked(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any, **keywords: Any) -> Any:
            self.calls += 1
            if self.failed:
                raise SpecbuildError(f"{name} failed: {LOST}; the GPU's state is lost")
            if name in BLOCKING:
                self._wait_for_peers()
            return call(*arguments, **keywords)

        return checked

    def _wait_for_peers(self) -> None:
        behind = [peer for peer in self.world if peer.queued < self.queued or peer.failed]
        if not behind:
            return
        assert any(peer.failed for peer in self.world), "a call waits before all have their work"
        if self.queued and self.fault is not None:
            self.fault[:5] = [1, self.number, behind[0].number, 3, 1]
            raise SpecbuildError("waiting for the GPU failed: CUDA_ERROR_LAUNCH_FAILED")


def ranked_plan(plan: Plan, ranks: int, rounds: int = 2) -> Plan:
    """Return the plan for several ranks, with an inbox and the ports of exchanges."""
    first = len(plan.buffers)
    buffers = (
        Buffer("exchange.inbox", "exchange", 4096), Buffer("exchange.state", "state", 256),
        Buffer(EXCHANGE_FAULT, "ring", 32),
    )  # fmt: skip
    ports = (
        Port(EXCHANGE_EPOCH, first + 1, 0, (1,), "int32"),
        Port(EXCHANGE_LIMIT, first + 1, 4, (1,), "int32"),
        Port(EXCHANGE_FAULT, first + 2, 0, (8,), "int32"),
    )
    return dataclasses.replace(
        plan,
        ranks=ranks,
        buffers=(*plan.buffers, *buffers),
        ports=(*plan.ports, *ports),
        programs=tuple(dataclasses.replace(entry, rounds=rounds) for entry in plan.programs),
    )


@dataclasses.dataclass
class ToyRanks:
    """An engine with one toy device per rank. Each device computes the complete step."""

    engine: Engine
    executor: RankedExecutor
    devices: list[ToyDevice]
    gpus: list[RankGpu]


def toy_ranks(
    ranks: int, *, failing: int | None = None, fails_at: int | None = None, **options: object
) -> ToyRanks:
    """Return a new engine. The rank ``failing`` fails from its call ``fails_at`` on."""
    manifest = cuda_manifest(**options)
    plan = ranked_plan(toy_plan(manifest), ranks)
    devices, gpus = [], []
    for _ in range(ranks):
        device = ToyDevice(manifest, plan)
        device.gpu = RankGpu(gpus, device.gpu.kernels)
        devices.append(device)
    if failing is not None:
        gpus[failing].fails_at = fails_at
    executor = RankedExecutor(
        gpus,
        plan,
        lambda name: plan_file(plan, name),
        lambda rank, addresses: devices[rank].load_weights(addresses),
    )
    for gpu, rank in zip(gpus, executor.ranks, strict=True):
        gpu.fault = rank.ring(EXCHANGE_FAULT)
    return ToyRanks(Engine(manifest, executor), executor, devices, gpus)


def state_of(toy: ToyRanks, rank: int) -> dict[str, bytes]:
    """Return the bytes of every port of a rank, except those of the ring."""
    toy.executor.synchronize()
    names: Sequence[str] = [p.name for p in toy.executor.plan.ports if "ring." not in p.name]
    device = toy.devices[rank]
    return {n: device.port(n).numpy().tobytes() for n in names if n != EXCHANGE_FAULT}
