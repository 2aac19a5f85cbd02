"""Write GGUF files with gguf-py, and pack block types that gguf-py cannot pack."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

Stored = tuple[np.ndarray, gguf.GGMLQuantizationType]
# Types that gguf-py cannot pack: where their float16s are, and how large random codes then are.
_SCALES = {
    "Q2_K": {80: 12.0, 82: 8.0},
    "Q3_K": {108: 45.0},
    "IQ4_NL": {0: 65.0},
    "IQ4_XS": {0: 1200.0},
}
_SUB_BLOCKS = {"Q4_K": 15, "Q5_K": 31}


def stored(tensor: torch.Tensor, kind: str) -> tuple[Stored, torch.Tensor]:
    """Return the tensor in this type, as bytes or floats, and the values that it represents."""
    values = np.ascontiguousarray(tensor.float().numpy())
    dtype = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        plain = values.astype(np.float32 if kind == "F32" else np.float16)
        return (plain, dtype), torch.from_numpy(plain)
    pack = {"Q4_K": _pack_q45_k, "Q5_K": _pack_q45_k, "Q6_K": _pack_q6_k}.get(kind)
    if kind in _SCALES or kind == "NVFP4":
        raw = _random_blocks(values, kind)
    elif pack is None:
        raw = quantize(values, dtype)
    else:
        raw = pack(values.reshape(-1, 256), kind).reshape(*values.shape[:-1], -1)
    back = torch.from_numpy(np.array(dequantize(raw, dtype)))
    return (raw, dtype), back.bfloat16() if kind == "BF16" else back


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    tensors_a_file: int = 0,
) -> Path:
    """Write one file, or several with ``tensors`` per file; return the path of the first.

    ``keys`` that begin with a dot are prefixed with the architecture. Integers are stored as u32,
    floats as f32.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_file)
    for name, value in keys.items():
        _add(writer, f"{architecture}{name}" if name.startswith(".") else name, value)
    for name, (array, dtype) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return first[0] if tensors_a_file else path


def tokenizer_keys(tokenizer: Any, pre: str, controls: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the keys of a byte-level BPE of the library tokenizers."""
    import json

    data = json.loads(tokenizer.to_str())
    added = {entry["content"]: entry["special"] for entry in data["added_tokens"]}
    vocab = {**data["model"]["vocab"], **{e["content"]: e["id"] for e in data["added_tokens"]}}
    tokens = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]
    kinds = [3 if added.get(token) or token in controls else 4 if token in added else 1
             for token in tokens]  # fmt: skip
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
    }


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if name == "general.alignment":
        writer.add_custom_alignment(value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def _random_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Return random blocks about as large as float32 [..., w], as bytes [..., w / e * b]."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(len(values) + values.shape[-1])
    count = values.size // elements
    raw = generator.integers(0, 256, (count, nbytes), dtype=np.uint8)
    sizes = values.std() * (0.5 + generator.random((count, 1)))
    if kind == "NVFP4":  # four float8s, without a sign
        scales = torch.from_numpy(sizes / 3.4).expand(-1, 4).to(torch.float8_e4m3fn)
        raw[:, :4] = scales.contiguous().view(torch.uint8).numpy()
    for place, unit in _SCALES.get(kind, {}).items():
        raw[:, place : place + 2] = (sizes / unit).astype(np.float16).view(np.uint8)
    return raw.reshape(*values.shape[:-1], -1)


def _pack_q45_k(values: np.ndarray, kind: str) -> np.ndarray:
    """Pack float32 [n, 256] to blocks of Q4_K or Q5_K: values times scale, less a minimum."""
    most = _SUB_BLOCKS[kind]
    parts = values.reshape(-1, 8, 32)
    low = np.minimum(parts.min(-1), 0)
    scale = (parts.max(-1) - low) / most
    d, dmin = _half(scale.max(-1, keepdims=True) / 63), _half((-low).max(-1, keepdims=True) / 63)
    qs, qm = _codes(scale, d, 63), _codes(-low, dmin, 63)
    steps, minima = d * qs, dmin * qm
    codes = _codes(parts + minima[..., None], steps[..., None], most)
    s = np.empty((len(values), 12), np.uint8)
    s[:, 0:4] = qs[:, 0:4] | ((qs[:, 4:8] >> 4) << 6)
    s[:, 4:8] = qm[:, 0:4] | ((qm[:, 4:8] >> 4) << 6)
    s[:, 8:12] = (qs[:, 4:8] & 15) | ((qm[:, 4:8] & 15) << 4)
    nibbles = codes & 15
    packed = (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).reshape(-1, 128)
    fifth = np.zeros((len(values), 32 if kind == "Q5_K" else 0), np.uint8)
    if kind == "Q5_K":
        for part in range(8):
            fifth |= (codes[:, part] >> 4) << part
    return np.hstack([_bytes(d), _bytes(dmin), s, fifth, packed])


def _pack_q6_k(values: np.ndarray, _kind: str) -> np.ndarray:
    """Pack float32 [n, 256] to blocks of Q6_K: values less 32, times an eight-bit scale."""
    parts = values.reshape(-1, 16, 16)
    scale = np.abs(parts).max(-1) / 31
    d = _half(scale.max(-1, keepdims=True) / 127)
    scales = _codes(scale, d, 127)
    codes = np.rint(_over(parts, (d * scales)[..., None])).clip(-32, 31) + 32
    q = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    ql = low[:, :, 0:2].reshape(-1, 2, 64) | (low[:, :, 2:4].reshape(-1, 2, 64) << 4)
    qh = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    return np.hstack([ql.reshape(-1, 128), qh.reshape(-1, 64), scales.astype(np.uint8), _bytes(d)])


def _codes(values: np.ndarray, step: np.ndarray, most: int) -> np.ndarray:
    return np.rint(_over(values, step)).clip(0, most).astype(np.uint8)


def _over(values: np.ndarray, step: np.ndarray) -> np.ndarray:
    return np.divide(values, step, out=np.zeros_like(values), where=step > 0)


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def _bytes(halves: np.ndarray) -> np.ndarray:
    return halves.astype(np.float16).view(np.uint8)
