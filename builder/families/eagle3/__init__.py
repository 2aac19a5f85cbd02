"""EAGLE3 drafts."""
