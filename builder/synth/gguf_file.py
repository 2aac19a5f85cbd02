"""Synthetic models as GGUF files, in the mixtures of types of llama.cpp's quantizer."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from specbuild.builder.checkpoint.gguf.layer_names import NAMES
from specbuild.builder.checkpoint.gguf.rope import ROPE_FACTORS, llama3_factors
from specbuild.builder.checkpoint.target_parts import EMBEDDING, HEAD
from specbuild.builder.durable import fsync
from specbuild.builder.families.registry import target_family
from specbuild.builder.progress import Progress
from specbuild.builder.synth.gguf_blocks import BLOCKS
from specbuild.builder.synth.noise import Noise
from specbuild.builder.synth.tensor import SynthTensor
from specbuild.runtime.engine_dir.feed_forward import MoeFeedForward
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.rope_scaling import Llama3Scaling
from specbuild.runtime.errors import SpecbuildError

FILE = "model.gguf"
_F32, _U32, _FLOAT, _TEXT = 0, 4, 6, 8
_ALIGNMENT = 32
_VERSION = 3
_BF16_BYTES = 2
# Numbers of the embedding, head or experts that are generated together.
_PIECE = 1 << 22
_OUTER = {
    EMBEDDING: "token_embd.weight",
    HEAD: "output.weight",
    "model.norm.weight": "output_norm.weight",
}
_STEMS = {stem: name for name, stem in NAMES.items()} | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file, its axes in torch's order, and its bytes in pieces."""

    name: str
    shape: tuple[int, ...]
    kind: int
    nbytes: int
    pieces: Callable[[], Iterator[torch.Tensor]]


def write_gguf(
    folder: Path,
    model: tuple[Noise, TargetGeometry, Mapping[str, SynthTensor]],
    mixture: str,
    progress: Progress,
) -> None:
    """Write ``model.gguf`` of a noise, a geometry and tensors, in this mixture.

    Raises SpecbuildError for an unsupported model type, and for rows that are no multiple of
    blocks.
    """
    noise, g, tensors = model
    family = target_family(g.model_type)
    architecture = None if family.synth is None else family.synth.gguf.get(g.model_type)
    if architecture is None:
        raise SpecbuildError(
            f"--weights-format {mixture}: no GGUF file is written of a {g.model_type}; choose "
            "another --geometry or format"
        )
    if not isinstance(g.rope.scaling, Llama3Scaling | None):
        raise SpecbuildError(
            f"--weights-format {mixture}: rotary scaling {g.rope.scaling.kind} is not written; "
            "choose another --geometry"
        )
    entries = [*_entries(noise, g, tensors, mixture)]
    keys = _keys(architecture, g)
    head = b"GGUF" + struct.pack("<IQQ", _VERSION, len(entries), len(keys)) + b"".join(keys)
    offset = 0
    for entry in entries:
        axes = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *entry.shape[::-1])
        head += _text(entry.name) + axes + struct.pack("<IQ", entry.kind, offset)
        offset += entry.nbytes + _padding(entry.nbytes)
    with (folder / FILE).open("wb") as stream:
        stream.write(head + bytes(_padding(len(head))))
        for entry in entries:
            # Progress counts the bytes of the numbers in bf16.
            share = _BF16_BYTES * math.prod(entry.shape) / entry.nbytes
            for piece in entry.pieces():
                stream.write(piece.contiguous().flatten().view(torch.uint8).numpy().data)
                progress.advance(round(piece.nbytes * share))
            stream.write(bytes(_padding(entry.nbytes)))
    fsync(folder / FILE)


def _keys(architecture: str, g: TargetGeometry) -> list[bytes]:
    """Return the metadata that readers need; there is no tokenizer."""
    mlp = g.feed_forwards[0]
    numbers: dict[str, int | float] = {
        "block_count": g.layers,
        "context_length": g.max_positions,
        "embedding_length": g.hidden,
        "feed_forward_length": mlp.inner if not isinstance(mlp, MoeFeedForward) else g.hidden,  # type: ignore[union-attr]
        "attention.head_count": g.q_heads,
        "attention.head_count_kv": g.kv_heads,
        "attention.key_length": g.head_dim,
        "attention.value_length": g.head_dim,
        "attention.layer_norm_rms_epsilon": g.norm.eps,
        "rope.freq_base": float(g.rope.theta),
        "rope.dimension_count": g.head_dim,
    }
    if isinstance(mlp, MoeFeedForward):
        numbers |= {
            "expert_count": mlp.experts,
            "expert_used_count": mlp.experts_per_token,
            "expert_feed_forward_length": mlp.inner,
        }
    own = [_key("general.architecture", _TEXT, _text(architecture))]
    for name, value in numbers.items():
        kind, letter = (_U32, "I") if isinstance(value, int) else (_FLOAT, "f")
        own.append(_key(f"{architecture}.{name}", kind, struct.pack(f"<{letter}", value)))
    return own


def _entries(
    noise: Noise, g: TargetGeometry, tensors: Mapping[str, SynthTensor], mixture: str
) -> Iterator[_Entry]:
    stacked: dict[str, list[SynthTensor]] = {}
    for name, tensor in tensors.items():
        expert = _EXPERT.fullmatch(name)
        if expert:
            stacked.setdefault(f"blk.{expert[1]}.ffn_{expert[3]}_exps.weight", []).append(tensor)
            continue
        yield _entry(noise, g, _name(name), [tensor], mixture)
    for name, experts in stacked.items():
        yield _entry(noise, g, name, experts, mixture)
    if isinstance(g.rope.scaling, Llama3Scaling):
        factors = llama3_factors(g.rope.theta, g.rope.scaling.factor, g.head_dim // 2)
        values = torch.tensor(factors, dtype=torch.float32)
        yield _Entry(ROPE_FACTORS, tuple(values.shape), _F32, values.nbytes, lambda: iter([values]))


def _entry(
    noise: Noise, g: TargetGeometry, name: str, parents: list[SynthTensor], mixture: str
) -> _Entry:
    """Return one tensor, or the experts of a layer together."""
    shape = parents[0].shape if len(parents) == 1 else (len(parents), *parents[0].shape)
    kind = _type_of(name, shape, g, mixture)
    if kind is None:
        pieces = partial(_plain, parents)
        return _Entry(name, shape, _F32, 4 * parents[0].shape[0] * _width(parents), pieces)
    blocks = BLOCKS[kind]
    if shape[-1] % blocks.elements:
        raise SpecbuildError(
            f"--weights-format {mixture} stores {name} as {kind}, in blocks of {blocks.elements}, "
            f"but its rows have {shape[-1]} inputs; choose another --geometry or format"
        )
    row_bytes = shape[-1] // blocks.elements * blocks.nbytes
    rows = sum(parent.shape[0] for parent in parents)

    def made() -> Iterator[torch.Tensor]:
        step = max(1, _PIECE // shape[-1])
        for place, parent in enumerate(parents):
            for first in range(0, parent.shape[0], step):
                end = min(first + step, parent.shape[0])
                if parent.std is None:
                    yield blocks.packed(parent.part(first, end))
                    continue
                numbers = torch.arange(first, end)
                yield blocks.random(noise, f"{name}.{place}", numbers, shape[-1], parent.std)

    return _Entry(name, shape, blocks.number, rows * row_bytes, made)


def _type_of(name: str, shape: tuple[int, ...], g: TargetGeometry, mixture: str) -> str | None:
    """Return the type that llama-quant.cpp chooses; None for float32."""
    if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
        return None
    if mixture == "q8_0":
        return "Q8_0"
    if name == _OUTER[HEAD] or (name == _OUTER[EMBEDDING] and g.tied_head):
        return "Q6_K"
    layer = re.match(r"blk\.(\d+)\.(attn_v|ffn_down)", name)
    return "Q6_K" if layer and has_more_bits(int(layer[1]), g.layers) else "Q4_K"


def has_more_bits(layer: int, layers: int) -> bool:
    """Return whether a layer is in the half: the first and last eighths, every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _plain(parents: list[SynthTensor]) -> Iterator[torch.Tensor]:
    for parent in parents:
        yield parent.load().float()


def _width(parents: list[SynthTensor]) -> int:
    return math.prod(parents[0].shape[1:]) * len(parents)


def _name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    layer = _LAYER.fullmatch(name)
    assert layer is not None, name
    return f"blk.{layer[1]}.{_STEMS[layer[2]]}.{layer[3]}"


def _key(name: str, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padding(nbytes: int) -> int:
    return -nbytes % _ALIGNMENT
