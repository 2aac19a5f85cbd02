"""P-EAGLE (arXiv 2602.01469): EAGLE3 drafts that draft every position in one causal pass."""
