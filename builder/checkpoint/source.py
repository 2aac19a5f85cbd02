"""Safetensors directories: one file, or shards with an index; read lazily through memory maps."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specbuild.builder.checkpoint.config_json import check_numbers
from specbuild.builder.checkpoint.quantization.tensor import QuantizedSource
from specbuild.runtime.engine_dir.strict_json import brief
from specbuild.runtime.errors import SpecbuildError

INDEX_SUFFIX = ".safetensors.index.json"
LARGEST_HEADER_BYTES = LARGEST_JSON_BYTES = 100 << 20
_MAX_AXES = 8
_MAX_FILE_NAME = 255
_SHOWN_NAMES = 3
# Files next to a checkpoint that are read by their own names.
SIDE_FILES = ("mla_kv.safetensors", "dsa_indexer.safetensors")
DTYPE_BITS = {
    "F4": 4,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
FLOAT_DTYPES = ("BF16", "F16", "F32")
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a checkpoint, not yet read.

    ``name`` is canonical; ``sources`` are the names on disk. ``dtype`` is spelled as in
    safetensors. ``load`` maps the file and returns the tensor, which the caller must not write to.
    ``file`` and ``offset`` (bytes) are None where the tensor is no verbatim slice of one file.
    ``load_as`` gives it in another float type, as ``load().to(…)`` would, but without holding it
    whole in its own; None where that takes no less memory. ``quantized`` has the codes of a matrix
    that the checkpoint stores quantized, of which ``load`` gives the numbers. ``less_1``: the
    weight of a norm that the checkpoint stores less 1, to which 1 was added in fp32. ``experts``:
    the weights of single experts [out, in] that were stacked, expert by expert.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    load: Callable[[], torch.Tensor]
    file: Path | None
    offset: int | None
    load_as: Callable[[torch.dtype], torch.Tensor] | None = None
    quantized: QuantizedSource | None = None
    less_1: bool = False
    experts: tuple[SourceTensor, ...] = ()


# The tensors of a checkpoint by name.
Tensors = dict[str, SourceTensor]


def remade(
    name: str,
    parent: SourceTensor,
    make: Callable[[torch.Tensor], torch.Tensor],
    *,
    dtype: str | None = None,
) -> SourceTensor:
    """Return ``make`` of the parent; its shape is computed on the meta device.

    ``dtype`` is the type of the result, by default the parent's.
    """
    blank = torch.empty(parent.shape, device="meta")
    return SourceTensor(
        name=name,
        dtype=dtype or parent.dtype,
        shape=tuple(make(blank).shape),
        sources=parent.sources,
        load=lambda: make(parent.load()),
        file=None,
        offset=None,
    )


def row_slices(tensor: SourceTensor, counts: Mapping[str, int]) -> dict[str, SourceTensor]:
    """Return the tensor's rows in consecutive parts, from names to numbers of rows."""
    row_bytes = DTYPE_BITS[tensor.dtype] // 8 * math.prod(tensor.shape[1:])
    load_as, quantized, slices, first = tensor.load_as, tensor.quantized, {}, 0
    rows = torch.arange(tensor.shape[0])
    for name, count in counts.items():
        cut = partial(torch.narrow, dim=0, start=first, length=count)
        slices[name] = replace(
            tensor,
            name=name,
            shape=(count, *tensor.shape[1:]),
            load=partial(_cut, tensor.load, cut),
            offset=None if tensor.offset is None else tensor.offset + first * row_bytes,
            load_as=None if load_as is None else partial(_cut, load_as, cut),
            quantized=None if quantized is None else quantized.select_rows(cut(rows), len(rows)),
        )
        first += count
    return slices


def _cut(
    load: Callable[..., torch.Tensor],
    cut: Callable[[torch.Tensor], torch.Tensor],
    *dtype: torch.dtype,
) -> torch.Tensor:
    return cut(load(*dtype))


def open_directory(path: Path) -> dict[str, SourceTensor]:
    """Return all tensors of a safetensors directory by their names on disk; reads headers only.

    Raises SpecbuildError if the directory has no safetensors, a file is damaged, or the index and
    the shards disagree.
    """
    index = _find_index(path)
    if index is not None:
        return _open_indexed(index)
    single = path / "model.safetensors"
    found_files = (file for file in path.glob("*.safetensors") if file.name not in SIDE_FILES)
    files = [single] if single.is_file() else sorted(found_files)
    if not files:
        raise SpecbuildError(_no_safetensors(path))
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        found = read_header(file)
        twice = sorted(set(found) & set(tensors))
        if twice:
            raise SpecbuildError(
                f"{file}: {shorten(twice)} also in {_file_of(tensors[twice[0]])}; "
                "a tensor may stand in one shard only"
            )
        tensors |= found
    return tensors


def read_header(file: Path) -> dict[str, SourceTensor]:
    """Return the tensors of one safetensors file, after a check that it has all of their bytes."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise SpecbuildError(f"{file}: is no regular file")
        size = found.st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            whole = len(prefix) == 8 and header_bytes <= min(size - 8, LARGEST_HEADER_BYTES)
            raw = stream.read(header_bytes) if whole else b""
    except OSError as error:
        raise SpecbuildError(f"{file}: cannot be read ({error.strerror})") from None
    if not whole:
        raise SpecbuildError(
            f"{file}: not a whole safetensors file ({size} bytes); download it again"
        )
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise SpecbuildError(f"{file}: the safetensors header is damaged ({error})") from None
    checked = {name: _check_entry(file, name, entry) for name, entry in entries.items()}
    start = 8 + header_bytes
    _check_extent(file, size - start, [(begin, stop) for _, _, begin, stop in checked.values()])
    return {
        name: SourceTensor(
            name, dtype, shape, (name,), partial(_load, file, name), file, start + begin
        )
        for name, (dtype, shape, begin, _) in checked.items()
    }


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises SpecbuildError if it is invalid, or has a number above 64 bits.
    """
    if path.exists() and not path.is_file():
        raise SpecbuildError(f"{path}: is no regular file")
    try:
        if path.stat().st_size > LARGEST_JSON_BYTES:
            raise SpecbuildError(
                f"{path}: is larger than {LARGEST_JSON_BYTES} bytes; it is no file of a checkpoint"
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecbuildError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(data, dict):
        raise SpecbuildError(f"{path}: got {type(data).__name__}, expected a JSON object")
    check_numbers(str(path), data)
    return data


def read_config(path: Path) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint directory; SpecbuildError describes other paths."""
    if not path.exists():
        raise SpecbuildError(f"{path}: no such directory{_fetch_hint(path)}")
    safetensors = any(path.glob("*.safetensors"))
    refuse_gguf(path)
    if not safetensors and (files := sorted(path.glob("*.gguf"))):
        raise SpecbuildError(
            f"{path}: holds no safetensors, but GGUF ({shorten([file.name for file in files])}); "
            f"give build one file, --model {files[0]}, of a split model the first"
        )
    if not path.is_dir():
        raise SpecbuildError(f"{path}: is a file; give the directory that holds config.json")
    _refuse_adapter(path)
    config = path / "config.json"
    if not has_file(config):
        raise SpecbuildError(f"{path}: not a checkpoint directory, it has no config.json")
    return read_json(config)


def has_file(file: Path) -> bool:
    """Return whether a checkpoint has this file.

    Raises SpecbuildError for a directory, a device or a broken link, which must not count as an
    absent file.
    """
    if file.is_file():
        return True
    if os.path.lexists(file):
        raise SpecbuildError(
            f"{file}: is no regular file, nor a link to one; download it again or remove it"
        )
    return False


def refuse_gguf(path: Path) -> None:
    """Raise SpecbuildError if ``path`` has the name of a GGUF file."""
    if path.suffix == ".gguf":
        raise SpecbuildError(
            f"{path}: is a GGUF file, which is not supported here; give the directory of the "
            "safetensors, which hf download ORGANISATION/NAME --local-dir DIR fetches"
        )


def _refuse_adapter(path: Path) -> None:
    """Raise SpecbuildError for the directory of a LoRA adapter, which has no model of its own."""
    file = path / "adapter_config.json"
    if has_file(file):
        base = read_json(file).get("base_model_name_or_path")
        of_model = f" of {brief(base)}" if isinstance(base, str) and base else ""
        raise SpecbuildError(
            f"{path}: is an adapter{of_model} (adapter_config.json), not a model; merge it into "
            "its base model first (in peft merge_and_unload, then save_pretrained) and give the "
            "result"
        )


def _fetch_hint(path: Path) -> str:
    """Return advice if a Hugging Face model name was given instead of a directory."""
    if path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", "..", "~"):
        return ""
    return (
        f"; if it is a model on Hugging Face, fetch it (pip install huggingface_hub, then "
        f"hf download {path} --local-dir {path.name}) and give {path.name}"
    )


def shorten(names: list[str]) -> str:
    """Return the first few names, and the number of the others."""
    rest = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _find_index(path: Path) -> Path | None:
    named = path / f"model{INDEX_SUFFIX}"
    indexes = [named] if has_file(named) else sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise SpecbuildError(
            f"{path}: several indexes ({shorten([i.name for i in indexes])}); keep the right one"
        )
    return indexes[0] if indexes else None


def _open_indexed(index: Path) -> dict[str, SourceTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SpecbuildError(f"{index}: has no weight_map from tensor names to shard files")
    wanted: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or len(file) > _MAX_FILE_NAME:
            raise SpecbuildError(
                f"{index}: {name} names {brief(file)}, expected a file beside the index"
            )
        wanted.setdefault(file, []).append(name)
    absent = sorted(file for file in wanted if not (index.parent / file).is_file())
    if absent:
        raise SpecbuildError(
            f"{index}: names {shorten(absent)}, not in {index.parent}; download the missing shards"
        )
    tensors: dict[str, SourceTensor] = {}
    for file, names in sorted(wanted.items()):
        found = read_header(index.parent / file)
        lacking = sorted(set(names) - set(found))
        if lacking:
            raise SpecbuildError(f"{index}: {shorten(lacking)} should be in {file}, but is not")
        extra = sorted(set(found) - set(names))
        if extra:
            elsewhere = weight_map.get(extra[0], "no shard")
            raise SpecbuildError(
                f"{index.parent / file}: holds {shorten(extra)}, which the index places in "
                f"{elsewhere}; index and shards do not belong together"
            )
        tensors |= found
    return tensors


def _check_entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, stop = entry["data_offsets"]
        sizes = (*shape, begin, stop)
        # Checked before multiplication: a product of many large numbers takes minutes.
        sound = len(shape) <= _MAX_AXES and all(type(size) is int for size in sizes)
        sound = sound and all(0 <= size < 1 << 63 for size in sizes) and begin <= stop
        sound = sound and (stop - begin) * 8 == DTYPE_BITS[dtype] * math.prod(shape)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise SpecbuildError(f"{file}: the header's entry for {name} is damaged: {brief(entry)}")
    return dtype, shape, begin, stop


def _check_extent(file: Path, size: int, extents: list[tuple[int, int]]) -> None:
    """Check that the tensors fill the data part without gaps or overlaps."""
    end = 0
    for begin, stop in sorted(extents):
        if begin != end:
            raise SpecbuildError(f"{file}: tensors overlap or leave a gap at data byte {end}")
        end = stop
    if end != size:
        raise SpecbuildError(
            f"{file}: holds {size} bytes of tensors, but its header describes {end}; the file is "
            "truncated or damaged, download it again"
        )


def _load(file: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor
    except (OSError, SafetensorError) as error:
        raise SpecbuildError(f"{file}: {name} cannot be read ({error})") from None


def _no_safetensors(path: Path) -> str:
    kinds = {".bin": "pickle", ".pt": "pickle", ".pth": "pickle", ".gguf": "GGUF"}
    others = sorted(f.name for f in path.iterdir() if f.suffix in kinds)
    if not others:
        return f"{path}: not a checkpoint, it holds no *.safetensors"
    kind = kinds[Path(others[0]).suffix]
    return (
        f"{path}: holds no *.safetensors, only {kind} weights ({shorten(others)}), which specbuild "
        "does not read; convert them to safetensors"
    )


def _file_of(tensor: SourceTensor) -> str:
    return tensor.file.name if tensor.file else "another file"
