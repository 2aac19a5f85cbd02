"""The data of a CUDA lowering: kernels, launches and workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from specbuild.runtime.engine_dir.plan import ITEM_BYTES
from specbuild.runtime.errors import SpecbuildError


@dataclass(frozen=True)
class PeerPointer:
    """The address of the tensor ``name`` on rank (rank + ``distance``) modulo the ranks."""

    distance: int
    name: str


@dataclass(frozen=True)
class RankNumber:
    """The index of the launching rank, an int32."""


RANK = RankNumber()


# A kernel argument: the name of a tensor or workspace (a pointer), an int32, a float32, or None.
# None and the name of an absent tensor give a null pointer. Ops that exchange data between ranks
# also take pointers into the memory of other ranks, and the rank.
Argument: TypeAlias = str | int | float | PeerPointer | RankNumber | None
Tactic: TypeAlias = Mapping[str, int]
Phase: TypeAlias = Literal["decode", "prefill"]
# The launches of a refresh are of phase "decode", but most of their rows may be of one sequence.
ProgramPhase: TypeAlias = Literal["decode", "refresh", "prefill"]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and element type (a key of ``ITEM_BYTES``) of a tensor of a request."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, packed."""
        total = ITEM_BYTES[self.dtype]
        for size in self.shape:
            total *= size
        return total


# The hardware reserves this much shared memory of a multiprocessor for every CTA.
RESERVED_BYTES = 1024


@dataclass(frozen=True)
class Target:
    """The GPU for which kernels are compiled."""

    arch: str = "sm_90a"
    multiprocessors: int = 132
    shared_bytes_per_block: int = 227 * 1024

    def fits_twice(self, shared_bytes: int) -> bool:
        """Return whether a multiprocessor holds two CTAs of ``shared_bytes`` each."""
        total = self.shared_bytes_per_block + RESERVED_BYTES
        return 2 * (shared_bytes + RESERVED_BYTES) <= total

    @property
    def exclusive_shared_bytes(self) -> int:
        """The least shared memory, in steps of 256, of a CTA alone on a multiprocessor."""
        half = (self.shared_bytes_per_block + RESERVED_BYTES) // 2 - RESERVED_BYTES
        return half // 256 * 256 + 256

    def requested_shared_bytes(self, ctas: int, required: int) -> int:
        """Return the shared memory that CTAs request if they need ``required`` bytes.

        If every CTA can have a multiprocessor, they request enough that no two share one.
        """
        each_alone = ctas <= self.multiprocessors
        return max(required, self.exclusive_shared_bytes) if each_alone else required


@dataclass(frozen=True)
class LoweringRequest:
    """The call that an op is lowered for.

    ``tensors`` holds every present input and output by its declared name, at the sizes of the
    bucket. Launches of the phase ``decode`` are batch-invariant and have at most 256 rows; those of
    ``prefill`` run prompt chunks only. ``uneven``: most rows may belong to one sequence.
    """

    tensors: Mapping[str, TensorInfo]
    attributes: Mapping[str, int | float | str]
    phase: Phase = "decode"
    target: Target = field(default_factory=Target)
    tactic: Tactic = field(default_factory=dict)
    uneven: bool = False


def parameter_bytes(argument: Argument) -> int:
    """Return the bytes of a kernel parameter that takes the argument."""
    return 4 if isinstance(argument, int | float | RankNumber) else 8


@dataclass(frozen=True)
class Kernel:
    """An entry point of ``plugins_cuda/<folder>/<file>``, specialised by its ``constants``.

    The constants become members of a struct, ``Config::kName``. The source declares it with
    ``CONFIG`` and passes it to templates. A ``hot`` kernel must not spill registers: the build
    checks it.
    """

    folder: str
    entry: str
    constants: tuple[tuple[str, int | float | str], ...] = ()
    file: str = "kernel.cu"
    hot: bool = True


@dataclass(frozen=True)
class OpLaunch:
    """One launch: ``block`` threads along x, ``shared_bytes`` of dynamic shared memory.

    ``programmatic``: the launch may start before the previous one has finished (programmatic
    dependent launch). Its kernel executes ``griddepcontrol.wait`` before it writes, or reads
    anything but constants. At least one CTA executes it for all inputs, so a launch never finishes
    before the previous ones.

    ``reads_early``: before this wait, the kernel reads data that the previous launch does not
    write. It may only start early if the previous launch ``triggers_late``, that is, after all
    launches before it have finished.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    programmatic: bool = True
    reads_early: bool = False
    triggers_late: bool = False

    def may_start_early(self, previous: OpLaunch | None) -> bool:
        """Return whether the launch may start before the launch ``previous`` has finished."""
        late = previous is not None and previous.triggers_late
        return self.programmatic and (late or not self.reads_early)


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of one op. ``zeroed``: zeros before the first launch; the op restores them."""

    name: str
    nbytes: int
    zeroed: bool = False


@dataclass(frozen=True)
class Lowering:
    """The launches of an op in order, and their scratch memory."""

    launches: tuple[OpLaunch, ...]
    workspaces: tuple[Workspace, ...] = ()


@dataclass(frozen=True)
class Unsupported:
    """The reason why no kernel supports a request, or why the kernel may not run.

    It is a return value if the caller has an alternative. The build report then states the reason.
    """

    reason: str


def require(refusal: Unsupported | None) -> None:
    """Raise SpecbuildError with the reason of a refusal, if there is one."""
    if refusal is not None:
        raise SpecbuildError(refusal.reason)
