"""A row's result on the GPU is the same, bit for bit, alone, among few rows and among many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from specbuild.builder.backends.cuda.kernels.kernel_case import bits
from specbuild.builder.backends.cuda.kernels.nvrtc import Compiler
from specbuild.builder.backends.cuda.kernels.op_runner import OpRunner
from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.block_scaled import quantised
from specbuild.plugins_cuda.linear.storage import BF16, FP8, MXFP4, Storage
from specbuild.plugins_cuda.paged_tree_attention.cases import Branch, Launch, chain_of
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_moe.packing import pack_down, pack_gate_up

Tensors = dict[str, torch.Tensor]
ROWS = 80
COUNTS = (1, 2, 5, 8, 9, 16, 17, 20, 32, 33, 64, 80)
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32",
          torch.uint8: "uint8"}  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[OpRunner]:
    yield OpRunner(Compiler("sm_90a"))


@dataclass(frozen=True)
class Rows:
    """An op over rows: what all rows share, what belongs to a row, and a row's outputs."""

    op: str
    shared: Tensors
    by_row: Tensors
    outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    attributes: Mapping[str, int | float | str] = field(default_factory=dict)
    counted: bool = False

    def tensors(self, rows: Sequence[int]) -> tuple[Tensors, Tensors]:
        """Inputs, and outputs to be filled, of these rows."""
        inputs = self.shared | {n: t[list(rows)] for n, t in self.by_row.items()}
        if self.counted:
            inputs["row_start"] = torch.tensor([0, len(rows)], dtype=torch.int32)
        outputs = {
            n: torch.empty(len(rows), *shape, dtype=dtype)
            for n, (shape, dtype) in self.outputs.items()
        }
        return inputs, outputs

    def lowering(self, rows: Sequence[int]) -> Lowering:
        inputs, outputs = self.tensors(rows)
        op = op_named(self.op)
        order = {t.name: i for i, t in enumerate((*op.inputs, *op.outputs))}
        named = dict(sorted((inputs | outputs).items(), key=lambda item: order[item[0]]))
        tensors = {n: TensorInfo(tuple(t.shape), _NAMES[t.dtype]) for n, t in named.items()}
        assert op.lower is not None
        return op.lower(LoweringRequest(tensors, op.complete(self.attributes)))

    def run(self, runner: OpRunner, rows: Sequence[int]) -> dict[str, np.ndarray]:
        inputs, outputs = ({n: bits(t) for n, t in some.items()} for some in self.tensors(rows))
        return runner.run(op_named(self.op), self.lowering(rows), inputs, outputs)


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def dense(n: int, k: int, storage: Storage = BF16) -> torch.Tensor:
    return quantised(normal(n // 16, k // 32, 512, scale=k**-0.5), storage)


def linear(n: int, k: int, storage: Storage = BF16) -> Rows:
    shared = {"weight": dense(n, k, storage), "bias": normal(n)}
    by_row = {"x": normal(ROWS, k), "residual": normal(ROWS, n)}
    return Rows("Linear", shared, by_row, {"y": ((n,), torch.bfloat16)})


def swiglu(inner: int, k: int, storage: Storage = BF16) -> Rows:
    shared = {"norm": normal(k), "gate_up": dense(2 * inner, k, storage)}
    outputs = {"h": ((inner,), torch.bfloat16)}
    return Rows("RmsSwiglu", shared, {"x": normal(ROWS, k)}, outputs, {"eps": 1e-5})


def draft_head(vocab: int, k: int, storage: Storage) -> Rows:
    shared = {"norm": normal(k), "weight": dense(vocab, k, storage), "x": normal(ROWS, k)}
    by_row = {"logit_rows": torch.arange(ROWS, dtype=torch.int32)}
    outputs = {"logits": ((vocab,), torch.float32)}
    return Rows("RmsHead", shared, by_row, outputs, {"eps": 1e-5, "rounding": "llama"})


def head(vocab: int, k: int) -> Rows:
    shared = {"norm": normal(k), "weight": dense(vocab, k), "x": normal(ROWS, k)}
    ids = torch.arange(ROWS, dtype=torch.int32)
    by_row = {"logit_rows": ids, "temperature": torch.rand(ROWS), "seed": ids, "position": ids}
    outputs = {"choice": ((), torch.int32), "logprob": ((), torch.float32)}
    attributes = {"eps": 1e-5, "rounding": "gpt_oss"}
    return Rows("HeadChoose", shared, by_row, outputs, attributes)


def moe(experts: int, hidden: int, inner: int) -> Rows:
    generator = torch.Generator().manual_seed(experts + hidden)

    def packed(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (experts, rows, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(116, 120, shape, generator=generator, dtype=torch.uint8)
        return blocks, scales

    shared = {
        "norm": normal(hidden),
        "router_weight": normal(experts, hidden, scale=hidden**-0.5),
        "router_bias": normal(experts),
        "gate_up": pack_gate_up(*packed(2 * inner, hidden)),
        "gate_up_bias": normal(experts, 2 * inner),
        "down": pack_down(*packed(hidden, inner)),
        "down_bias": normal(experts, hidden),
    }
    return Rows(
        "RmsMoe", shared, {"x": normal(ROWS, hidden)}, {"y": ((hidden,), torch.bfloat16)},
        {"eps": 1e-5, "top_k": 4}, counted=True,
    )  # fmt: skip


CASES = {
    "Linear, example": linear(192, 192),
    "Linear, 20B": linear(2880, 4096),
    "RmsSwiglu, example": swiglu(384, 192),
    "RmsSwiglu, wide": swiglu(2880, 2880),
    "HeadChoose, example": head(4096, 192),
    "HeadChoose, 32000": head(32000, 2880),
    **{
        f"{name}, {storage.name}": made
        for storage in (MXFP4, FP8)
        for name, made in (
            ("Linear, fc", linear(2880, 8640, storage)),
            ("Linear, odd blocks", linear(192, 1120, storage)),
            ("RmsSwiglu, wide", swiglu(2880, 2880, storage)),
            ("RmsHead, 32000", draft_head(32000, 2880, storage)),
        )
    },
    "RmsMoe, example": moe(8, 192, 32),
    "RmsMoe, 20B": moe(32, 2880, 2880),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_see_each_other(runner: OpRunner, name: str) -> None:
    case = CASES[name]
    runner.prepare([case.lowering(range(count)) for count in (*COUNTS, ROWS)])
    every = case.run(runner, range(ROWS))
    for count in COUNTS:
        for first in (0, ROWS - count):
            rows = range(first, first + count)
            got = case.run(runner, rows)
            for output, whole in every.items():
                wrong = (got[output] != whole[list(rows)]).reshape(count, -1).any(1)
                assert not wrong.any(), f"{output}: {count} rows from {first}: {wrong.nonzero()}"


@pytest.mark.parametrize(("heads", "group", "width"), [(2, 3, 32), (8, 8, 64)])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("nodes", [1, 4, 5, 9])
def test_sequences_do_not_see_each_other(
    runner: OpRunner, heads: int, group: int, width: int, window: int, nodes: int
) -> None:
    branches = [Branch(c, 0, chain_of(nodes)) for c in (200, 3, 64, 700, 127)]
    launch = Launch(
        branches, kv_heads=heads, group=group, width=width, v_width=width, page_size=64,
        window=window, padding_rows=0,
    )  # fmt: skip
    op = op_named("PagedTreeAttention")
    arrays = launch.arrays(np.random.default_rng(5))
    whole = {s.name: a for s, a in zip(op.inputs, arrays, strict=True) if a is not None}
    tensors = {
        n: torch.from_numpy(a).bfloat16() if n in ("q", "k_pool", "v_pool") else torch.from_numpy(a)
        for n, a in whole.items()
    }

    def attend(inputs: Tensors) -> np.ndarray:
        output = torch.empty_like(inputs["q"])
        named = {n: TensorInfo(tuple(t.shape), _NAMES[t.dtype]) for n, t in inputs.items()}
        named["attended"] = TensorInfo(tuple(output.shape), "bfloat16")
        assert op.lower is not None
        lowering = op.lower(LoweringRequest(named, op.complete(launch.attributes)))
        given = {n: bits(t) for n, t in inputs.items()}
        return runner.run(op, lowering, given, {"attended": bits(output)})["attended"]

    together = attend(tensors)
    for b in range(len(branches)):
        rows = slice(b * nodes, (b + 1) * nodes)
        alone = {n: tensors[n][rows] for n in ("q", "row_slot", "ancestor_bits")}
        alone |= {n: tensors[n][b : b + 1] for n in ("page_table", "tree_start")}
        alone["row_start"] = torch.tensor([0, nodes], dtype=torch.int32)
        inputs = {n: alone.get(n, tensors[n]) for n in tensors}
        np.testing.assert_array_equal(attend(inputs), together[rows], err_msg=f"sequence {b}")
