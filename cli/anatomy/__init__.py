"""The anatomy of steps: launches folded by alike layers, as tables and as a picture."""
