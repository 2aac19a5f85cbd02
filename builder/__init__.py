"""From a checkpoint to an engine directory: reading, models, export, passes, lowering, writing."""
