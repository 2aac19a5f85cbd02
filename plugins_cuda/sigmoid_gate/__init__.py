"""Rows times the sigmoid of a gate."""
