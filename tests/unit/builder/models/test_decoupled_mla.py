"""MLA with decoupled RoPE: three forms of one definition, transformers, and the paged form."""

from __future__ import annotations

import pytest
import torch

from specbuild.builder.families.parts.graph_io import GroupView, LatentPool, Launch
from specbuild.builder.families.parts.mla import FORMS, AttentionInputs, MlaAttention
from specbuild.builder.families.parts.rope import rope_tables
from specbuild.runtime.engine_dir.geometry import MlaGeometry, Norm, Rope

ROWS, PAGE = 37, 8
GEOMETRIES = {
    "512 + 64, heads of 64": (512, 64, 64, 64, None, True),
    "512 + 64, heads of 128, query latent": (512, 64, 128, 128, 96, True),
    "narrow values, half-split weights": (48, 16, 32, 24, 40, False),
}


HEADS, HIDDEN = 4, 96


def module_of(name: str) -> MlaAttention:
    rank, rope, nope, value, q_rank, interleaved = GEOMETRIES[name]
    norm = Norm(1e-6, "before_weight")
    g = MlaGeometry(rank, rope, nope, value, (nope + rope) ** -0.5, norm, q_rank)
    module = MlaAttention(HIDDEN, HEADS, g, interleaved=interleaved)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator).mul_(parameter.shape[-1] ** -0.5)
        module.kv_a_layernorm.weight.abs_().mul_(10)
        if g.q_lora_rank:
            module.q_a_layernorm.weight.abs_().mul_(10)
    return module


def inputs(g: MlaGeometry, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(rows), rope_tables(Rope(theta=10000.0), g.rope_dim, rows)


@torch.no_grad()
def scene_of(
    module: MlaAttention, seen: torch.Tensor, positions: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, AttentionInputs]:
    g = module.geometry
    x, _, tables = inputs(g, len(positions))
    q = module.queries(x, tables, positions)
    entries = module.entries(x, tables, positions)
    return x, AttentionInputs(*q, entries, *module.up_projections(), seen, g.scale, sinks)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_all_forms_agree(name: str, with_sinks: bool) -> None:
    module = module_of(name)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0]) if with_sinks else None
    seen = torch.ones(ROWS, ROWS).tril().bool()
    _, scene = scene_of(module, seen, torch.arange(ROWS), sinks)
    result = {form: attend(scene) for form, attend in FORMS.items()}
    assert len(result) == 3 and result["naive"].std() > 0.05
    for attended in result.values():
        torch.testing.assert_close(attended, result["naive"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", GEOMETRIES)
@torch.no_grad()
def test_the_definition_equals_transformers(name: str) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    module = module_of(name)
    g = module.geometry
    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        q_lora_rank=g.q_lora_rank, kv_lora_rank=g.kv_lora_rank, qk_rope_head_dim=g.rope_dim,
        qk_nope_head_dim=g.nope_dim, v_head_dim=g.v_dim, rope_interleave=module.interleaved,
        attention_bias=False, attn_implementation="eager",
    )  # fmt: skip
    reference = theirs.DeepseekV3Attention(config, 0).eval()
    reference.load_state_dict(module.state_dict())  # load by name, strictly
    x, positions, (cos, sin) = inputs(g)
    doubled = tuple(torch.cat([table, table], dim=-1)[None] for table in (cos, sin))
    hidden = torch.full((ROWS, ROWS), -torch.inf).triu(1)[None, None]
    expected = reference(x[None], doubled, hidden)[0][0]
    seen = torch.ones(ROWS, ROWS).tril().bool()
    _, scene = scene_of(module, seen, positions, None)
    for attend in FORMS.values():
        result = module.o_proj(attend(scene).flatten(1))
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_paged_form_of_a_tree_equals_the_naive_one() -> None:
    """Run a prompt, then a tree whose siblings share positions, over pages in falling order."""
    module = module_of("512 + 64, heads of 64")
    g = module.geometry
    parents = (-1, 0, 0, 1, 1, 2)
    prompt = 21
    lineages = []
    for node in range(len(parents)):
        lineage = [node]
        while parents[lineage[-1]] >= 0:
            lineage.append(parents[lineage[-1]])
        lineages.append(lineage)
    depths = [len(lineage) - 1 for lineage in lineages]
    positions = torch.tensor([*range(prompt), *(prompt + depth for depth in depths)])
    seen = torch.zeros(len(positions), len(positions)).bool()
    seen[:, :prompt] = torch.ones(len(positions), prompt).tril().bool()
    for node, lineage in enumerate(lineages):
        seen[prompt + node, [prompt + ancestor for ancestor in lineage]] = True
    x, scene = scene_of(module, seen, positions, None)
    expected = module.o_proj(FORMS["naive"](scene).flatten(1))
    tables = rope_tables(Rope(theta=10000.0), g.rope_dim, len(positions))
    table = torch.arange(5, 0, -1, dtype=torch.int32).view(1, 1, 1, -1)
    pool = LatentPool(torch.full((6, 1, PAGE, g.entry_width), torch.nan))
    bits = [sum(1 << ancestor for ancestor in lineage) for lineage in lineages]
    results = []
    for rows, words in ((range(prompt), [0] * prompt), (range(prompt, len(positions)), bits)):
        slot = torch.arange(rows.start, rows.stop, dtype=torch.int32)
        write = table.flatten()[slot // PAGE] * PAGE + slot % PAGE
        launch = Launch(
            positions[rows.start : rows.stop].int(),
            torch.tensor([0, len(rows)], dtype=torch.int32),
            torch.tensor(words, dtype=torch.int32).unsqueeze(1),
            slot,
        )
        view = GroupView(table, slot, torch.tensor([prompt], dtype=torch.int32), write)
        part, pool, *_ = module(x[rows.start : rows.stop], pool, view, launch, tables)
        results.append(part)
    torch.testing.assert_close(torch.cat(results), expected, atol=1e-5, rtol=1e-5)
