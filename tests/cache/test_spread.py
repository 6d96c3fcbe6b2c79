"""The spread of a head's channels."""

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.cache.spread import channel_spread


@pytest.mark.parametrize(
    ("head_dim", "gain"), [(2, 0.5), (4, 1.0), (64, 1.0), (80, 1.0), (96, 0.5), (128, 0.5), (256, 1.0)]
)
def test_it_is_orthogonal_and_exact_in_every_dtype(head_dim: int, gain: float) -> None:
    spread = channel_spread(head_dim)
    assert spread.gain == gain
    np.testing.assert_array_equal(spread.matrix @ spread.matrix.T, gain * np.eye(head_dim))
    for dtype in (ml_dtypes.bfloat16, np.float16):
        np.testing.assert_array_equal(spread.matrix.astype(dtype).astype(np.float32), spread.matrix)


@pytest.mark.parametrize(("head_dim", "stretch"), [(64, 64), (128, 128), (80, 16), (96, 32)])
def test_an_outlier_is_shared_by_its_stretch(head_dim: int, stretch: int) -> None:
    spread = channel_spread(head_dim)
    outlier = np.zeros(head_dim, np.float32)
    outlier[3] = 100.0
    shares = np.abs(outlier @ spread.matrix) / spread.gain**0.5
    np.testing.assert_allclose(shares[:stretch], 100.0 / stretch**0.5, rtol=1e-6)
    assert not shares[stretch:].any()
