"""Text that the target writes itself, greedily: what its draft will have to predict."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from specbuild.builder.progress import SilentProgress
from specbuild.builder.training.config import SelfText
from specbuild.builder.training.corpus import pack
from specbuild.builder.training.documents import DocumentReader
from specbuild.builder.training.frozen_target import end_of_text_ids, load_target
from specbuild.builder.training.self_text import write_rows


def main() -> None:
    """Write `self_text.npy`, uint16 ids: continuations of pieces of the corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.npy")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    model = load_target(args.model, device=args.device, dtype=dtype)
    end = end_of_text_ids(model)
    reader = DocumentReader(args.model, vocab=model.config.vocab_size, end_of_text=end)
    rows = write_rows(
        model,
        pack(reader.read((args.corpus / "train.npy",)), end),
        SelfText(count=args.rows, batch_size=1024),
        length=args.length,
        stop=end,
        seed=0,
        progress=SilentProgress(),
    )
    texts = []
    for ids, counted in zip(rows.ids, rows.counted, strict=True):
        text = ids[: np.flatnonzero(counted)[-1] + 2]
        texts.append(text if text[-1] in end else np.append(text, end[0]))
    np.save(args.output, np.concatenate(texts).astype(np.uint16))


if __name__ == "__main__":
    main()
