"""The Llama-family decoder: parameter names and mathematics as in Hugging Face's LlamaForCausalLM.

Builds on the meta device, keeps nothing but parameters as state, and gives each parameter's initial value by name.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import ModelConfig


class Llama(nn.Module):
    """Token ids to logits.

    With `tie_word_embeddings` there is no `lm_head` parameter: the embedding is used at both ends, and so it has to
    stay in the root's FSDP group (sharding `embed_tokens` by itself would free it before the last projection).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        # One parameter under one name. A second, tied one would come apart in `to_empty`, which replaces each
        # module's meta parameters on their own, and would be stored twice in a checkpoint.
        self.lm_head = None if config.tie_word_embeddings else _linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [batch, seq, vocab] in the parameters' dtype, of `input_ids` [batch, seq] int64."""
        hidden = self.model(input_ids)
        if self.lm_head is None:
            return F.linear(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden)


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats, a scalar in fp32.

    `logits` [batch, seq, vocab]; `labels` [batch, seq] int64, already shifted: `labels[:, t]` is the token that
    follows position t. Every position counts.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def full_initial_value(name: str, shape: torch.Size, *, config: ModelConfig, seed: int, device: torch.device) -> Tensor:
    """The unsharded fp32 initial value of parameter `name`.

    A pure function of (seed, name, shape): each rank of any world size computes the same tensor, in any order, and
    keeps its own shard. The random stream differs between CPU and CUDA, and CUDA's between GPU models.
    """
    value = torch.empty(shape, dtype=torch.float32, device=device)
    if name.endswith("norm.weight"):
        return value.fill_(1.0)
    std = config.initializer_range
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        # Each block adds two of these to the residual stream; this keeps its variance independent of depth (GPT-2).
        std /= math.sqrt(2 * config.num_hidden_layers)
    digest = hashlib.sha256(f"{seed}/{name}/{tuple(shape)}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return value.normal_(0.0, std, generator=generator)


class Decoder(nn.Module):
    """Embedding, blocks and the last norm; `layers` are the units to shard and to recompute."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        rotary = Rotary(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, rotary) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Hidden states [batch, seq, hidden] of `input_ids` [batch, seq]."""
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, rotary: "Rotary") -> None:
        super().__init__()
        self.self_attn = Attention(config, rotary)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Causal attention with rotary positions; `num_key_value_heads` below `num_attention_heads` is GQA."""

    def __init__(self, config: ModelConfig, rotary: "Rotary") -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        self.rotary = rotary
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(config.hidden_size, config.hidden_size)
        self.k_proj = _linear(config.hidden_size, kv_width)
        self.v_proj = _linear(config.hidden_size, kv_width)
        self.o_proj = _linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] to the same shape; position t sees positions 0 to t."""
        batch, seq, _ = hidden.shape
        q, k, v = (
            projection(hidden).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.rotary.tables(seq, hidden.device)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=self.grouped
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dimension; the mean is taken in fp32 whatever the input's dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] to the same shape and dtype."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Rotary:
    """The fp32 cosine and sine tables of rotary positions, computed on first use and shared by every block.

    No module, and its tables no buffers: they survive meta construction, are in no checkpoint, and FSDP's mixed
    precision, which casts a block's parameters and inputs, can't round them to bf16.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine [seq_len, head_dim / 2] of positions 0 to seq_len - 1."""
        if self._tables is None or self._tables[0].device != device or len(self._tables[0]) < seq_len:
            positions = torch.arange(seq_len, dtype=torch.float32, device=device)
            angles = torch.outer(positions, inverse_frequencies(self._config, device))
            self._tables = angles.cos(), angles.sin()
        cos, sin = self._tables
        return cos[:seq_len], sin[:seq_len]


def inverse_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of each rotated pair, [head_dim / 2] fp32, after `rope_scaling` (Llama 3.1)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # Pairs that turn more than high_freq_factor times in the original context keep their frequency, those that
    # turn less than low_freq_factor times are slowed by `factor`, and a linear ramp joins the two.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `heads` [batch, heads, seq, head_dim] by its positions, in fp32; the result has the input's dtype.

    Element i pairs with element i + head_dim / 2: the layout of Hugging Face's weights, not of Meta's own release.
    """
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(heads)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)
