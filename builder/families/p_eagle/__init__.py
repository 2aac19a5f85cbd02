"""P-EAGLE (arXiv 2602.01469): EAGLE3 drafts that draft all positions in one causal pass."""
