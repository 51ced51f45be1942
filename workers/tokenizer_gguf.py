"""The tokenizer inside a GGUF file.

NOTE: byte-level BPE vocabularies are built here and not by transformers, which takes the same
pre-tokenizer for every file of an architecture, whatever `tokenizer.ggml.pre` says: SmolLM's single
digits are then split differently ("  1"), and the model sees tokens that it was not trained on. It
also takes seconds. Other vocabularies are left to transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spectrue.workers.errors import ModelLoadError
from spectrue.workers.gguf_file import GGUFFile

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
KEY = "tokenizer.ggml."
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def _pre_tokenizer(pre: str, path: Path) -> Any:
    from tokenizers import Regex, pre_tokenizers

    def split(digits: str) -> Any:
        pattern = Regex(SPLIT.format(digits=digits))
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre == "llama-bpe":
        return split(r"\p{N}{1,3}")
    if pre == "qwen2":
        return split(r"\p{N}")
    raise ModelLoadError(
        f"{path}: pre-tokenizer {pre!r} is not supported in GGUF; supported: "
        f"{', '.join(PRE_TOKENIZERS)}. The Hugging Face directory of the model has its own."
    )


def _byte_level(metadata: dict[str, Any], path: Path) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    pre = metadata.get(KEY + "pre", "gpt-2")
    tokens: list[str] = metadata[KEY + "tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata[KEY + "merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, path)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = metadata.get(KEY + "token_type", [])
    added = {i: kind for i, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)}
    tokenizer.add_tokens(
        [
            AddedToken(tokens[i], special=kind == CONTROL, normalized=False)
            for i, kind in added.items()
        ]
    )
    bos = metadata.get(KEY + "bos_token_id")
    if bos is not None and metadata.get(KEY + "add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def tokenizer_from_gguf(path: Path) -> tuple[Any, list[int]]:
    """A transformers fast tokenizer, and the token ids that end a text."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    metadata = GGUFFile(path).metadata
    if KEY + "tokens" not in metadata:
        raise ModelLoadError(f"{path} has no tokenizer in it")
    eos = [metadata.get(f"{KEY}{name}_token_id") for name in ("eos", "eot")]
    eos_ids = [e for e in eos if e is not None]
    if metadata.get(KEY + "model") != "gpt2":
        return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name), eos_ids

    tokens: list[str] = metadata[KEY + "tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"{KEY}{key}_token_id") for name, key in names.items()}
    hf = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(metadata, path),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )
    if len(hf) != len(tokens):
        raise ModelLoadError(f"{path}: its tokenizer has {len(hf)} tokens of {len(tokens)}")
    return hf, eos_ids
