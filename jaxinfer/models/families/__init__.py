"""One table a model family: its config keys, its weight names."""
