"""A target whose block kinds are exported once gives the graph of an export of all layers."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from checkpoints import write_target
from deepseek_checkpoints import write_deepseek
from engine_sizes import compute_engine_sizes
from latent_files import write_latents
from llama_checkpoints import write_llama
from shared_graphs import exported_anew
from torch import nn

from specbuild.builder import graphs
from specbuild.builder.families.checkpoints import read_target
from specbuild.builder.graph.repeated_blocks import BLOCK_DOMAIN, BlockPorts, kind_of
from specbuild.builder.options import BuildOptions


def write_mixed_caches(path: Path) -> None:
    write_target(path)
    write_latents(path, {1: 24, 3: 24})


MODELS: dict[str, tuple[Callable[[Path], None], int]] = {
    "gpt-oss, windows in turn": (write_target, 2),
    "deepseek, one dense layer": (lambda path: write_deepseek(path, num_hidden_layers=3), 2),
    "qwen3 with experts": (lambda path: write_llama(path, "qwen3_moe"), 1),
    "gpt-oss, latents where there is no window": (write_mixed_caches, 2),
}


def computed(graph: ir.Graph) -> dict[str, str]:
    """Describe how each output is computed from ports and weights, independent of names."""
    numbers: dict[ir.Value, str] = {}

    def described(value: ir.Value | None) -> str:
        if value is None:
            return ""
        if value not in numbers:
            numbers[value] = f"{value.name} {value.dtype} {value.shape}"
        return numbers[value]

    for node in graph:
        attributes = sorted(str(attribute) for attribute in node.attributes.values())
        described_node = repr(
            (node.op_identifier(), attributes, [described(value) for value in node.inputs])
        )
        for place, value in enumerate(node.outputs):
            line = f"{described_node} {place} {value.dtype} {value.shape}"
            numbers[value] = sha256(line.encode()).hexdigest()
    return {value.name or "": numbers[value] for value in graph.outputs}


@pytest.mark.parametrize(
    "model",
    [name if "qwen3" in name or "latents" in name else pytest.param(name, marks=pytest.mark.slow)
     for name in MODELS],
)  # fmt: skip
def test_the_graph_equals_an_export_of_all_layers(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, kinds = MODELS[model]
    write(tmp_path)
    target = read_target(tmp_path, strict=True)
    g = target.geometry
    engine_sizes = compute_engine_sizes(
        BuildOptions(model=tmp_path, output=Path("unused")), g, None
    )
    exported = []

    def counted(block: nn.Module, ports: BlockPorts) -> ir.Model:
        exported.append(kind_of(block, ports))
        return block_graph(block, ports)

    with exported_anew():
        block_graph = graphs.block_graph
        monkeypatch.setattr(graphs, "block_graph", counted)
        result = graphs.target_graph(g, engine_sizes, (0, g.layers - 1), torch.bfloat16)
        monkeypatch.setattr(graphs, "call_blocks", lambda *_: [])
        expected = graphs.target_graph(g, engine_sizes, (0, g.layers - 1), torch.bfloat16)
    assert len(set(exported)) == len(exported) == kinds < g.layers
    assert BLOCK_DOMAIN not in result.graph.opset_imports and not result.functions
    assert computed(result.graph) == computed(expected.graph)
    weights = [
        {name: (value.dtype, value.shape) for name, value in graph.initializers.items()}
        for graph in (result.graph, expected.graph)
    ]
    assert weights[0] == weights[1]
