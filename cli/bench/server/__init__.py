"""``specbuild bench server``: the speed of a server as its clients see it."""
