"""``/v1/responses``: creates responses, and stores them for a limited time."""
