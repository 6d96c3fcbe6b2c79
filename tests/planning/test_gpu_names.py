"""GPUs by the names that people write."""

import pytest

from jaxinfer.planning.gpu_names import find_gpu
from jaxinfer.planning.gpu_specs import GPU_SPECS


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("A100 80G", "a100-80g"),
        ("A100-80GB", "a100-80g"),
        ("A100-80", "a100-80g"),
        ("40 GB A100", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("a100_80g", "a100-80g"),
        ("A100", "a100-80g"),
        ("A100 40G", "a100-40g"),
        ("A100 40GB PCIe", "a100-40g"),
        ("RTX 4090", "rtx4090"),
        ("RTX4090", "rtx4090"),
        ("4090 24G", "rtx4090"),
        ("4090", "rtx4090"),
        ("GeForce RTX 4090 (24 GB)", "rtx4090"),
        ("L4", "l4"),
        ("NVIDIA L4 24GB", "l4"),
        ("L40S", "l40s"),
        ("l40s 48g", "l40s"),
        ("H100", "h100"),
        ("H100 SXM5 80GB", "h100"),
        ("h200", "h200"),
        ("H200 141GB", "h200"),
        ("B200", "b200"),
        ("NVIDIA B200 192GB", "b200"),
    ],
)
def test_names(name: str, card: str) -> None:
    found = find_gpu(name)
    assert (found.name, found.count) == (card, None)
    assert found.guessed == (name == "A100")


@pytest.mark.parametrize("name", GPU_SPECS)
def test_own_names_and_the_drivers(name: str) -> None:
    assert find_gpu(name).name == find_gpu(GPU_SPECS[name].device_name).name == name


@pytest.mark.parametrize(
    ("name", "card", "count"),
    [
        ("4x 4090", "rtx4090", 4),
        ("4x4090", "rtx4090", 4),
        ("4 x RTX 4090 24G", "rtx4090", 4),
        ("8xA100 80G", "a100-80g", 8),
        ("2*h100", "h100", 2),
        ("8 H100", "h100", 8),
        ("2 4090", "rtx4090", 2),
        ("h200 x 8", "h200", 8),
        ("A100 80GB x2", "a100-80g", 2),
        ("L4x16", "l4", 16),
    ],
)
def test_names_with_a_number(name: str, card: str, count: int) -> None:
    assert (find_gpu(name).name, find_gpu(name).count) == (card, count)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("V100", "gpu='V100' is not a known GPU; use one of a100-40g"),
        ("", "gpu='' is not a known GPU"),
        ("h100 h200", "is not a known GPU"),
        ("A100 60G", "no A100 of 60 GB; it has 80 or 40 GB"),
        ("H100 94G", "no H100 of 94 GB"),
        ("0x h100", "at least one GPU"),
    ],
)
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_gpu(name)


def test_a_name_is_a_text() -> None:
    with pytest.raises(TypeError, match="gpu=4090"):
        find_gpu(4090)  # type: ignore[arg-type]


def test_memory_is_what_the_name_says_within_the_units() -> None:
    """80 GB are between 80e9 bytes and 80 GiB; the driver keeps a part, on cards with error correction a twelfth."""
    for name, size in {"a100-40g": 40, "a100-80g": 80, "rtx4090": 24, "l4": 24, "l40s": 48, "h100": 80}.items():
        assert 0.91 * size * 2**30 <= GPU_SPECS[name].memory_bytes <= size * 2**30
    assert 141e9 <= GPU_SPECS["h200"].memory_bytes <= 141 * 2**30
    assert 180e9 <= GPU_SPECS["b200"].memory_bytes <= 192 * 2**30
