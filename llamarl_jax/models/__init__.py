"""The policy network."""
