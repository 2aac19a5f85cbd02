"""How well the model recalls over its context: by distance, with the definition and without.

Held-out documents of ``recall_text.py`` ask at their end for names (of which the first word is
given) and numbers that stood up to their whole length before. Each is read as it is, and again
with other text in the place of the definitions: what is right there is guessed.

    python judge_recall.py --model target --corpus ../../out/corpus --documents 16
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from export import load_target
from model import Positions, Target, make_positions, rms_norm
from recall_text import Document, documents
from tokenizers import Tokenizer

EDGES = (0, 128, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)


@dataclass(frozen=True, kw_only=True)
class Recalled:
    """One span as the model reads it: mean loss in nats a token, and whether all tokens are its."""

    kind: str
    distance: int
    loss: float
    right: float


@torch.inference_mode()
def recalled(model: Target, document: Document, positions: Positions) -> list[list[Recalled]]:
    """Its spans with the definitions, and without them."""
    both = []
    for ids in (document.ids, document.undefined):
        rows = torch.tensor([ids], device=model.head.device)
        x, _ = model.states(rows[:, :-1], positions, dtype=torch.float32, quantised=False)
        results = []
        for span in document.spans:
            # The row before a token says what it thinks of it.
            states = rms_norm(x[0, span.start - 1 : span.stop - 1], model.norm, 1e-5)
            scores = (states @ model.head.T).log_softmax(-1)
            expected = rows[0, span.start : span.stop]
            loss = -scores.gather(1, expected[:, None]).mean().item()
            right = float((scores.argmax(-1) == expected).float().mean())
            results.append(Recalled(kind=span.kind, distance=span.distance, loss=loss, right=right))
        both.append(results)
    return both


def table(result: Sequence[tuple[Recalled, Recalled]]) -> Iterable[dict[str, float | str | int]]:
    """Means of pairs (with the definition, without) by kind and distance, with standard errors."""
    for kind in ("name", "value"):
        for low, high in pairwise(EDGES):
            chosen = [p for p in result if p[0].kind == kind and low <= p[0].distance < high]
            if not chosen:
                continue
            row: dict[str, float | str | int] = {
                "kind": kind,
                "from": low,
                "to": high,
                "spans": len(chosen),
            }
            for name, i in (("defined", 0), ("undefined", 1)):
                loss = np.array([p[i].loss for p in chosen])
                right = np.array([p[i].right for p in chosen])
                row[f"loss_{name}"] = round(float(loss.mean()), 3)
                row[f"right_{name}"] = round(float(right.mean()), 4)
                row[f"right_{name}_error"] = round(float(right.std() / len(chosen) ** 0.5), 4)
            yield row


def main() -> None:
    """Print one row for each kind and distance; ``--json`` keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--constants", type=int, default=24)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    held_out = np.load(args.corpus / "held_out.npy")
    rng = random.Random(args.seed)
    documents_of_text = documents(
        rng, tokenizer, held_out, length=args.length + 1, count=args.constants
    )
    device = torch.device(args.device)
    model = load_target(args.model).to(device)
    if device.type == "cuda":
        model.compiled()
    positions = make_positions(model.geometry, args.length, device)
    results: list[tuple[Recalled, Recalled]] = []
    for document in islice(documents_of_text, args.documents):
        results += zip(*recalled(model, document, positions), strict=True)
    rows = list(table(results))
    print("kind   distance      spans   loss, defined or not   right, defined or not")
    for row in rows:
        print(
            f"{row['kind']:6} {row['from']:4}–{row['to']:4} {row['spans']:8}   "
            f"{row['loss_defined']:8.3f} {row['loss_undefined']:10.3f}    "
            f"{row['right_defined']:8.1%} {row['right_undefined']:8.1%}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
