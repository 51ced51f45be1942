"""transformers' tensor-parallel plans by our collectives."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectrue.workers.errors import ConfigError
from spectrue.workers.forward_batch import ForwardBatch
from spectrue.workers.models import generic_load
from spectrue.workers.parallel import TPGroup
from spectrue.workers.weights import load_model

from .generic_models import OPTIONS, make_generic
from .harness import complete, make_engine
from .test_generic_load import write_config
from .test_models import assert_same, reference_logits, tokens_of
from .test_tensor_parallel import _requests, make_config, run_ranks


class Shared:
    """What the ranks of one process hand to one another."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors: list[Tensor | None] = [None] * size


class ThreadGroup(TPGroup):
    """Ranks that are threads: no process to start."""

    def __init__(self, rank: int, shared: Shared) -> None:
        super().__init__(rank, len(shared.tensors))
        self.shared = shared

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.shared.tensors[self.rank] = x.clone()
        self.shared.barrier.wait()
        found = [t for t in self.shared.tensors if t is not None]
        self.shared.barrier.wait()
        return found

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self.exchange(x)).sum(0))

    def gather_vocab(self, x: Tensor) -> Tensor | None:
        found = self.exchange(x)
        return torch.cat(found, -1) if self.rank == 0 else None


@pytest.mark.parametrize("family", OPTIONS)
def test_logits_of_two_ranks(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A vocabulary of no equal parts; biases, of which the sum over ranks must have one.
    path = make_generic(tmp_path, family, vocab_size=127, attention_bias=True)
    tokens = tokens_of(30, vocab_size=127)
    shared = Shared(2)
    read, lock = generic_load._read, threading.Lock()

    def read_alone(*args: Any) -> Any:
        with lock:  # transformers sets defaults of the whole process while it loads
            return read(*args)

    monkeypatch.setattr(generic_load, "_read", read_alone)

    def run(rank: int) -> list[Tensor | None]:
        with torch.inference_mode():
            model = load_model(path, "float32", group=ThreadGroup(rank, shared))
            kv_cache = model.new_kv_cache(8, 4)
            logits = []
            for start, stop in ((0, 11), (11, 26), (26, 27), (27, 30)):
                batch = ForwardBatch.build(
                    token_ids=[tokens[start:stop]],
                    starts=[start],
                    block_tables=torch.arange(8).int().flip(0)[None],
                    block_size=4,
                )
                logits.append(model.compute_logits(model.forward(batch, kv_cache).hidden_states))
            return logits

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert second == [None] * 4
    assert_same(torch.cat([x for x in first if x is not None]), reference_logits(path, tokens))


def test_two_processes_decide_as_one(tmp_path: Path) -> None:
    """Greedy and seeded texts, up to floating-point near ties."""
    path = make_generic(tmp_path / "model", "qwen3_moe", vocab_size=127)
    tokens, buffers = run_ranks(make_config(path, path, "ngram", False), tmp_path)
    assert buffers[0] == buffers[1], "the ranks hold different texts"
    requests = _requests()
    alone = [r for r in requests if r.params.temperature == 0 or r.params.seed is not None]
    engine = make_engine(path, "ngram", num_kv_blocks=64, max_model_len=128)
    want = dict(zip([r.request_id for r in alone], complete(engine, *alone), strict=True))
    same = [
        got == want[request.request_id].token_ids
        for request, got in zip(requests, tokens, strict=True)
        if request.request_id in want
    ]
    assert sum(same) >= len(same) - 1, same


class Pretend(TPGroup):
    """A rank whose collectives do nothing: its weights can be looked at."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def gather_vocab(self, x: Tensor) -> Tensor | None:
        return None if self.rank else x


def parts(path: Path, size: int = 2) -> list[Any]:
    return [
        load_model(path, "float16", load_format="dummy", group=Pretend(rank, size))
        for rank in range(1, size)
    ]


def test_a_rank_holds_its_part(tmp_path: Path) -> None:
    path = write_config(tmp_path, "qwen3_moe", **OPTIONS["qwen3_moe"])
    whole: Any = load_model(path, "float16", load_format="dummy")
    (part,) = parts(path)
    assert part.num_kv_heads == 1
    assert part.config.num_kv_heads == whole.config.num_kv_heads == 2
    assert part.new_kv_cache(2, 4).layers[0].shape == (8, 2, 1, 16)
    full, own = (dict(m.hf.named_parameters()) for m in (whole, part))
    layer = "model.layers.1."
    name = layer + "self_attn.q_proj.weight"
    assert own[name].equal(full[name][32:])
    name = layer + "self_attn.o_proj.weight"
    assert own[name].equal(full[name][:, 32:])
    name = layer + "mlp.experts.down_proj"
    assert own[name].equal(full[name][..., 16:])
    name = layer + "mlp.experts.gate_up_proj"  # half of the gates, then half of the ups
    assert own[name][:, :16].equal(full[name][:, 16:32])
    assert own[name][:, 16:].equal(full[name][:, 48:])
    assert own["lm_head.weight"].equal(full["lm_head.weight"][64:])
    assert own["model.embed_tokens.weight"].equal(full["model.embed_tokens.weight"])


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    def refused(family: str, size: int, message: str, **changes: Any) -> None:
        options = {**OPTIONS.get(family, {}), **changes}
        folder = tmp_path / f"{family}-{size}-{len(changes)}"
        folder.mkdir()
        with pytest.raises(ConfigError, match=message):
            parts(write_config(folder, family, **options), size)

    refused("qwen3_moe", 3, "tp_size = 3 must divide the 4 attention heads")
    refused("qwen3_moe", 4, "tp_size = 4 must divide the 2 key-value heads")
    refused(
        "qwen3_moe",
        2,
        "tp_size = 2 must divide dimension 66 of .*experts",
        moe_intermediate_size=33,
    )
    refused("bloom", 2, "no tensor-parallel plan for model type 'bloom'")
    refused("phi3", 2, "o_proj by 'rowwise_split_input', which is not supported")
