"""Why asynchrony is faster: costs, memory, schedules, and their simulation."""
