"""Finding the model, for subcommands that start no engine."""

import argparse
from pathlib import Path


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds what a model of the Hub may need."""
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hub model")
    parser.add_argument("--hf-token", metavar="TOKEN", help="access token of the Hub")


def find_model(model: str, arguments: argparse.Namespace, *, weights: bool = True) -> Path:
    """Where the model lies, after fetching it if need be; without `weights` no more than a Hub model's settings.

    Raises:
        ValueError: there is no such model.
        ConnectionError: it has to be downloaded and the network does not answer.
    """
    from jaxinfer.cache_dir import default_cache_dir
    from jaxinfer.checkpoint.resolve import resolve_model

    return resolve_model(
        model,
        revision=arguments.revision,
        token=arguments.hf_token,
        weights=weights,
        cache_dir=default_cache_dir(),
    )
