"""The EAGLE3 head with gradients (Li et al., arXiv 2503.01840), and its training-time test.

It computes what `workers/models/eagle3.py` serves. Position i reads token i + 1 and hidden states
at i, and predicts token i + 2. Unrolled step 0 reads the target's hidden states at every position.
Step j is what a server computes at depth j, from every position i at once: at position i + j, token
i + j + 1 and the head's own output of step j - 1, over the keys of step 0 up to i and of the steps
1 to j of its own branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrue.workers.models.config import ModelConfig
from spectrue.workers.models.rope import RotaryEmbedding, rotate

LAYER = "midlayer."  # published name of the one decoder layer


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    target: ModelConfig
    aux_layers: tuple[int, ...]  # of the target, as "output of layer i"
    draft_vocab_size: int
    intermediate_size: int

    def as_config(self) -> dict[str, Any]:
        """config.json as SafeAILab, SGLang and vLLM read it. Without ids of auxiliary layers where
        they are the default: that is the same for all, and ids are counted in two ways."""
        target = self.target
        rope: dict[str, Any] = {"rope_theta": target.rope_theta}
        if target.rope_scaling:
            rope["rope_scaling"] = target.rope_scaling
        ids: dict[str, Any] = {}
        if self.aux_layers != default_aux_layers(target.num_layers):
            ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.aux_layers)}}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": target.hidden_size,
            "target_hidden_size": target.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": float(f"{target.rms_norm_eps:.6g}"),  # GGUF has it as a float32
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "bfloat16",
            **rope,
            **ids,
        }

    def weights(self) -> dict[str, tuple[int, ...]]:
        t, hidden, inner = self.target, self.target.hidden_size, self.intermediate_size
        q, kv = t.num_heads * t.head_dim, t.num_kv_heads * t.head_dim
        return {
            "fc.weight": (hidden, len(self.aux_layers) * hidden),
            f"{LAYER}input_layernorm.weight": (hidden,),
            f"{LAYER}hidden_norm.weight": (hidden,),
            f"{LAYER}self_attn.q_proj.weight": (q, 2 * hidden),
            f"{LAYER}self_attn.k_proj.weight": (kv, 2 * hidden),
            f"{LAYER}self_attn.v_proj.weight": (kv, 2 * hidden),
            f"{LAYER}self_attn.o_proj.weight": (hidden, q),
            f"{LAYER}post_attention_layernorm.weight": (hidden,),
            f"{LAYER}mlp.gate_proj.weight": (inner, hidden),
            f"{LAYER}mlp.up_proj.weight": (inner, hidden),
            f"{LAYER}mlp.down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab_size, hidden),
        }


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """What all engines take when a head's configuration names none."""
    return 1, num_layers // 2 - 1, num_layers - 4


def choose_aux_layers(num_layers: int) -> tuple[int, ...]:
    """The default, each layer once and ascending: small models have no three of them."""
    return tuple(
        sorted({min(max(layer, 0), num_layers - 1) for layer in default_aux_layers(num_layers)})
    )


class TrainableHead(nn.Module):
    """Parameters are float32 under their published names, dots replaced; autocast does the rest."""

    def __init__(self, shape: HeadShape, device: torch.device, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.rope = RotaryEmbedding(shape.target, device)
        generator = torch.Generator().manual_seed(seed)
        for name, size in shape.weights().items():
            if len(size) == 1:
                value = torch.ones(size)
            else:
                value = torch.randn(size, generator=generator) * size[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value *= 0.5  # what is added to the stream begins small
            self.register_parameter(_key(name), nn.Parameter(value.to(device)))

    def weight(self, name: str) -> Tensor:
        found: Tensor = getattr(self, _key(name))
        return found

    def published(self) -> dict[str, Tensor]:
        return {name: self.weight(name).detach() for name in self.shape.weights()}

    @torch.no_grad()
    def load_published(self, weights: dict[str, Tensor]) -> None:
        for name in self.shape.weights():
            self.weight(name).copy_(weights[name])

    def unroll(
        self,
        aux: Tensor,  # [B, T, aux layers * hidden], the target's
        embedded: Tensor,  # [B, T + steps, hidden]: row i is of token i + 1
        steps: int,
    ) -> list[Tensor]:  # steps x [B, T, hidden], normalised: what `lm_head` reads
        length = aux.shape[1]
        hidden = F.linear(aux, self.weight("fc.weight"))
        positions = torch.arange(length + steps, device=aux.device)
        tables = self.rope.tables(positions)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs = []
        for step in range(steps):
            rope = tables[0][step : step + length, 0], tables[1][step : step + length, 0]
            hidden = self._layer(embedded[:, step : step + length], hidden, rope, keys, values)
            outputs.append(self._norm(hidden, "norm"))
        return outputs

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weight(f"{name}.weight")
        eps = self.shape.target.rms_norm_eps
        normed: Tensor = F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return normed

    def _layer(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],  # [T, head_dim] each
        keys: list[Tensor],  # of the steps before, [B, kv heads, T, head_dim]; grows
        values: list[Tensor],
    ) -> Tensor:
        target = self.shape.target
        normed = self._norm(hidden, f"{LAYER}hidden_norm")
        x = torch.cat((self._norm(embedded, f"{LAYER}input_layernorm"), normed), -1)

        def heads(part: str, number: int) -> Tensor:
            rows = F.linear(x, self.weight(f"{LAYER}self_attn.{part}_proj.weight"))
            return rows.view(*rows.shape[:-1], number, target.head_dim).transpose(1, 2)

        query = rotate(heads("q", target.num_heads), *rope)
        keys.append(rotate(heads("k", target.num_kv_heads), *rope))
        values.append(heads("v", target.num_kv_heads))
        attended = F.scaled_dot_product_attention(
            query,
            _repeat(torch.cat(keys, 2), query.shape[1]),
            _repeat(torch.cat(values, 2), query.shape[1]),
            attn_mask=branch_mask(x.shape[1], len(keys), x.device),
        )
        attended = attended.transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(attended, self.weight(f"{LAYER}self_attn.o_proj.weight"))
        x = self._norm(hidden, f"{LAYER}post_attention_layernorm")
        gate = F.silu(F.linear(x, self.weight(f"{LAYER}mlp.gate_proj.weight")))
        up = F.linear(x, self.weight(f"{LAYER}mlp.up_proj.weight"))
        out: Tensor = hidden + F.linear(gate * up, self.weight(f"{LAYER}mlp.down_proj.weight"))
        return out


_masks: dict[tuple[int, int, torch.device], Tensor] = {}


def branch_mask(length: int, steps: int, device: torch.device) -> Tensor:
    """[length, steps * length] bool: keys of step 0 up to the own position, then the own branch."""
    key = length, steps, device
    if key not in _masks:
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        own = torch.eye(length, dtype=torch.bool, device=device)
        _masks[key] = torch.cat((causal, *[own] * (steps - 1)), 1)
    return _masks[key]


def _repeat(x: Tensor, num_heads: int) -> Tensor:
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def _key(name: str) -> str:
    return name.replace(".", "__")
