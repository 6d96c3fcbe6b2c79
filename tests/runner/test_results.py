"""The best of a whole row of logits, of which there are too many for the step's own copy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.runner.results import _best

VALUES = st.lists(st.sampled_from([-np.inf, -2.5, -1.0, 0.0, 0.5]), min_size=1, max_size=40)


@given(values=VALUES, share=st.floats(0, 1))
def test_the_largest_first_and_the_first_of_equals_first(values: list[float], share: float) -> None:
    row, count = np.array(values, np.float32), max(1, round(share * len(values)))
    expected = sorted(range(len(values)), key=lambda place: -values[place])[:count]
    assert _best(row, count).tolist() == expected


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_row_that_is_not_finite_has_as_many(count: int) -> None:
    row = np.array([0.0, np.nan, 1.0, np.nan, -1.0, np.inf], np.float32)
    assert len(set(_best(row, count).tolist())) == count
