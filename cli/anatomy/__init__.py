"""The anatomy of steps: launches grouped by similar layers, as tables and as a picture."""
