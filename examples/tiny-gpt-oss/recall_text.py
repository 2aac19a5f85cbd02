"""Add documents to the corpus whose end can only be read who remembers their beginning.

Each defines constants, goes on with a real file of the corpus, and then asserts the constants
again: recall over any distance up to the document's length. Training on them gives the example
model a context that it has to use; the held-out ones measure whether a partial view still finds
what is asked for (benchmarks/specpv_quality.py --ids).

    python recall_text.py --tokenizer target --corpus ../../out/corpus --output ../../out/recall
    python train_target.py --corpus ../../out/recall --output ../../out/long --long-from 0.4
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

WORDS = """
    buffer cache chunk client codec column cursor depth digest encoder entry event field filter
    frame handle header index key label level limit lock mask node offset option packet page
    parser path pool port prefix queue range record region reply request row scale schema scope
    segment session signal size slot socket source stack state step stream symbol table tag task
    thread timer token trace value vector version weight width window worker
"""
END_OF_TEXT = "<|endoftext|>"


def constants(rng: random.Random, count: int) -> list[tuple[str, int]]:
    """Names that differ, and numbers of four to six digits."""
    words, names = WORDS.split(), set[str]()
    while len(names) < count:
        names.add("_".join(rng.sample(words, 2)).upper())
    return [
        (name, rng.randrange(1000, 1_000_000)) for name in sorted(names, key=lambda _: rng.random())
    ]


def document(
    rng: random.Random, tokenizer: Tokenizer, filler: list[int], *, length: int, count: int
) -> list[int]:
    """Definitions, as much of ``filler`` as fits, then the assertions in another order: ids."""
    known = constants(rng, count)
    head = "".join(f"{name} = {value}\n" for name, value in known)
    asked = rng.sample(known, count)
    tail = "\n\ndef test_constants():\n" + "".join(f"    assert {n} == {v}\n" for n, v in asked)
    first, last = tokenizer.encode(head + "\n\n").ids, tokenizer.encode(tail).ids
    room = length - len(first) - len(last)
    start = rng.randrange(max(1, len(filler) - room))
    return [*first, *filler[start : start + room], *last]


def main() -> None:
    """Write ``train.npy``, ``held_out.npy``, ``recall.npy`` [n, length + 1] and ``recall.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--constants", type=int, default=12)
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    tokenizer = Tokenizer.from_file(str(given.tokenizer / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    train, held_out = (np.load(given.corpus / f"{name}.npy") for name in ("train", "held_out"))

    def made(filler: np.ndarray, length: int) -> list[int]:
        ids = [i for i in filler.tolist() if i != end]
        return document(rng, tokenizer, ids, length=length, count=given.constants)

    span = 2 * given.length
    added: list[int] = []
    for _ in range(given.documents):
        start = rng.randrange(len(train) - span)
        # Any distance is to be bridged, not one.
        added += [*made(train[start : start + span], rng.randrange(512, given.length)), end]
    samples = []
    for _ in range(given.held_out):
        start = rng.randrange(len(held_out) - span)
        samples.append(made(held_out[start : start + span], given.length + 1))
    given.output.mkdir(parents=True, exist_ok=True)
    np.save(given.output / "train.npy", np.concatenate([train, np.array(added, train.dtype)]))
    shutil.copy(given.corpus / "held_out.npy", given.output / "held_out.npy")
    np.save(given.output / "recall.npy", np.array(samples, train.dtype))
    facts = {"documents": given.documents, "tokens_added": len(added), "seed": given.seed}
    (given.output / "recall.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
