"""CUDA graphs of quantized checkpoints: the bf16 weights are those of the dequantized numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fused_graphs import PAGE, blank_pools, fused_model, launch_feeds, run_graph
from left_out import slow
from llama_checkpoints import write_llama
from quantized_checkpoints import write_quantized
from quantized_formats import FORMATS

from specbuild.builder.backends.cuda.check import require_cuda_support

QUICK = ("fp8 blocks", "compressed-tensors nvfp4", "gptq, ordered", "bitsandbytes nf4, twice")

# Where the weights of layers keep their codes: in which storage; or why not.
STORED = {
    "awq": "int4-g32",
    "gptq of 3 bits": "int4-g32",
    "fp8 a tensor": "fp8-block",
    "fbgemm fp8": "fp8-rows",
    "gptq, ordered": "its groups are no runs of columns",
    "compressed-tensors nvfp4": "no kernel decodes its codes",
}


@pytest.mark.parametrize("name", STORED)
def test_layers_keep_their_codes_where_kernels_decode_them(tmp_path: Path, name: str) -> None:
    write_llama(tmp_path / "model", num_hidden_layers=2)
    write_quantized(tmp_path, FORMATS[name])
    kept = fused_model(tmp_path / "model", max_seq_len=64, page_size=PAGE).kept
    found = {storage.name: len(weights) for (_, storage), weights in kept.stored.items()}
    found |= {reason: len(weights) for (_, reason), weights in kept.dequantized.items()}
    assert found == {STORED[name]: 14}
    record = kept.record([])
    assert record is not None and record.math == "bf16"
    assert [form.weights for form in record.forms] == [14]


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in FORMATS if name not in QUICK))])
def test_logits_are_those_of_a_checkpoint_with_the_numbers(tmp_path: Path, name: str) -> None:
    """Bit for bit: the fused graph computes with equal weights in the same way."""
    write_llama(tmp_path / "model", num_hidden_layers=2)
    write_quantized(tmp_path, FORMATS[name])
    logits = []
    for folder in ("model", "plain"):
        fused = fused_model(tmp_path / folder, max_seq_len=64, page_size=PAGE)
        require_cuda_support(fused.target.geometry, None)
        model = fused.models["target"]
        feeds = launch_feeds(model, range(20), torch.arange(20)) | blank_pools(model)
        feeds["token_ids"] = torch.arange(3, 23, dtype=torch.int32)
        logits.append(run_graph(model, feeds)["logits"])
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])
