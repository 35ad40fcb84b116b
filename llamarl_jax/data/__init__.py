"""Prompt sources, tokenizers and chat templates."""
