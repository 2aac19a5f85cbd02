"""Modes that give up exactness for speed, off unless asked for."""
