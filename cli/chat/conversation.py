"""A chat with one engine: its messages, and the answers of the model."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.session import Stream
from specbuild.runtime.draft.registry import AUTO
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import RequestError
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt, Request, TokenEvent

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What the model answered. ``drafted`` of the output tokens were accepted draft tokens."""

    record: RunRecord
    drafted: int

    @property
    def text(self) -> str:
        """The answer without special tokens."""
        return self.record.text or ""


@dataclass
class Conversation:
    """The messages so far, and how they are answered.

    ``answers`` are those of this conversation, also the ones before a reset.
    """

    engine: Engine
    params: GenerateParams
    setting: DraftSetting
    system: str | None = None
    history: list[Message] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def messages(self) -> list[Message]:
        """The system message, if there is one, and the history."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.history]

    def reset(self) -> None:
        """Clear the history; the system message stays."""
        self.history.clear()

    def ask(self, question: str, show: Callable[[TokenEvent], None]) -> Answer:
        """Answer a question, and add both to the history; ``show`` gets every token as it comes.

        Ctrl-C ends the answer; the part that was generated stays. Raises RequestError where the
        conversation does not fit the engine; the conversation is then unchanged.
        """
        self.history.append({"role": "user", "content": question})
        try:
            answer = self._answer(self._requests(), self.setting, show)
        except BaseException:
            self.history.pop()
            raise
        self.history.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)
        return answer

    def compare(self, show: Callable[[TokenEvent], None]) -> tuple[Answer, Answer]:
        """Answer the last question again, without and with the draft. The history does not change.

        ``show`` gets the tokens of the second answer. Raises RequestError where there is no
        question yet, or no draft.
        """
        if not self.history:
            raise RequestError("there is no question yet to compare the answers of")
        if not self.has_draft:
            raise RequestError("the engine has no draft: there is nothing to compare")
        question = self.history.pop()
        try:
            requests = self._requests()
        finally:
            self.history.append(question)
        plain = self._answer(requests, DraftSetting(None), lambda _: None)
        return plain, self._answer(requests, self.setting, show)

    @property
    def has_draft(self) -> bool:
        """Whether answers are drafted."""
        return bool(self.engine.manifest.drafters) and self.setting.speculation is not None

    @property
    def has_seen_answers(self) -> bool:
        """Whether drafts may come from earlier answers, as those of suffix decoding do."""
        kinds = [drafter.kind for drafter in self.engine.manifest.host_drafters]
        chosen = self.setting.drafter
        return chosen in kinds or (chosen == AUTO and bool(kinds))

    def _requests(self) -> list[Request]:
        return self.engine.check_prompts(Prompt("chat", messages=self.messages()), self.params)  # type: ignore[arg-type]

    def _answer(
        self, requests: list[Request], setting: DraftSetting, show: Callable[[TokenEvent], None]
    ) -> Answer:
        stream = self.engine.session.add(requests, setting)
        drafted = 0
        with contextlib.closing(stream), _stopped_by_ctrl_c(stream):
            for event in stream:
                if isinstance(event, FinishEvent):
                    return Answer(event.record, drafted)
                drafted += event.from_draft
                show(event)
        raise AssertionError("a stream ends with a finish event")


@contextlib.contextmanager
def _stopped_by_ctrl_c(stream: Stream) -> Iterator[None]:
    """Abort the stream on ctrl-C. A KeyboardInterrupt could be raised while a token is printed."""
    previous = signal.signal(signal.SIGINT, lambda *_: stream.abort())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
