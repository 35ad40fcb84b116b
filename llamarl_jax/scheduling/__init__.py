"""WHEN things may happen: versions, admission order, timeline records."""
