"""The engine's host side: requests, scheduling, outputs. Nothing here imports JAX."""
