"""How a toy step verifies the host's chains, by definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbuild.runtime.engine_dir.plan import ProgramEntry


def offered_tree(port: torch.Tensor, entry: ProgramEntry) -> tuple[torch.Tensor, ...]:
    """Return the chains as TreeSelect does: tokens, parents, depths, bits, counts."""
    n, nodes = entry.batch, entry.draft_tokens + 1
    slots = torch.arange(nodes).expand(n, nodes)
    bits = (torch.ones(nodes, nodes).tril().int() << torch.arange(nodes)).sum(1).int()
    tokens = port[n : n * (nodes + 1)].view(n, nodes)
    return tokens, slots - 1, slots, bits.expand(n, nodes)[..., None], port[:n]


def counts_port(entry: ProgramEntry) -> str:
    """Return the port of the rows of each sequence of a ragged step."""
    return "offered" if entry.host_proposal else "row_counts"


def slot_rows(row_start: torch.Tensor, entry: ProgramEntry) -> torch.Tensor:
    """Return the row of each slot of all chains; any row for slots without one."""
    if not entry.is_ragged:
        return torch.arange(entry.rows)
    slots = row_start[:-1].unsqueeze(1) + torch.arange(entry.draft_tokens + 1)
    return slots.flatten().clamp(max=entry.rows - 1).long()


def accepted_rows(
    tree: tuple[torch.Tensor, ...],
    accepted: Sequence[int],
    length: torch.Tensor,
    table: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Return positions, places and write slots of a draft's rows.

    Those of accepted tokens are written to pages. ``accepted[b]`` is -1 for a finished sequence.
    """
    n, nodes = tree[0].shape
    positions = torch.zeros(n, nodes).int()
    write = torch.arange(n * nodes).int().view(n, nodes) % page_size
    for b, count in enumerate(accepted):
        positions[b] = torch.arange(nodes) + (int(length[b]) if count >= 0 else 0)
        for i in range(count):
            at = int(positions[b, i])
            write[b, i] = table[b, at // page_size] * page_size + at % page_size
            assert write[b, i] >= page_size, "the draft has no page to write"
    starts = (torch.arange(n + 1) * nodes).int()
    places = (starts, positions.flatten(), positions[:, 0], tree[3].flatten(0, 1))
    return positions.flatten(), places, write.flatten()
