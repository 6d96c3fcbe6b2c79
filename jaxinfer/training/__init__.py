"""Training: log-probabilities that gradients flow through, losses, a data-parallel step, distillation."""

from jaxinfer.training.logprobs import token_logprobs

__all__ = ["token_logprobs"]
