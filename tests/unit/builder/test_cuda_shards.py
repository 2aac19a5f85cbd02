"""The parts of weights that ranks store, for every storage format."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_graphs import fused_model
from gguf_keys import write_gguf_llama
from hypothesis import given
from hypothesis import strategies as st
from left_out import examples, slow
from llama_checkpoints import write_llama
from quantized_checkpoints import write_quantized
from quantized_formats import FORMATS

from specbuild.builder.backends.cuda.shard.split import (
    by_columns,
    by_heads,
    by_rows,
    expert_down,
    expert_gate_up,
    inner_of_rank,
)
from specbuild.builder.graph.passes.weights import Recipe, derived, recipe_of
from specbuild.plugins_cuda.linear.packing import pack_rows, unpack_rows
from specbuild.plugins_cuda.rms_moe.packing import (
    pack_down,
    pack_down_values,
    pack_gate_up,
    pack_gate_up_values,
    unpack_down,
    unpack_down_values,
    unpack_gate_up,
    unpack_gate_up_values,
)
from specbuild.runtime.errors import SpecbuildError

RANKS = st.sampled_from([2, 4, 8])
SIZES: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256,
}  # fmt: skip
LIMITS: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 1, "page_size": 16}


@pytest.mark.parametrize("dtype", ["fp8", "mxfp4"])
def test_quantized_parts_equal_parts_of_the_quantized_weight(tmp_path: Path, dtype: str) -> None:
    """A rank's part is rounded as within the full weight: blocks of 32 columns are complete."""
    write_llama(tmp_path, **SIZES)
    require_parts(tmp_path, f".packed.sharded.{dtype}", weights_dtype=dtype)


@pytest.mark.parametrize(
    "name", ["awq", "fp8 a tensor", *slow("gptq", "fbgemm fp8", "modelopt nvfp4")]
)
def test_quantized_values_of_a_checkpoint_are_split_unchanged(tmp_path: Path, name: str) -> None:
    """The scales and zero points of a group are with its columns."""
    # Every matrix has full blocks of 128 rows and columns.
    write_llama(tmp_path / "model", **SIZES | {"hidden_size": 256, "num_key_value_heads": 4})
    write_quantized(tmp_path, FORMATS[name])
    require_parts(tmp_path / "model", ".sharded", kv_heads=4)


@pytest.mark.parametrize(
    "kind", ["Q8_0", "Q4_K", *slow("Q6_K", "Q5_K", "Q4_0", "Q4_1", "Q5_1", "IQ4_XS")]
)
def test_blocks_of_gguf_are_split_unchanged(tmp_path: Path, kind: str) -> None:
    """A super-block of 256 columns may be split: its scales are stored with each 64 columns."""
    file = write_gguf_llama(tmp_path, kind, hidden_size=256, **SIZES)
    require_parts(file, ".sharded")


def test_rejects_quantized_weights_that_ranks_cannot_split(tmp_path: Path) -> None:
    """The layer has three units of 64 columns, of which two ranks would have one and a half."""
    write_llama(tmp_path / "model", **{**SIZES, "intermediate_size": 192})
    write_quantized(tmp_path, FORMATS["awq"])
    message = r"down_proj.* has 3 quantized units along K, .*; build with --weights-dtype bf16"
    with pytest.raises(SpecbuildError, match=message):
        fused_model(tmp_path / "model", **LIMITS, tensor_parallel=2)
    fused_model(tmp_path / "model", **LIMITS, tensor_parallel=2, weights_dtype="bf16")


def require_parts(path: Path, suffix: str, kv_heads: int = 2, **options: Any) -> None:
    """Assert that two ranks have the parts of every projection, under names with this suffix."""
    one, two = (
        fused_model(path, **LIMITS, **options, **several)
        for several in ({}, {"tensor_parallel": 2})
    )
    whole = one.models["target"].graph.initializers
    splits: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "qkv_proj": partial(by_heads, q_heads=8, kv_heads=kv_heads, ranks=2),
        "o_proj": partial(by_columns, ranks=2),
        "gate_up_proj": partial(by_rows, ranks=2),
        "down_proj": partial(by_columns, ranks=2),
    }
    seen = set()
    for name, value in two.models["target"].graph.initializers.items():
        recipe = recipe_of(value)
        if recipe is None or recipe.ranks == 1:
            continue
        expected = recipe_of(whole[name.replace(".sharded", "")])
        assert expected is not None and name.endswith(suffix), name
        assert expected.dtype == torch.uint8
        kind = name.split(".packed")[0].rsplit(".", 1)[1]
        assert torch.equal(recipe.checked(), splits[kind](expected.checked())), name
        seen.add(kind)
    assert seen == set(splits)


@examples(20)
@given(ranks=RANKS, seed=st.integers(0, 99))
def test_dense_parts_are_rows_and_columns_of_the_weight(ranks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16 * ranks * 2, 32 * ranks, generator=generator)
    for part, expected in zip(by_rows(pack_rows(weight), ranks), weight.chunk(ranks), strict=True):
        assert torch.equal(unpack_rows(part), expected)
    columns = zip(by_columns(pack_rows(weight), ranks), weight.chunk(ranks, 1), strict=True)
    for part, expected in columns:
        assert torch.equal(unpack_rows(part.contiguous()), expected)


@examples(20)
@given(ranks=RANKS, kv_heads=st.sampled_from([1, 2, 4, 8]), group=st.sampled_from([1, 2, 8]))
def test_every_rank_has_the_heads_that_attend_together(
    ranks: int, kv_heads: int, group: int
) -> None:
    q_heads = kv_heads * group
    if q_heads % ranks:
        return
    # Each head contains its number: queries from 0, keys from 100, values from 200.
    numbers = [range(q_heads), range(100, 100 + kv_heads), range(200, 200 + kv_heads)]
    rows = torch.tensor([n for part in numbers for n in part]).repeat_interleave(3)
    own_kv = max(1, kv_heads // ranks)
    for part in by_heads(rows, q_heads, kv_heads, ranks).tolist():
        heads = part[::3]
        assert part == [head for head in heads for _ in range(3)]
        q, k, v = heads[: -2 * own_kv], heads[-2 * own_kv : -own_kv], heads[-own_kv:]
        assert len(q) == q_heads // ranks
        assert {head // group + 100 for head in q} == set(k) == {head - 100 for head in v}
    queries = by_heads(rows, q_heads, kv_heads, ranks)[:, : 3 * (q_heads // ranks)]
    assert sorted(set(queries.flatten().tolist())) == list(range(q_heads))


@examples(12)
@given(ranks=RANKS, blocks=st.integers(1, 5), seed=st.integers(0, 9), coded=st.booleans())
def test_experts_are_split_in_blocks_and_padded_with_zeros(
    ranks: int, blocks: int, seed: int, coded: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inner, hidden, own = 32 * blocks, 64, inner_of_rank(32 * blocks, ranks)
    if coded:
        up = [
            torch.randint(0, 256, (2, 2 * inner, hidden // 32, 16), generator=generator),
            torch.randint(1, 127, (2, 2 * inner, hidden // 32), generator=generator),
        ]
        down = [torch.randint(0, 256, (2, hidden, blocks, 16), generator=generator),
                torch.randint(1, 127, (2, hidden, blocks), generator=generator)]  # fmt: skip
        up, down = [t.byte() for t in up], [t.byte() for t in down]
        w1 = expert_gate_up(pack_gate_up(*up), ranks)
        w2 = expert_down(pack_down(*down), inner, ranks)
        codes = torch.cat([unpack_gate_up(part)[0] for part in w1], dim=1)
        of_down = torch.cat([unpack_down(part, own)[0] for part in w2], dim=2)
        rows, columns, expected = 1, 2, (up[0], down[0])
    else:
        expected = (torch.randn(2, hidden, 2 * inner, generator=generator),
                  torch.randn(2, inner, hidden, generator=generator))  # fmt: skip
        w1 = expert_gate_up(pack_gate_up_values(expected[0]), ranks)
        w2 = expert_down(pack_down_values(expected[1]), inner, ranks)
        codes = torch.cat([unpack_gate_up_values(part) for part in w1], dim=2)
        of_down = torch.cat([unpack_down_values(part, own) for part in w2], dim=1)
        rows, columns = 2, 1
    assert torch.equal(codes.narrow(rows, 0, 2 * inner), expected[0])
    assert torch.equal(of_down.narrow(columns, 0, columns_of(inner, coded=coded)), expected[1])
    assert not codes.narrow(rows, 2 * inner, codes.shape[rows] - 2 * inner).any()
    behind = columns_of(inner, coded=coded)
    assert not of_down.narrow(columns, behind, of_down.shape[columns] - behind).any()


def columns_of(inner: int, *, coded: bool) -> int:
    """Return the entries on the axis of ``inner`` columns: blocks of 32 for quantized values."""
    return inner // 32 if coded else inner


def test_derived_tensors_are_computed_for_each_part() -> None:
    parts = torch.arange(12.0).view(2, 3, 2)
    sharded = Recipe((3, 2), torch.float32, ("a",), lambda: parts, ranks=2)
    shared = Recipe((2,), torch.float32, ("b",), lambda: torch.tensor([10.0, 20.0]))
    derived_parts = derived([sharded, shared, None], lambda a, b, _: a @ b)
    assert (derived_parts.ranks, derived_parts.shape, derived_parts.sources) == (
        2,
        (3,),
        ("a", "b"),
    )
    assert torch.equal(derived_parts.checked(), parts @ torch.tensor([10.0, 20.0]))
    assert not derived_parts.describes(shared)
