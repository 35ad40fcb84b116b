"""Model files in, run state in and out."""
