"""The plan: launches and a place for every tensor; written, read back, and run on a CPU."""
