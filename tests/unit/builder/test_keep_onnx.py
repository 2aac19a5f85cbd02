"""The graphs of ``build --keep-onnx``: they load, and compute the results of references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from checkpoints import write_draft, write_target
from indexer_files import write_indexers
from latent_files import write_latents
from safetensors.torch import load_file
from view_engines import SPECPV

from specbuild.builder.backends.cpu.backend import CPU
from specbuild.builder.build import build
from specbuild.builder.families.eagle3.reference import load_reference_draft
from specbuild.builder.inputs import read_checkpoints, settled_inputs
from specbuild.builder.kept_graphs import keep_graphs
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.errors import SpecbuildError

ROLES = {"target", "draft_fuse", "draft", "expand", "select", "choose", "accept", "commit"}
PAGE = 16
# Two sequences: one crosses a page and the sliding window, one is shorter.
LENGTHS = (21, 9)


class Notes(SilentProgress):
    """Progress that stores its messages."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_target(folder / "target", layers=2, sliding_window=8)
    write_draft(folder / "draft", target_layers=2)
    return folder


def options(checkpoints: Path, output: Path) -> BuildOptions:
    return BuildOptions.from_flat(
        model=checkpoints / "target",
        draft=checkpoints / "draft",
        output=output,
        max_seq_len=64,
        max_batch_size=2,
        page_size=PAGE,
    )


def kept(checkpoints: Path, folder: Path, dtype: str | None) -> tuple[Path, Notes]:
    arguments, notes = options(checkpoints, folder / "unused"), Notes()
    inputs = settled_inputs(arguments, CPU, read_checkpoints(arguments, notes))
    keep_graphs(folder / "onnx", dtype, inputs, notes)
    return folder / "onnx", notes


@pytest.fixture(scope="module")
def in_float32(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept(checkpoints, tmp_path_factory.mktemp("float32"), "float32")[0]


def test_graphs_in_bf16_are_valid_and_have_the_tensors_of_the_checkpoint(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder, notes = kept(checkpoints, tmp_path, None)
    assert {file.stem for file in folder.glob("*.onnx")} == ROLES
    size = (folder / "weights.safetensors").stat().st_size
    assert any(f"{size / 1e6:.1f} MB" in text and str(folder) in text for text in notes.told)
    stored = load_file(checkpoints / "target" / "model.safetensors")
    drafts = load_file(checkpoints / "draft" / "model.safetensors")
    stored |= {f"draft.{name}": t for name, t in drafts.items() if name not in ("d2t", "t2d")}
    named = set()
    for file in folder.glob("*.onnx"):
        onnx.checker.check_model(file, full_check=True)
        for tensor in onnx.load(file).graph.initializer:
            if tensor.name in stored:
                raw = stored[tensor.name].contiguous().flatten().view(torch.uint8).numpy()
                assert onnx.numpy_helper.to_array(tensor).tobytes() == raw.tobytes(), tensor.name
                named.add(tensor.name)
    assert named == set(stored)


def session(folder: Path, role: str) -> ort.InferenceSession:
    quiet = ort.SessionOptions()
    quiet.log_severity_level, quiet.intra_op_num_threads = 3, 1
    return ort.InferenceSession(folder / f"{role}.onnx", quiet, providers=["CPUExecutionProvider"])


def launch(result: ort.InferenceSession, lengths: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return rows of sequences of these lengths from position 0 on, and pools of zeros."""
    tables = np.array([[[5, 2, 6]], [[3, 7, 1]]], dtype=np.int32)[: len(lengths)]
    at = np.concatenate([np.arange(n) for n in lengths])
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    view = {
        "page_table": tables[None],
        "row_slot": at,
        "tree_start": np.array(lengths),
        "write_slot": tables[sequence, 0, at // PAGE] * PAGE + at % PAGE,
    }
    feeds = {
        "positions": at,
        "row_start": np.cumsum((0, *lengths)),
        "ancestor_bits": np.zeros((len(at), 1)),
        "logit_rows": np.arange(len(at)),
    }
    for port in result.get_inputs():
        name = port.name.rpartition(".")[2]
        if name in view:
            feeds[port.name] = view[name]
        elif name.endswith("_pool"):
            feeds[port.name] = np.zeros(port.shape)
    types = {port.name: port.type for port in result.get_inputs()}
    return {
        name: value.astype(np.float32 if "float" in types[name] else np.int32)
        for name, value in feeds.items()
    }


def test_logits_in_plain_onnx_runtime_equal_the_reference(
    checkpoints: Path, in_float32: Path
) -> None:
    from transformers import GptOssForCausalLM

    path = checkpoints / "target"
    reference_model = GptOssForCausalLM.from_pretrained(path, dtype=torch.float32).float().eval()
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 256, (n,), generator=generator) for n in LENGTHS]
    target = session(in_float32, "target")
    feeds = launch(target, LENGTHS) | {"token_ids": torch.cat(ids).int().numpy()}
    logits, aux_hidden = target.run(["logits", "captured"], feeds)
    with torch.no_grad():
        expected = torch.cat([reference_model(i[None]).logits[0] for i in ids])
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)

    (hidden,) = session(in_float32, "draft_fuse").run(["hidden"], {"captured": aux_hidden})
    draft = session(in_float32, "draft")
    first, next_ids = LENGTHS[0], ids[0].roll(-1)
    feeds = launch(draft, LENGTHS)
    feeds |= {"token_ids": torch.cat([next_ids, ids[1]]).int().numpy(), "hidden": hidden}
    (draft_logits,) = draft.run(["draft_logits"], feeds)
    weights = load_file(path / "model.safetensors")
    reference = load_reference_draft(
        checkpoints / "draft",
        embedding=weights["model.embed_tokens.weight"],
        head=weights["lm_head.weight"],
    )
    fused = reference.fuse(torch.from_numpy(aux_hidden[:first]))
    states = reference.run(next_ids, fused, torch.arange(first))
    result = torch.from_numpy(draft_logits[:first])
    torch.testing.assert_close(result, states.logits, rtol=1e-4, atol=1e-4)


def test_plain_onnx_runtime_loads_every_graph(in_float32: Path) -> None:
    assert {file.stem for file in in_float32.glob("*.onnx")} == ROLES
    for role in ROLES - {"target", "draft_fuse", "draft"}:
        session(in_float32, role)


def test_lossy_modes_and_latents_have_functions(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write_target(target, layers=2, sliding_window=8)
    write_draft(tmp_path / "draft", target_layers=2)
    write_indexers(target, [1])
    write_latents(target, {0: 12, 1: 20})
    build_options = BuildOptions.from_flat(
        model=target,
        draft=tmp_path / "draft",
        output=tmp_path / "unused",
        max_seq_len=128,
        page_size=8,
        draft_depth=3,
        draft_tokens=6,
        dsa=True,
        dsa_threshold=40,
        **SPECPV | {"specpv_score": "indexer"},
    )
    inputs = settled_inputs(build_options, CPU, read_checkpoints(build_options, SilentProgress()))
    keep_graphs(tmp_path / "onnx", "float32", inputs, SilentProgress())
    file = tmp_path / "onnx" / "target.onnx"
    onnx.checker.check_model(file, full_check=True)
    functions = {function.name for function in onnx.load(file).functions}
    assert {
        "DsaIndexer",
        "DsaCheck",
        "MlaAttention",
        "KvBlockSummary",
        "KvBlockSelect",
    } <= functions
    session(tmp_path / "onnx", "target")


def test_rejects_a_folder_that_is_not_empty(checkpoints: Path, tmp_path: Path) -> None:
    kept_file = tmp_path / "mine"
    kept_file.write_text("mine")
    arguments = options(checkpoints, tmp_path / "e").flat() | {"keep_onnx": tmp_path}
    with pytest.raises(SpecbuildError, match=r"--keep-onnx .* is not empty"):
        build(BuildOptions.from_flat(**arguments), SilentProgress())
    arguments |= {"keep_onnx": None, "portable_dtype": "float32"}
    with pytest.raises(SpecbuildError, match="add --keep-onnx DIR"):
        build(BuildOptions.from_flat(**arguments), SilentProgress())
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
