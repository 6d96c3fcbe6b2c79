"""Batches of rows for the sampler's tests, made field by field, independently of the packing under test."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxinfer.sampling.batch import SamplingBatch

FIELDS = {
    "slot": (np.int32, None),
    "target": (np.int32, -1),
    "position": (np.int32, 0),
    "temperature": (np.float32, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "repetition_penalty": (np.float32, 1.0),
    "presence_penalty": (np.float32, 0.0),
    "frequency_penalty": (np.float32, 0.0),
    "seed_lo": (np.uint32, 0),
    "seed_hi": (np.uint32, 0),
    "child_index": (np.int32, 0),
    "use_bias": (np.int32, 0),
    "use_counts": (np.int32, 0),
    "want_logprobs": (np.int32, 0),
}


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., SamplingBatch]:
    """make_batch(R, field=scalar or list, ...): the rest is a plain greedy draw into slots 0 .. R - 1."""

    def make(num_rows: int, **values: object) -> SamplingBatch:
        assert values.keys() <= FIELDS.keys()
        columns = {}
        for name, (dtype, default) in FIELDS.items():
            value = values.get(name, np.arange(num_rows) if default is None else default)
            columns[name] = np.broadcast_to(np.asarray(value, dtype), (num_rows,)).copy()
        return SamplingBatch(**columns)

    return make
