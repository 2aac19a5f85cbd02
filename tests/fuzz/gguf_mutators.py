"""Changes of a GGUF file that know what its parts mean."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from random import Random

from gguf_raw import ARRAY, TEXT, Info, Key, RawFile, array, number, text

from fuzz.byte_mutators import mutated_bytes

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_EDGES = (
    0,
    1,
    2,
    31,
    255,
    256,
    65535,
    1 << 31,
    (1 << 32) - 1,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_NAMES = (
    "general.architecture", "general.alignment", "general.type", "split.count", "split.no",
    "split.tensors.count", "tokenizer.ggml.pre", "tokenizer.ggml.scores", "rope_freqs.weight",
    "blk.0.ffn_gate_exps.weight", "blk.999999.attn_q.weight", "x",
)  # fmt: skip
_TEXTS = ("", "llama", "deepseek2", "gpt-oss", "gpt2", "qwen2", "yarn", "\0", "é" * 50, "{{ 1 }}")


def parsed(data: bytes) -> RawFile:
    """The parts of a sound file."""
    version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
    place = 24
    found_keys, infos = [], []
    for _ in range(keys):
        name, place = _text(data, place)
        (kind,) = struct.unpack_from("<I", data, place)
        end = _value_end(data, place + 4, kind)
        found_keys.append(Key(name, kind, data[place + 4 : end]))
        place = end
    for _ in range(tensors):
        name, place = _text(data, place)
        (axes,) = struct.unpack_from("<I", data, place)
        *dims, kind, offset = struct.unpack_from(f"<{axes}QIQ", data, place + 4)
        infos.append(Info(name, tuple(dims), kind, offset))
        place += 4 + 8 * axes + 12
    return RawFile(tuple(found_keys), tuple(infos), data[-(-place // 32) * 32 :], version=version)


def mutated_gguf(random: Random, data: bytes) -> tuple[bytes, str]:
    """Another file, and what was done: to a key, to a tensor's entry, to counts, or to bytes."""
    if random.random() < 0.2:
        head = random.randrange(64, min(len(data), 1 << 14))
        changed, said = mutated_bytes(random, data[:head])
        return changed + data[head:], said
    file = parsed(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        said, change = random.choice(_CHANGES)
        file = change(random, file)
    return file.packed(), said


def _value(random: Random, file: RawFile) -> RawFile:
    place = random.randrange(len(file.keys))
    key = file.keys[place]
    if key.kind == TEXT:
        value = text(random.choice(_TEXTS))
    elif key.kind == ARRAY:
        kind, count = struct.unpack_from("<IQ", key.value)
        count = random.choice((*_EDGES, count - 1, count + 1)) % (1 << 64)
        value = struct.pack("<IQ", random.choice((kind, kind, 9, 4, 8, 99)), count) + key.value[12:]
    else:
        width = len(key.value)
        value = (random.choice(_EDGES) % (1 << 8 * width)).to_bytes(width, "little")
    return _with_key(file, place, replace(key, value=value))


def _another_value(random: Random, file: RawFile) -> RawFile:
    place = random.randrange(len(file.keys))
    kind, value = random.choice(
        [
            (4, number(4, random.choice((0, 1, 7, (1 << 32) - 1)))),
            (6, number(6, random.choice((0.0, -1.0, 1e30, float("nan"), float("inf"))))),
            (7, number(7, True)),
            (TEXT, text(random.choice(_TEXTS))),
            (ARRAY, array(4, [number(4, n) for n in range(random.randrange(4))])),
            (ARRAY, array(TEXT, [text(t) for t in _TEXTS[: random.randrange(4)]])),
        ]
    )
    return _with_key(file, place, Key(file.keys[place].name, kind, value))


def _name(random: Random, file: RawFile) -> RawFile:
    place = random.randrange(len(file.keys))
    other = random.choice((*_NAMES, random.choice(file.keys).name))
    return _with_key(file, place, replace(file.keys[place], name=other))


def _without_key(random: Random, file: RawFile) -> RawFile:
    place = random.randrange(len(file.keys))
    return replace(file, keys=file.keys[:place] + file.keys[place + 1 :])


def _entry(random: Random, file: RawFile) -> RawFile:
    place = random.randrange(len(file.infos))
    info = file.infos[place]
    changed = random.choice(
        [
            replace(info, name=random.choice((*_NAMES, random.choice(file.infos).name))),
            replace(info, kind=random.choice((*range(42), 1 << 31))),
            replace(info, offset=random.choice((*_EDGES, random.choice(file.infos).offset))),
            replace(info, dims=tuple(random.choice((n, *_EDGES)) for n in info.dims)),
            replace(info, dims=info.dims[::-1]),
            replace(info, dims=(*info.dims, random.choice((1, 2, 1 << 40)))),
            replace(info, dims=info.dims[1:]),
        ]
    )
    return replace(file, infos=(*file.infos[:place], changed, *file.infos[place + 1 :]))


def _without_entry(random: Random, file: RawFile) -> RawFile:
    place = random.randrange(len(file.infos))
    return replace(file, infos=file.infos[:place] + file.infos[place + 1 :])


def _head(random: Random, file: RawFile) -> RawFile:
    edge = random.choice(_EDGES)
    return random.choice(
        [
            replace(file, version=edge % (1 << 32)),
            replace(file, key_count=edge),
            replace(file, tensor_count=edge),
            replace(file, data=file.data[: random.randrange(len(file.data))]),
            replace(file, data=random.randbytes(64) + file.data[64:]),
        ]
    )


_CHANGES: tuple[tuple[str, Callable[[Random, RawFile], RawFile]], ...] = (
    ("a key's value", _value),
    ("a key's type", _another_value),
    ("a key's name", _name),
    ("a key less", _without_key),
    ("a tensor's entry", _entry),
    ("a tensor's entry", _entry),
    ("a tensor less", _without_entry),
    ("counts and data", _head),
)


def _with_key(file: RawFile, place: int, key: Key) -> RawFile:
    return replace(file, keys=(*file.keys[:place], key, *file.keys[place + 1 :]))


def _text(data: bytes, place: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, place)
    return data[place + 8 : place + 8 + length].decode(), place + 8 + length


def _value_end(data: bytes, place: int, kind: int) -> int:
    if kind == TEXT:
        return _text(data, place)[1]
    if kind != ARRAY:
        return place + _WIDTHS[kind]
    item, count = struct.unpack_from("<IQ", data, place)
    place += 12
    if item != TEXT:
        return place + count * _WIDTHS[item]
    for _ in range(count):
        place = _text(data, place)[1]
    return place
