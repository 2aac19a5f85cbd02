"""What the programs of an engine are made of: fused graphs, weights, ports and caches."""

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

# State that all sequences share; the rest has an entry for each of them.
_SHARED_STATE = ("eos_ids", "step")
_RING = "ring."
# The graph input that a sparse pass alone has (DSA).
LISTS_ASKED = f"{INDEXER_GROUP}.top_k"


@dataclass(frozen=True)
class EngineParts:
    """The parts; ``graphs`` by role, ``layouts`` by cache group.

    ``drafts`` are named as steps' forms name them: by kind, the only one of an engine not at all.
    ``screens``: the target's head has a screened form.
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
    def chooser(self) -> str:
        """The group by whose keys SpecPV chooses blocks."""
        assert self.views is not None
        return choosing_group(self.views.config)

    @property
    def viewed(self) -> str:
        """The group of full-attention layers, which see views where there are any (SpecPV)."""
        return FULL_GROUP if FULL_GROUP in self.layouts else LATENT_GROUP

    @property
    def page_size(self) -> int:
        """Tokens in a page; the same in every group."""
        return next(iter(self.layouts.values())).tokens_per_page

    @cached_property
    def caches(self) -> dict[str, Tensor]:
        """The buffer of a group's pools, as bytes, by group."""
        return {
            name: Tensor(
                Storage(layout.name, "cache", layout.bytes),
                0,
                TensorInfo((layout.bytes,), "uint8"),
            )
            for name, layout in self.layouts.items()
        }

    @cached_property
    def state_cache(self) -> Tensor | None:
        """The buffer of recurrent states, as bytes; None without."""
        if self.states is None:
            return None
        info = TensorInfo((self.states.bytes,), "uint8")
        return Tensor(Storage(self.states.name, "cache", info.nbytes), 0, info)

    @cached_property
    def state_pools(self) -> dict[str, Tensor]:
        """The pools of recurrent states under the names of their graph inputs."""
        if self.states is None or self.state_cache is None:
            return {}
        storage = self.state_cache.storage
        return {
            pool.name: Tensor(storage, pool.offset, TensorInfo(pool.shape, pool.dtype))
            for pool in self.states.pools
        }

    def stacks(self, group: str) -> tuple[Tensor, ...]:
        """A group's pools, those of one shape that adjoin as one [parts, pages, …]."""
        layout = self.layouts[group]
        return tuple(
            Tensor(self.caches[group].storage, offset, TensorInfo(shape, layout.dtype))
            for offset, shape in layout.stacks
        )

    @cached_property
    def pools(self) -> dict[str, Tensor]:
        """Every pool under the name of its graph input."""
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
        layout = self.layouts[self.chooser]
        pages, heads, _, width = layout.pools[0].shape
        info = TensorInfo((len(layout.group.layers), pages, heads, 2, width), layout.dtype)
        return Tensor(Storage(f"{layout.name}.summaries", "cache", info.nbytes), 0, info)

    @cached_property
    def summary_pools(self) -> dict[str, Tensor]:
        """Every layer's block summaries under the name of its graph input."""
        if self.summaries is None:
            return {}
        layers = self.layouts[self.chooser].group.layers
        return {
            f"{self.chooser}.{layer}.summary_pool": self.summaries.part(i)
            for i, layer in enumerate(layers)
        }

    def layer_inputs(self, name: str, tensors: Sequence[Tensor], group: str) -> dict[str, Tensor]:
        """An input of a group that each of its layers has for itself."""
        if len(tensors) == 1:
            return {f"{group}.{name}": tensors[0]}
        return {f"{group}.{name}.{i}": tensor for i, tensor in enumerate(tensors)}

    def page_table(self, group: str, batch: int) -> Tensor:
        """The first ``batch`` rows of a group's page table, [batch, P]."""
        return self.ports.first(f"page_table.{group}", batch)

    def state(self, op_name: str, batch: int) -> dict[str, Tensor]:
        """The inputs of an op that are ports: ``length`` [batch], ``ring_tokens`` and so on."""
        found = {}
        for spec in op_named(op_name).inputs:
            ring = _RING + spec.name.removeprefix("ring_")
            if spec.name in _SHARED_STATE:
                found[spec.name] = self.ports[spec.name]
            elif spec.name.startswith("ring_"):
                found[spec.name] = self.ports[ring]
            elif spec.name in self.ports.tensors:
                found[spec.name] = self.ports.first(spec.name, batch)
        return found

    def fixed(self, name: str, values: torch.Tensor) -> Tensor:
        """A tensor that kernels read and none changes, of these values: a weight of this name."""
        recipe = Recipe(tuple(values.shape), values.dtype, (), lambda: values)
        return self.weights.tensor(f"constant.{name}", recipe)

    def constant(self, value: int) -> Tensor:
        """A scalar that kernels read: an int32 weight."""
        return self.fixed(str(value), torch.tensor(value, dtype=torch.int32))

    def chain_parents(self, batch: int, depth: int) -> Tensor:
        """The parents of a pool that is a chain: −1, 0, 1, …, an int32 weight [batch, depth]."""
        chain = torch.arange(-1, depth - 1, dtype=torch.int32).repeat(batch, 1)
        return self.fixed(f"chain-{batch}-{depth}", chain)

    def chain(self, nodes: int) -> dict[str, Tensor]:
        """``depths``, ``tree_parents`` [B, N1] and ``ancestor_bits`` [B, N1, W] of full chains."""
        batch = self.ports.sizes.batch
        slots, seen = torch.arange(nodes), torch.ones(nodes, nodes, dtype=torch.bool).tril()
        rows = {"depths": slots, "tree_parents": slots - 1, "ancestor_bits": pack_bits(seen)}
        return {
            name: self.fixed(
                f"{name}-{batch}-{nodes}", row.int().expand(batch, *row.shape).contiguous()
            )
            for name, row in rows.items()
        }

    def mask_states(self, draft: DraftParts) -> Tensor:
        """What mask rows have in the place of the target's states, bf16 [C]."""
        assert draft.mask_states is not None
        return self.weights.tensor(mask_weight(draft), draft.mask_states)

    def offsets(self, draft: DraftParts) -> Tensor:
        """A draft vocabulary's offsets, int32 [Vd]."""
        return self.weights.tensor(draft.own("d2t"), draft.d2t)

    def own_states(self, draft: DraftParts, program: ProgramIr, aux_hidden: Tensor) -> Tensor:
        """Of ``aux_hidden`` [T, C], for all drafts, the columns of one: [T, layers · H]."""
        if draft.columns is None:
            return aux_hidden
        rows, of_row, layers = aux_hidden.shape[0], len(draft.columns), draft.layers
        width = aux_hidden.shape[1] // layers
        most = max(self.ports.sizes.prefill_rows, MAX_DECODE_ROWS)
        places = torch.arange(most)[:, None] * layers + torch.tensor(draft.columns)
        named = self.fixed(draft.own("aux_columns"), places.flatten().int())
        # A row of each layer's states, in the order in which the draft reads them.
        taken = program.call(
            "Embed",
            {
                "token_ids": named.rows(0, rows * of_row),
                "table": aux_hidden.view(rows * layers, width),
            },
            sizes={"H": width},
        )
        return taken["x"].view(rows, of_row * width)

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
        """A role's graph on its way into a program of these sizes."""
        sizes = {"T": rows, "R": logit_rows}
        budget = ports.get(LISTS_ASKED)
        if budget is not None:
            words = ports["ancestor_bits"].shape[1]
            sizes |= {"B": budget.shape[0], "S": self._list_length(words)}
        everything = {**self.pools, **self.summary_pools, **self.state_pools}
        everything |= {**self.ports.exchange, **ports}
        return Placement(
            self.graphs[role],
            program,
            self.weights,
            everything,
            sizes,
            sparse=budget is not None,
            prefilter_head=self.prefilter_head and role == "target",
            stores=stores,
        )

    def _list_length(self, words: int) -> int:
        """Entries of a row's list where its ancestors have so many words of bits."""
        assert self.dsa is not None
        slots = self.page_size * self.ports.sizes.logical_pages[INDEXER_GROUP]
        dsa = self.dsa
        return list_length(slots, words, dsa.top_k, dsa.first_tokens, dsa.recent_tokens)
