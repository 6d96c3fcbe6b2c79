"""The model that is learned from, from its headers to its parameters on the devices."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.load import load_params, resolve_dtype
from jaxinfer.models.config import ModelConfig
from jaxinfer.tokenizers.tokenizer import Tokenizer
from jaxinfer.typing import Params

if TYPE_CHECKING:
    from jaxinfer.llm import LLM


class Teacher:
    """A checkpoint of which nothing but headers and the tokenizer has been read.

    Args:
        path: of the model.
        dtype: in which it computes, as for `TrainOptions`.

    Attributes:
        checkpoint: the opened checkpoint.
        dtype: "float32", "bfloat16" or "float16".
        tokenizer: of the model.

    Raises:
        ValueError: it does not load, or has no tokenizer.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(path.expanduser())
        self.dtype = resolve_dtype(dtype, self.checkpoint.dtype, jax.default_backend())
        self.tokenizer: Tokenizer = self.checkpoint.tokenizer()

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.model_config

    def params(self, mesh: Mesh, progress: bool) -> Params:
        """Reads the parameters onto every device of the mesh."""
        everywhere = NamedSharding(mesh, PartitionSpec())
        return load_params(self.checkpoint, self.dtype, device=everywhere, progress=progress)

    def llm_maker(self) -> Callable[..., "LLM"]:
        """A function that starts the engine for texts of the model's own, given further keywords of `LLM`."""

        def make(**keywords: Any) -> "LLM":
            from jaxinfer.llm import LLM

            return LLM(
                str(self.checkpoint.path), dtype=self.dtype, skip_tokenizer_init=True, enforce_eager=True, **keywords
            )

        return make
