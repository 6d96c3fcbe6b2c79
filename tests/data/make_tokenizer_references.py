"""Makes tokenizers.json: small vocabularies, and the ids that other libraries give for texts that are hard to cut.

    python make_tokenizer_references.py

Run with transformers 4.57.3 (the last with tokenizers that run sentencepiece itself), sentencepiece 0.2.3, gguf and
llama-cpp-python 0.3.36 in an environment of their own; the tests read only the file. Ids are without BOS.
"""

import base64
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2 as model_pb2
from tokenizers import models, pre_tokenizers, trainers

OUTPUT = Path(__file__).parent / "tokenizers.json"
TEXTS = [
    "",
    " ",
    "  ",
    " hello",
    "hello world ",
    "  two  spaces  ",
    "\n",
    "\n\nhello\n\n\nthere",
    "\t\ttabs\n \n",
    "it's don't WE'LL I'M 'sup o'Re",
    "12345 1 22 4444 0x1F 3.14 $1,000 ½ ٣",
    "<s>hello",
    "<s> hello</s> the",
    "hello</s>the",
    "a<unk>b",
    "[INST] hello [/INST] the",
    "[INST]hello[/INST]the",
    "<start_of_turn>user\nhello<end_of_turn>\n",
    "<|user|>\nhello<|end|>\n <|assistant|> the",
    "x<|extra|>y <|extra|> z",
    "<|im_start|>user\n hi<|im_end|>\n",
    "<tool> the<tool>",
    "▁hello▁world",
    "<0x41>",
    "café 你好 😀🚀 日本語テスト 한국",
    "é e\u0301 \u200bzero\u00a0nbsp\u3000wide\u2028",
    "\x00\x01\x7f",
    "\r\n crlf\r\n",
    "FooBar fooBAR HTMLParser ÀÉx ǅa",
    "END. (the) [dog] {fox}!!! xyzzy ???\n\n",
    "foo_bar #tag/@me//a\n",
    "    indent\n        more",
    "👩‍👩‍👧 the",
    "a" * 20,
]
WORDS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there; the dog said hello to the fox",
    "desc ribed described  two spaces and 12345 digits 67890",
    "a small vocabulary is enough for a small test of the tokenizer",
    "don't we'll I'm they're it's new lines and tabs",
    "naïve café grüße 你好 世界 日本語",
] * 4
# Cut at any place, so that merges cross every border that a pre-tokenizer may put between words.
RUNS = [
    *WORDS[:6],
    "it's don't WE'LL I'M 12345 2024 1000 3.14 $1,000 x=1;y=22;abc123def (the) [dog]!!! ... FooBar fooBAR",
    "HTMLParser hello!!!\n\nthe ???\n\n ...\n\n  the\n\n\n\tnew lines\tand  tabs\r\n    indented\n        more  \n \n",
    " foo_bar #tag/@me//a\n ÀÉx 你好 日本語テスト",
]
SPM_STYLES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 360},
    "mistral": {"vocab_size": 368, "control_symbols": ["[INST]", "[/INST]"]},
    "gemma": {
        "vocab_size": 380,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁"],
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
    },
}
PRE_TOKENIZERS = [
    "default",
    "gpt-2",
    "phi-2",
    "mpt",
    "olmo",
    "a.x-4.0",
    "granite-docling",
    "mellum",
    "trillion",
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "minerva-7b",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "midm-2.0",
    "pixtral",
    "dbrx",
    "smaug-bpe",
    "qwen2",
    "deepseek-r1-qwen",
    "f2llmv2",
    "kormo",
    "megrez",
    "stablelm2",
    "gpt-4o",
    "kanana2",
    "deepseek-coder",
    "seed-coder",
    "tekken",
]
NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
PHI3 = ["<|user|>", "<|end|>", "<|assistant|>", "<|extra|>"]


def train_sentencepiece(**options: Any) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS),
        model_writer=out,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **options,
    )
    return out.getvalue()


def train_bpe() -> dict[str, Any]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [run[i : i + 12] for run in RUNS for i in range(0, len(run), 5)]
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(pieces, trainer)
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    # A user-defined token, and a whole word that no merge leads to.
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<tool>", "Ġxyzzy"],
        "tokenizer.ggml.token_type": [3, 3, 3, 3] + [1] * (len(tokens) - 4) + [4, 1],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def sentencepiece_fields(model: bytes, added: list[str], **more: Any) -> dict[str, Any]:
    """The metadata of a GGUF file of the model; turns are control tokens there."""
    proto = model_pb2.ModelProto()
    proto.ParseFromString(model)
    kinds = [3 if piece.piece.endswith("_of_turn>") else piece.type for piece in proto.pieces]
    ids = sentencepiece.SentencePieceProcessor(model_proto=model)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*(piece.piece for piece in proto.pieces), *added],
        "tokenizer.ggml.token_type": kinds + [4 if text == "<|extra|>" else 3 for text in added],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces] + [-1000.0] * len(added),
        "tokenizer.ggml.bos_token_id": ids.bos_id(),
        "tokenizer.ggml.eos_token_id": ids.eos_id(),
        "tokenizer.ggml.unknown_token_id": ids.unk_id(),
        **more,
    }


def llama_cpp_ids(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kind = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32}[type(value)]
            kind(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ids = {
        name: [model.tokenize(text.encode(), add_bos=False, special=special) for text in TEXTS]
        for name, special in (("ids", True), ("split", False))
    }
    return {"bos": model.tokenize(b"", add_bos=True), **ids}


def transformers_ids(model: bytes, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    cls = getattr(transformers, config["tokenizer_class"])
    slow, fast = (
        cls.from_pretrained(folder),
        getattr(transformers, f"{config['tokenizer_class']}Fast").from_pretrained(folder),
    )
    ids = [slow(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    return {
        "bos": slow("")["input_ids"],
        "ids": ids,
        # The slow one's decoder puts spaces around special tokens.
        "texts": [fast.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False) for row in ids],
    }


def added(texts: list[str], first: int, **flags: bool) -> dict[str, Any]:
    base = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {str(first + i): {"content": text, **base, **flags} for i, text in enumerate(texts)}


def directory_cases(spm: dict[str, bytes]) -> dict[str, tuple[str, dict[str, Any]]]:
    llama = {"tokenizer_class": "LlamaTokenizer", **NAMED}
    roles = added(PHI3, 360)
    phi3 = added(PHI3, 360, rstrip=True) | added(PHI3[3:], 363, lstrip=True, special=False)
    inst = added(["[INST]", "[/INST]"], 3)
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm["gemma"])
    turns = [processor.piece_to_id(text) for text in ("<start_of_turn>", "<end_of_turn>")]
    gemma = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return {
        "llama": ("llama", llama),
        "llama, legacy": ("llama", llama | {"legacy": True}),
        "llama, not legacy": ("llama", llama | {"legacy": False}),
        "llama, no prefix": ("llama", llama | {"legacy": False, "add_prefix_space": False}),
        "added tokens": ("llama", llama | {"legacy": True, "added_tokens_decoder": roles}),
        "phi-3": ("llama", llama | {"legacy": True, "added_tokens_decoder": phi3}),
        "mistral": ("mistral", llama | {"legacy": True, "added_tokens_decoder": inst}),
        "gemma": ("gemma", gemma | {"added_tokens_decoder": added(["<start_of_turn>", "<end_of_turn>"], turns[0])}),
    }


def main() -> None:
    spm = {name: train_sentencepiece(**options) for name, options in SPM_STYLES.items()}
    bpe = train_bpe()
    llama_cpp_cases = {
        "llama": ("llama", PHI3, {}),
        "phi-3": ("llama", [*PHI3, "<|endoftext|>"], {"general.name": "Phi-3 mini"}),
        "mistral": ("mistral", [], {}),
        "gemma": ("gemma", [], {"tokenizer.ggml.add_space_prefix": False}),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        by_pre: dict[str, dict[str, Any]] = {}
        for pre in PRE_TOKENIZERS:
            found = llama_cpp_ids(bpe | {"tokenizer.ggml.pre": pre}, folder)
            same = next((group for group in by_pre.values() if group["expected"] == found), None)
            if same is None:
                by_pre[pre] = {"names": [pre], "expected": found}
            else:
                same["names"].append(pre)
        content = {
            "source": "llama-cpp-python 0.3.36, transformers 4.57.3, sentencepiece 0.2.3",
            "texts": TEXTS,
            "bpe": bpe,
            "pre_tokenizers": list(by_pre.values()),
            "sentencepiece": {name: base64.b64encode(model).decode() for name, model in spm.items()},
            "gguf": {
                name: {
                    "model": model,
                    "added": texts,
                    "fields": more,
                    **llama_cpp_ids(sentencepiece_fields(spm[model], texts, **more), folder),
                }
                for name, (model, texts, more) in llama_cpp_cases.items()
            },
            "directories": {
                name: {"model": model, "config": config, **transformers_ids(spm[model], config, folder)}
                for name, (model, config) in directory_cases(spm).items()
            },
        }
    OUTPUT.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
