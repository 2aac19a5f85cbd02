"""The GPT-OSS module, run with the ops' references, against HF transformers in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import write_target

from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.families.gpt_oss.model import GptOss
from specbuild.builder.families.parts.graph_io import GroupView, Launch, LayerPools
from specbuild.builder.families.parts.rope import rope_tables
from specbuild.builder.families.parts.target import GraphSizes

PAGE, PAGES = 4, 40


def load_module(checkpoint: TargetCheckpoint, aux_layers: tuple[int, ...] = ()) -> GptOss:
    g = checkpoint.geometry
    module = GptOss(g, GraphSizes(aux_layers, PAGE * PAGES))
    cos, sin = rope_tables(g.rope, g.head_dim, PAGE * PAGES)
    state = {name: tensor.load() for name, tensor in checkpoint.tensors.items()}
    state = {n: t if t.dtype == torch.uint8 else t.float() for n, t in state.items()}
    module.load_state_dict({**state, "rope_cos": cos, "rope_sin": sin})
    return module.eval()


def launch(rows: range) -> tuple[Launch, GroupView]:
    """Return one sequence's chunk with a page table in falling order, which is no identity."""
    ids = torch.arange(rows.start, rows.stop, dtype=torch.int32)
    table = torch.arange(PAGES - 1, 0, -1, dtype=torch.int32).view(1, 1, 1, -1)
    slots = table.flatten()[ids // PAGE] * PAGE + ids % PAGE
    bits = torch.zeros(len(ids), 1, dtype=torch.int32)
    start = torch.tensor([0, len(ids)], dtype=torch.int32)
    everything = torch.arange(len(ids), dtype=torch.int32)
    tree_start = torch.tensor([rows.stop], dtype=torch.int32)
    return Launch(ids, start, bits, everything), GroupView(table, ids, tree_start, slots)


def fresh_pools(checkpoint: TargetCheckpoint) -> tuple[LayerPools, ...]:
    g = checkpoint.geometry
    shape = (PAGES, g.kv_heads, PAGE, g.head_dim)
    poison = torch.full(shape, float("nan"))
    return tuple(LayerPools(poison.clone(), poison.clone()) for _ in range(g.layers))


@pytest.mark.parametrize("experts_format", ["mxfp4", "bf16"])
@pytest.mark.parametrize("rope_spelling", ["rope_parameters", "rope_scaling"])
def test_matches_transformers(tmp_path: Path, experts_format: str, rope_spelling: str) -> None:
    from transformers import GptOssForCausalLM

    write_target(tmp_path / "t", experts_format=experts_format, rope_spelling=rope_spelling)
    checkpoint = read_target(tmp_path / "t", strict=True)
    module = load_module(checkpoint, aux_layers=(0, 1, 3))
    # float(): transformers leaves dequantized experts in bf16 for any requested dtype.
    reference_model = (
        GptOssForCausalLM.from_pretrained(tmp_path / "t", dtype=torch.float32).float().eval()
    )
    ids = torch.randint(
        3, checkpoint.geometry.vocab, (70,), generator=torch.Generator().manual_seed(5)
    )
    with torch.no_grad():
        expected = reference_model(ids[None], output_hidden_states=True)
        pools, hidden, logits, aux_hidden = fresh_pools(checkpoint), [], [], []
        for rows in (range(33), range(33, 34), range(34, 70)):  # chunks that split pages
            step, view = launch(rows)
            part, aux_layers, pools, stages, _ = module(
                ids[rows.start : rows.stop].int(), step, (view,), pools, group_of_layer=(0, 0, 0, 0)
            )
            logits.append(part)
            aux_hidden.append(aux_layers)
            hidden.append(torch.stack(stages))
    ours_hidden = torch.cat(hidden, dim=1)
    # hidden_states[i + 1] is the output of layer i, except the last, which transformers norms.
    for layer in range(checkpoint.geometry.layers - 1):
        torch.testing.assert_close(
            ours_hidden[layer], expected.hidden_states[layer + 1][0], atol=1e-4, rtol=1e-4
        )
    torch.testing.assert_close(torch.cat(logits), expected.logits[0], atol=1e-4, rtol=1e-4)
    expected_aux_hidden = torch.cat([ours_hidden[0], ours_hidden[1], ours_hidden[3]], dim=-1)
    assert torch.equal(torch.cat(aux_hidden), expected_aux_hidden)
