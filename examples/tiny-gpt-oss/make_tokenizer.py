"""Train the example's byte-level BPE tokenizer on the standard library's sources."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from corpus import END_OF_TEXT, iter_documents
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
START_OF_TEXT = "<|startoftext|>"
PAD = "<|pad|>"
CONTEXT = 4096

# One alternative per kind of piece, tried in order at each position.
PIECES = "|".join(
    (
        r"(?:\r?\n)+[ \t]*",  # line ends together with the indentation that follows
        r"[^\s\p{L}\p{N}_]?[\p{L}_]+",  # a name with one leading mark: `.append`, `(self`
        r" [\p{L}_]+",  # a name with its leading space
        r"\p{N}",  # every digit alone
        r" ?[^\s\p{L}\p{N}_]+",  # operators and brackets
        r"[^\S\r\n]+(?!\S)",  # spaces, leaving the last one for the next word
        r"\s",
    )
)


def train() -> Tokenizer:
    """Return a tokenizer of `VOCABULARY` ids, specials first, of the training split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document.text for document in iter_documents() if not document.held_out)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"tokenizer: got {tokenizer.get_vocab_size()} ids, expected {VOCABULARY}; add text"
        )
    return tokenizer


def main() -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    train().save(str(args.output / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": START_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (args.output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
