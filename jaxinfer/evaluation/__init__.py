"""Measuring what a change of number format does to a model's predictions."""
