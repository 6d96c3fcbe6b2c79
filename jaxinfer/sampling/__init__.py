"""Drawing tokens on the device: per-row parameters, per-slot state, logits transforms, the sampler."""
