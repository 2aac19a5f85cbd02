"""Choices that the last bits of fp32 decide: what two correct computations may differ in."""

from __future__ import annotations

# Two experts whose router logits are closer than this may change places. Another expert's output
# is as far away as it likes, and every later row reads it: what follows may differ at will.
ROUTING_TIE = 1e-5
