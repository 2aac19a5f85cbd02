"""Runs an engine's graphs launch by launch, with their inner stages as outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from specbuild.runtime.cache.pages import KvPools
from specbuild.runtime.cache.row_placement import RowLayout, SlotCounter, groups_of
from specbuild.runtime.cache.sequence_pages import SequencePages
from specbuild.runtime.cache.state_paths import path_feeds
from specbuild.runtime.draft.eagle3 import columns_of
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.cache_groups import slots_per_sequence
from specbuild.runtime.engine_dir.files import check_sizes, read_manifest
from specbuild.runtime.engine_dir.manifest import Manifest, Port
from specbuild.runtime.engine_dir.weights_file import open_weights
from specbuild.runtime.errors import OutdatedEngineError, SpecbuildError
from specbuild.runtime.executors.cpu.executor import CpuExecutor
from specbuild.runtime.executors.cpu.graphs import read_graphs
from specbuild.runtime.lossy.specpv.host_tables import launch_feeds

DRAFT_STAGES = ("stage.attention", "stage.ffn", "stage.pre_head")


def target_stages(layers: int) -> tuple[str, ...]:
    """Return the names of values that a target graph keeps: layer outputs, and the last norm's."""
    return (*(f"stage.layer.{i}" for i in range(layers)), "stage.pre_head")


class EngineProbe:
    """A CPU engine whose target and draft graphs also output their stages.

    ``model`` is the kind of the compared draft model; None is the engine's first. Its roles have
    the names of ``ROLES`` here.
    """

    def __init__(self, directory: Path, model: str | None = None) -> None:
        manifest = read_manifest(directory)
        if not facts_of(manifest.backend).has_graphs:
            raise SpecbuildError(
                f"{directory} was built for {manifest.backend}, verify compares the stages of CPU "
                "engines; build the checkpoint with --backend cpu and verify that"
            )
        check_sizes(directory, manifest)
        stages = {"target": target_stages(manifest.target.layers)}
        self.model = next((m for m in manifest.models if model in (None, m.kind)), None)
        self._names: dict[str, str] = {}
        if self.model is not None:
            self._names = {name: self.model.role(name) for name in self.model.ROLES}
            stages[self._names["draft"]] = DRAFT_STAGES
        graphs = read_graphs(directory, manifest)
        for role, names in stages.items():
            file = manifest.roles[role].file
            graphs[file] = _with_outputs(graphs[file], names, file)
        self.manifest = _with_ports(manifest, stages)
        weights = open_weights(directory, manifest) if manifest.tensors else {}
        self.executor = CpuExecutor(self.manifest, graphs, weights)
        limits = manifest.limits
        self.counter = SlotCounter(slots_per_sequence(limits) + limits.max_rows + 1)
        self._kv = KvPools(manifest.sequence_groups, limits)

    @contextmanager
    def sequence(self, tokens: int) -> Iterator[ProbedSequence]:
        """Return an empty sequence with capacity for this many tokens and a tree."""
        pages = self._kv.admit(self._kv.pages_needed(tokens))
        try:
            yield ProbedSequence(self, pages)
        finally:
            self._kv.release(pages)

    def run(self, role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return copies of a role's outputs."""
        outputs = self.executor.run(self._names.get(role, role), feeds)
        return {name: value.copy() for name, value in outputs.items()}

    def groups(self, role: str) -> tuple[str, ...]:
        """Return the cache groups of a role."""
        return groups_of(self.manifest.roles[self._names.get(role, role)])

    def aux_hidden(self, outputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return the draft's input in ``outputs`` [T, aux_layers·H] of the target, or None."""
        if self.model is None:
            return None
        columns = columns_of(self.manifest, self.model.geometry.aux_layers)
        return outputs["captured"][:, columns]


class ProbedSequence:
    """One sequence in the caches of a probe."""

    def __init__(self, probe: EngineProbe, pages: dict[str, SequencePages]) -> None:
        self._probe = probe
        self._pages = pages

    def extend(self, role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run committed tokens: ``token_ids`` [n] in ``feeds`` follow those already present."""
        count = len(feeds["token_ids"])
        first = self._length(role)
        layout = RowLayout([first], [count], [first + count])
        placed = {
            "positions": self._probe.counter.range(first, count),
            "ancestor_bits": np.zeros((count, 1), np.int32),
        }
        states = self._states(role, [range(count)], stores=True)
        outputs = self._launch(role, layout, {**feeds, **placed, **states}, capacity=count)
        for group in self._probe.groups(role):
            self._pages[group].commit(first + count)
        return outputs

    def branch(
        self,
        role: str,
        feeds: Mapping[str, np.ndarray],
        *,
        slots: Sequence[int],
        positions: Sequence[int],
        ancestors: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Run tree nodes at consecutive tree ``slots``; ``ancestors`` bool [n, tree slots]."""
        length = self._length(role)
        layout = RowLayout([length + slots[0]], [len(slots)], [length])
        words = np.packbits(
            np.pad(ancestors, ((0, 0), (0, -ancestors.shape[1] % 32))), axis=1, bitorder="little"
        )
        placed = {
            "positions": np.array(positions, np.int32),
            "ancestor_bits": words.view("<i4").astype(np.int32),
        }
        paths = [row.nonzero()[0].tolist() for row in ancestors]
        states = self._states(role, paths, stores=False)
        return self._launch(role, layout, {**feeds, **placed, **states}, capacity=slots[-1] + 1)

    def fuse(self, aux_hidden: np.ndarray) -> np.ndarray:
        """Return the draft's states [T, H] of the target's states [T, aux_layers·Ht]."""
        return self._probe.run("draft_fuse", {"captured": aux_hidden})["hidden"]

    def attend(self, role: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a row at the next position, which attends to all committed tokens of the caches.

        The row writes to no cache.
        """
        length = self._length(role)
        placed = {
            "positions": self._probe.counter.range(length, 1),
            "ancestor_bits": np.zeros((1, 1), np.int32),
        }
        layout = RowLayout([length], [1], [length])
        return self._launch(role, layout, {**feeds, **placed}, capacity=0)

    def write_states(self, aux_hidden: np.ndarray) -> None:
        """Write states [n, aux_layers·Ht] of committed tokens to caches that ``draft`` reads."""
        role, count, first = "draft", len(aux_hidden), self._length("draft")
        layout = RowLayout([first], [count], [first + count])
        feeds = {"captured": aux_hidden, "positions": self._probe.counter.range(first, count)}
        for group in self._probe.groups(role):
            self._pages[group].append(count)
            feeds |= launch_feeds(
                self._probe.manifest, group, [self._pages[group]], layout, self._probe.counter
            )
        self._probe.run("draft_fuse", feeds)
        for group in self._probe.groups(role):
            self._pages[group].commit(first + count)

    def forget_tree(self, role: str) -> None:
        """Drop the rows of :meth:`branch`."""
        for group in self._probe.groups(role):
            self._pages[group].rewind(self._pages[group].length)

    def _states(
        self, role: str, paths: Sequence[Sequence[int]], *, stores: bool
    ) -> dict[str, np.ndarray]:
        """Return the paths of rows through the target's recurrent states."""
        feeds: dict[str, np.ndarray] = {}
        for group in self._probe.manifest.state_groups if role == "target" else ():
            through = [(0, path) for path in paths]
            feeds |= path_feeds(group, [self._pages[group.name]], through, stores=stores)
        return feeds

    def _length(self, role: str) -> int:
        return self._pages[self._probe.groups(role)[0]].length

    def _launch(
        self, role: str, layout: RowLayout, feeds: dict[str, np.ndarray], *, capacity: int
    ) -> dict[str, np.ndarray]:
        feeds["row_start"] = layout.row_start()
        feeds["logit_rows"] = self._probe.counter.range(0, layout.rows)
        for group in self._probe.groups(role):
            self._pages[group].append(capacity)
            feeds |= launch_feeds(
                self._probe.manifest, group, [self._pages[group]], layout, self._probe.counter
            )
        return self._probe.run(role, feeds)


def _with_outputs(graph: bytes, names: Sequence[str], where: str) -> bytes:
    """Return the model with the named values as additional fp32 outputs."""
    import onnx

    model = onnx.load_model_from_string(graph)
    existing = {name for node in model.graph.node for name in node.output}
    missing = [name for name in names if name not in existing]
    if missing:
        raise OutdatedEngineError(f"{where}: has no value named {missing[0]} to look at")
    for name in names:
        value = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        model.graph.output.append(value)
    return model.SerializeToString()


def _with_ports(manifest: Manifest, stages: Mapping[str, Sequence[str]]) -> Manifest:
    roles = dict(manifest.roles)
    for role, names in stages.items():
        ports = tuple(Port(name, "float32", ("T", "H")) for name in names)
        roles[role] = dataclasses.replace(roles[role], outputs=(*roles[role].outputs, *ports))
    return dataclasses.replace(manifest, roles=roles)
