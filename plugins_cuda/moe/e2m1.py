"""The four-bit floats of MXFP4 (OCP Microscaling Formats, version 1.0)."""

from __future__ import annotations

from specbuild.plugins_cuda.placed_words import PlacedWords

# By the low three bits; the fourth bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_CODES = (*E2M1, *(-value for value in E2M1))

# The bits of eight values of a word (mantissa, exponent low, exponent high, sign). In this order
# the bf16 pairs (0, 1), (2, 3), (4, 5), (6, 7) take 9 instructions: ``place_word`` in
# ``_device/mxfp4.cuh``. Each is e2m1 · 2^-126 in bits 8:6 of its half, with the sign in bit 15.
E2M1_WORDS = PlacedWords(
    (
        (6, 7, 8, 15),
        (22, 23, 24, 31),
        (0, 1, 2, 9),
        (16, 17, 18, 25),
        (10, 11, 12, 19),
        (26, 27, 28, 3),
        (4, 5, 14, 13),
        (20, 21, 30, 29),
    )
)
