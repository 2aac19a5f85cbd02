"""The programs of one speculative step."""
