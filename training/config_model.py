"""The model's settings and the presets: shapes of the published Llama checkpoints, and a small one for drills."""

from pydantic import Field, model_validator

from training.config_base import Config, PositiveFloat, PositiveInt


class RopeScaling(Config):
    """Llama 3.1's frequency scaling (names and meaning as in Hugging Face's `rope_scaling`)."""

    factor: PositiveFloat = Field(description="how much slower the slow frequencies turn; 8 in Llama 3.1, 32 in 3.2")
    low_freq_factor: PositiveFloat = Field(description="turns in the original context below which a pair is slowed")
    high_freq_factor: PositiveFloat = Field(description="turns in the original context above which a pair is kept")
    original_max_position_embeddings: PositiveInt = Field(description="context length before scaling, tokens")

    @model_validator(mode="after")
    def _check_order(self) -> "RopeScaling":
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} must be below high_freq_factor {self.high_freq_factor:g}; "
                "Llama 3.1 has 1 and 4"
            )
        return self


class ModelConfig(Config):
    """A Llama-family decoder; field names as in Hugging Face's LlamaConfig."""

    vocab_size: PositiveInt = Field(description="tokens the model knows")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    intermediate_size: PositiveInt = Field(description="width inside the feed-forward network")
    num_hidden_layers: PositiveInt = Field(description="blocks")
    num_attention_heads: PositiveInt = Field(description="query heads per block")
    num_key_value_heads: PositiveInt = Field(description="key and value heads per block; fewer than query heads is GQA")
    max_position_embeddings: PositiveInt = Field(description="longest sequence, tokens")
    rope_theta: PositiveFloat = Field(default=10_000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(default=None, description="Llama 3.1's scaling of the rotary frequencies")
    rms_norm_eps: PositiveFloat = Field(default=1e-5, description="added to the mean square in every norm")
    tie_word_embeddings: bool = Field(default=False, description="one matrix for the embedding and the last projection")
    initializer_range: PositiveFloat = Field(default=0.02, description="standard deviation of the initial weights")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters, computed from the shapes."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * self.num_block_parameters + self.hidden_size

    @property
    def num_block_parameters(self) -> int:
        """Number of trainable parameters of one block."""
        kv_width = self.num_key_value_heads * self.head_dim
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * kv_width
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @model_validator(mode="after")
    def _check_heads(self) -> "ModelConfig":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; choose a hidden_size that is"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}; choose num_key_value_heads that divides it"
            )
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} is odd; rotary embeddings rotate pairs, make it even")
        return self


def _llama3(**shape: int | bool) -> ModelConfig:
    """A Llama 3.1 or 3.2 model; what all of them share stands here."""
    scaling = RopeScaling(
        factor=32.0 if shape["tie_word_embeddings"] else 8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    shared = {
        "vocab_size": 128_256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": scaling,
    }
    return ModelConfig.model_validate(shared | shape)


# Shapes of the published checkpoints (config.json of each on the Hugging Face hub). Llama 3.3 70B is 3.1's.
MODEL_PRESETS: dict[str, ModelConfig] = {
    "debug-3m": ModelConfig(
        vocab_size=257,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    "llama-2-7b": ModelConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
    ),
    "llama-3.2-1b": _llama3(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "llama-3.2-3b": _llama3(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _llama3(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "llama-3.1-70b": _llama3(
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        tie_word_embeddings=False,
    ),
}
