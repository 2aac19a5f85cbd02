"""The manifest's records of drafters: a file for each kind, found by the registry."""
