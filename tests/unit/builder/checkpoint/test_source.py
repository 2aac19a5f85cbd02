"""Safetensors directories: reading, and detection of any damage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import edit_config, write_json, write_shards
from checkpoints import write_target
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_checkpoints import write_llama
from safetensors.torch import load_file, save_file

from specbuild.builder.checkpoint.source import open_directory, read_config, read_header, shorten
from specbuild.builder.families.checkpoints import read_target
from specbuild.runtime.errors import SpecbuildError


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(4, 6, generator=generator).bfloat16(),
        "b.weight": torch.randn(3, generator=generator),
        "c.blocks": torch.randint(0, 256, (2, 5, 3), generator=generator, dtype=torch.uint8),
        "d.ids": torch.randint(-9, 9, (7,), generator=generator),
        "e.mask": torch.rand(5, generator=generator) > 0.5,
    }


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_tensors_equal_the_written_ones(tmp_path: Path, shards: int) -> None:
    written = some_tensors()
    write_shards(tmp_path, written, shards)
    result = open_directory(tmp_path)
    assert set(result) == set(written)
    for name, tensor in written.items():
        source = result[name]
        assert source.sources == (name,)
        assert source.shape == tuple(tensor.shape)
        assert source.load().dtype == tensor.dtype
        assert torch.equal(source.load(), tensor)
    assert result["a.weight"].dtype == "BF16"
    assert result["e.mask"].dtype == "BOOL"


def test_the_offset_is_the_position_of_the_bytes(tmp_path: Path) -> None:
    written = some_tensors()
    write_shards(tmp_path, written, 2)
    for name, source in open_directory(tmp_path).items():
        raw = written[name].view(torch.uint8).numpy().tobytes()
        assert source.file is not None
        stored = np.memmap(source.file, np.uint8, mode="r", offset=source.offset, shape=len(raw))
        assert stored.tobytes() == raw


def test_files_without_index_are_read_together(tmp_path: Path) -> None:
    written = some_tensors()
    save_file({"a.weight": written["a.weight"]}, tmp_path / "one.safetensors")
    save_file({"b.weight": written["b.weight"]}, tmp_path / "two.safetensors")
    assert set(open_directory(tmp_path)) == {"a.weight", "b.weight"}


def test_rejects_a_tensor_in_two_files(tmp_path: Path) -> None:
    for file in ("one", "two"):
        save_file({"a.weight": torch.rand(2)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(SpecbuildError, match=r"two\.safetensors: a\.weight also in one\.safe"):
        open_directory(tmp_path)


def edit_index(path: Path, edit) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    write_json(file, index)


def test_rejects_an_index_with_a_missing_file(tmp_path: Path) -> None:
    write_shards(tmp_path, some_tensors(), 2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SpecbuildError, match=r"names model-00002-of-00002\.safetensors, not in"):
        open_directory(tmp_path)


def test_rejects_an_index_with_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    write_shards(tmp_path, some_tensors(), 2)
    edit_index(tmp_path, lambda m: m.update({"f.weight": "model-00001-of-00002.safetensors"}))
    with pytest.raises(SpecbuildError, match=r"f\.weight should be in model-00001"):
        open_directory(tmp_path)


def test_rejects_a_tensor_in_another_shard_than_in_the_index(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_shards(tmp_path, tensors, 2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file({n: tensors[n] for n in ("a.weight", "b.weight", "d.ids")}, second)
    with pytest.raises(
        SpecbuildError, match=r"holds a\.weight, which the index places in model-00001"
    ):
        open_directory(tmp_path)


def test_rejects_a_tensor_that_is_not_in_the_index(tmp_path: Path) -> None:
    write_shards(tmp_path, some_tensors(), 2)
    edit_index(tmp_path, lambda m: m.pop("a.weight"))
    with pytest.raises(
        SpecbuildError, match=r"holds a\.weight, which the index places in no shard"
    ):
        open_directory(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3, None])
def test_rejects_an_index_with_files_outside_the_folder(tmp_path: Path, file: object) -> None:
    write_shards(tmp_path, some_tensors(), 2)
    edit_index(tmp_path, lambda m: m.update({"a.weight": file}))
    with pytest.raises(SpecbuildError, match="expected a file beside the index"):
        open_directory(tmp_path)


def test_rejects_an_index_without_a_map(tmp_path: Path) -> None:
    write_shards(tmp_path, some_tensors(), 2)
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {}})
    with pytest.raises(SpecbuildError, match="has no weight_map"):
        open_directory(tmp_path)


def test_rejects_several_indexes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_json(tmp_path / f"{name}.safetensors.index.json", {"weight_map": {"x": "y"}})
    with pytest.raises(SpecbuildError, match="several indexes"):
        open_directory(tmp_path)


@pytest.mark.parametrize(
    ("file", "kind"), [("pytorch_model.bin", "pickle"), ("m.pth", "pickle"), ("m.gguf", "GGUF")]
)
def test_rejects_other_formats(tmp_path: Path, file: str, kind: str) -> None:
    (tmp_path / file).write_bytes(b"\x80\x02")
    with pytest.raises(SpecbuildError, match=f"only {kind} weights .*convert them to safetensors"):
        open_directory(tmp_path)


def test_rejects_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(SpecbuildError, match=r"not a checkpoint, it holds no \*\.safetensors"):
        open_directory(tmp_path)


@settings(max_examples=60, deadline=None)
@given(fraction=st.floats(0, 1, exclude_max=True))
def test_rejects_a_shard_truncated_anywhere(tmp_path_factory, fraction: float) -> None:
    file = tmp_path_factory.mktemp("cut") / "model.safetensors"
    save_file(some_tensors(), file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * fraction)])
    with pytest.raises(SpecbuildError, match=r"model\.safetensors: .*download it again"):
        read_header(file)


def test_rejects_bytes_after_the_last_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(some_tensors(), file)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(SpecbuildError, match="truncated or damaged"):
        read_header(file)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ENTRY | {"dtype": "F33"}, "entry for a is damaged"),
        (ENTRY | {"shape": [3]}, "entry for a is damaged"),
        (ENTRY | {"shape": [-2]}, "entry for a is damaged"),
        (ENTRY | {"shape": "x"}, "entry for a is damaged"),
        (ENTRY | {"data_offsets": [8, 0]}, "entry for a is damaged"),
        (ENTRY | {"data_offsets": [4, 12]}, "overlap or leave a gap"),
        ({"dtype": "F32"}, "entry for a is damaged"),
        ([1], "entry for a is damaged"),
    ],
)
def test_rejects_damaged_header_entries(tmp_path: Path, entry: object, message: str) -> None:
    header = json.dumps({"a": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(SpecbuildError, match=message):
        read_header(file)


@pytest.mark.parametrize("header", [b"{", b"[]", b"\xff\xff"])
def test_rejects_damaged_headers(tmp_path: Path, header: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(SpecbuildError, match="header is damaged"):
        read_header(file)


def test_rejects_a_file_that_is_deleted_before_loading(tmp_path: Path) -> None:
    write_shards(tmp_path, some_tensors(), 1)
    source = open_directory(tmp_path)["a.weight"]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SpecbuildError, match=r"a\.weight cannot be read"):
        source.load()


def test_rejects_paths_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SpecbuildError, match="absent: no such directory"):
        read_config(tmp_path / "absent")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(
        SpecbuildError, match=r"is a file; give the directory that holds config\.json"
    ):
        read_config(file)
    with pytest.raises(SpecbuildError, match=r"not a checkpoint directory, it has no config\.json"):
        read_config(tmp_path)
    for text in ("{", "[1]", "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SpecbuildError, match=r"config\.json: (cannot be read as|got list)"):
            read_config(tmp_path)


def test_errors_name_the_remedy_for_other_locations_and_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecbuildError, match="hf download openai/gpt-oss-20b --local-dir gpt-oss"):
        read_config(Path("openai/gpt-oss-20b"))
    for path in ("gpt-oss-20b", "../gpt-oss-20b", "a/b/c", str(tmp_path / "a")):
        with pytest.raises(SpecbuildError, match=r"no such directory$"):
            read_config(Path(path))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(SpecbuildError, match="is not supported here; give the directory of"):
        read_config(file)
    with pytest.raises(SpecbuildError, match=r"give build one file, --model \S+/model.gguf"):
        read_config(tmp_path)


def test_rejects_negative_axes(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]}}
    head = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(24))
    with pytest.raises(SpecbuildError, match="the header's entry for a is damaged"):
        read_header(file)


def test_long_lists_end_with_the_number_of_omitted_names() -> None:
    assert shorten(["a", "b", "c"]) == "a, b, c"
    assert shorten(["a", "b", "c", "d"]) == "a, b, c and 1 more"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_rejects_special_files_without_blocking(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(SpecbuildError, match="is no regular file"):
        open_directory(tmp_path)


ADAPTER = {"base_model_name_or_path": "Qwen/Qwen3-8B", "peft_type": "LORA", "r": 8}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("adapter_config.json", ADAPTER, "is an adapter of 'Qwen/Qwen3-8B' (adapter_config.json), "
         "not a model; merge it into its base model first (in peft merge_and_unload, then "
         "save_pretrained) and give the result"),
        ("adapter_config.json", {}, "is an adapter (adapter_config.json), "
         "not a model; merge it into its base model first (in peft merge_and_unload, then "
         "save_pretrained) and give the result"),
    ],
)  # fmt: skip
def test_rejects_adapters(
    tmp_path: Path, name: str, content: dict[str, object], sentence: str, whole: bool
) -> None:
    """They are also rejected in a folder with a configuration."""
    (tmp_path / name).write_text(json.dumps(content))
    if whole:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpecbuildError) as refused:
        read_config(tmp_path)
    assert str(refused.value) == f"{tmp_path}: {sentence}"


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**62] * 100_000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
    ],
    ids=["floats", "boolean", "too many axes", "before the data", "no name of a type"],
)
def test_rejects_header_entries_that_are_not_integers(
    tmp_path: Path, entry: dict[str, object]
) -> None:
    head = json.dumps({"a": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    with pytest.raises(SpecbuildError, match="the header's entry for a is damaged") as refused:
        read_header(file)
    assert len(str(refused.value)) < 300


def test_rejects_a_shard_with_an_invalid_file_name(tmp_path: Path) -> None:
    write_target(tmp_path, layers=1, shards=2)
    (index,) = tmp_path.glob("*.index.json")
    data = json.loads(index.read_text())
    first = next(iter(data["weight_map"]))
    index.write_text(json.dumps(data | {"weight_map": data["weight_map"] | {first: "a" * 5000}}))
    with pytest.raises(SpecbuildError, match=rf"{first} names 'aaaa.*expected a file beside") as e:
        open_directory(tmp_path)
    assert len(str(e.value)) < 500


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors.index.json",
        "adapter_config.json",
        "hf_quant_config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "mla_kv.safetensors",
        "dsa_indexer.safetensors",
    ],
)
@pytest.mark.parametrize("kind", ["directory", "broken link", "pipe"])
def test_special_files_are_not_treated_as_absent(tmp_path: Path, name: str, kind: str) -> None:
    write_target(tmp_path, layers=1, vocab=264, tokenizer=True)
    file = tmp_path / name
    file.unlink(missing_ok=True)
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:  # a snapshot of the hub cache whose blob was deleted
        file.symlink_to(tmp_path / "blobs" / "absent")
    with pytest.raises(SpecbuildError, match=f"{file}: is no regular file"):
        read_target(tmp_path, strict=False)


@pytest.mark.parametrize("name", ["model.layers.{}.x", "model.layers.0.mlp.experts.{}.up.weight"])
def test_very_long_numbers_in_names(tmp_path: Path, name: str) -> None:
    write_llama(tmp_path, "qwen3_moe")
    extra = {name.format("9" * 5000): torch.zeros(1)}
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | extra, file)
    with pytest.raises(SpecbuildError, match="1 tensor does not fit the model"):
        read_target(tmp_path, strict=False)


@pytest.mark.parametrize("kind", ["granite", "llama", "mixtral", "olmo3", "phi3", "smollm3"])
def test_the_error_names_the_quantization_method(tmp_path: Path, kind: str) -> None:
    """As in published configurations: sorted, with the method last."""
    write_llama(tmp_path, kind)
    method = {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq"}
    edit_config(tmp_path, quantization_config=method)
    with pytest.raises(SpecbuildError, match=r"quantization_config.*awq, but no tensor is stored"):
        read_target(tmp_path, strict=False)
    edit_config(tmp_path, quantization_config=method | {"quant_method": "aqlm"})
    with pytest.raises(SpecbuildError, match=r"quantized by 'aqlm', which is not implemented"):
        read_target(tmp_path, strict=False)
