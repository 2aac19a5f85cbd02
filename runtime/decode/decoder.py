"""What an engine decodes with: loops over steps of the host, or of a device."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from specbuild.runtime.cache.kv_policy import allocates_on_demand
from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixCache
from specbuild.runtime.decode.emission import Emission, TextStreams
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.scheduler import Scheduler
from specbuild.runtime.decode.scoring import ScoredRows
from specbuild.runtime.decode.step_clock import StepClock
from specbuild.runtime.decode.stepper import Stepper
from specbuild.runtime.draft.choice import PolicyByKind, asked_for
from specbuild.runtime.draft.drafter import Drafter
from specbuild.runtime.draft.policy import EXPLORED_SHARE, DraftPolicy, LearnedPolicies
from specbuild.runtime.draft.registry import AUTO, NONE, drafter_named
from specbuild.runtime.draft.suffix_cache import SuffixStatistics
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import Request
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

Speculation: TypeAlias = DraftShape | Literal["default"] | None


@dataclass(frozen=True, eq=False)
class DraftSetting:
    """How requests draft: those of one loop draft alike. The tokens are the same with any.

    ``speculation``: a shape, None for no draft, or "default" for what pays; ``drafter``: the kind
    of one of the engine's, ``auto`` for those that pay, ``none``, or an object of the caller's.
    """

    speculation: Speculation = "default"
    drafter: Drafter | str = AUTO

    def __post_init__(self) -> None:
        if self.drafter == NONE:
            if isinstance(self.speculation, DraftShape):
                raise RequestError("a draft shape is given, but drafter none: leave one out")
            object.__setattr__(self, "speculation", None)

    @property
    def custom_drafter(self) -> Drafter | None:
        """The caller's own drafter, None where the engine's draft."""
        return None if isinstance(self.drafter, str) else self.drafter

    def same_as(self, other: DraftSetting) -> bool:
        """Whether requests of both may share a loop."""
        if self.speculation is None and other.speculation is None:
            return True
        is_same_drafter = self.drafter is other.drafter
        if isinstance(self.drafter, str) and isinstance(other.drafter, str):
            is_same_drafter = self.drafter == other.drafter
        return self.speculation == other.speculation and is_same_drafter

    def for_requests(self, requests: Sequence[Request]) -> DraftSetting:
        """What these requests draft with: nothing, where one of them is exact.

        RequestError where such a request asks for a draft.
        """
        if self.speculation is None or not any(request.params.exact for request in requests):
            return self
        if self.speculation != "default" or self.drafter != AUTO:
            raise RequestError("exact decodes without a draft: leave speculation and drafter out")
        return replace(self, speculation=None)


class Decoder(ABC):
    """Makes the loops that serve checked requests, one at a time.

    Whoever uses the executor holds ``machine``: a loop, a measurement, a scoring. Trying drafts
    may cost ``explored_share`` of the time. ``observe_launch`` may be set before a loop is made:
    the decoding thread calls it with the number of tokens of each launch.
    """

    explored_share = EXPLORED_SHARE

    def __init__(
        self,
        manifest: Manifest,
        kv: KvPools,
        settings: RuntimeSettings,
        prefixes: PrefixCache | None,
    ) -> None:
        self._manifest = manifest
        self._kv = kv
        self._learned = LearnedPolicies(self.explored_share)
        self.machine = threading.Lock()
        self._prefill = settings.prefill
        self._prefixes = prefixes
        self._on_demand = allocates_on_demand(manifest, settings.kv_policy)
        self.observe_launch: Callable[[int], None] | None = None

    @property
    def clock(self) -> StepClock | None:
        """How the time of steps is shared; None where they do not run on the host."""
        return None

    @property
    def suffix_statistics(self) -> SuffixStatistics | None:
        """What suffix decoding has counted; None where it has not been asked for."""
        return None

    def _max_step_tokens(self, policy: DraftPolicy) -> int | None:
        """The most tokens of a step; None where a request reserves all that it may need."""
        return 1 + policy.max_depth if self._on_demand else None

    @property
    @abstractmethod
    def default_draft(self) -> DraftPolicy:
        """What ``speculation="default"`` last used; its ``reason`` says what it chose, and why."""

    def _check_named(self, setting: DraftSetting) -> None:
        """RequestError where the engine was built without the drafter that is asked for."""
        if setting.speculation is not None and isinstance(setting.drafter, str):
            drafter_named(self._manifest, setting.drafter)

    @abstractmethod
    def check(self, requests: Sequence[Request], setting: DraftSetting) -> None:
        """RequestError where the engine has no such draft, or no steps for such requests."""

    @abstractmethod
    def loop(
        self,
        setting: DraftSetting,
        *,
        text_stream: TextStreams,
        prefill: PrefillSchedule | None = None,
    ) -> Loop:
        """A loop of this setting; whoever runs it holds :attr:`machine`.

        ``prefill`` None is the schedule of the engine's settings.
        """

    def score(
        self, ids: Sequence[int], *, prompt_tokens: int | None = None
    ) -> Iterator[ScoredRows]:
        """The target's logits behind every token of a sequence, by what decodes.

        The first ``prompt_tokens`` are read as a prompt, those behind as steps without a draft see
        them; None reads all as a prompt. Requests wait until all is read. Raises RequestError
        where the sequence does not fit, the engine cannot score so, or requests are being served.
        """
        limit = self._manifest.limits.max_seq_len
        if not 1 <= len(ids) <= limit:
            raise RequestError(f"{len(ids)} tokens to score, the engine takes 1 to {limit}")
        num_prompt = len(ids) if prompt_tokens is None else prompt_tokens
        if not 1 <= num_prompt <= len(ids):
            raise RequestError(f"prompt_tokens is {num_prompt}, must be 1 to {len(ids)}")
        return self._with_machine(self._score_rows(ids, num_prompt))

    def _with_machine(self, rows: Iterator[ScoredRows]) -> Iterator[ScoredRows]:
        if not self.machine.acquire(blocking=False):
            raise RequestError("the engine is serving requests; score when they are done")
        try:
            yield from rows
        finally:
            self.machine.release()

    @abstractmethod
    def _score_rows(self, ids: Sequence[int], prompt_tokens: int) -> Iterator[ScoredRows]:
        """Rows in order; whoever asks for them holds :attr:`machine`."""

    @abstractmethod
    def _default_policy(self, drafter: str, *, sampled: bool, full_logits: bool) -> DraftPolicy:
        """That of a drafter: it starts from what the one before it has learned.

        Those of greedy steps and of sampled ones learn apart.
        """

    def _engine_policy(self, setting: DraftSetting) -> DraftPolicy:
        """The policy of a loop that drafts with an engine's own drafter."""
        if setting.speculation != "default":
            return asked_for(setting.speculation)
        assert isinstance(setting.drafter, str)
        drafter = setting.drafter
        return PolicyByKind(
            lambda sampled, full_logits: self._default_policy(
                drafter, sampled=sampled, full_logits=full_logits
            )
        )

    def _loop(
        self,
        stepper: Stepper,
        scheduler: Scheduler,
        policy: DraftPolicy,
        text_stream: TextStreams,
    ) -> Loop:
        eos, depth = self._manifest.target.eos_token_ids, policy.max_depth
        emission = Emission(eos, max_depth=depth, text_stream=text_stream)
        return Loop(stepper, scheduler, emission, policy, self.observe_launch)
