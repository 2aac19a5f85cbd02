"""Write documents that only who remembers what stood far before can read, and where they ask.

Each is a real file of the corpus with constants defined here and there, and ends in assertions of
them all: names and numbers of no meaning, so that nothing but the definition tells them. Training
on them teaches recall over the whole context; ``judge_recall.py`` measures it on held-out ones,
and ``benchmarks/specpv_quality.py --ids`` whether a partial view still finds what is asked for.

    python recall_text.py --tokenizer target --corpus ../../out/corpus --output ../../out/recall
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

WORDS = """
    buffer cache chunk client codec column cursor depth digest encoder entry event field filter
    frame handle header index key label level limit lock mask node offset option packet page
    parser path pool port prefix queue range record region reply request row scale schema scope
    segment session signal size slot socket source stack state step stream symbol table tag task
    thread timer token trace value vector version weight width window worker
"""
END_OF_TEXT = "<|endoftext|>"
ASKING = "\n\ndef test_constants():\n"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens [start, stop) of a document that repeat those ``distance`` before them.

    ``kind``: of a ``name``, all but its first word; or the ``value``, which the name asks for.
    """

    kind: str
    start: int
    stop: int
    distance: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """Token ids, what of them is recalled, and what they would be with nothing to recall."""

    ids: list[int]
    spans: list[Span]
    undefined: list[int]


@dataclass(frozen=True)
class Constant:
    """``NAME = value`` with a name of three words, of which the first is no other's."""

    words: tuple[str, ...]
    value: int

    @property
    def name(self) -> str:
        """As it is written."""
        return "_".join(self.words).upper()

    @property
    def definition(self) -> str:
        """A line of its own."""
        return f"\n{self.name} = {self.value}\n"

    @property
    def assertion(self) -> str:
        """A line of a test."""
        return f"    assert {self.name} == {self.value}\n"

    def parts(self, line: str, encoded: Encoding) -> dict[str, tuple[int, int]]:
        """First and last + 1 token of the name behind its first word, and of the value."""
        name = line.index(self.name)
        number = line.rindex(str(self.value))
        bounds = {
            "name": (name + len(self.words[0]), name + len(self.name)),
            "value": (number, number + len(str(self.value))),
        }
        found = {}
        for kind, (first, last) in bounds.items():
            inside = [i for i, (a, b) in enumerate(encoded.offsets) if b > first and a < last]
            # A token that reaches back into the first word is given away by nothing.
            inside = [i for i in inside if encoded.offsets[i][0] >= first - (kind == "value")]
            found[kind] = (inside[0], inside[-1] + 1)
        return found


def constants(rng: random.Random, count: int) -> list[Constant]:
    """Names that differ in their first word, and numbers of four to six digits."""
    words = WORDS.split()
    firsts = rng.sample(words, count)
    return [
        Constant((first, *rng.sample(words, 2)), rng.randrange(1000, 1_000_000)) for first in firsts
    ]


@dataclass
class Writing:
    """A document while it is written: token ids, and those of the text without definitions."""

    ids: list[int] = field(default_factory=list)
    undefined: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], instead: Sequence[int] | None = None) -> int:
        """Appends to both texts, and gives the first one's length before."""
        at = len(self.ids)
        self.ids += ids
        self.undefined += ids if instead is None else instead
        return at


def document(
    rng: random.Random,
    tokenizer: Tokenizer,
    filler: Sequence[int],
    *,
    length: int,
    count: int,
    ends_at: float = 1.0,
) -> Document:
    """``length`` ids of ``filler`` with ``count`` definitions and assertions of them all.

    Definitions stand at even distances, moved a little; the first is the first line. The
    assertions stand behind the share ``ends_at`` of the filler.
    """
    known = constants(rng, count)
    heads = {c: tokenizer.encode(c.definition) for c in known}
    tails = {c: tokenizer.encode(c.assertion) for c in rng.sample(known, count)}
    asking = tokenizer.encode(ASKING).ids
    room = length - len(asking) - sum(len(e.ids) for e in (*heads.values(), *tails.values()))
    begin = rng.randrange(max(1, len(filler) - length))
    text, spare = filler[begin : begin + room], iter(filler[begin + room : begin + length])
    end = int(room * ends_at)
    places = [0, *(int(end * (i + rng.random()) / count) for i in range(1, count)), end]
    written, defined = Writing(), {}
    for (constant, encoded), (place, following) in zip(
        heads.items(), pairwise(places), strict=True
    ):
        # As much other text is what stands there without it.
        at = written.add(encoded.ids, [next(spare) for _ in encoded.ids])
        defined[constant] = _moved(constant.parts(constant.definition, encoded), at)
        written.add(text[place:following])
    written.add(asking)
    spans = []
    for constant, encoded in tails.items():
        parts = _moved(constant.parts(constant.assertion, encoded), written.add(encoded.ids))
        for kind, (start, stop) in parts.items():
            distance = start - defined[constant][kind][0]
            spans.append(Span(kind=kind, start=start, stop=stop, distance=distance))
    written.add(text[end:])
    return Document(ids=written.ids, spans=spans, undefined=written.undefined)


def _moved(parts: dict[str, tuple[int, int]], by: int) -> dict[str, tuple[int, int]]:
    return {kind: (start + by, stop + by) for kind, (start, stop) in parts.items()}


def documents(
    rng: random.Random, tokenizer: Tokenizer, corpus: np.ndarray, *, length: int, count: int
) -> Iterator[Document]:
    """Documents that ask at their end, without end, from places of the corpus that are drawn."""
    while True:
        filler = _filler(rng, tokenizer, corpus, length)
        yield document(rng, tokenizer, filler, length=length, count=count)


def _filler(rng: random.Random, tokenizer: Tokenizer, corpus: np.ndarray, length: int) -> list[int]:
    end = tokenizer.token_to_id(END_OF_TEXT)
    start = rng.randrange(max(1, len(corpus) - 2 * length))
    return [i for i in corpus[start : start + 2 * length].tolist() if i != end]


def main() -> None:
    """Write ``train.npy``, ``recall.npy`` (held out) [n, length + 1] and ``recall.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of tokenizer.json")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--constants", type=int, default=24)
    parser.add_argument("--documents", type=int, default=6000)
    parser.add_argument("--held-out", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    args.output.mkdir(parents=True, exist_ok=True)
    length, count = args.length + 1, args.constants
    rng = random.Random(args.seed)
    train = np.load(args.corpus / "train.npy")
    rows = np.zeros((args.documents, length), np.uint16)
    for row in rows:
        filler = _filler(rng, tokenizer, train, length)
        # Half of them ask before their end: any position is to recall.
        ends_at = rng.uniform(0.3, 1.0) if rng.random() < 0.5 else 1.0
        sample = document(rng, tokenizer, filler, length=length, count=count, ends_at=ends_at)
        row[:] = sample.ids
    np.save(args.output / "train.npy", rows)
    held_out = np.load(args.corpus / "held_out.npy")
    asking = documents(rng, tokenizer, held_out, length=length, count=count)
    ids = [sample.ids for sample in islice(asking, args.held_out)]
    np.save(args.output / "recall.npy", np.array(ids, np.uint16))
    facts = {name: getattr(args, name) for name in ("length", "constants", "documents", "seed")}
    (args.output / "recall.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
