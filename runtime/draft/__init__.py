"""Drafting: trees, the draft model's calls, policy and costs."""
