"""Tiny random models on disk, so that tests run the real loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # on tiny tensors threads only wait for one another

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|end|>", "<|start|>"]  # ids 0 (EOS) and 1


def _save_tokenizer(path: Path, vocab_size: int) -> None:
    """Byte-level: every text can be written when vocab_size >= 258; else printable ASCII."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [c for c in alphabet if c.isascii() or c in "ĊĠ"]
    symbols = printable + [c for c in alphabet if c not in printable]
    tokens = (SPECIAL_TOKENS + symbols)[:vocab_size]
    merges: list[tuple[str, str]] = []
    for left in printable:  # two-letter tokens fill what is left of the vocabulary
        for right in printable:
            if len(tokens) < vocab_size and left.isalpha() and right.isalpha():
                tokens.append(left + right)
                merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL_TOKENS)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)


def make_tiny_model(
    path: Path,
    family: str = "llama",
    *,
    vocab_size: int = 128,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Save a random float32 model of `family` and a tokenizer. Its logits have a std of 1 to 2."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
        **config,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                gain = 1.5 if "lm_head" in name or "q_proj" in name else 1.0
                if name.endswith("embed_tokens.weight"):
                    gain = 1.5 if model.config.tie_word_embeddings else hidden**0.5
                torch.nn.init.normal_(parameter, std=gain / parameter.shape[1] ** 0.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
            else:  # norms: near 1, so that a dropped one shows
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(path, max_shard_size=max_shard_size)
    _save_tokenizer(path, vocab_size)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers, hidden 64, 4 heads, 2 KV heads, vocabulary 128, float32."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny_qwen2"), "qwen2", seed=1)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny_qwen3"),
        "qwen3",
        seed=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
