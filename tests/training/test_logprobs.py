"""Log-probabilities of tokens: the engine's own, and their gradients."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.training import token_logprobs
from jaxinfer.training.chunks import over_tokens

IDS = jnp.array([[5, 1, 7, 2, 9, 4, 3], [3, 3, 8, 1, 0, 6, 200]], jnp.int32)


def log_softmax(logits: Any) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.mark.parametrize(("chunk", "remat", "temperature"), [(512, False, 1.0), (5, True, 0.7)])
def test_they_are_the_log_softmax_of_the_logits(
    tiny_config: ModelConfig, tiny_params: Any, chunk: int, remat: bool, temperature: float
) -> None:
    params = tiny_params(0)
    logits = jax.jit(SequenceDecoder(tiny_config).__call__)(params, IDS) / temperature
    expected = np.take_along_axis(log_softmax(logits)[:, :-1], np.asarray(IDS)[:, 1:, None], -1)[..., 0]
    run = jax.jit(partial(token_logprobs, config=tiny_config, chunk=chunk, remat=remat, temperature=temperature))
    np.testing.assert_allclose(run(params, IDS), expected, rtol=0, atol=2e-4)


def test_segments_have_no_say_over_each_other(tiny_config: ModelConfig, tiny_params: Any) -> None:
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1], [0] * 7], jnp.int32)
    run = jax.jit(partial(token_logprobs, config=tiny_config))
    found = run(tiny_params(0), IDS, segments=segments)
    assert found[0, 2] == 0.0
    alone = [run(tiny_params(0), row[None])[0] for row in (IDS[0, :3], IDS[0, 3:])]
    np.testing.assert_allclose(found[0, :2], alone[0], atol=1e-4)
    np.testing.assert_allclose(found[0, 3:], alone[1], atol=1e-4)


def test_gradients_do_not_depend_on_how_it_is_computed(tiny_config: ModelConfig, tiny_params: Any) -> None:
    """In pieces and with layers computed again; their slope is checked where the decoder is tested."""

    def slopes(**options: Any) -> Any:
        loss = lambda params: token_logprobs(params, IDS, tiny_config, **options).sum()  # noqa: E731
        return jax.jit(jax.grad(loss))(jax.tree.map(jnp.asarray, tiny_params(0)))

    plain, other = slopes(), slopes(chunk=3, remat=True)
    for name, leaf in jax.tree_util.tree_leaves_with_path(plain):
        pair = other
        for key in name:
            pair = pair[key.key]
        np.testing.assert_allclose(leaf, pair, rtol=1e-3, atol=1e-3, err_msg=jax.tree_util.keystr(name))
        assert np.abs(leaf).max() > 0


def test_pieces_cover_every_token_once() -> None:
    x = jnp.arange(11.0)
    found = over_tokens(lambda tree: {"double": tree["x"] * 2, "none": tree["y"]}, {"x": x, "y": None}, chunk=4)
    assert found["double"].tolist() == (2 * x).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": 0.0}, "temperature=0.0 must be above 0"), ({"chunk": 0}, "chunk=0 must be at least 1")],
)
def test_refusals(tiny_config: ModelConfig, tiny_params: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logprobs(tiny_params(0), IDS, tiny_config, **options)
    with pytest.raises(ValueError, match="rows of 1 token"):
        token_logprobs(tiny_params(0), IDS[:, :1], tiny_config)
