"""A matrix product whose weights stay packed: 4 or 8 bits each, with a scale (and an offset, or a table) a group."""

from pallas_kernels.quantized_matmul.api import chosen_implementation, quantized_matmul
from pallas_kernels.quantized_matmul.operands import ScaleTable
from pallas_kernels.quantized_matmul.reference import dequantize, quantized_matmul_reference

__all__ = ["ScaleTable", "chosen_implementation", "dequantize", "quantized_matmul", "quantized_matmul_reference"]
