"""The table of launches."""

from jaxinfer.planning.kernel_resources import KernelResources
from jaxinfer.planning.launch_table import aligned, launch_table, operation
from jaxinfer.planning.xla_dump import Launch

LAYER = "jit(forward_step)/Decoder/jit(apply_layer)/DecoderLayer"


def test_a_kernel_and_a_library_call() -> None:
    launches = (
        Launch("CublasLtMatmul", "kCublasLtMatmul", True, source=f"{LAYER}/attn/qkv/dot_general"),
        Launch("CustomKernel", "rope_kv_write", False, (32, 8, 1), 64, 128, f"{LAYER}/attn/rope_kv_write/pallas_call"),
    )
    kernel = KernelResources("rope_kv_write", 1, (32, 8, 1), 64, 60, 8, 128)
    header, call, write = launch_table(launches, [kernel]).splitlines()
    assert header.split() == ["launch", "computes", "blocks", "threads", "registers", "spilled", "shared"]
    assert call.split() == ["1", "kCublasLtMatmul", "attn/qkv/dot_general"]
    assert write.split() == ["2*", "rope_kv_write", "attn/rope_kv_write/pallas_call", "32x8", "64", "60", "8", "128"]


def test_operations_are_named_from_their_module_on() -> None:
    assert operation(f"{LAYER}/mlp_norm/mul") == "mlp_norm/mul"
    assert operation("jit(step)/shard_map/Decoder/embed/jit(_take)/gather") == "embed/gather"
    assert operation("jit(step)/vmap(jit(search))/closed_call/select_n") == "select_n"
    assert operation(f"{LAYER}/mlp/down/cond/branch_0_fun/dot_general") == "mlp/down/dot_general"
    assert operation("") == ""


def test_columns_line_up() -> None:
    assert aligned([("", "name", "n"), ("10", "a", "5")], left=[1]) == "    name  n\n10  a     5"
