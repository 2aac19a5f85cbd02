"""A toy engine with one token per byte, and harmony's control tokens, for serving."""

from __future__ import annotations

from dataclasses import replace

import pytest
import toy_model
from serve.served import CONTROL
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from toy_engine import toy_engine

from specbuild.runtime.engine import Engine
from specbuild.runtime.text.codec import TextCodec

BYTES = sorted(ByteLevel.alphabet())
MARKS = ("<think>", "</think>")
WORDS = [*BYTES, *(f"<|{name}|>" for name in CONTROL), *MARKS, "<eos>"]
TEMPLATE = "{%- for m in messages %}{{ m.content or '' }}\n{% endfor -%}<|start|>assistant"


def token_id(word: str) -> int:
    """Return the id of an ASCII character or of a control token."""
    return WORDS.index("Ġ" if word == " " else word)


def lettered_engine(
    patch: pytest.MonkeyPatch, template: str = TEMPLATE, **options: object
) -> Engine:
    """Return the toy model with these tokens. The last one ends a sequence."""
    size = len(WORDS)
    patch.setattr(toy_model, "VOCAB", size)
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w in WORDS[len(BYTES) :]])
    engine = toy_engine(max_seq_len=1024, **options)
    target = replace(engine.manifest.target, vocab=size, eos_token_ids=(size - 1,))
    text = TextCodec(tokenizer.to_str().encode(), None, template.encode())
    return Engine(replace(engine.manifest, target=target), engine.executor, text=text)
