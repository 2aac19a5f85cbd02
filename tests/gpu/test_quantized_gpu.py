"""CUDA engines with the codes of a checkpoint: bit for bit the bf16 engines of the same file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf_models
import pytest
from example_engine import every_other_sampled, on_gpu, outputs, random_prompts, records
from gguf_files import write_gguf
from gguf_keys import LLAMA_KEYS, LLAMA_KINDS
from gguf_models import llama_twin
from llama_checkpoints import LAYERS, VOCAB, write_llama

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress

pytestmark = pytest.mark.timeout(600)

# Slices of K of one block and of three: neighbours share a unit of two.
HIDDEN, INNER, HEADS, TOKENS = 512, 1536, 8, 40
LENGTHS = (5, 230, 40, 17)
KINDS = ("Q4_0", "Q8_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")


@pytest.fixture(scope="module", params=KINDS)
def file(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A Llama whose matrices have one type, but for the embedding."""
    folder = tmp_path_factory.mktemp(request.param)
    write_llama(
        folder / "model", hidden_size=HIDDEN, intermediate_size=INNER, rope_parameters=None,
        head_dim=64, num_attention_heads=HEADS,
    )  # fmt: skip
    config = json.loads((folder / "model" / "config.json").read_text())
    architecture, keys = LLAMA_KINDS["llama"]
    keys = LLAMA_KEYS | keys | {
        ".embedding_length": HIDDEN, ".feed_forward_length": INNER, ".rope.dimension_count": 64,
        ".attention.head_count": HEADS,
    }  # fmt: skip

    def kinds(name: str, shape: tuple[int, ...]) -> str:
        is_matrix = len(shape) == 2 and "embed_tokens" not in name
        return request.param if is_matrix else "F32"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "mixed", kinds)
        tensors = llama_twin(folder / "model", config)
    yield write_gguf(folder / "model.gguf", architecture, keys, tensors)


def test_no_bit_differs_from_dequantized_weights(file: Path) -> None:
    found = []
    for dtype in ("bf16", "checkpoint"):
        folder = file.parent / dtype
        options = BuildOptions.from_flat(
            model=file, output=folder, backend="cuda", max_batch_size=4, page_size=64,
            max_seq_len=512, weights_dtype=dtype,
        )  # fmt: skip
        build(options, SilentProgress())
        prompts, params = random_prompts(VOCAB, LENGTHS), every_other_sampled(len(LENGTHS), TOKENS)
        with on_gpu(folder) as engine:
            kept = [name for name in engine.manifest.tensors if name.endswith(".packed")]
            alone = outputs(records(engine, prompts[:1], params[:1]))
            found.append((alone, outputs(records(engine, prompts, params))))
            coded = engine.manifest.quantized
        if dtype == "checkpoint":
            assert coded is not None and coded.math == "bf16"
            assert [form.dequantized for form in coded.forms] == [None]
            assert not kept
            assert sum(form.weights for form in coded.forms) == 7 * LAYERS + 1
    assert found[0] == found[1]
