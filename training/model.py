"""The Llama-family decoder: parameter names and mathematics as in Hugging Face's LlamaForCausalLM.

Builds on the meta device, keeps nothing but parameters as state, and gives each parameter's initial value by name.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config_model import ModelConfig
from training.loss import chunked_next_token_loss, next_token_loss, token_losses


class Llama(nn.Module):
    """Token ids to logits, or with labels to the loss.

    With `tie_word_embeddings` there is no `lm_head` parameter: the embedding is used at both ends, and so it has to
    stay in the root's FSDP group (sharding `embed_tokens` by itself would free it before the last projection).
    """

    def __init__(self, config: ModelConfig, *, loss_chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.loss_chunk_tokens = loss_chunk_tokens
        self.model = Decoder(config)
        # One parameter under one name. A second, tied one would come apart in `to_empty`, which replaces each
        # module's meta parameters on their own, and would be stored twice in a checkpoint.
        self.lm_head = None if config.tie_word_embeddings else _linear(config.hidden_size, config.vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        end_of_document: int | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Logits [batch, seq, vocab] in the parameters' dtype, of `input_ids` [batch, seq] int64.

        Args:
            input_ids: [batch, seq] int64.
            labels: [batch, seq] int64, already shifted; with them the result is the mean loss, an fp32 scalar. The
                loss is part of forward, for it needs the last projection's weight, which FSDP gathers for forward.
            end_of_document: the token that ends a document; with it no token attends to another document's.
            per_token: with labels: each token's loss [batch, seq] instead of the mean, without gradient.
        """
        mask = None if end_of_document is None else document_mask(input_ids, end_of_document)
        hidden = self.model(input_ids, mask)
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if labels is None:
            return F.linear(hidden, weight)
        if per_token:
            losses = token_losses(hidden.flatten(0, 1), weight, labels.flatten(), self.loss_chunk_tokens)
            return losses.view_as(labels)
        if self.loss_chunk_tokens is not None:
            return chunked_next_token_loss(hidden, weight, labels, chunk_tokens=self.loss_chunk_tokens)
        return next_token_loss(F.linear(hidden, weight), labels)


def document_mask(input_ids: Tensor, end_of_document: int) -> Tensor:
    """Who may attend to whom, [batch, 1, seq, seq] bool: to itself and what precedes it in its own document.

    A document's end token is its last one. Positions need not start over with each document: rotary attention sees
    their differences only.
    """
    ends = input_ids == end_of_document
    documents = ends.cumsum(dim=-1) - ends.long()
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


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
        self.rotary = Rotary(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states [batch, seq, hidden] of `input_ids` [batch, seq]; `mask` as `document_mask` makes it."""
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.rotary.tables(input_ids.shape[1], hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, mask)
        return self.norm(hidden)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, seq, hidden] to the same shape; `cos` and `sin` as `Rotary.tables` gives them."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Causal attention with rotary positions; `num_key_value_heads` below `num_attention_heads` is GQA."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(config.hidden_size, config.hidden_size)
        self.k_proj = _linear(config.hidden_size, kv_width)
        self.v_proj = _linear(config.hidden_size, kv_width)
        self.o_proj = _linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """[batch, seq, hidden] to the same shape; position t sees positions 0 to t, or what `mask` allows.

        Without a mask PyTorch takes the flash kernel where there is one. With a mask it can't: on CUDA the
        memory-efficient kernel takes over.
        """
        batch, seq, _ = hidden.shape
        q, k, v = (
            projection(hidden).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.grouped,
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

    No module, and its tables no buffers: they survive meta construction and are in no checkpoint.
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
