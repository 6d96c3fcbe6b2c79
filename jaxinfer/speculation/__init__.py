"""Guessing tokens ahead of the model: methods that propose drafts, and the engine's `Speculation` around them."""
