"""Drafting with the layer of a checkpoint that was trained to predict a further token (MTP)."""
