"""From arguments to a running engine: checks, model, tokenizer, parameters, sizes."""
