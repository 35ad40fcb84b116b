"""HOW a token is drawn: keys, samplers, decode segments."""
