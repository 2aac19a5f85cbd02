"""Gemma 4's assistants: drafts whose layers read the target's caches."""
