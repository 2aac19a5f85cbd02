"""The components that an engine's programs share: fused graphs, weights, ports and caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from specbuild.builder.backends.cuda.step.draft_parts import DraftParts, mask_weight
from specbuild.builder.backends.cuda.step.fused_graph import (
    FusedGraph,
    Placement,
    WeightTensors,
)
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Storage, Tensor
from specbuild.builder.backends.cuda.step.state import StatePorts
from specbuild.builder.engine.backend_sizes import MAX_DECODE_ROWS
from specbuild.builder.graph.passes.weights import Recipe
from specbuild.plugins_cuda.dsa_indexer.body import list_length
from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.plugins_cuda.registry import op_named
from specbuild.plugins_cuda.tree_select.op import pack_bits
from specbuild.runtime.cache.layout import KvLayout
from specbuild.runtime.cache.state_layout import StateLayout
from specbuild.runtime.engine_dir.cache_groups import (
    FULL_GROUP,
    LATENT_GROUP,
    choosing_group,
)
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, Dsa
from specbuild.runtime.lossy.specpv.state import ViewGeometry

# State that all sequences share. Other state has an entry per sequence.
_SHARED_STATE = ("eos_ids", "step")
_RING = "ring."
# The graph input that only sparse passes have (DSA).
LIST_LIMITS = f"{INDEXER_GROUP}.top_k"


@dataclass(frozen=True)
class EngineParts:
    """The components; ``graphs`` are by role, ``layouts`` by cache group.

    ``drafts`` have the names that the steps' forms use: the kind, or "" for the only draft. With
    ``prefilter_head`` the target's head is also stored in int8.
    """

    graphs: Mapping[str, FusedGraph]
    weights: WeightTensors
    ports: StatePorts
    layouts: Mapping[str, KvLayout]
    drafts: Mapping[str, DraftParts]
    views: ViewGeometry | None = None
    dsa: Dsa | None = None
    prefilter_head: bool = False
    states: StateLayout | None = None

    @property
    def target_groups(self) -> tuple[str, ...]:
        """The cache groups of the target."""
        return tuple(name for name in self.layouts if name not in DRAFT_GROUPS)

    @property
    def block_group(self) -> str:
        """The group whose keys score SpecPV's blocks."""
        assert self.views is not None
        return choosing_group(self.views.config)

    @property
    def view_group(self) -> str:
        """The group of full-attention layers, which read views with SpecPV."""
        return FULL_GROUP if FULL_GROUP in self.layouts else LATENT_GROUP

    @property
    def page_size(self) -> int:
        """Tokens per page, equal in all groups."""
        return next(iter(self.layouts.values())).tokens_per_page

    @cached_property
    def caches(self) -> dict[str, Tensor]:
        """The buffer of each group's pools, as bytes; a group without layers has none."""
        return {
            name: Tensor(
                Storage(layout.name, "cache", layout.bytes),
                0,
                TensorInfo((layout.bytes,), "uint8"),
            )
            for name, layout in self.layouts.items()
            if layout.bytes
        }

    @cached_property
    def state_cache(self) -> Tensor | None:
        """The buffer of recurrent states as bytes, or None without them."""
        if self.states is None:
            return None
        info = TensorInfo((self.states.bytes,), "uint8")
        return Tensor(Storage(self.states.name, "cache", info.nbytes), 0, info)

    @cached_property
    def state_pools(self) -> dict[str, Tensor]:
        """The pools of recurrent states by the names of their graph inputs."""
        if self.states is None or self.state_cache is None:
            return {}
        storage = self.state_cache.storage
        return {
            pool.name: Tensor(storage, pool.offset, TensorInfo(pool.shape, pool.dtype))
            for pool in self.states.pools
        }

    def stacks(self, group: str) -> tuple[Tensor, ...]:
        """Return a group's pools; adjacent pools of one shape are combined to [parts, pages, …]."""
        layout = self.layouts[group]
        return tuple(
            Tensor(self.caches[group].storage, offset, TensorInfo(shape, layout.dtype))
            for offset, shape in layout.stacks
        )

    @cached_property
    def pools(self) -> dict[str, Tensor]:
        """Every pool by the name of its graph input."""
        return {
            f"{name}.{pool.layer}.{pool.part}_pool": Tensor(
                self.caches[name].storage, pool.offset, TensorInfo(pool.shape, layout.dtype)
            )
            for name, layout in self.layouts.items()
            for pool in layout.pools
        }

    @cached_property
    def summaries(self) -> Tensor | None:
        """All block summaries, [layers, pages, kv_heads, 2, width]; None without SpecPV."""
        if self.views is None:
            return None
        layout = self.layouts[self.block_group]
        pages, heads, _, width = layout.pools[0].shape
        info = TensorInfo((len(layout.group.layers), pages, heads, 2, width), layout.dtype)
        return Tensor(Storage(f"{layout.name}.summaries", "cache", info.nbytes), 0, info)

    @cached_property
    def summary_pools(self) -> dict[str, Tensor]:
        """The block summaries of each layer by the name of their graph input."""
        if self.summaries is None:
            return {}
        layers = self.layouts[self.block_group].group.layers
        return {
            f"{self.block_group}.{layer}.summary_pool": self.summaries.part(i)
            for i, layer in enumerate(layers)
        }

    def layer_inputs(self, name: str, tensors: Sequence[Tensor], group: str) -> dict[str, Tensor]:
        """Return a group's input that is separate for each layer."""
        if len(tensors) == 1:
            return {f"{group}.{name}": tensors[0]}
        return {f"{group}.{name}.{i}": tensor for i, tensor in enumerate(tensors)}

    def page_table(self, group: str, batch: int) -> Tensor:
        """Return the first ``batch`` rows of a group's page table, [batch, P]."""
        return self.ports.first(f"page_table.{group}", batch)

    def state(self, op_name: str, batch: int) -> dict[str, Tensor]:
        """Return an op's inputs that are ports, such as ``length`` [batch] and ``ring_tokens``."""
        inputs = {}
        for spec in op_named(op_name).inputs:
            ring = _RING + spec.name.removeprefix("ring_")
            if spec.name in _SHARED_STATE:
                inputs[spec.name] = self.ports[spec.name]
            elif spec.name.startswith("ring_"):
                inputs[spec.name] = self.ports[ring]
            elif spec.name in self.ports.tensors:
                inputs[spec.name] = self.ports.first(spec.name, batch)
        return inputs

    def fixed(self, name: str, values: torch.Tensor) -> Tensor:
        """Return a constant tensor with these values, stored as a weight."""
        recipe = Recipe(tuple(values.shape), values.dtype, (), lambda: values)
        return self.weights.tensor(f"constant.{name}", recipe)

    def constant(self, value: int) -> Tensor:
        """Return a constant int32 scalar, stored as a weight."""
        return self.fixed(str(value), torch.tensor(value, dtype=torch.int32))

    def chain_parents(self, batch: int, depth: int) -> Tensor:
        """Return the parents of a chain: −1, 0, 1, …, an int32 weight [batch, depth]."""
        chain = torch.arange(-1, depth - 1, dtype=torch.int32).repeat(batch, 1)
        return self.fixed(f"chain-{batch}-{depth}", chain)

    def chain(self, nodes: int) -> dict[str, Tensor]:
        """Return ``depths``, ``tree_parents`` and ``ancestor_bits`` [B, N1, W] of chains."""
        batch = self.ports.sizes.batch
        slots, ancestors = torch.arange(nodes), torch.ones(nodes, nodes, dtype=torch.bool).tril()
        rows = {"depths": slots, "tree_parents": slots - 1, "ancestor_bits": pack_bits(ancestors)}
        return {
            name: self.fixed(
                f"{name}-{batch}-{nodes}", row.int().expand(batch, *row.shape).contiguous()
            )
            for name, row in rows.items()
        }

    def mask_states(self, draft: DraftParts) -> Tensor:
        """Return the hidden states bf16 [C] of mask rows."""
        assert draft.mask_states is not None
        return self.weights.tensor(mask_weight(draft), draft.mask_states)

    def offsets(self, draft: DraftParts) -> Tensor:
        """Return a draft vocabulary's offsets, int32 [Vd]."""
        return self.weights.tensor(draft.full_name("d2t"), draft.d2t)

    def draft_states(self, draft: DraftParts, program: ProgramIr, aux_hidden: Tensor) -> Tensor:
        """Select one draft's columns of ``aux_hidden`` [T, C]: [T, layers · H]."""
        if draft.columns is None:
            return aux_hidden
        rows, num_columns, layers = aux_hidden.shape[0], len(draft.columns), draft.layers
        width = aux_hidden.shape[1] // layers
        max_rows = max(self.ports.sizes.prefill_rows, MAX_DECODE_ROWS)
        indices = torch.arange(max_rows)[:, None] * layers + torch.tensor(draft.columns)
        constant = self.fixed(draft.full_name("aux_columns"), indices.flatten().int())
        # Treat the hidden states of each layer as a table row and look up those of the draft.
        selected = program.call(
            "Embed",
            {
                "token_ids": constant.rows(0, rows * num_columns),
                "table": aux_hidden.view(rows * layers, width),
            },
            sizes={"H": width},
        )
        return selected["x"].view(rows, num_columns * width)

    def placement(
        self,
        role: str,
        program: ProgramIr,
        ports: Mapping[str, Tensor],
        *,
        rows: int,
        logit_rows: int,
        stores: bool = False,
    ) -> Placement:
        """Return the placement of a role's graph in a program with these sizes."""
        sizes = {"T": rows, "R": logit_rows}
        budget = ports.get(LIST_LIMITS)
        if budget is not None:
            words = ports["ancestor_bits"].shape[1]
            sizes |= {"B": budget.shape[0], "S": self._list_length(words)}
        all_ports = {**self.pools, **self.summary_pools, **self.state_pools}
        all_ports |= {**self.ports.exchange, **ports}
        return Placement(
            self.graphs[role],
            program,
            self.weights,
            all_ports,
            sizes,
            sparse=budget is not None,
            prefilter_head=self.prefilter_head and role == "target",
            stores=stores,
        )

    def _list_length(self, words: int) -> int:
        """Return the length of a row's list if its ancestors have this many words of bits."""
        assert self.dsa is not None
        slots = self.page_size * self.ports.sizes.logical_pages[INDEXER_GROUP]
        dsa = self.dsa
        return list_length(slots, words, dsa.top_k, dsa.first_tokens, dsa.recent_tokens)
