"""Quantising with calibration: AWQ and GPTQ, a layer at a time (``layerwise.quantise_layers``)."""
