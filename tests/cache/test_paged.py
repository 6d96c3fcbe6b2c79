"""The KV pool on the device."""

import pytest

from jaxinfer.cache.paged import init_kv_cache
from jaxinfer.models.config import ModelConfig

CONFIG = ModelConfig(vocab_size=16, hidden_size=64, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)


def test_a_pool_that_does_not_fit_says_what_to_lower() -> None:
    # 2 layers x 1e11 blocks x 8 rows x 16 tokens x 16 numbers x 4 bytes
    with pytest.raises(ValueError, match=r"100000000000 blocks, 1525878.9 GiB, does not fit.*num_gpu_blocks_override"):
        init_kv_cache(CONFIG, 10**11, 16, "float32")
