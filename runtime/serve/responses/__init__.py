"""``/v1/responses``: items in, items out, kept for a while under their answer's id."""
