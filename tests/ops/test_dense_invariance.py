"""A row's result of a dense kernel has equal bits alone and in any batch.

The two halves of K nearly cancel, so that an fp32 sum in another order still differs after it is
rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from emulation import has_compiler, run_lowering
from left_out import slow

from specbuild.builder.backends.cuda.tuning.kernel_case import bits
from specbuild.plugins_cuda.launches import LoweringRequest, Phase, Tactic, Target, TensorInfo
from specbuild.plugins_cuda.linear.block_scaled import quantised
from specbuild.plugins_cuda.linear.slices import slices_of
from specbuild.plugins_cuda.linear.storage import BF16, FP8, MXFP4, Storage
from specbuild.plugins_cuda.linear.streaming import MAX_ROWS
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.errors import SpecbuildError

Tensors = dict[str, torch.Tensor]

# K is 59 blocks: 15 slices of four blocks in three groups; the last slice has three.
K, VOCAB, ROWS = 1888, 336, 40
HALF = 928
TARGET = Target(multiprocessors=3)
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32",
          torch.uint8: "uint8"}  # fmt: skip
# The rows of the whole batch that each launch has, in order.
BATCHES: tuple[Sequence[int], ...] = ([17], [3, 17, 5], range(9, 20), range(ROWS))
# Tactics that select another form of the kernel, for some rows of the batch.
STREAMED: dict[str, Sequence[int]] = {
    "ring": range(20, 25),
    "many": range(30, 35),
    "panels": range(10, 30),
}
PANELS: dict[str, Sequence[int]] = {"panels": range(10, 30)}
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="g++ is not installed")


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def cancelling(*shape: int) -> torch.Tensor:
    """Return values over K whose second half repeats the first."""
    values = normal(*shape, K)
    values[..., HALF : 2 * HALF] = values[..., :HALF]
    return values


def weight(rows: int) -> torch.Tensor:
    """Return a packed weight whose second half subtracts 255/256 of the first half's products."""
    values = normal(rows // 16, K // 32, 512, scale=K**-0.5)
    half = HALF // 32
    values[:, half:] /= 256
    values[:, half : 2 * half] -= values[:, :half]
    return values


def run(
    name: str,
    inputs: Tensors,
    outputs: Tensors,
    tactic: Tactic | None = None,
    *,
    phase: Phase = "decode",
    **attributes: Any,
) -> dict[str, np.ndarray]:
    op = op_named(name)
    tensors = {
        n: TensorInfo(tuple(t.shape), _NAMES[t.dtype]) for n, t in (inputs | outputs).items()
    }
    arrays, blank = ({n: bits(t) for n, t in some.items()} for some in (inputs, outputs))
    assert op.lower is not None
    request = LoweringRequest(tensors, op.complete(attributes), phase, TARGET, tactic or {})
    return run_lowering(op, op.lower(request), arrays, blank)


def assert_same_for_every_batch(
    name: str,
    shared: Tensors,
    by_row: Tensors,
    outputs: Tensors,
    forms: Mapping[str, Sequence[int]],
    **attributes: Any,
) -> None:
    """Run every batch, and parts of it in other forms; ``outputs`` are those of one row."""
    references: dict[tuple[str, int], np.ndarray] = {}

    def check(rows: Sequence[int], tactic: Tactic | None) -> None:
        inputs = shared | {n: t[list(rows)] for n, t in by_row.items()}
        blank = {n: t.repeat(len(rows), *[1] * (t.ndim - 1)) for n, t in outputs.items()}
        written = run(name, inputs, blank, tactic, **attributes)
        for output in outputs:
            for place, row in enumerate(rows):
                reference = references.setdefault((output, row), written[output][place])
                np.testing.assert_array_equal(
                    written[output][place], reference, err_msg=f"{output} {row}"
                )

    for rows in BATCHES:
        check(rows, None)
    check(range(20), {"ctas": 2})
    check(range(15, 20), {"loads": 4})
    for form, rows in forms.items():
        check(rows, {form: 1})
        check(range(ROWS), {form: 0})


@needs_compiler
@pytest.mark.parametrize("storage", [FP8, *slow(MXFP4)], ids=lambda storage: storage.name)
def test_quantized_weights(storage: Storage) -> None:
    """Cover every form in which the kernel gets normed tokens. The halves of K cancel."""
    values, half = normal(18, K // 32, 512, scale=K**-0.5), HALF // 32
    values[:, half : 2 * half] = -values[:, :half]
    values[:, 2 * half :] /= 256
    shared = {"norm": cancelling(), "gate_up": quantised(values, storage)}
    by_row = {"x": cancelling(ROWS)}
    references: dict[int, np.ndarray] = {}
    forms: tuple[tuple[Sequence[int], Tactic], ...] = (
        ([17], {}),
        (range(14, 20), {}),
        (range(14, 24), {"many": 1, "panels": 0}),
        (range(10, 30), {"many": 1, "panels": 1}),
        (range(ROWS), {}),
    )
    for rows, tactic in forms:
        inputs = shared | {n: t[list(rows)] for n, t in by_row.items()}
        written = run("RmsSwiglu", inputs, {"h": normal(len(rows), 144)}, tactic, eps=1e-5)["h"]
        for place, row in enumerate(rows):
            np.testing.assert_array_equal(
                written[place], references.setdefault(row, written[place])
            )


@needs_compiler
def test_linear() -> None:
    assert_same_for_every_batch(
        "Linear",
        {"weight": weight(432), "bias": normal(432) / 256},
        {"x": cancelling(ROWS), "residual": normal(ROWS, 432) / 256},
        {"y": normal(1, 432)},
        STREAMED,
    )


@needs_compiler
def test_partial_sums() -> None:
    assert_same_for_every_batch(
        "LinearPartial",
        {"weight": weight(144)},
        {"x": cancelling(ROWS)},
        {"partial": torch.zeros(1, 144)},
        STREAMED,
    )


@needs_compiler
def test_swiglu() -> None:
    assert_same_for_every_batch(
        "RmsSwiglu",
        {"norm": cancelling(), "gate_up": weight(144)},
        {"x": cancelling(ROWS)},
        {"h": normal(1, 72)},
        STREAMED,
        eps=1e-5,
    )


@needs_compiler
@pytest.mark.parametrize("storage", [MXFP4, *slow(BF16, FP8)], ids=lambda storage: storage.name)
def test_head(storage: Storage) -> None:
    stored = quantised(weight(VOCAB), storage)
    assert_same_for_every_batch(
        "RmsHead",
        {"x": cancelling(ROWS), "norm": cancelling(), "weight": stored},
        {"logit_rows": torch.arange(ROWS, dtype=torch.int32)},
        {"logits": torch.zeros(1, VOCAB)},
        PANELS,
        eps=1e-5,
        rounding="gpt_oss",
    )


@needs_compiler
@pytest.mark.parametrize("storage", [BF16, *slow(FP8)], ids=lambda storage: storage.name)
def test_head_choose(storage: Storage) -> None:
    stored = quantised(weight(VOCAB), storage)
    assert_same_for_every_batch(
        "HeadChoose",
        {"x": cancelling(ROWS), "norm": cancelling(), "weight": stored},
        {
            "logit_rows": torch.arange(ROWS, dtype=torch.int32),
            "temperature": torch.tensor([0.0, 1.0] * (ROWS // 2)),
            "seed": torch.arange(ROWS, dtype=torch.int32),
            "position": torch.arange(100, 100 + ROWS, dtype=torch.int32),
        },
        {"choice": torch.zeros(1, dtype=torch.int32), "logprob": torch.zeros(1)},
        PANELS,
        eps=1e-5,
        rounding="llama",
    )


@needs_compiler
@pytest.mark.parametrize(
    ("rounding", "head_norms"),
    [("gpt_oss", False), ("llama", True), *slow((None, False), (None, True))],
)
def test_qkv(rounding: str | None, head_norms: bool) -> None:
    """Compare the written keys and values too; each row has its own slot."""
    heads, kv_heads, width, page_size = 3, 1, 32, 16
    pages = 2 + ROWS // page_size
    angles = torch.randn(64, width // 2, generator=torch.Generator().manual_seed(1))
    pool = (pages, kv_heads, page_size, width)
    shared = {"weight": weight(160), "cos": angles.cos(), "sin": angles.sin(),
              "k_pool": normal(*pool), "v_pool": normal(*pool)}  # fmt: skip
    if rounding is not None:
        shared |= {"norm": cancelling(), "bias": normal(160) / 256}
    if head_norms:
        shared |= {"q_norm": normal(width), "k_norm": normal(2 * width)[:width]}
    slots = page_size + torch.arange(ROWS, dtype=torch.int32)
    by_row = {
        "x": cancelling(ROWS),
        "positions": torch.arange(ROWS, dtype=torch.int32) % 64,
        "write_slot": slots,
    }
    references: dict[tuple[str, int], np.ndarray] = {}
    for rows in BATCHES:
        inputs = shared | {n: t[list(rows)] for n, t in by_row.items()}
        outputs = {
            "q": normal(len(rows), heads, width),
            "k_pool_out": shared["k_pool"],
            "v_pool_out": shared["v_pool"],
        }
        sizes = {"q_heads": heads, "kv_heads": kv_heads, "eps": 1e-5}
        sizes |= {"rounding": rounding or "gpt_oss"}
        written = run("RmsQkvRope", inputs, outputs, None, **sizes)
        for place, row in enumerate(rows):
            page, offset = divmod(int(slots[row]), page_size)
            results = {"q": written["q"][place]}
            results |= {n: written[n][page, :, offset] for n in ("k_pool_out", "v_pool_out")}
            for name, result in results.items():
                reference = references.setdefault((name, row), result)
                np.testing.assert_array_equal(result, reference, err_msg=f"{name} {row}")


@needs_compiler
@pytest.mark.parametrize("rounding", ["llama", *slow(None)])
def test_low_rank(rounding: str | None) -> None:
    """Compare query latents and cache entries, normed and rotated after the projection."""
    query, rank, rope, page_size = 64, 32, 16, 16
    angles = torch.randn(64, rope // 2, generator=torch.Generator().manual_seed(1))
    pool = normal(2 + ROWS // page_size, 1, page_size, rank + rope)
    shared = {"weight": weight(query + rank + rope), "cos": angles.cos(), "sin": angles.sin(),
              "q_norm": normal(query), "latent_norm": normal(rank), "c_pool": pool}  # fmt: skip
    if rounding is not None:
        shared["norm"] = cancelling()
    slots = page_size + torch.arange(ROWS, dtype=torch.int32)
    by_row = {
        "x": cancelling(ROWS),
        "positions": torch.arange(ROWS, dtype=torch.int32) % 64,
        "write_slot": slots,
    }
    references: dict[tuple[str, int], np.ndarray] = {}
    for rows in BATCHES:
        inputs = shared | {n: t[list(rows)] for n, t in by_row.items()}
        outputs = {"q": normal(len(rows), query), "c_pool_out": pool}
        sizes = {"eps": 1e-5, "rounding": rounding or "llama", "latent_eps": 1e-6}
        written = run("RmsLowRank", inputs, outputs, None, **sizes)
        for place, row in enumerate(rows):
            page, offset = divmod(int(slots[row]), page_size)
            results = {
                "q": written["q"][place],
                "c_pool_out": written["c_pool_out"][page, 0, offset],
            }
            for name, result in results.items():
                reference = references.setdefault((name, row), result)
                np.testing.assert_array_equal(result, reference, err_msg=f"{name} {row}")


@needs_compiler
def test_absorbed_queries() -> None:
    """Cover both phases: one kernel computes them and adds the products over K in order."""
    heads, nope, rope, rank = 2, 96, 16, 64
    angles = torch.randn(64, rope // 2, generator=torch.Generator().manual_seed(1))
    values = normal(heads * rank // 16, nope // 32, 512)
    values[:, 1] = -values[:, 0]
    q = normal(ROWS, heads, nope + rope)
    q[..., 32:64] = q[..., :32]
    q[..., 64:96] /= 256
    shared = {"weight": values, "cos": angles.cos(), "sin": angles.sin()}
    positions = torch.arange(ROWS, dtype=torch.int32)
    references: dict[int, np.ndarray] = {}
    phases: tuple[Phase, ...] = ("decode", "prefill")
    for rows, phase in product(BATCHES, phases):
        by_row = {"q": q.flatten(1)[list(rows)], "positions": positions[list(rows)]}
        blank = {"absorbed": normal(len(rows), heads, rank + rope)}
        sizes = {"q_heads": heads, "entry": rank + rope}
        written = run("AbsorbQuery", shared | by_row, blank, phase=phase, **sizes)["absorbed"]
        for place, row in enumerate(rows):
            np.testing.assert_array_equal(
                written[place], references.setdefault(row, written[place])
            )


@needs_compiler
@pytest.mark.parametrize("storage", [BF16, MXFP4, FP8], ids=lambda storage: storage.name)
def test_holding_the_sums_of_chunks_changes_no_bit(storage: Storage) -> None:
    """A CTA has two or three chunks, whose sums may be held until all of them are complete."""
    values = normal(18, K // 32, 512, scale=K**-0.5)
    shared = {"norm": cancelling(), "gate_up": quantised(values, storage)}
    x, blank = cancelling(5), {"h": normal(5, 144)}
    alone, together = (
        run("RmsSwiglu", shared | {"x": x}, blank, {"held": value}, eps=1e-5)["h"]
        for value in (0, 1)
    )
    np.testing.assert_array_equal(together, alone)


@needs_compiler
@pytest.mark.parametrize("storage", [FP8, *slow(BF16, MXFP4)], ids=lambda storage: storage.name)
def test_few_wide_tokens_as_rows_have_the_bits_of_eight(storage: Storage) -> None:
    """The tactic ``rows`` keeps tokens in shared memory.

    Otherwise they come from L2, as for 8 rows.
    """
    columns = 9248
    values = quantised(normal(4, columns // 32, 512, scale=columns**-0.5), storage)
    x = normal(8, columns)
    whole = run("Linear", {"weight": values, "x": x}, {"y": normal(8, 64)})["y"]
    for rows in (1, 3):
        for value in (0, 1):
            arrays, blank = {"weight": values, "x": x[:rows]}, {"y": normal(rows, 64)}
            written = run("Linear", arrays, blank, {"rows": value})["y"]
            np.testing.assert_array_equal(written, whole[:rows])


def test_slices_depend_on_the_width_only() -> None:
    blocks = {2880: 15, 4096: 16, 5760: 15, 8640: 15, 17280: 15, 192: 6, 32: 1}
    assert {width: slices_of(width // 32) for width in blocks} == blocks


def test_rejects_too_many_rows() -> None:
    rows = MAX_ROWS + 1
    inputs = {"x": normal(rows, 32), "weight": normal(1, 1, 512)}
    with pytest.raises(SpecbuildError, match=f"Linear: got {rows} rows"):
        run("Linear", inputs, {"y": normal(rows, 16)})


def test_rejects_a_tactic_with_unknown_keys() -> None:
    inputs = {"x": normal(1, 32), "weight": normal(1, 1, 512)}
    with pytest.raises(SpecbuildError, match="the tactic has unknown keys depth"):
        run("Linear", inputs, {"y": normal(1, 16)}, {"depth": 3})
