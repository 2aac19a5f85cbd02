"""Kills, full disks and signals at every call that changes a file, and what they leave."""
