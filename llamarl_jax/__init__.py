"""Asynchronous reinforcement learning of Llama policies, in JAX."""
