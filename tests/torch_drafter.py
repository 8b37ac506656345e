"""A drafter in plain PyTorch, from the paper's words and the published key names alone: what others would load into."""

import torch
from torch import nn


class TorchDrafter(nn.Module):
    """`forward` gives what every layer predicts from the same true rows, [layers, b, t, h]."""

    def __init__(self, config: dict, layers: int):
        super().__init__()
        hidden = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=config["bias"])
        self.layers = nn.ModuleList(TorchLayer(config) for _ in range(layers))

    def forward(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        x = self.fc(torch.cat([self.embed_tokens(tokens), features], dim=-1))
        return torch.stack([layer(x) for layer in self.layers])


class TorchLayer(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.self_attn = TorchAttention(config)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(x)
        y = self.post_attention_layernorm(x)
        gated = nn.functional.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y)
        return x + self.mlp["down_proj"](gated)


class TorchAttention(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.size = config.get("head_dim") or hidden // heads
        self.theta, self.group = config["rope_theta"], heads // config["num_key_value_heads"]
        bias = config.get("qkv_bias", False)
        self.q_proj = nn.Linear(hidden, heads * self.size, bias=bias)
        self.k_proj = nn.Linear(hidden, heads // self.group * self.size, bias=bias)
        self.v_proj = nn.Linear(hidden, heads // self.group * self.size, bias=bias)
        self.o_proj = nn.Linear(heads * self.size, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        key, value = (part.repeat_interleave(self.group, dim=1) for part in (self._rotate(key), value))
        attended = nn.functional.scaled_dot_product_attention(self._rotate(query), key, value, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)  # [b, heads, t, d]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        inverse = self.theta ** (-torch.arange(0, self.size, 2) / self.size)
        angles = torch.arange(x.shape[2])[:, None] * inverse
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
