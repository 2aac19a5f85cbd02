"""The tokens that end an answer: from a GGUF file's keys, and by their known texts."""

from __future__ import annotations

from specbuild.builder.checkpoint.gguf.vocabulary import CONTROL, Vocabulary

# A file names one of each kind, models have more.
_NAMED = ("eos", "eot", "eom")
_KNOWN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|user|>",
    "<|observation|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<|eot|>",
)
# In OpenAI's format this token ends a message, and an answer may have several.
_MESSAGE_END, _ANSWER_ENDS = "<|end|>", ("<|return|>", "<|call|>")


def end_tokens(vocabulary: Vocabulary) -> list[int]:
    """Return ids, the model's own first."""
    controls = vocabulary.of_kind(CONTROL)
    named = [vocabulary.named(name) for name in _NAMED]
    found = [number for number in named if number is not None]
    harmony = all(end in controls for end in _ANSWER_ENDS)
    known = [text for text in _KNOWN if not (harmony and text == _MESSAGE_END)]
    found += [controls[text] for text in known if text in controls]
    return list(dict.fromkeys(found))
