"""Measures reading of GGUF files: a large vocabulary's header, and blocks compared with ``cp``.

``header FILE`` writes a file with 200,000 tokens, merges and types, opens it, and creates its
tokenizer; ``gguf-py FILE`` opens the same with gguf-py. ``blocks FOLDER`` writes layers of
llama-3.3-70b's sizes as Q4_K (random blocks), dequantizes every tensor to disk, and copies as many
bytes with ``cp``. ``build FOLDER`` writes a complete model of such layers, with embedding and head
in Q4_K, and builds a bf16 engine of it (CUDA, without a GPU). Each prints one line of JSON. Run
each in a separate process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from specbuild.builder.build import build
from specbuild.builder.checkpoint.gguf.parts import open_model
from specbuild.builder.checkpoint.gguf.tokenizer import text_files
from specbuild.builder.checkpoint.gguf.values import read_values
from specbuild.builder.checkpoint.gguf.vocabulary import read_vocabulary
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress

TOKENS = 200_000
HIDDEN, INNER, KV = 8192, 28672, 1024
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (KV, HIDDEN), "attn_v": (KV, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}  # fmt: skip
VOCAB = 128256
OUTER = ("token_embd", "output")
KEYS = {
    "block_count": 0, "context_length": 131072, "embedding_length": HIDDEN,
    "feed_forward_length": INNER, "vocab_size": VOCAB, "attention.head_count": 64,
    "attention.head_count_kv": 8, "rope.dimension_count": 128,
}  # fmt: skip
Q4_K = gguf.GGMLQuantizationType.Q4_K


def write_vocabulary(file: Path) -> None:
    """Return tokens and merges of realistic lengths."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "llama-bpe")
    writer.add_array("tokenizer.ggml.tokens", [f"tok{n}" for n in range(TOKENS)])
    writer.add_array("tokenizer.ggml.merges", [f"t{n} u{n}" for n in range(TOKENS)])
    writer.add_array("tokenizer.ggml.token_type", [1] * TOKENS)
    _finish(writer)


def write_layers(file: Path, layers: int, *, whole: bool = False) -> None:
    """Write layers of random blocks with small scales; with ``whole``, a complete model."""
    writer = gguf.GGUFWriter(file, "llama", use_temp_file=True)
    random = np.random.default_rng(0)

    def add(name: str, rows: int, columns: int) -> None:
        raw = random.integers(0, 256, (rows * columns // 256, 144), dtype=np.uint8)
        raw[:, :4] = np.array([0.001, 0.01], np.float16).view(np.uint8)
        stored = raw.reshape(rows, columns // 256 * 144)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=Q4_K)

    for layer in range(layers):
        for name, shape in MATRICES.items():
            add(f"blk.{layer}.{name}", *shape)
    if whole:
        _add_the_rest(writer, layers, add)
    _finish(writer)


def _add_the_rest(
    writer: gguf.GGUFWriter, layers: int, add: Callable[[str, int, int], None]
) -> None:
    for name in OUTER:
        add(name, VOCAB, HIDDEN)
    norms = [f"blk.{i}.{part}_norm" for i in range(layers) for part in ("attn", "ffn")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for key, value in (KEYS | {"block_count": layers}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 500000.0)


def header(file: Path) -> dict[str, Any]:
    """Return seconds and peak megabytes of opening, and of also creating ``tokenizer.json``."""
    before, started = _resident("VmRSS"), time.perf_counter()
    model = open_model(file)
    opened = time.perf_counter() - started
    after = _resident("VmHWM")
    vocabulary = read_vocabulary(str(file), model.keys, TOKENS)
    assert vocabulary is not None
    size = len(text_files(vocabulary, model.keys)["tokenizer.json"])
    return {
        "open_s": round(opened, 3),
        "open_mb": round(after - before, 1),
        "with_tokenizer_s": round(time.perf_counter() - started, 3),
        "with_tokenizer_mb": round(_resident("VmHWM") - before, 1),
        "tokenizer_json_mb": round(size / 1e6, 1),
    }


def gguf_py(file: Path) -> dict[str, Any]:
    """Return the same for gguf-py's reader."""
    before, started = _resident("VmRSS"), time.perf_counter()
    gguf.GGUFReader(file)
    return {
        "gguf_py_s": round(time.perf_counter() - started, 3),
        "gguf_py_mb": round(_resident("VmHWM") - before, 1),
    }


def blocks(folder: Path, layers: int, dtype: str) -> dict[str, Any]:
    """Return gigabytes per second of dequantizing to disk, and of ``cp`` of an equal file."""
    file, output, copy = (folder / name for name in ("layers.gguf", "weights", "copy"))
    if not file.exists():
        write_layers(file, layers)
    requested = getattr(torch, dtype)
    started, own = time.perf_counter(), time.process_time()
    reading = 0.0
    with output.open("wb") as stream:
        for tensor in open_model(file).tensors.values():
            begun = time.perf_counter()
            values = read_values(tensor, requested)
            reading += time.perf_counter() - begun
            stream.write(values.view(torch.uint8).numpy().data)
    seconds, own = time.perf_counter() - started, time.process_time() - own
    size = output.stat().st_size
    started = time.perf_counter()
    subprocess.run(["cp", output, copy], check=True)
    copying = time.perf_counter() - started
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    output.unlink()
    copy.unlink()
    return {
        "dtype": dtype, "threads": torch.get_num_threads(), "source_gb": file.stat().st_size / 1e9,
        "written_gb": size / 1e9, "seconds": round(seconds, 1),
        "of_which_dequantising": round(reading, 1), "cp_seconds": round(copying, 1),
        "share_of_cp": round(copying / seconds, 2), "processor_s": round(own, 1),
        "cp_processor_s": round(children.ru_utime + children.ru_stime, 1),
        "peak_rss_mb": round(_resident("VmHWM")),
    }  # fmt: skip


def built(folder: Path, layers: int) -> dict[str, Any]:
    """Return wall seconds, CPU seconds and memory of building an engine of the full model."""
    file, engine = folder / "model.gguf", folder / "engine"
    if not file.exists():
        write_layers(file, layers, whole=True)
        raise SystemExit("the file is written; run again")
    options = BuildOptions.from_flat(
        model=file, output=engine, backend="cuda", gpu="sm_90a", max_seq_len=4096,
        max_batch_size=1, force=True,
    )  # fmt: skip
    started, processor = time.perf_counter(), time.process_time()
    build(options, SilentProgress())
    return {
        "layers": layers, "source_gb": file.stat().st_size / 1e9,
        "engine_gb": sum(f.stat().st_size for f in engine.rglob("*") if f.is_file()) / 1e9,
        "seconds": round(time.perf_counter() - started, 1),
        "processor_s": round(time.process_time() - processor, 1),
        "peak_rss_mb": round(_resident("VmHWM")),
    }  # fmt: skip


def main() -> None:
    """Run the requested measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["header", "gguf-py", "blocks", "build"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    path = arguments.path
    if arguments.what == "build":
        print(json.dumps(built(path, arguments.layers)))
        return
    if arguments.what != "blocks" and not path.exists():
        write_vocabulary(path)
        parser.exit(message="the file is written; run again\n")
    if arguments.what == "blocks":
        print(json.dumps(blocks(path, arguments.layers, arguments.dtype)))
    else:
        print(json.dumps((header if arguments.what == "header" else gguf_py)(path)))


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _resident(field: str) -> float:
    """Return megabytes of this process with mapped files: ``VmRSS`` now, ``VmHWM`` at the peak."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1e3
    raise LookupError(field)


if __name__ == "__main__":
    main()
