"""Rule-based scorers: pure functions from text to named numbers."""
