"""Drafting with a checkpoint's multi-token prediction (MTP) layer."""
