"""Seeded faults that named tests must detect: ``python -m mutations``."""
