"""The first half of a gated feed-forward layer: normalise, project twice, gate."""

from pallas_kernels.gated_matmul.api import chosen_implementation, norm_gated_matmul
from pallas_kernels.gated_matmul.reference import ACTIVATIONS, norm_gated_matmul_reference

__all__ = ["ACTIVATIONS", "chosen_implementation", "norm_gated_matmul", "norm_gated_matmul_reference"]
