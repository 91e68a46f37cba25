"""A Llama-family decoder whose parameter names equal Hugging Face's LlamaForCausalLM.

So safetensors load and export without a mapping. Buildable on the meta device: what is not a parameter is computed
when it is first needed, on the device where it is needed.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import ModelConfig, RopeScaling


class Llama(nn.Module):
    """Token ids [batch, seq] to logits [batch, seq, vocab_size]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        # Tied embeddings have no head of their own, and so no second name for one tensor in a state dict.
        self.lm_head = None if config.tie_word_embeddings else _linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits for the token after each position, in the dtype of the computation."""
        hidden = self.model(input_ids)
        if self.lm_head is None:
            return F.linear(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden)


class Decoder(nn.Module):
    """Embedding, blocks and final norm: ids [batch, seq] to hidden states [batch, seq, hidden_size]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)
        self.rotary = Rotary(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Hidden states after the final norm."""
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.rotary.tables(input_ids.shape[1], device=hidden.device, dtype=hidden.dtype)
        for block in self.layers:
            hidden = block(hidden, cos, sin)
        return self.norm(hidden)


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states of the same shape [batch, seq, hidden_size]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Causal grouped-query attention with rotary position embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(config.hidden_size, config.hidden_size)
        self.k_proj = _linear(config.hidden_size, kv_width)
        self.v_proj = _linear(config.hidden_size, kv_width)
        self.o_proj = _linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states [batch, seq, hidden_size]."""
        query = rotate(self._heads(self.q_proj(hidden)), cos, sin)
        key = rotate(self._heads(self.k_proj(hidden)), cos, sin)
        value = self._heads(self.v_proj(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> Tensor:
        """[batch, seq, heads * head_dim] to [batch, heads, seq, head_dim]."""
        return projected.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states of the same shape."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 as the reference does."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, hidden: Tensor) -> Tensor:
        """The normed input, in its dtype."""
        exact = hidden.float()
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (exact * scale).to(hidden.dtype)


class Rotary:
    """Cosine and sine tables. No module and no buffer: nothing to lose on the meta device or in a checkpoint."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._cache: tuple[Tensor, Tensor] | None = None

    def tables(self, seq_len: int, *, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables [seq_len, head_dim], computed in fp32 and cast, kept for the next call of the same shape."""
        cached = self._cache
        if cached is None or cached[0].shape[0] != seq_len or cached[0].device != device or cached[0].dtype != dtype:
            angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), rotary_frequencies(self.config))
            angles = torch.cat((angles, angles), dim=-1)
            cached = self._cache = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        return cached


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Angular frequency of each rotated pair [head_dim / 2], fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _scaled(frequencies, config.rope_scaling)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's context extension: long wavelengths are stretched by `factor`, short ones kept, those between
    blended linearly in the number of turns over the original context.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of [batch, heads, seq, head_dim]: Hugging Face's pairing."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 of logits [batch, seq, vocab] against label ids [batch, seq]."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def full_initial_value(name: str, shape: torch.Size, *, config: ModelConfig, seed: int, device: torch.device) -> Tensor:
    """The initial value of one whole parameter, fp32: a function of seed, name and shape alone.

    So it is the same at every world size and in every order of creation. Norms are ones; matrices are normal, and
    those that write into the residual stream are scaled down with its depth, as GPT-2 does.
    """
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device=device)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    deviation = config.initializer_range
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        deviation /= math.sqrt(2 * config.num_hidden_layers)
    return torch.empty(shape, device=device).normal_(0.0, deviation, generator=generator)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)
