"""What a lowering to CUDA is: kernels, launches and workspaces, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError


@dataclass(frozen=True)
class PeerPointer:
    """The place of the tensor ``name`` on rank (rank + ``distance``) modulo the ranks."""

    distance: int
    name: str


@dataclass(frozen=True)
class RankNumber:
    """The rank that launches, an int32."""


RANK = RankNumber()


# A kernel argument: the name of a tensor or workspace (a pointer), an int32, a float32, or None
# for a null pointer, which an absent tensor's name gives too. Ops that exchange data between ranks
# also take pointers into other ranks' memory, and the rank.
Argument: TypeAlias = str | int | float | PeerPointer | RankNumber | None
Tactic: TypeAlias = Mapping[str, int]
Phase: TypeAlias = Literal["decode", "prefill"]
# What a program's launches are: those of a refresh decode, most rows perhaps of one sequence.
ProgramPhase: TypeAlias = Literal["decode", "refresh", "prefill"]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and element type (a key of ``ITEM_BYTES``) of a tensor that an op is lowered for."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, packed."""
        total = ITEM_BYTES[self.dtype]
        for size in self.shape:
            total *= size
        return total


# Of a multiprocessor's shared memory the hardware takes so much for every CTA.
RESERVED_BYTES = 1024


@dataclass(frozen=True)
class Target:
    """The GPU that is compiled for."""

    arch: str = "sm_90a"
    multiprocessors: int = 132
    shared_bytes_per_block: int = 227 * 1024

    def two_fit(self, shared_bytes: int) -> bool:
        """Whether a multiprocessor has capacity for two CTAs that take so much shared memory
        each."""
        whole = self.shared_bytes_per_block + RESERVED_BYTES
        return 2 * (shared_bytes + RESERVED_BYTES) <= whole

    @property
    def shared_bytes_alone(self) -> int:
        """The least shared memory, in steps of 256, of which no two CTAs share a multiprocessor."""
        half = (self.shared_bytes_per_block + RESERVED_BYTES) // 2 - RESERVED_BYTES
        return half // 256 * 256 + 256

    def shared_bytes_to_ask_for(self, ctas: int, needed: int) -> int:
        """What CTAs that need so much ask for: where each can have a multiprocessor, it has one."""
        one_each = ctas <= self.multiprocessors
        return max(needed, self.shared_bytes_alone) if one_each else needed


@dataclass(frozen=True)
class LoweringRequest:
    """What an op is lowered for.

    ``tensors`` holds every present input and output by its declared name, at the sizes of the
    bucket. ``phase``: launches of ``decode`` are batch-invariant and have at most 256 rows,
    those of ``prefill`` run prompt chunks only. ``uneven``: one sequence may have most rows.
    """

    tensors: Mapping[str, TensorInfo]
    attributes: Mapping[str, int | float | str]
    phase: Phase = "decode"
    target: Target = field(default_factory=Target)
    tactic: Tactic = field(default_factory=dict)
    uneven: bool = False


def parameter_bytes(argument: Argument) -> int:
    """Bytes of the kernel parameter that takes the argument."""
    return 4 if isinstance(argument, int | float | RankNumber) else 8


@dataclass(frozen=True)
class Kernel:
    """An entry point of ``plugins_cuda/<folder>/<file>``, specialised by its ``constants``.

    They are members of one struct, ``Config::kName``, which the source declares by ``CONFIG`` and
    hands to templates. A ``hot`` kernel must not spill registers: the build checks it.
    """

    folder: str
    entry: str
    constants: tuple[tuple[str, int | float | str], ...] = ()
    file: str = "kernel.cu"
    hot: bool = True


@dataclass(frozen=True)
class OpLaunch:
    """One launch: ``block`` threads along x, ``shared_bytes`` of dynamic shared memory.

    ``programmatic``: the launch may start before the one in front of it is done; its kernel then
    executes ``griddepcontrol.wait`` before it writes anything, or reads what is no constant, and
    some CTA of it does so whatever it is given, so that no launch is done before those in front.
    ``reads_early``: it reads before that what the launch directly in front of it leaves alone, and
    so may only start early behind one that ``triggers_late``: that lets it start no sooner than all
    launches in front of both are done.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    programmatic: bool = True
    reads_early: bool = False
    triggers_late: bool = False

    def may_start_early(self, in_front: OpLaunch | None) -> bool:
        """Whether it may start before ``in_front``, the launch directly in front, is done."""
        late = in_front is not None and in_front.triggers_late
        return self.programmatic and (late or not self.reads_early)


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of one op. ``zeroed``: zeros before the first launch; the op leaves zeros."""

    name: str
    nbytes: int
    zeroed: bool = False


@dataclass(frozen=True)
class Lowering:
    """The launches of an op in order, and the scratch memory that they share."""

    launches: tuple[OpLaunch, ...]
    workspaces: tuple[Workspace, ...] = ()


@dataclass(frozen=True)
class Unsupported:
    """What was asked for has no kernel, or none that may run, and why.

    It is returned where something else can be chosen instead, and then told in the build report.
    """

    reason: str


def require(refused: Unsupported | None) -> None:
    """SpecbuildError with the reason, where there is nothing else to choose."""
    if refused is not None:
        raise SpecbuildError(refused.reason)
