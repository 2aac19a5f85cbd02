"""Compares an engine with an independent reference."""

from specbuild.builder.verify.report import LosslessRow, VerifyReport, VerifyRow
from specbuild.builder.verify.verification import verify_engine

__all__ = ["LosslessRow", "VerifyReport", "VerifyRow", "verify_engine"]
