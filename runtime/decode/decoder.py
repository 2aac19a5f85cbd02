"""The decoder of an engine: creates decoding loops for a CPU or a device."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.prefix import PrefixCache
from specbuild.runtime.decode.emission import Emission, TextStreams
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.scheduler import Scheduler
from specbuild.runtime.decode.scoring import ScoredRows
from specbuild.runtime.decode.stepper import Stepper
from specbuild.runtime.draft.choice import PolicyByLogits, requested_policy
from specbuild.runtime.draft.drafter import Drafter
from specbuild.runtime.draft.policy import DraftPolicy
from specbuild.runtime.draft.registry import AUTO, NONE, drafter_named
from specbuild.runtime.draft.sequence_policy import LearnedPolicies
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams, Request
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings
from specbuild.runtime.statistics import StepClock

Speculation: TypeAlias = DraftShape | Literal["default"] | None


@dataclass(frozen=True, eq=False)
class DraftSetting:
    """How the requests of one loop draft. The tokens do not depend on it.

    ``speculation`` is a draft shape, None for no draft, or "default" for the fastest draft by
    measured costs. ``drafter`` is the kind of one of the engine's drafters, ``auto``, ``none``, or
    a custom :class:`Drafter` object.
    """

    speculation: Speculation = "default"
    drafter: Drafter | str = AUTO

    def __post_init__(self) -> None:
        if self.drafter == NONE:
            if isinstance(self.speculation, DraftShape):
                raise RequestError("speculation is a draft shape, but drafter is none: omit one")
            object.__setattr__(self, "speculation", None)

    @property
    def custom_drafter(self) -> Drafter | None:
        """The custom drafter object; None if a drafter of the engine drafts."""
        return None if isinstance(self.drafter, str) else self.drafter

    def same_as(self, other: DraftSetting) -> bool:
        """Return whether requests with these two settings may share a loop."""
        if self.speculation is None and other.speculation is None:
            return True
        is_same_drafter = self.drafter is other.drafter
        if isinstance(self.drafter, str) and isinstance(other.drafter, str):
            is_same_drafter = self.drafter == other.drafter
        return self.speculation == other.speculation and is_same_drafter

    def for_requests(self, requests: Sequence[Request]) -> DraftSetting:
        """Return the setting for these requests: no draft if one of them is exact.

        Raises RequestError if an exact request also asks for a draft.
        """
        if self.speculation is None or not any(request.params.exact for request in requests):
            return self
        if self.speculation != "default" or self.drafter != AUTO:
            raise RequestError("exact decodes without a draft: omit speculation and drafter")
        return replace(self, speculation=None)


class Decoder(ABC):
    """Creates loops that serve checked requests, one loop at a time.

    A caller that runs a loop, a measurement or a scoring holds the lock ``device_lock``.
    """

    def __init__(
        self,
        manifest: Manifest,
        kv: KvPools,
        settings: RuntimeSettings,
        prefixes: PrefixCache | None,
    ) -> None:
        self._manifest = manifest
        self._kv = kv
        self._learned = LearnedPolicies()
        self.device_lock = threading.Lock()
        self._prefill = settings.prefill
        self._prefixes = prefixes
        self._on_demand = settings.allocates_on_demand(manifest)
        self._observe_launch: Callable[[int], None] | None = None

    def observe_launches(self, observe: Callable[[int], None]) -> None:
        """Call ``observe`` with the number of tokens of each launch of later loops.

        The decoding thread calls it, so it must not block.
        """
        self._observe_launch = observe

    @property
    def clock(self) -> StepClock | None:
        """Time spent drafting and verifying; None if steps run on a device."""
        return None

    @property
    def host_statistics(self) -> Mapping[str, Any]:
        """Return the counters of the host drafters in use, by kind."""
        return {}

    def _max_step_tokens(self, policy: DraftPolicy) -> int | None:
        """The maximum tokens per sequence and step; None if all pages are reserved at admission."""
        return 1 + policy.max_depth if self._on_demand else None

    @property
    @abstractmethod
    def default_draft(self) -> DraftPolicy:
        """The policy of the last run with ``speculation="default"``; ``reason`` explains it."""

    def _check_named(self, setting: DraftSetting) -> None:
        """Raise RequestError if the engine was built without the named drafter."""
        if setting.speculation is not None and isinstance(setting.drafter, str):
            drafter_named(self._manifest, setting.drafter)

    @abstractmethod
    def check(self, requests: Sequence[Request], setting: DraftSetting) -> None:
        """Raise RequestError if the engine lacks this draft, or has no steps for these requests."""

    @abstractmethod
    def loop(
        self,
        setting: DraftSetting,
        *,
        text_stream: TextStreams,
        prefill: PrefillSchedule | None = None,
    ) -> Loop:
        """Create a loop with this setting. The caller holds :attr:`device_lock` while it runs.

        ``prefill`` None uses the schedule of the engine's settings.
        """

    def preparation(self, setting: DraftSetting, params: GenerateParams) -> Iterator[None]:
        """Load what requests with these parameters are likely to need, likeliest first.

        The steps of a single sequence are loaded before the first item, and one more program for
        each further item. The caller holds :attr:`device_lock` while it advances the iterator. If
        steps run on the host there is nothing to load.
        """
        del setting, params
        return iter(())

    def score(
        self, ids: Sequence[int], *, prompt_tokens: int | None = None
    ) -> Iterator[ScoredRows]:
        """Iterate over the target's logits after every token of a sequence.

        The first ``prompt_tokens`` tokens are computed by prefill, the others one by one, as in
        decoding steps without a draft. With None, prefill computes all of them. Requests wait until
        the iterator is exhausted. Raises RequestError if the sequence is too long, the engine has
        no scoring programs, or requests are being served.
        """
        self._check_length(ids)
        num_prompt = len(ids) if prompt_tokens is None else prompt_tokens
        if not 1 <= num_prompt <= len(ids):
            raise RequestError(f"prompt_tokens is {num_prompt}, must be 1 to {len(ids)}")
        return self._with_lock(self._score_rows(ids, num_prompt))

    def score_with_lock(self, ids: Sequence[int]) -> Iterator[ScoredRows]:
        """Iterate as :meth:`score` does. The caller holds :attr:`device_lock`."""
        self._check_length(ids)
        return self._score_rows(ids, len(ids))

    def _check_length(self, ids: Sequence[int]) -> None:
        limit = self._manifest.limits.max_seq_len
        if not 1 <= len(ids) <= limit:
            raise RequestError(f"cannot score {len(ids)} tokens, the engine scores 1 to {limit}")

    def _with_lock(self, rows: Iterator[ScoredRows]) -> Iterator[ScoredRows]:
        if not self.device_lock.acquire(blocking=False):
            raise RequestError("the engine is serving requests; score when they have finished")
        try:
            yield from rows
        finally:
            self.device_lock.release()

    @abstractmethod
    def _score_rows(self, ids: Sequence[int], prompt_tokens: int) -> Iterator[ScoredRows]:
        """Iterate over the rows in order. The caller holds :attr:`device_lock`."""

    @abstractmethod
    def _default_policy(self, drafter: str, *, full_logits: bool) -> DraftPolicy:
        """Create the default policy of a drafter.

        It continues from what the previous policy learned. Policies of greedy and of sampled steps
        learn separately.
        """

    def _engine_policy(self, setting: DraftSetting) -> DraftPolicy:
        """The policy of a loop that uses the engine's own drafters."""
        if setting.speculation != "default":
            return requested_policy(setting.speculation)
        assert isinstance(setting.drafter, str)
        drafter = setting.drafter
        return PolicyByLogits(
            lambda full_logits: self._default_policy(drafter, full_logits=full_logits)
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
        return Loop(stepper, scheduler, emission, policy, self._observe_launch)
