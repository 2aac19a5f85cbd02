"""Mutants of what comes from elsewhere, and what becomes of each: `make fuzz`."""
