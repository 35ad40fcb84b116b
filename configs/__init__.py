"""Configs: base.py has every field, the others are diffs on it."""
