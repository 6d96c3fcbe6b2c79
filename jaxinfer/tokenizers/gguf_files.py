"""A GGUF file's tokenizer as the files of a Hugging Face directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.tokenizers.gguf import GGUFTokenizer, added_tokens, chat_templates, sentencepiece_model, special_tokens
from jaxinfer.tokenizers.hf import HFTokenizer


def write_gguf_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Writes files from which `load_tokenizer` makes the tokenizer that the metadata describes, id for id.

    A byte-level vocabulary becomes a tokenizer.json, which other libraries read alike. A sentencepiece one becomes a
    tokenizer.model; that a space is put in front of every stretch of text between special tokens, which is what
    llama.cpp does, is written as ``legacy``.

    Args:
        fields: metadata keys -> Python values.
        folder: where tokenizer.json or tokenizer.model, tokenizer_config.json and the chat templates go.

    Raises:
        ValueError: a field is missing, inconsistent or of a kind that is not supported; names the field.
    """
    tokenizer = GGUFTokenizer.from_metadata(fields)
    config: dict[str, Any] = {**special_tokens(fields), "clean_up_tokenization_spaces": False}
    for key in ("add_bos_token", "add_eos_token"):
        if f"tokenizer.ggml.{key}" in fields:
            config[key] = bool(fields[f"tokenizer.ggml.{key}"])
    if isinstance(tokenizer, HFTokenizer):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    else:
        config |= {"tokenizer_class": "LlamaTokenizer", "legacy": True}
        config.setdefault("add_bos_token", True)
        config["added_tokens_decoder"] = {
            str(token.id): {"content": token.content, "special": token.special, "rstrip": token.rstrip}
            for token in added_tokens(fields)
        }
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(fields))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    for name, template in chat_templates(fields).items():
        file = folder / "chat_template.jinja"
        if name != "default":
            file = folder / "additional_chat_templates" / f"{Path(name).name}.jinja"
            file.parent.mkdir(exist_ok=True)
        file.write_text(template, encoding="utf-8")
