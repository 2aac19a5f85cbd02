"""The records of drafters in the manifest: a file for each kind; ``registry.py`` lists them."""
