"""Markers of reasoning in outputs, and the state in which a prompt leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from specbuild.runtime.serve.parsers.parser import ChatPrompt


@dataclass(frozen=True)
class ReasoningMarkers:
    """The texts before and after reasoning. ``begin`` starts with ``begin_token``."""

    begin: str
    end: str
    header: str = ""

    @property
    def begin_token(self) -> str:
        """The part of ``begin`` that may be a token; ``header`` is the rest."""
        return self.begin.removesuffix(self.header)


THINK = ReasoningMarkers("<think>", "</think>")
# By the name of their parser. Magistral's and Gemma 4's templates show the last two.
REASONING_MARKERS: Mapping[str, ReasoningMarkers] = {
    "think": THINK,
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "gemma4": ReasoningMarkers("<|channel>thought\n", "<channel|>", "thought\n"),
}


class ReasoningState(Enum):
    """The state of the assistant's reasoning at the end of the prompt."""

    OPEN = "the output starts within reasoning"
    CLOSED = "the output starts with content"
    UNMARKED = "the output may start with the marker of reasoning"


def reasoning_state(prompt: ChatPrompt, markers: ReasoningMarkers = THINK) -> ReasoningState:
    """Return the state of the reasoning at the end of a rendered prompt.

    The template decides it. With ``enable_thinking`` false, templates of Qwen3 and Gemma 4 end the
    prompt with empty reasoning. Without ``thinking``, DeepSeek-V3.1's ends it with ``</think>``.
    Markers elsewhere in the prompt belong to earlier messages.
    """
    if prompt.continued:
        is_open = prompt.continued.rfind(markers.begin) > prompt.continued.rfind(markers.end)
        return ReasoningState.OPEN if is_open else ReasoningState.CLOSED
    text = prompt.text.rstrip()
    if text.endswith(markers.begin.rstrip()):
        return ReasoningState.OPEN
    return ReasoningState.CLOSED if text.endswith(markers.end) else ReasoningState.UNMARKED


def detect_reasoning(template: str) -> str:
    """Return the name of the markers that a chat template has; ``none`` if it has none."""
    names = (name for name, m in REASONING_MARKERS.items() if m.begin_token in template)
    return next(names, "none")
