"""CPU engines with quantized values of a GGUF file: drafts, batches, prefixes change nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_draft
from command_line import Command
from gguf_files import write_gguf
from gguf_keys import LLAMA_KEYS, LLAMA_KINDS
from gguf_models import llama_twin
from llama_checkpoints import LAYERS, VOCAB, write_llama

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.device import this_device
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_file, read_manifest
from specbuild.runtime.engine_dir.manifest import WEIGHTS_FILE, DraftShape
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.executors.cpu import loading
from specbuild.runtime.executors.cpu.executor import CpuExecutor, run_probe
from specbuild.runtime.executors.cpu.graphs import read_graphs
from specbuild.runtime.executors.cpu.row_padding import (
    PROBE_FILE,
    Padding,
    at_least_two,
    even,
    padding_here,
    unpadded,
)
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.settings import RuntimeSettings

HIDDEN, CONTEXT = 256, 40
PROMPTS = [tuple(range(3, 3 + count)) for count in (1, 5, 21)]
TREE, CHAIN = DraftShape(4, 3, 12), DraftShape(1, 3, 3)


@pytest.fixture(scope="module", params=["fast", "exact"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine of a Llama whose layers use several GGUF types, with a random EAGLE3 draft."""
    folder = tmp_path_factory.mktemp(request.param)
    write_llama(folder / "model", hidden_size=HIDDEN, rope_parameters=None, head_dim=64)
    config = json.loads((folder / "model" / "config.json").read_text())
    architecture, keys = LLAMA_KINDS["llama"]
    keys = LLAMA_KEYS | keys | {".embedding_length": HIDDEN, ".rope.dimension_count": 64}
    file = write_gguf(
        folder / "model.gguf", architecture, keys, llama_twin(folder / "model", config)
    )
    write_draft(
        folder / "draft", target_layers=LAYERS, target_hidden=HIDDEN, target_vocab=VOCAB,
        hidden=HIDDEN, draft_vocab=24, aux_layers=(0,),
    )  # fmt: skip
    options = BuildOptions.from_flat(
        model=file, draft=folder / "draft", output=folder / "engine", max_seq_len=128,
        cpu_math=request.param,
    )  # fmt: skip
    build(options, SilentProgress())
    return folder / "engine"


def decoded(
    loaded: Engine, prompts: list[tuple[int, ...]], shape: DraftShape | None = None
) -> list[tuple[int, ...]]:
    params = GenerateParams(max_new_tokens=64, ignore_eos=True, temperature=0.0)
    requests = [Prompt(str(place), prompt_ids=ids) for place, ids in enumerate(prompts)]
    events = loaded.generate(requests, params, speculation=shape)
    finished = {
        int(e.request): tuple(e.record.output_ids) for e in events if isinstance(e, FinishEvent)
    }
    return [finished[place] for place in range(len(prompts))]


@pytest.mark.parametrize("padding", [None, at_least_two, even], ids=["here", "two", "even"])
def test_drafts_batches_and_prefixes_change_no_token(
    engine: Path, padding: Padding | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if padding is not None:
        monkeypatch.setattr(loading, "padding_here", lambda _probe: padding)
    loaded = Engine.load(engine, RuntimeSettings(prefix_caching="on"))
    alone = [decoded(loaded, [ids])[0] for ids in PROMPTS]
    assert len(set(alone)) == len(alone)
    assert decoded(loaded, PROMPTS) == alone
    for shape in (TREE, CHAIN):
        assert decoded(loaded, PROMPTS, shape) == alone
    assert decoded(Engine.load(engine), PROMPTS, TREE) == alone


def test_rows_have_equal_bits_in_launches_of_1_to_16_rows(engine: Path) -> None:
    manifest = read_manifest(engine)
    padding = unpadded
    if PROBE_FILE in manifest.files:
        probe = bytes(read_file(engine, manifest, PROBE_FILE))
        here = padding_here(run_probe(probe, 1))
        if here is None:
            pytest.skip("this processor has no padding with which bits are equal")
        padding = here
    executor = CpuExecutor(
        manifest, read_graphs(engine, manifest), open_weights(engine, manifest), padding=padding
    )
    ids = np.random.default_rng(0).integers(3, VOCAB, CONTEXT + 16).astype(np.int32)
    executor.run("target", launch(ids, 0, CONTEXT))
    logits = {
        rows: executor.run("target", launch(ids, CONTEXT, rows))["logits"].copy()
        for rows in range(1, 17)
    }
    for rows, result in logits.items():
        assert result.shape[0] == rows
        np.testing.assert_array_equal(result, logits[16][:rows], err_msg=f"{rows} rows")


def test_verify_accepts_exact_math(engine: Path, command: Command) -> None:
    verified = command("verify", engine, "--model", engine.parent / "model.gguf")
    if read_manifest(engine).quantized.math == "exact":
        assert verified.code == 0, verified.err
    else:
        assert verified.refused("its products round activations to int8")
    text = command("inspect", engine).out
    assert "4 bits, a scale for 32 values" in text


def launch(ids: np.ndarray, start: int, rows: int) -> dict[str, np.ndarray]:
    """Return the inputs of causal rows at these positions, in pages 1, 2, … of 16 tokens."""
    places = np.arange(start, start + rows, dtype=np.int32)
    return {
        "token_ids": ids[start : start + rows],
        "positions": places,
        "row_start": np.array([0, rows], np.int32),
        "ancestor_bits": np.zeros((rows, 1), np.int32),
        "logit_rows": np.arange(rows, dtype=np.int32),
        "full.page_table": np.arange(1, 5, dtype=np.int32).reshape(1, 1, 1, -1),
        "full.row_slot": places,
        "full.write_slot": places + 16,
        "full.tree_start": np.array([start + rows], np.int32),
    }


@pytest.mark.parametrize(
    ("differs", "padding"),
    [
        (lambda _rows: False, unpadded),
        (lambda rows: rows == 1, at_least_two),
        (lambda rows: rows % 2 == 1, even),
        (lambda rows: rows < 16, None),
    ],
    ids=["equal", "one row", "odd", "all"],
)
def test_selects_the_cheapest_padding(differs: object, padding: Padding | None) -> None:
    def probe(x: np.ndarray) -> list[np.ndarray]:
        return [x + float(differs(len(x)))]  # type: ignore[operator]

    assert padding_here(probe) is padding


def test_large_engines_use_the_physical_cores(engine: Path) -> None:
    manifest = read_manifest(engine)
    weights = manifest.files[WEIGHTS_FILE]
    large = replace(manifest, files={WEIGHTS_FILE: replace(weights, bytes=1 << 30)})
    for cores, threads in ((1, 1), (6, 6), (64, 8)):
        here = replace(this_device(), physical_cores=cores)
        assert loading.default_threads(large, here) == threads
        assert loading.default_threads(manifest, here) == 1
    assert 1 <= this_device().physical_cores <= this_device().cores
