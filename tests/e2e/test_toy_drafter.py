"""A drafter added by the steps of docs/developers/add-a-drafter.md, from the build to the output.

It needs no weights and proposes the last token repeatedly. It adds only its record, its code and
its lines in both registries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

import numpy as np
import pytest
from checkpoints import write_target

from specbuild.builder.build import build
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import SilentProgress
from specbuild.builder.verify import verify_engine
from specbuild.cli.tables.engine_table import host_drafter_table
from specbuild.runtime.draft.drafter import DrafterCapabilities, HostDrafterKind
from specbuild.runtime.draft.host_proposal import HostProposal
from specbuild.runtime.draft.registry import HOST_KINDS
from specbuild.runtime.draft.tree import DraftTrees, chain_trees
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.drafters.record import Facts, HostRecord
from specbuild.runtime.engine_dir.drafters.registry import RECORDS
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.engine_dir.manifest_check import check_manifest
from specbuild.runtime.errors import EngineFileError, RequestError
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt, SequenceState
from specbuild.runtime.sampling import SamplingParams

KIND, LONGEST, NEW_TOKENS = "repeat", 5, 40


@dataclass(frozen=True, kw_only=True)
class RepeatRecord(HostRecord):
    """The drafter's record in the manifest:

    ``chance`` is the acceptance probability of each token.
    """

    FEATURE: ClassVar[str] = "repeat"
    kind: Literal["repeat"] = "repeat"
    max_tokens: int = LONGEST
    chance: float = 0.5

    def problem(self) -> str | None:
        """See :class:`HostRecord`."""
        return None if 0 <= self.chance <= 1 else f"chance is {self.chance}, must be 0 to 1"

    def facts(self) -> Facts:
        """See :class:`DrafterRecord`."""
        return (("proposes", f"the newest token, up to {self.max_tokens} times"),)


class Repeat:
    """Propose the root repeatedly, in chains of the requested length."""

    capabilities = DrafterCapabilities(
        name=KIND, reads_aux_hidden=False, gives_probabilities=True, needs_host=True
    )

    def __init__(self, record: RepeatRecord) -> None:
        self._record = record
        self.statistics = SimpleNamespace(proposed_tokens=0)

    def observe(self, sequence: SequenceState, aux_hidden: np.ndarray | None) -> None:
        pass

    def propose_chains(
        self, sequences: Sequence[SequenceState], most: Sequence[int]
    ) -> HostProposal:
        lengths = [min(n, self._record.max_tokens) for n in most]
        return HostProposal(
            [[s.root] * n for s, n in zip(sequences, lengths, strict=True)],
            tuple(tuple(self._record.chance ** (1 + i) for i in range(n)) for n in lengths),
        )

    def propose(self, sequences: Sequence[SequenceState], shape: DraftShape) -> DraftTrees:
        roots = [s.root for s in sequences]
        self.statistics.proposed_tokens += shape.draft_depth * len(roots)
        return chain_trees(roots, np.repeat(np.array(roots)[:, None], shape.draft_depth, axis=1))

    def record_result(
        self,
        sequences: Sequence[SequenceState],  # noqa: ARG002
        depths: Sequence[int],
        accepted: Sequence[int],  # noqa: ARG002
    ) -> None:
        self.statistics.proposed_tokens += sum(depths)

    def release(self, sequence: SequenceState) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def registered():
    """Add the lines that the registries would have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECORDS, KIND, RepeatRecord)
        patch.setitem(HOST_KINDS, KIND, HostDrafterKind(Repeat.capabilities, Repeat))
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "target"
    write_target(path, vocab=256)
    return path


@pytest.fixture(scope="module")
def built(registered: None, target: Path) -> Path:
    output = target.parent / "engine"
    options = BuildOptions.from_flat(model=target, output=output, drafter=KIND, max_seq_len=96)
    build(options, SilentProgress())
    return output


def decoded(engine: Engine, temperature: float, **options: object) -> list[RunRecord]:
    # The prompts use the lowest ids only, so that some tokens repeat.
    bias = dict.fromkeys(range(3), 100.0)
    sampling = SamplingParams(temperature, seed=3, logit_bias=bias)
    params = GenerateParams(NEW_TOKENS, sampling, ignore_eos=True)
    prompts = [Prompt(str(i), prompt_ids=(4 + i, 9, 2)) for i in range(2)]
    events = engine.generate(prompts, params, **options)  # type: ignore[arg-type]
    finished = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [finished[i] for i in sorted(finished)]


def steps_of(output: Sequence[int], depth: int) -> int:
    """Return the number of steps that chains of the last token need for an output."""
    steps, num_tokens = 0, 1
    while num_tokens < len(output):
        length = min(depth, len(output) - num_tokens - 1)
        root, accepted = output[num_tokens - 1], 0
        while accepted < length and output[num_tokens + accepted] == root:
            accepted += 1
        num_tokens += accepted + 1
        steps += 1
    return steps


def test_the_manifest_stores_the_record(built: Path) -> None:
    manifest = read_manifest(built)
    assert manifest.drafters == (RepeatRecord(),) and "repeat" in manifest.features
    assert manifest.host_drafters == manifest.drafters and manifest.models == ()
    assert manifest.limits.draft_depth == LONGEST
    assert host_drafter_table(manifest.host_drafters[0]).row_count == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_equals_plain_decoding_in_fewer_steps(built: Path, temperature: float) -> None:
    engine = Engine.load(built)
    plain = decoded(engine, temperature, speculation=None)
    drafted = decoded(engine, temperature, speculation=DraftShape(1, 3, 3), drafter=KIND)
    assert [r.output_ids for r in drafted] == [r.output_ids for r in plain]
    assert [r.stats.steps for r in drafted] == [steps_of(r.output_ids, 3) for r in plain]
    assert sum(r.stats.steps for r in drafted) < 2 * (NEW_TOKENS - 1)
    assert engine.decoder.host_statistics[KIND].proposed_tokens > 0


def test_the_policy_selects_the_depth_of_proposals(built: Path) -> None:
    engine = Engine.load(built)
    plain = decoded(engine, 0.0, speculation=None)
    for name in (KIND, "auto"):
        chosen = decoded(engine, 0.0, drafter=name)
        assert [r.output_ids for r in chosen] == [r.output_ids for r in plain]


def test_verify_runs_with_the_drafter(built: Path, target: Path) -> None:
    assert verify_engine(built, target, None, SilentProgress()).passed


def test_rejects_an_invalid_record(built: Path) -> None:
    manifest = replace(read_manifest(built), drafters=(RepeatRecord(chance=1.5),))
    with pytest.raises(EngineFileError, match=r"drafters\[0\]: chance is 1.5, must be 0 to 1"):
        check_manifest(manifest)


def test_an_engine_without_the_drafter_rejects_it(tiny_engine: Path) -> None:
    with pytest.raises(RequestError, match="drafter 'repeat': the engine has eagle3"):
        decoded(Engine.load(tiny_engine), 0.0, drafter=KIND)
