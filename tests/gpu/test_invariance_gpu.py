"""A row's result on the GPU has equal bits alone, with few rows and with many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler
from specbuild.builder.backends.cuda.tuning.kernel_case import bits
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.plugins_cuda.launches import Lowering, LoweringRequest, TensorInfo
from specbuild.plugins_cuda.linear.block_scaled import quantised
from specbuild.plugins_cuda.linear.storage import BF16, FP8, MXFP4, Storage
from specbuild.plugins_cuda.mla_attention.cases import LatentLaunch, latent_launch
from specbuild.plugins_cuda.paged_tree_attention.cases import Branch, Launch, chain_of
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.rms_moe.cases import DEEPSEEK_V3, GLM_FLASH, KIMI_K2, V2_LITE, Layer
from specbuild.plugins_cuda.rms_moe.packing import (
    pack_down,
    pack_down_values,
    pack_gate_up,
    pack_gate_up_values,
)

Tensors = dict[str, torch.Tensor]
ROWS = 200
COUNTS = (1, 2, 5, 8, 9, 16, 17, 20, 32, 33, 40, 64, 80, 128)
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32",
          torch.uint8: "uint8"}  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[OpRunner]:
    yield OpRunner(Compiler("sm_90a"))


@dataclass(frozen=True)
class Rows:
    """An op over rows: inputs that all rows share, inputs of each row, and a row's outputs."""

    op: str
    shared: Tensors
    by_row: Tensors
    outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    attributes: Mapping[str, int | float | str] = field(default_factory=dict)
    counted: bool = False

    def tensors(self, rows: Sequence[int]) -> tuple[Tensors, Tensors]:
        """Return inputs, and outputs to be filled, of these rows."""
        inputs = self.shared | {n: t[list(rows)] for n, t in self.by_row.items()}
        if self.counted:
            inputs["row_start"] = torch.tensor([0, len(rows)], dtype=torch.int32)
        outputs = {
            n: torch.empty(len(rows), *shape, dtype=dtype)
            for n, (shape, dtype) in self.outputs.items()
        }
        return inputs, outputs

    def lowering(self, runner: OpRunner, rows: Sequence[int]) -> Lowering:
        """Lower with the first tactic that does not spill registers, as in a build."""
        inputs, outputs = self.tensors(rows)
        op = op_named(self.op)
        order = {t.name: i for i, t in enumerate((*op.inputs, *op.outputs))}
        named = dict(sorted((inputs | outputs).items(), key=lambda item: order[item[0]]))
        tensors = {n: TensorInfo(tuple(t.shape), _NAMES[t.dtype]) for n, t in named.items()}
        assert op.lower is not None
        request = LoweringRequest(tensors, op.complete(self.attributes))
        tactics = (op.tactics(request) if op.tactics else ()) or ({},)
        lowerings = [op.lower(replace(request, tactic=tactic)) for tactic in tactics]
        return next(lowering for lowering in lowerings if runner.refusal(lowering) is None)

    def run(self, runner: OpRunner, rows: Sequence[int]) -> dict[str, np.ndarray]:
        inputs, outputs = ({n: bits(t) for n, t in some.items()} for some in self.tensors(rows))
        return runner.run(op_named(self.op), self.lowering(runner, rows), inputs, outputs)


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
    return Rows(
        "RmsSwiglu", shared, {"x": normal(ROWS, k)}, outputs, {"eps": 1e-5, "rounding": "llama"}
    )


def draft_head(vocab: int, k: int, storage: Storage) -> Rows:
    shared = {"norm": normal(k), "weight": dense(vocab, k, storage), "x": normal(ROWS, k)}
    by_row = {"logit_rows": torch.arange(ROWS, dtype=torch.int32)}
    outputs = {"logits": ((vocab,), torch.float32)}
    return Rows("RmsHead", shared, by_row, outputs, {"eps": 1e-5, "rounding": "llama"})


def head(vocab: int, k: int) -> Rows:
    shared = {"norm": normal(k), "weight": dense(vocab, k), "x": normal(ROWS, k)}
    ids = torch.arange(ROWS, dtype=torch.int32)
    temperature = torch.rand(ROWS)
    temperature[::2] = 0.0  # greedy rows among sampled ones
    by_row = {"logit_rows": ids, "temperature": temperature, "seed": ids, "position": ids}
    outputs = {"choice": ((), torch.int32), "logprob": ((), torch.float32)}
    attributes = {"eps": 1e-5, "rounding": "gpt_oss"}
    return Rows("HeadChoose", shared, by_row, outputs, attributes)


def moe(experts: int, hidden: int, inner: int, *, bf16: bool = False) -> Rows:
    generator = torch.Generator().manual_seed(experts + hidden)

    def packed(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (experts, rows, width // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(116, 120, shape, generator=generator, dtype=torch.uint8)
        return blocks, scales

    if bf16:
        gate_up = pack_gate_up_values(normal(experts, hidden, 2 * inner, scale=hidden**-0.5))
        down = pack_down_values(normal(experts, inner, hidden, scale=inner**-0.5))
    else:
        gate_up = pack_gate_up(*packed(2 * inner, hidden))
        down = pack_down(*packed(hidden, inner))
    shared = {
        "norm": normal(hidden),
        "router_weight": normal(experts, hidden, scale=hidden**-0.5),
        "router_bias": normal(experts),
        "gate_up": gate_up,
        "gate_up_bias": normal(experts, 2 * inner),
        "down": down,
        "down_bias": normal(experts, hidden),
    }
    return Rows(
        "RmsMoe", shared, {"x": normal(ROWS, hidden)}, {"y": ((hidden,), torch.bfloat16)},
        {"eps": 1e-5, "top_k": 4}, counted=True,
    )  # fmt: skip


def routed(layer: Layer) -> Rows:
    op, rows = op_named("RmsMoe"), replace(layer, rows=ROWS)
    shared = {}
    for spec, array in zip(op.inputs, rows.arrays(np.random.default_rng(5)), strict=True):
        if array is not None and spec.name != "row_start":
            tensor = torch.from_numpy(array)
            narrow = tensor.is_floating_point() and spec.dtype != "float32"
            shared[spec.name] = tensor.bfloat16() if narrow else tensor
    by_row = {"x": shared.pop("x")}
    outputs = {"y": ((layer.hidden,), torch.bfloat16)}
    return Rows("RmsMoe", shared, by_row, outputs, layer.attributes(), counted=True)


# The tests that run them create them: some take seconds and a gigabyte.
CASES: dict[str, Callable[[], Rows]] = {
    "Linear, example": partial(linear, 192, 192),
    "Linear, 20B": partial(linear, 2880, 4096),
    "Linear, draft": partial(linear, 2880, 17280),
    "Linear, half a panel and a short group": partial(linear, 192, 1888),
    "RmsSwiglu, example": partial(swiglu, 384, 192),
    "RmsSwiglu, wide": partial(swiglu, 2880, 2880),
    "HeadChoose, example": partial(head, 4096, 192),
    "HeadChoose, 32000": partial(head, 32000, 2880),
    "HeadChoose, half a panel": partial(head, 4096, 1888),
    "RmsHead, 32000, bf16": partial(draft_head, 32000, 2880, BF16),
    **{
        f"{name}, {storage.name}": partial(make, *sizes, storage)
        for storage in (MXFP4, FP8)
        for name, make, sizes in (
            ("Linear, fc", linear, (2880, 8640)),
            ("Linear, odd blocks", linear, (192, 1120)),
            ("RmsSwiglu, wide", swiglu, (2880, 2880)),
            ("RmsHead, 32000", draft_head, (32000, 2880)),
        )
    },
    "RmsMoe, example": partial(moe, 8, 192, 32),
    "RmsMoe, 20B": partial(moe, 32, 2880, 2880),
    "RmsMoe, bf16": partial(moe, 32, 2048, 768, bf16=True),
    "RmsMoe, DeepSeek-V3": partial(routed, replace(DEEPSEEK_V3, inner=128)),
    "RmsMoe, Kimi-K2": partial(routed, replace(KIMI_K2, inner=64)),
    "RmsMoe, GLM-4.7-Flash, bf16": partial(routed, replace(GLM_FLASH, experts=16)),
    "RmsMoe, DeepSeek-V2-Lite, bf16": partial(routed, replace(V2_LITE, experts=16)),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_independent(runner: OpRunner, name: str) -> None:
    case = CASES[name]()
    runner.prepare([case.lowering(runner, range(count)) for count in (*COUNTS, ROWS)])
    every = case.run(runner, range(ROWS))
    for count in COUNTS:
        for first in (0, ROWS - count):
            rows = range(first, first + count)
            result = case.run(runner, rows)
            for output, whole in every.items():
                wrong = (result[output] != whole[list(rows)]).reshape(count, -1).any(1)
                assert not wrong.any(), f"{output}: {count} rows from {first}: {wrong.nonzero()}"


class Attention:
    """A launch's inputs, and the results of any of its rows alone.

    ``launched`` are the entry points of the last kernels.
    """

    def __init__(self, runner: OpRunner, name: str, launch: Launch | LatentLaunch) -> None:
        self._runner, self._op, self._attributes = runner, op_named(name), launch.attributes
        arrays = launch.arrays(np.random.default_rng(5))
        named_inputs = {
            s.name: a for s, a in zip(self._op.inputs, arrays, strict=True) if a is not None
        }
        rounded = {spec.name for spec in self._op.inputs if spec.dtype in ("T", "C")}
        self.tensors = {
            n: torch.from_numpy(a).bfloat16()
            if n in rounded and a.dtype == np.float32
            else torch.from_numpy(a)
            for n, a in named_inputs.items()
        }

    def attend(self, inputs: Tensors) -> np.ndarray:
        width = inputs["v_pool"].shape[3] if "v_pool" in inputs else inputs["w_v"].shape[2]
        output = torch.empty(*inputs["q"].shape[:2], width, dtype=torch.bfloat16)
        named = {n: TensorInfo(tuple(t.shape), _NAMES[t.dtype]) for n, t in inputs.items()}
        named["attended"] = TensorInfo(tuple(output.shape), "bfloat16")
        assert self._op.lower is not None
        lowering = self._op.lower(LoweringRequest(named, self._op.complete(self._attributes)))
        self.launched = [launch.kernel.entry for launch in lowering.launches]
        named_inputs = {n: bits(t) for n, t in inputs.items()}
        return self._runner.run(self._op, lowering, named_inputs, {"attended": bits(output)})[
            "attended"
        ]

    def alone(self, sequence: int, rows: slice) -> np.ndarray:
        tensors = self.tensors
        own = {n: tensors[n][rows] for n in ("q", "row_slot", "ancestor_bits")}
        own |= {n: tensors[n][sequence : sequence + 1] for n in ("page_table", "tree_start")}
        own["row_start"] = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
        return self.attend({n: own.get(n, tensors[n]) for n in tensors})


def check_sequences_apart(
    runner: OpRunner, name: str, launch: Launch | LatentLaunch, branches: int, nodes: int
) -> None:
    """Assert that every sequence of a launch has equal bits alone and in the launch."""
    attention = Attention(runner, name, launch)
    together = attention.attend(attention.tensors)
    for b in range(branches):
        rows = slice(b * nodes, (b + 1) * nodes)
        alone = attention.alone(b, rows)
        np.testing.assert_array_equal(alone, together[rows], err_msg=f"sequence {b}")


CONTEXTS = (200, 3, 64, 700, 127)


@pytest.mark.parametrize(("heads", "group", "width"), [(2, 3, 32), (8, 8, 64)])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("nodes", [1, 4, 5, 9])
@pytest.mark.parametrize("codes", [False, True], ids=["bf16", "codes"])
def test_sequences_are_independent(
    runner: OpRunner, heads: int, group: int, width: int, window: int, nodes: int, codes: bool
) -> None:
    branches = [Branch(c, 0, chain_of(nodes)) for c in CONTEXTS]
    launch = Launch(
        branches, kv_heads=heads, group=group, width=width, v_width=width, page_size=64,
        window=window, padding_rows=0, codes=codes,
    )  # fmt: skip
    check_sequences_apart(runner, "PagedTreeAttention", launch, len(branches), nodes)


@pytest.mark.parametrize("contexts", [
    (900, 0, 9000, 127, 128, 3, 2100, 64, 700),
    (*(37 * b for b in range(19)), 8200),
    (1000,) * 16,
], ids=["9", "20", "16 alike"])  # fmt: skip
@pytest.mark.parametrize("nodes", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("codes", [False, True], ids=["bf16", "codes"])
def test_many_sequences_have_equal_bits_alone(
    runner: OpRunner, contexts: tuple[int, ...], nodes: int, codes: bool
) -> None:
    """Compare splits that are assigned by length with the kernel of one sequence."""
    branches = [Branch(c, 0, chain_of(nodes)) for c in contexts]
    launch = Launch(
        branches, kv_heads=8, group=8, width=64, v_width=64, page_size=64, padding_rows=0,
        codes=codes,
    )  # fmt: skip
    check_sequences_apart(runner, "PagedTreeAttention", launch, len(branches), nodes)


@pytest.mark.parametrize(("context", "fed", "tree"), [
    (20000, 48, chain_of(4)), (700, 61, chain_of(3)), (9000, 0, (-1, 0, 0, 1, 1, 2, *range(5, 19))),
    (40000, 0, (-1, 0, 0, 1, 1, 2, 5)), (30000, 9, chain_of(4)),
])  # fmt: skip
def test_rows_of_a_large_launch_have_equal_bits_alone(
    runner: OpRunner, context: int, fed: int, tree: tuple[int, ...]
) -> None:
    """Combine SpecPV's re-verified rows, and a large tree, with sequences of few rows."""
    branches = [Branch(4100, 0, chain_of(4)), Branch(context, fed, tree), Branch(130, 1)]
    launch = Launch(
        branches, kv_heads=8, group=8, width=64, v_width=64, page_size=64, padding_rows=12,
        padding_pages=130,
    )  # fmt: skip
    attention = Attention(runner, "PagedTreeAttention", launch)
    together = attention.attend(attention.tensors)
    assert "attend_many" in attention.launched
    first, rows = 4, fed + len(tree)
    for row in {0, 1, 7, 8, 31, 32, fed, rows - 2, rows - 1}:
        if row < rows:
            own = slice(first + row, first + row + 1)
            np.testing.assert_array_equal(attention.alone(1, own), together[own], err_msg=str(row))


@pytest.mark.parametrize("latent", [48, 256, 512, 768])
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_sequences_with_latents_are_independent(
    runner: OpRunner, latent: int, window: int, nodes: int
) -> None:
    branches = [Branch(c, 0, chain_of(nodes)) for c in CONTEXTS]
    launch = latent_launch(
        branches, latent=latent, heads=(8, 8), widths=(64, 64), page_size=64, window=window,
        padding_rows=0,
    )  # fmt: skip
    check_sequences_apart(runner, "MlaAttention", launch, len(branches), nodes)


@pytest.mark.parametrize("nodes", [1, 3])
def test_sequences_with_absorbed_queries_are_independent(runner: OpRunner, nodes: int) -> None:
    branches = [Branch(c, 0, chain_of(nodes)) for c in CONTEXTS]
    launch = latent_launch(
        branches, latent=576, rope=64, heads=(1, 64), widths=(64, 64), biases=False, page_size=64,
        padding_rows=0,
    )  # fmt: skip
    check_sequences_apart(runner, "MlaAttention", launch, len(branches), nodes)


@pytest.mark.parametrize(
    ("form", "latent"), [("rebuilt", 512), ("rebuilt", 256), ("absorbed", 576)]
)
@pytest.mark.parametrize("window", [0, 128])
def test_a_node_has_the_bits_of_its_committed_token(
    runner: OpRunner, form: str, latent: int, window: int
) -> None:
    """Compare the last node of a path, with ancestors in scattered slots, and the committed token.

    The node is one of several rows, or alone.
    """
    rope, heads = (64, (1, 64)) if form == "absorbed" else (None, (8, 8))
    parents = (-1, 0, 0, 1, 0, 3, 1)  # the path 0, 1, 3, 5
    path, context, op = (0, 1, 3, 5), 300, op_named("MlaAttention")
    tree = latent_launch(
        [Branch(context, 0, parents)], latent=latent, rope=rope, heads=heads, widths=(64, 64),
        biases=form == "rebuilt", page_size=64, window=window, padding_rows=0,
    )  # fmt: skip
    arrays = tree.arrays(np.random.default_rng(6))
    rounded = {spec.name for spec in op.inputs if spec.dtype in ("T", "C")}
    inputs = {
        s.name: bits(torch.from_numpy(a).bfloat16() if s.name in rounded else torch.from_numpy(a))
        for s, a in zip(op.inputs, arrays, strict=True)
        if a is not None
    }

    def attend(arrays_by_name: dict[str, np.ndarray]) -> np.ndarray:
        names = {"uint16": "bfloat16", "float32": "float32", "int32": "int32"}
        named = {n: TensorInfo(a.shape, names[a.dtype.name]) for n, a in arrays_by_name.items()}
        output = np.zeros((len(arrays_by_name["q"]), arrays_by_name["q"].shape[1], 64), np.uint16)
        named["attended"] = TensorInfo(output.shape, "bfloat16")
        assert op.lower is not None
        lowering = op.lower(LoweringRequest(named, op.complete(tree.attributes)))
        return runner.run(op, lowering, arrays_by_name, {"attended": output})["attended"]

    node = attend(inputs)[path[-1]]
    table, pool = inputs["page_table"][0, 0], inputs["c_pool"].copy()
    place = [(table[s // 64], 0, s % 64) for s in range(context + len(parents))]
    for depth, slot in enumerate(path):
        pool[place[context + depth]] = inputs["c_pool"][place[context + slot]]
    position = context + len(path) - 1
    alone = inputs | {
        "c_pool": pool,
        "q": inputs["q"][path[-1] :][:1],
        "row_start": np.array([0, 1], np.int32),
        "row_slot": np.array([position], np.int32),
        "tree_start": np.array([position + 1], np.int32),
        "ancestor_bits": np.zeros((1, 1), np.int32),
    }
    np.testing.assert_array_equal(attend(alone)[0], node)
