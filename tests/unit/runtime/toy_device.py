"""The toy model as a CUDA engine: the kernels of its plan, and an engine with them.

The declared references compute a step, like the kernels of a real plan, around the toy's target and
draft. A slot that no live row wrote contains NaN, and reading it fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from fake_gpu import FakeGpu, FakeKernel
from page_ledger import PageLedger
from toy_model import D2T, DRAFT_VOCAB, VOCAB, logits_of, mix
from toy_plan import BATCHES, SHAPES, cuda_manifest, plan_file, toy_plan, with_programs
from toy_processors import processed
from toy_proposals import accepted_rows, counts_port, offered_tree, slot_rows

from specbuild.plugins_cuda.paged_tree_attention.op import visibility
from specbuild.plugins_cuda.registry import op_named
from specbuild.runtime.draft.device_costs import StepCosts
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest
from specbuild.runtime.engine_dir.plan import MASKED_ROW, Plan, ProgramEntry
from specbuild.runtime.executors.cuda.executor import CudaExecutor
from specbuild.runtime.settings import DEFAULT_SETTINGS, RuntimeSettings
from specbuild.runtime.text.codec import TextCodec


class ToyDevice:
    """The kernels of a toy plan, in the memory of a fake GPU."""

    def __init__(self, manifest: Manifest, plan: Plan) -> None:
        self.manifest = manifest
        self.plan = plan
        self._ports = {port.name: port for port in plan.ports}
        self.started: list[str] = []
        self.masked_steps = 0
        self.lengths: list[list[int]] = []
        kinds = "p" * len(plan.buffers) + "iip"
        run = FakeKernel(self._run, kinds)
        self.gpu = FakeGpu({entry.name: run for entry in plan.programs})
        self._addresses: Sequence[int] = ()

    def load_weights(self, addresses: Sequence[int]) -> None:
        """Load D2T, the engine's only weight, and fill unwritten cache slots with NaN."""
        self._addresses = addresses
        stream = self.gpu.new_stream()
        host = self.gpu.allocate_host(D2T.nbytes)
        host.view[:] = D2T.view(np.uint8)
        self.gpu.upload(addresses[0], host.address, D2T.nbytes, stream)
        self.gpu.synchronize(stream)

    def poison(self, executor: CudaExecutor, group: str, pages: Sequence[int]) -> None:
        """Fill released pages with NaN after the work that was queued before."""

        def operation() -> None:
            self.cache(group)[:, list(pages)] = float("nan")

        self.gpu.enqueue(executor.runner.stream, operation)

    def cache(self, group: str) -> torch.Tensor:
        """Return [2 (K, V), pages, 1, page_size, 1] of the toy's only layer."""
        found = self.manifest.group(group)
        index = next(i for i, b in enumerate(self.plan.buffers) if b.name == f"cache:{group}")
        data = self.gpu.view(self._addresses[index], self.plan.buffers[index].bytes)
        shape = (2, found.pages, 1, found.page_size, 1)
        return torch.from_numpy(data.view(np.float32)).view(shape)

    def port(self, name: str, rows: int | None = None) -> torch.Tensor:
        """Return the first rows of a port in the device's memory."""
        port = self._ports[name]
        address = self._addresses[port.buffer] + port.offset
        data = self.gpu.view(address, torch.Size(port.shape).numel() * 4)
        return torch.from_numpy(data.view(port.dtype)).view(port.shape)[:rows]

    def _run(self, *arguments: int) -> None:
        *addresses, index, seven, null = arguments
        assert (seven, null) == (7, 0)
        assert tuple(addresses) == tuple(self._addresses)
        entry = self.plan.programs[index]
        self.started.append(entry.name)
        kinds = {"step": self._step, "prefill": self._prefill, "score": self._score}
        (kinds | {"adjust": self._adjust_first})[entry.kind](entry)

    def _step(self, entry: ProgramEntry) -> None:
        n, done = entry.batch, "adjusted_done" if entry.changes_logits else "done"
        names = ("length", "root", done, "limit", "temperature", "top_k", "top_p", "seed")
        state = [self.port(name, n) for name in names]
        self.lengths.append(state[0].tolist())
        self._check_tables(state[0].tolist(), (state[2] == 0).tolist())
        takes_up = entry.extends or (entry.host_proposal and self.manifest.draft is not None)
        if takes_up:
            self._extend(entry)
        tree = offered_tree(self.port("offered"), entry) if entry.host_proposal else None
        if entry.draft_depth and not entry.host_proposal:
            tree = self._tree(entry)
        tables = [self.port(f"page_table.{g}", n) for g in ("full", "sliding")]
        given = (None,) * 4 if tree is None else (tree[0], tree[2], tree[3], tree[4])
        counts = self.port(counts_port(entry), n) if entry.is_ragged else None
        rows = op_named("VerifyInputs").reference(
            *(*given, *state, *tables, None, None, None, self._floor("floor", n), counts),
            page_size=self.manifest.group("full").page_size,
            rows=entry.rows if entry.is_ragged else 0,
        )
        ids, positions, row_start, row_slot, tree_start, bits, full, sliding = rows[:8]
        writes = {"full": full, "sliding": sliding}
        places = (row_start, row_slot, tree_start, bits)
        logits, aux_hidden = self._target(ids, positions, places, writes, n)
        logit_rows, temperature, top_k, top_p, seed, count, floor = rows[11:]
        if not entry.full_logits:
            wanted = ((top_k != 0) | (top_p != 1) | (floor != 0)) & (temperature != 0)
            # Rows of finished sequences, and padding rows, are at position 0.
            assert not (wanted & (positions > 0)).any(), "top-k, top-p and min-p need full logits"
        how = (temperature, top_k, top_p, seed, positions, floor)
        if self._processes(entry):
            is_masked = self.port("changes", n) & MASKED_ROW
            self.masked_steps += int((is_masked.bool() & (state[2] == 0)).any())
            starts = row_start if entry.is_ragged else None
            chosen = processed(self.port, logits[logit_rows.long()], how, (ids, bits), n, starts)
        else:
            chosen = op_named("Choose").reference(logits[logit_rows.long()], *how)
        path = accepted = None
        if tree is not None:
            choices = (chosen[0][None], row_start) if entry.is_ragged else (chosen[0].view(n, -1),)
            path, accepted, _ = op_named("TreeAccept").reference(
                *(tree[0], tree[1], tree[3], count, *choices), depth=entry.draft_depth
            )
            if self._processes(entry):
                self.port("top_path")[: path.numel()] = path.flatten()
            self._commit(path, n)
        if entry.host_proposal and takes_up:
            of_slots = slot_rows(row_start, entry)
            self._keep_accepted(entry, tree, accepted, chosen[0][of_slots], aux_hidden[of_slots])
        self._advance(entry, chosen, path, accepted, aux_hidden, row_start)

    def _check_tables(self, lengths: list[int], live: list[bool]) -> None:
        """Check that the page a live row writes next is in no other row's table."""
        for group in ("full", "sliding"):
            table, size = self.port(f"page_table.{group}"), self.manifest.group(group).page_size
            window = self.manifest.group(group).window
            seen = [
                set(table[b, max(0, length - window + 1) // size if window else 0 :].tolist())
                for b, length in enumerate(lengths)
                if live[b]
            ]
            written = [int(table[b, x // size]) for b, x in enumerate(lengths) if live[b]]
            assert 0 not in written, "a row has no page to write"
            for page in written:
                assert sum(page in pages for pages in seen) == 1, "a row writes another's page"

    def _floor(self, name: str, n: int) -> torch.Tensor | None:
        return self.port(name, n) if self.manifest.logit_processor_steps else None

    def _processes(self, entry: ProgramEntry) -> bool:
        drafted = self.manifest.drafted_logit_processors and entry.full_logits
        return entry.changes_logits or drafted

    def _adjust_first(self, entry: ProgramEntry) -> None:
        names = ("temperature", "top_k", "top_p", "seed", "position", "floor")
        how = tuple(self.port(f"prefill.{name}", entry.batch) for name in names)
        raw = self.port("prefill.logits", entry.batch)
        chosen = processed(self.port, raw, how, (None, None), entry.batch)
        self.port("prefill.choice").copy_(chosen[0])
        self.port("prefill.logprob").copy_(chosen[1])

    def _advance(self, entry, chosen, path, accepted, aux_hidden, row_start) -> None:
        n, drafted = entry.batch, self.manifest.draft is not None
        drafted &= entry.extends or not entry.changes_logits
        pending = ("pending_count", "pending_tokens", "pending_captured")
        state = [self.port("length", n), self.port("root", n)]
        state += [self.port(name, n) for name in pending] if drafted else [None] * 3
        state += [self.port("adjusted_done" if entry.changes_logits else "done", n)]
        rest = [self.port("limit", n), self.port("ignore_eos", n), self.port("eos_ids")]
        ring = [self.port(f"ring.{r}") for r in ("tokens", "logprobs", "accepted", "count", "step")]
        marked = [self.port(x, n) if self._processes(entry) else None for x in ("changes", "marks")]
        results = op_named("Advance").reference(
            *chosen,
            path,
            accepted,
            aux_hidden if drafted else None,
            *state,
            *rest,
            self.port("step"),
            *ring,
            *marked,
            row_start if entry.is_ragged else None,
            extended=int(path is not None or entry.extends),
        )
        places = [*state, self.port("step"), *ring, marked[1]]
        for place, result in zip(places, results, strict=True):
            if place is not None:
                place.copy_(result)

    def _extend(self, entry: ProgramEntry) -> tuple[torch.Tensor, ...]:
        """Let the draft ingest pending rows; return its logits, outputs, last rows and scores."""
        n, size = entry.batch, self.manifest.group("draft").page_size
        names = ("length", "adjusted_done" if entry.changes_logits else "done", "page_table.draft")
        length, done, table = (self.port(x, n) for x in names)
        pending = [self.port(f"pending_{x}", n) for x in ("count", "tokens", "captured")]
        rows = op_named("ExtendInputs").reference(length, done, *pending, table, page_size=size)
        ids, hidden, positions, row_start, row_slot, write, start, bits, last, score = rows
        logits, out = self._draft(ids, hidden, positions, (row_start, row_slot, start, bits), write)
        return logits, out, last, score

    def _keep_accepted(self, entry: ProgramEntry, tree, accepted, choice, aux_hidden) -> None:
        n, size = entry.batch, self.manifest.group("draft").page_size
        length, done, table = (self.port(x, n) for x in ("length", "done", "page_table.draft"))
        live = torch.where(done == 0, accepted, -1).tolist()
        positions, places, write = accepted_rows(tree, live, length, table, size)
        self._draft(choice, aux_hidden, positions, places, write)

    def _tree(self, entry: ProgramEntry) -> tuple[torch.Tensor, ...]:
        n, k, depth = entry.batch, entry.draft_top_k, entry.draft_depth
        size = self.manifest.group("draft").page_size
        length, done, table = (self.port(x, n) for x in ("length", "done", "page_table.draft"))
        logits, out, last, score = self._extend(entry)
        logits, parent_rows, parent_bits = logits[last.long()], last, None
        m = k + (depth - 1) * k * k
        pool = [torch.full((n, m), -7), torch.full((n, m), float("nan")), torch.full((n, m), -7)]
        pool = [pool[0].int(), pool[1], pool[2].int(), torch.full((n, k), -7).int()]
        for level in range(1, depth + 1):
            expanded = op_named("TreeExpand").reference(logits, score, self._d2t(), torch.tensor(k))
            results = op_named("LevelInputs").reference(
                *(*expanded, out, parent_rows, parent_bits, length, done, self.port("limit", n)),
                *(table, *pool),
                level=level,
                depth=depth,
                page_size=size,
                last=int(level == depth),
            )
            ids, hidden, positions, row_start, row_slot, write, start, bits, _, score = results[:10]
            pool = list(results[10:])
            if level < depth:
                places = (row_start, row_slot, start, bits)
                logits, out = self._draft(ids, hidden, positions, places, write)
                parent_rows, parent_bits = None, bits
        nodes = torch.tensor(entry.draft_tokens)
        return op_named("TreeSelect").reference(*pool[:3], nodes, depth=depth)

    def _prefill(self, entry: ProgramEntry) -> None:
        self._check_padding(entry)
        aux_hidden, logits = self._given(entry, "prefill.logit_rows")
        names = ("temperature", "top_k", "top_p", "seed", "position", "floor")
        params = [self.port(f"prefill.{name}") for name in names[:-1]]
        params.append(self._floor("prefill.floor", BATCHES[-1]))
        if self.manifest.logit_processor_steps:
            self.port("prefill.logits").copy_(logits)
        chosen = op_named("Choose").reference(logits, *params)
        self.port("prefill.choice").copy_(chosen[0])
        self.port("prefill.logprob").copy_(chosen[1])
        if self.manifest.draft is None:
            return
        self.port("prefill.last_captured").copy_(aux_hidden[self.port("prefill.logit_rows").long()])
        names = ("row_start", "row_slot", "tree_start", "ancestor_bits")
        row_start, row_slot, start, bits = (self.port(f"prefill.{name}") for name in names)
        rows = entry.rows
        self._draft(
            self.port("prefill.draft_token_ids", rows),
            aux_hidden,
            self.port("prefill.positions", rows),
            (row_start, row_slot[:rows], start, bits[:rows]),
            self.port("prefill.draft_write_slot", rows),
        )

    def _score(self, entry: ProgramEntry) -> None:
        aux_hidden, logits = self._given(entry, "score.logit_rows")
        self.port("score.logits").copy_(logits)
        if self.manifest.draft is not None:
            self.port("score.captured", entry.rows).copy_(aux_hidden)

    def _given(self, entry: ProgramEntry, logit_rows: str) -> tuple[torch.Tensor, torch.Tensor]:
        rows, names = entry.rows, ("row_start", "row_slot", "tree_start", "ancestor_bits")
        row_start, row_slot, start, bits = (self.port(f"prefill.{name}") for name in names)
        assert not bits.any()
        writes = {g: self.port(f"prefill.write_slot.{g}", rows) for g in ("full", "sliding")}
        ids, positions = (self.port(f"prefill.{x}", rows) for x in ("token_ids", "positions"))
        places = (row_start, row_slot[:rows], start, bits[:rows])
        logits, aux_hidden = self._target(ids, positions, places, writes, BATCHES[-1])
        return aux_hidden, logits[self.port(logit_rows).long()]

    def _check_padding(self, entry: ProgramEntry) -> None:
        live = int(self.port("prefill.row_start")[-1])
        for name in ("token_ids", "positions", "row_slot", "write_slot.full", "write_slot.sliding"):
            assert not self.port(f"prefill.{name}", entry.rows)[live:].any(), name

    def _target(self, ids, positions, places, writes, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, at = ids.numpy(), positions.numpy()
        full = self._attend("full", mix(x, at, 1), mix(x, at, 3), places, writes["full"], n)
        sliding = self._attend(
            "sliding", mix(x, at, 2), mix(x, at, 4), places, writes["sliding"], n
        )
        state = mix(full, sliding, x)
        aux_hidden = np.stack([state, x], axis=1).astype(np.float32)
        return torch.from_numpy(logits_of(state, x, VOCAB, 2.5)), torch.from_numpy(aux_hidden)

    def _draft(self, ids, hidden, positions, places, write) -> tuple[torch.Tensor, torch.Tensor]:
        x, at = ids.numpy(), positions.numpy()
        own = mix(x, at, hidden[:, 0].nan_to_num().numpy())
        seen = self._attend("draft", own, np.zeros_like(own), places, write, len(places[2]))
        state = mix(seen, x)
        out = np.stack([state, at], axis=1).astype(np.float32)
        return torch.from_numpy(logits_of(state, x, DRAFT_VOCAB, 2.5)), torch.from_numpy(out)

    def _attend(self, group: str, k, v, places, write: torch.Tensor, n: int) -> np.ndarray:
        """Write k and v, and return the sum of k + 3v over visible slots; 0 for padding rows."""
        row_start, row_slot, tree_start, bits = places
        cache = self.cache(group)
        for pool, new in zip(cache, (k, v), strict=True):
            entries = torch.from_numpy(new.astype(np.float32)).view(-1, 1, 1)
            pool.copy_(op_named("KvWrite").reference(pool, entries, write))
        found = self.manifest.group(group)
        size, table = found.page_size, self.port(f"page_table.{group}")
        values = (cache[0] + 3 * cache[1]).view(-1, size)
        sums = torch.zeros(len(k))
        for b in range(min(n, len(row_start) - 1)):
            rows = slice(int(row_start[b]), int(row_start[b + 1]))
            slots = table[b].long()
            seen = visibility(
                row_slot[rows].long(),
                int(tree_start[b]),
                bits[rows].clone(),
                len(slots) * size,
                found.window,
            )
            real = write[rows] >= size  # a row that writes to page 0 is padding
            seen = seen & real[:, None]
            assert (slots[seen.any(0).view(-1, size).any(1)] > 0).all(), "page 0 was read"
            read = values[slots].view(1, -1).expand(len(seen), -1)
            sums[rows] = read.where(seen, 0.0).sum(1)
        assert not sums.isnan().any(), f"a row of {group} read a freed or unwritten slot"
        return sums.numpy().astype(np.int64)

    def _commit(self, path: torch.Tensor, n: int) -> None:
        """Run PathCommit by its definition: slot length + path[i] moves to length + i."""
        for group in ("full", "sliding"):
            cache, size = self.cache(group).flatten(1), self.manifest.group(group).page_size
            table, before = self.port(f"page_table.{group}"), cache.clone()
            for b in range(n):
                length = int(self.port("length")[b])
                for i, slot in enumerate(path[b].tolist()):
                    if slot >= 0 and slot != i:
                        source, target = (
                            int(table[b, x // size]) * size + x % size
                            for x in (length + slot, length + i)
                        )
                        cache[:, target] = before[:, source]

    def _d2t(self) -> torch.Tensor:
        data = self.gpu.view(self._addresses[0], D2T.nbytes)
        return torch.from_numpy(data.view(np.int32).copy())


@dataclasses.dataclass
class ToyCuda:
    """An engine with a toy device, which accounts for every page."""

    engine: Engine
    device: ToyDevice
    ledger: PageLedger


def toy_cuda(
    settings: RuntimeSettings = DEFAULT_SETTINGS,
    *,
    text: TextCodec | None = None,
    recorded: bool = True,
    shapes: Sequence[DraftShape] = SHAPES,
    step_costs: StepCosts | None = None,
    without: str = "none",
    guides_alone: bool = False,
    **options: object,
) -> ToyCuda:
    """Return a new engine whose unwritten and released cache slots are NaN."""
    manifest = cuda_manifest(**options)
    plan = toy_plan(manifest, shapes)
    if guides_alone:
        plan = with_programs(plan, lambda e: e.full_logits or not e.host_proposal)
        manifest = dataclasses.replace(manifest, drafters=manifest.models)
    plan = with_programs(plan, lambda e: without not in e.name)
    device, ledger = ToyDevice(manifest, plan), PageLedger()
    executor = CudaExecutor(
        device.gpu,
        plan,
        lambda name: plan_file(plan, name),
        device.load_weights,
        recorded=recorded,
    )
    for group in manifest.cache_groups:
        device.poison(executor, group.name, range(1, group.pages))

    def released(group: str, pages: Sequence[int]) -> None:
        ledger.released(group, pages)
        device.poison(executor, group, pages)

    hooks = {"pages_released": released, "pages_installed": ledger.installed}
    engine = Engine(manifest, executor, settings, text=text, step_costs=step_costs, **hooks)
    return ToyCuda(engine, device, ledger)
