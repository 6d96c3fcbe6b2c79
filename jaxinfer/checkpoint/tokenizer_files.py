"""The tokenizer's files of a model, written beside other weights."""

import shutil
from pathlib import Path

from jaxinfer.checkpoint.gguf import read_gguf

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
)
TEMPLATES = "additional_chat_templates"


def write_tokenizer(source: Path, folder: Path) -> None:
    """Copies a directory's tokenizer and chat templates, or writes those inside a GGUF file as such files.

    Raises:
        ValueError: there is no tokenizer, or the GGUF file's is not supported.
    """
    source = source.expanduser()
    if source.is_file() and source.suffix == ".gguf":
        from jaxinfer.tokenizers.gguf_files import write_gguf_tokenizer

        write_gguf_tokenizer(read_gguf(source).metadata, folder)
        return
    if not any((source / name).is_file() for name in FILES[:2]):
        raise ValueError(f"{source} has neither tokenizer.json nor tokenizer.model, so there is no tokenizer to copy")
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / TEMPLATES).is_dir():
        (folder / TEMPLATES).mkdir(exist_ok=True)
        for file in sorted((source / TEMPLATES).glob("*.jinja")):
            shutil.copyfile(file, folder / TEMPLATES / file.name)
