"""Launchers: where the executors of a program run."""
