"""Inputs that ``tune`` draws for layers with recurrent states: slots, accepted rows, factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from specbuild.builder.backends.cuda.tuning.inputs import LaunchData
    from specbuild.plugins_cuda.launches import TensorInfo


def state_slots(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return the slot of each sequence, int32 [B], in a random order."""
    return data.rng.permutation(info.shape[0]).astype(np.int32)


def replay_path(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return the rows of a chain for each sequence, int32 [B, D], as far as a slot keeps rows."""
    nodes = data.request.tensors["factor_pool"].shape[1]
    path = np.minimum(np.arange(info.shape[1]), nodes - 1)
    return np.broadcast_to(path, info.shape).astype(np.int32)


def replay_count(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return how many rows each sequence accepted, int32 [B].

    They are one row, and up to all other rows of the sequence's last launch.
    """
    path = data.request.tensors["replay_path"].shape[1]
    most = min(path, int(np.diff(data.row_start).max()))
    return (1 + np.arange(info.shape[0]) % max(most, 1)).astype(np.int32)


def factors(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return small factors, fp32, with which a state stays finite in all measured launches."""
    return data.rng.uniform(0, 0.1, info.shape).astype(np.float32)


def decay_scale(data: LaunchData, info: TensorInfo) -> np.ndarray:
    """Return negative factors of the decay, fp32 [V]."""
    return -data.rng.uniform(0.01, 1, info.shape).astype(np.float32)
