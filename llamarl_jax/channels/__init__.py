"""The paper's channels: data edges, and the movement of weights."""
