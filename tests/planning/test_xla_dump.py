"""XLA's launch list and buffer list, as jax 0.10.2 and 0.12 write them."""

from jaxinfer.planning.xla_dump import Buffer, Launch, parse_launches, parse_sources, parse_temporaries

THUNKS = """\
000: kCommandBuffer [source | next=005 (1)]
    001: kDynamicSliceFusion [source       | next=003 (1)] params=1, results=1
        002: kCopy [source | sink] kCopy
    003: kCustomKernel [prev=001 | sink] gemm_fusion_dot grid: [64, 8, 1] threads: [64, 2, 1] shared_memory: 768 bytes
005: kCustomKernel  [prev=000 (1) | next=006 (1)] loop_add_fusion grid: [160, 1, 1] threads: [128, 1, 1]
006: kCommandBuffer [prev=005 (1) | sink]
    007: kGemm      [source | sink] cublas-gemm.1
"""

METADATA = """\
thunk_metadata {
  thunk_info {
    profile_annotation: "command_buffer_1"
  }
  thunk_kind: "kCommandBuffer"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "gemm_fusion_dot.2"
    thunk_id: 3
  }
  thunk_kind: "kCustomKernel"
}
thunk_metadata {
  thunk_info {
    profile_annotation: "copy.1"
    thunk_id: 2
  }
  thunk_kind: "kCopy"
}
"""

HLO = """\
ENTRY %main.5 {
  %copy.1 = f32[4]{0} copy(%p), metadata={stack_frame_id=3}
  ROOT %gemm_fusion_dot.2 = bf16[32,4]{1,0} fusion(%a, %b), kind=kCustom, metadata={op_name="jit(step)/mlp/dot" stack_frame_id=2}
}
"""  # noqa: E501

BUFFERS = """\
BufferAssignment:
allocation 0: size 4096, parameter 0, shape |bf16[32,64]| at ShapeIndex {}, maybe-live-out:
 value: <146 kv.1 @0> (size=4096,offset=0): bf16[32,64]{1,0}
allocation 1: size 4, thread-local:
 value: <11 reduce_sum.14.0 @0> (size=4,offset=0): f32[]
allocation 2: size 3072, preallocated-temp:
 value: <150 input_reduce_fusion.7 @0> (size=16,offset=0): f32[4]{0}
 value: <152 gemm_fusion_dot @0> (size=3072,offset=0): f32[8,96]{1,0}
"""


def test_launches_know_their_graph() -> None:
    launches, num_command_buffers = parse_launches(THUNKS.splitlines())
    assert num_command_buffers == 2
    assert launches == (
        Launch("Copy", "kCopy", True),
        Launch("CustomKernel", "gemm_fusion_dot", True, (64, 8, 1), 128, 768),
        Launch("CustomKernel", "loop_add_fusion", False, (160, 1, 1), 128),
        Launch("Gemm", "cublas-gemm.1", True),
    )


def test_launches_know_what_they_compute() -> None:
    sources = parse_sources(METADATA, HLO)
    assert sources == {3: "jit(step)/mlp/dot"}
    launches, _ = parse_launches(THUNKS.splitlines(), sources)
    assert [launch.source for launch in launches] == ["", "jit(step)/mlp/dot", "", ""]


def test_temporaries_are_the_scratch_values_only() -> None:
    temporaries = parse_temporaries(BUFFERS.splitlines())
    assert temporaries == (Buffer("gemm_fusion_dot", 3072), Buffer("input_reduce_fusion.7", 16))
