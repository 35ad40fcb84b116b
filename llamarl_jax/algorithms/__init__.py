"""WHAT is optimized: losses, advantages, corrections; pure functions."""
