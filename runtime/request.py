"""What is asked of the engine, what comes back, and the state of a sequence in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import Any, TypeAlias

import numpy as np

from specbuild.runtime.cache.prefix import SequencePrefix
from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.errors import RequestError
from specbuild.runtime.generate_params import GenerateParams as GenerateParams  # noqa: PLC0414
from specbuild.runtime.guides.grammar import Grammar, GuideState
from specbuild.runtime.guides.remote import RemoteGrammar
from specbuild.runtime.guides.token_rules import RuledGrammar
from specbuild.runtime.parameters import refuses_unknown, whole_number
from specbuild.runtime.records import FinishReason, RunRecord
from specbuild.runtime.statistics import RunCounters
from specbuild.runtime.text.stream import TextStream

# Token ids with their natural log-probabilities, the likeliest first.
TopLogprobs = tuple[tuple[int, float], ...]


@refuses_unknown
@dataclass(frozen=True)
class Prompt:
    """A prompt of token ids, of text, or of a chat's messages, as a line of ``--prompts`` names it.

    A message is a mapping with a ``role``, as the chat template of the engine reads it. A prompt
    without an ``id`` gets its place among the prompts, counted from 0.
    Raises RequestError unless exactly one of the three is given, and it is not empty.

    >>> Prompt(messages=[{"role": "user", "content": "Hello"}]).messages
    ({'role': 'user', 'content': 'Hello'},)
    """

    id: str = ""
    prompt_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        where = f"prompt {self.id!r}" if self.id else "the prompt"
        if not isinstance(self.id, str):
            raise RequestError(f"a prompt's id is {self.id!r}, must be a string")
        kinds = ("prompt", "prompt_ids", "messages")
        given = [name for name in kinds if getattr(self, name) is not None]
        if not given:
            raise RequestError(
                f"{where} has neither prompt nor prompt_ids nor messages: give one of them"
            )
        if len(given) > 1:
            raise RequestError(f"{where} has both {' and '.join(given)}: give one of them")
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise RequestError(f"{where}: prompt is {self.prompt!r}, must be a string")
        if self.prompt_ids is not None:
            if isinstance(self.prompt_ids, str) or not isinstance(self.prompt_ids, Iterable):
                raise RequestError(f"{where}: prompt_ids is {self.prompt_ids!r}, must be token ids")
            ids = tuple(self.prompt_ids)
            if {*map(type, ids)} != {int}:
                ids = tuple(whole_number(f"{where}: a token id", i) for i in ids)
            object.__setattr__(self, "prompt_ids", ids)
        if self.messages is not None:
            object.__setattr__(self, "messages", _messages(self.messages, where))
        if not (self.prompt or self.prompt_ids or self.messages):
            what = "message" if given == ["messages"] else "token"
            raise RequestError(f"{where} is empty; give at least one {what}")


def _messages(given: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise RequestError(f"{where}: messages is {given!r}, must be a list of messages")
    messages = tuple(given)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f'{where}: messages[{i}] must be like {{"role": "user", "content": "text"}}'
            )
    return messages


Prompts: TypeAlias = str | Prompt | Iterable[str | Prompt]


def prompt_list(given: Prompts) -> list[Prompt]:
    """One prompt or any iterable of them as a list; without an id it is the place, from "0" on.

    Raises RequestError where one is neither a string nor a Prompt.
    """
    if isinstance(given, str | Prompt):
        given = [given]
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise RequestError(
            f"prompts is of type {type(given).__name__}, must be a string, a Prompt, or an "
            "iterable of either"
        )
    return [_prompt(item, place) for place, item in enumerate(given)]


def _prompt(item: object, place: int) -> Prompt:
    if isinstance(item, Prompt):
        return item if item.id else replace(item, id=str(place))
    if isinstance(item, str):
        return Prompt(str(place), prompt=item)
    raise RequestError(
        f"prompt {place} is of type {type(item).__name__}, must be a string or a Prompt; "
        "token ids go into Prompt(prompt_ids=ids)"
    )


DEFAULT_PARAMS = GenerateParams()


def params_list(
    given: GenerateParams | Sequence[GenerateParams], prompts: int
) -> list[GenerateParams]:
    """Parameters for each of so many prompts: one for all, or one each. RequestError otherwise."""
    params = [given] * prompts if isinstance(given, GenerateParams) else given
    if not isinstance(params, Sequence) or not all(isinstance(p, GenerateParams) for p in params):
        raise RequestError(f"params is {given!r}, must be GenerateParams or one for each prompt")
    if len(params) != prompts:
        raise RequestError(f"{prompts} prompts, but {len(params)} sets of parameters")
    return list(params)


@dataclass(slots=True)
class TokenEvent:
    """One emitted token; ``text`` has the characters that it completes, possibly none.

    ``logprob`` is None if an int8-prefiltered head selected the token and log-probabilities were
    not requested (``GenerateParams``). ``top_logprobs`` has the requested number of most likely
    tokens. In the first event, ``cached_tokens`` is the number of the prompt's tokens that were in
    the prefix cache.
    """

    request: int
    token_id: int
    text: str
    from_draft: bool
    logprob: float | None
    top_logprobs: TopLogprobs = ()
    cached_tokens: int = 0


@dataclass(slots=True)
class FinishEvent:
    """A request is done."""

    request: int
    record: RunRecord


Event = TokenEvent | FinishEvent


# Before every priority that a request may have, which are those of 32 bits.
MAX_URGENT = -(2**31) - 1


def _no_ids() -> np.ndarray:
    return np.zeros(0, np.int32)


@dataclass(frozen=True)
class Request:
    """A checked prompt: ids within the vocabulary, and capacity for at least one token.

    Of those that wait, the lowest ``priority`` runs first. What is not done at ``deadline_s`` of
    ``time.monotonic`` ends with the reason ``deadline``. ``grammar`` is its guide, compiled.
    ``ids`` is the prompt as int32 [P], read-only.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: GenerateParams
    token_budget: int
    priority: int = 0
    deadline_s: float | None = None
    grammar: Grammar | RemoteGrammar | RuledGrammar | None = None
    ids: np.ndarray = field(default_factory=_no_ids, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: copies of a request take it over. A Struct takes half the time that numpy does.
        if len(self.ids) != len(self.prompt_ids):
            ids = Struct(f"{len(self.prompt_ids)}i").pack(*self.prompt_ids)
            object.__setattr__(self, "ids", np.frombuffer(ids, np.int32))


@dataclass(slots=True, eq=False)
class SequenceState:
    """The state of an admitted request.

    ``ids[:num_tokens]`` are the prompt and the emitted tokens. The first ``length`` of them are in
    the target's cache. While decoding ``num_tokens`` = ``length`` + 1: the newest token is the root
    of the next step.

    Steps: ``steps_in_flight`` steps decode the sequence. The first ``discarded_steps`` of them
    started after a token that its guide refused, so their tokens are dropped. With
    ``uses_logit_processor`` its next step is a logit-processor step. If it ``needs_mask``, its next
    step masks its root, and starts after the previous one was received. While it ``awaits_mask`` no
    step decodes it, and its last events are ``held_events``.

    Pages: they hold ``capacity`` tokens. A ``paused`` sequence takes part in no step. If launches
    are queued ahead, pages for lengths up to ``covered_length`` are allocated, and no page of a
    window is freed before ``next_freed_length``. ``prefix`` is its entry in the prefix cache.

    Launches in flight may refer to a ``released`` sequence, which has finished or was preempted.
    After a preemption tokens up to ``replay_until`` are replayed without events.
    ``times_overtaken``: how many later requests were admitted while it waited.

    Of the request: the length of its prompt, the largest length with its output, whether ordinary
    steps must write full logits for it even without a mask, and whether its temperature is above 0.
    """

    request: Request
    index: int
    ids: np.ndarray
    pages: dict[str, SequencePages]
    counters: RunCounters
    text: TextStream | None
    num_tokens: int = 0
    length: int = 0
    steps_in_flight: int = 0
    discarded_steps: int = 0
    uses_logit_processor: bool = False
    needs_mask: bool = False
    capacity: int = 0
    covered_length: int = -1
    next_freed_length: int = 0
    paused: bool = False
    released: bool = False
    replay_until: int = 0
    times_overtaken: int = 0
    prefix: SequencePrefix | None = None
    guide: GuideState | None = None
    awaits_mask: bool = False
    held_events: list[Event] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    # Derived from the request. Each step reads them several times.
    prompt_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    needs_full_logits: bool = field(init=False)
    is_sampled: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.request.params
        self.prompt_tokens = len(self.request.prompt_ids)
        self.max_tokens = self.prompt_tokens + self.request.token_budget
        self.needs_full_logits = params.needs_full_logits or params.processes_rows
        self.is_sampled = params.sampling.temperature > 0

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far."""
        return self.num_tokens - self.prompt_tokens

    @property
    def tokens_left(self) -> int:
        """Largest number of output tokens still to come."""
        return self.max_tokens - self.num_tokens

    @property
    def output(self) -> np.ndarray:
        """The output tokens so far, int32 [num_output_tokens]."""
        return self.ids[self.prompt_tokens : self.num_tokens]

    @property
    def valid_steps_in_flight(self) -> int:
        """Steps in flight that emit at least one token of the sequence."""
        return self.steps_in_flight - self.discarded_steps

    @property
    def replay_remaining(self) -> int:
        """Number of next tokens that were emitted before a preemption."""
        return max(0, self.replay_until - self.num_tokens)

    @property
    def root(self) -> int:
        """The newest token, which is not in the cache yet."""
        return int(self.ids[self.num_tokens - 1])

    def publish(self, length: int, *, draft: str | None = None) -> None:
        """Publish pages to the prefix cache: ``length`` tokens are in the target's caches.

        With ``draft``, they are in the caches of that group. Called before pages of a window are
        freed.
        """
        if self.prefix is not None:
            self.prefix.cache.publish(
                self.prefix,
                self.pages,
                self.ids,
                length=length,
                num_tokens=self.num_tokens,
                draft=draft,
            )

    def record(self) -> RunRecord:
        """The result line of a finished request."""
        assert self.finish_reason is not None
        prompt = self.prompt_tokens
        return RunRecord(
            id=self.request.id,
            prompt_ids=self.request.prompt_ids,
            output_ids=tuple(self.ids[prompt : max(self.num_tokens, self.replay_until)].tolist()),
            text=None if self.text is None else self.text.emitted,
            finish_reason=self.finish_reason,
            stats=self.counters.stats(prompt),
            logprobs=tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs) if self.request.params.top_logprobs else None,
        )
