"""HOW one update is made: batches, optimizer, train step."""
