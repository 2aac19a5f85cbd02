"""``specbuild chat``: a conversation in a terminal."""
