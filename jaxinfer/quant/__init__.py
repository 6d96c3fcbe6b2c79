"""Weights in 8 and 4 bits: how they are made, stored, and multiplied with."""
