"""The four-bit floats of MXFP4 (OCP Microscaling Formats, version 1.0)."""

from __future__ import annotations

# By the low three bits of a code; the fourth is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_CODES = (*E2M1, *(-value for value in E2M1))
