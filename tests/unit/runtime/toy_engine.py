"""An engine with the toy model, drafters that propose badly, and the results of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from toy_model import ToyExecutor, choose, target_logits, toy_manifest

from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.draft.drafter import DrafterCapabilities
from specbuild.runtime.draft.tree import DraftTrees
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import (
    FinishEvent,
    GenerateParams,
    Prompt,
    SequenceState,
    TokenEvent,
)
from specbuild.runtime.settings import DEFAULT_SETTINGS, RuntimeSettings
from specbuild.runtime.text.codec import TextCodec

CACHING = RuntimeSettings(prefix_caching="on")
CACHING_ALL = RuntimeSettings(prefix_caching="on", publish_generated_pages=True)
ON_DEMAND = RuntimeSettings(kv_policy="max-utilization")


def toy_engine(
    settings: RuntimeSettings = DEFAULT_SETTINGS,
    *,
    text: TextCodec | None = None,
    **options: object,
) -> Engine:
    """Return a new engine whose released pages are poisoned."""
    manifest = toy_manifest(**options)
    executor = ToyExecutor(manifest)
    return Engine(manifest, executor, settings, text=text, pages_released=executor.poison)


def prompt(ids: Sequence[int], name: str = "p") -> Prompt:
    """Return a prompt of ids."""
    return Prompt(name, prompt_ids=tuple(ids))


@dataclass
class Run:
    """The events and records of one call, by request."""

    events: list[list[TokenEvent]]
    records: list[RunRecord]

    @property
    def ids(self) -> list[list[int]]:
        return [list(record.output_ids) for record in self.records]


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: GenerateParams | Sequence[GenerateParams],
    **options: object,
) -> Run:
    """Run the prompts to their end; check that every page was released."""
    free = {name: pool.free_pages for name, pool in engine._kv.pools.items()}
    tokens: list[list[TokenEvent]] = [[] for _ in prompts]
    records: dict[int, RunRecord] = {}
    for event in engine.generate(
        [prompt(p, str(i)) for i, p in enumerate(prompts)], params, **options
    ):
        if isinstance(event, FinishEvent):
            assert event.request not in records
            records[event.request] = event.record
        else:
            assert event.request not in records, "a token after the end"
            tokens[event.request].append(event)
    assert {name: pool.free_pages for name, pool in engine._kv.pools.items()} == free
    for events, record in zip(tokens, (records[i] for i in range(len(prompts))), strict=True):
        assert [event.token_id for event in events] == list(record.output_ids)
        assert [event.logprob for event in events] == list(record.logprobs or ())
    return Run(tokens, [records[i] for i in range(len(prompts))])


@dataclass
class TreeOfTokens:
    """Propose a tree whose node tokens are ``rule(sequence, path)``."""

    rule: object
    parents: Sequence[int]
    reads_aux_hidden: bool = False
    proposals: list[DraftTrees] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    observed: dict[int, int] = field(default_factory=dict)

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities("toy", reads_aux_hidden=self.reads_aux_hidden)

    def observe(self, sequence: SequenceState, aux_hidden: np.ndarray | None) -> None:
        assert (aux_hidden is not None) == self.reads_aux_hidden
        if aux_hidden is not None:
            self.observed[sequence.index] = self.observed.get(sequence.index, 0) + len(aux_hidden)
            assert self.observed[sequence.index] == sequence.length

    def release(self, sequence: SequenceState) -> None:
        self.released.append(sequence.index)

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        del shape  # a fixed tree, whatever is asked for
        trees = [self._tree(sequence) for sequence in sequences]
        stacked = [torch.cat(parts) for parts in zip(*trees, strict=True)]
        arrays = [part.numpy() for part in stacked]
        arrays[0][:, 0] = [s.root for s in sequences]
        self.proposals.append(DraftTrees(*arrays, contiguous=False))
        return self.proposals[-1]

    def _tree(self, sequence: SequenceState) -> tuple[torch.Tensor, ...]:
        tokens: list[int] = []
        paths: list[tuple[int, ...]] = []
        for parent in self.parents:
            path = () if parent < 0 else paths[parent]
            siblings = [t for t, p in zip(tokens, self.parents, strict=False) if p == parent]
            tokens.append(self.rule(sequence, path, siblings))
            paths.append((*path, tokens[-1]))
        count = len(tokens)
        return op_named("TreeSelect").reference(
            torch.tensor([tokens], dtype=torch.int32),
            torch.arange(count, 0, -1).float()[None],
            torch.tensor([list(self.parents)], dtype=torch.int32),
            torch.tensor(count),
            depth=count,
        )


def right(sequence: SequenceState, path: tuple[int, ...], siblings: list[int]) -> int:
    """Return the token that the target will sample; siblings get other tokens."""
    tokens = [*sequence.ids[: sequence.num_tokens].tolist(), *path]
    best, _ = choose(target_logits(tokens), sequence.request.params.sampling, len(tokens) - 1)
    while best in siblings:
        best = (best + 1) % 29
    return best


def wrong(sequence: SequenceState, path: tuple[int, ...], siblings: list[int]) -> int:
    """Return a token that the target will not sample."""
    best = right(sequence, path, [])
    token = (best + 1) % 29
    while token in siblings or token == best:
        token = (token + 1) % 29
    return token


def repeating(sequence: SequenceState, path: tuple[int, ...], siblings: list[int]) -> int:
    """Return the root's token again; siblings get the next ids."""
    token = sequence.root
    while token in siblings:
        token = (token + 1) % 29
    return token
