"""Expected acceptance of the chains of a synthetic draft, from the rules of both models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbuild.runtime.records import RunRecord


def expected_histogram(
    record: RunRecord, target: Sequence[int], draft: Mapping[int, int], depth: int
) -> list[int]:
    """Count steps with chains of ``depth`` by their accepted draft tokens.

    ``target`` and ``draft`` map a token to its successor. AssertionError if the output is not the
    target's.
    """
    token = record.prompt_ids[-1]
    for emitted in record.output_ids:
        assert emitted == target[token]
        token = emitted
    expected, root, done = [0] * (depth + 1), record.output_ids[0], 1
    while done < len(record.output_ids):
        accepted, token = 0, root
        most = min(depth, len(record.output_ids) - done - 1)
        while accepted < most and draft[token] == target[token]:
            accepted, token = accepted + 1, target[token]
        expected[accepted] += 1
        done, root = done + accepted + 1, target[token]
    return expected
