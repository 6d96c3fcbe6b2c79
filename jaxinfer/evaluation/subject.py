"""The model that is evaluated."""

from dataclasses import dataclass

import jax

from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.load import load_params, resolve_dtype
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.compile_cache import enable_compile_cache
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.device_memory import claim_gpu_memory
from jaxinfer.startup.loading import find_model, make_tokenizer
from jaxinfer.startup.quantization import named_method, quant_plan
from jaxinfer.startup.sizing import compilation_cache_dir
from jaxinfer.tokenizers.tokenizer import Tokenizer
from jaxinfer.typing import Params


@dataclass(frozen=True)
class Subject:
    """A checkpoint of which nothing but headers and the tokenizer has been read.

    Attributes:
        args: the engine's settings.
        config: the architecture.
        dtype: dtype name of parameters and activations.
        tokenizer: of the model.
    """

    args: EngineArgs
    checkpoint: Checkpoint
    dtype: str
    tokenizer: Tokenizer

    @classmethod
    def find(cls, args: EngineArgs) -> "Subject":
        """Raises ValueError for a model that is not there or has no tokenizer; ConnectionError where it has to be
        downloaded and the network does not answer."""
        assert args.model is not None
        claim_gpu_memory(args.gpu_memory_utilization)
        checkpoint = open_checkpoint(find_model(args, args.model, args.revision))
        tokenizer = make_tokenizer(args, checkpoint)
        if tokenizer is None:
            raise ValueError("skip_tokenizer_init=True: a text cannot be evaluated without a tokenizer; leave it out")
        return cls(args, checkpoint, resolve_dtype(args.dtype, checkpoint.dtype, jax.default_backend()), tokenizer)

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.model_config

    def window(self, wanted: int | None) -> int:
        """Tokens of a window: as wanted, by default the longest prompt that the model takes.

        Raises:
            ValueError: the model does not take that many.
        """
        longest = (self.args.max_model_len or self.config.max_position_embeddings) - 1
        if wanted is not None and wanted > longest:
            raise ValueError(f"window={wanted} exceeds the {longest} tokens of the longest prompt (max_model_len - 1)")
        return longest if wanted is None else wanted

    def load(self) -> Params:
        """Reads the parameters and quantises them as the arguments say; programs compiled from now on are kept where
        they say."""
        folder = compilation_cache_dir(self.args)
        if folder is not None:
            enable_compile_cache(folder)
        plan = quant_plan(
            named_method(self.args.quantization),
            self.args.quant_options,
            self.config,
            self.checkpoint,
            jax.default_backend(),
        )
        return load_params(self.checkpoint, self.dtype, plan=plan, progress=self.args.use_tqdm_on_load)
