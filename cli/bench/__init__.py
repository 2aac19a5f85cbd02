"""``specbuild bench``: measured runs, tables and plots."""
