"""The engine directory: manifest, plan, files, weights."""
