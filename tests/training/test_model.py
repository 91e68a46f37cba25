"""The model against independent computations: names, causality, rotary embedding, grouped heads, initial values."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from training.config import MODEL_PRESETS, ModelConfig, RopeScaling
from training.model import Llama, RMSNorm, full_initial_value, next_token_loss, rotary_frequencies, rotate

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def built(config: ModelConfig, seed: int = 0) -> Llama:
    model = Llama(config)
    fill(model, config, seed)
    return model


@torch.no_grad()
def fill(model: Llama, config: ModelConfig, seed: int = 0) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(full_initial_value(name, parameter.shape, config=config, seed=seed, device=torch.device("cpu")))


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def test_parameter_names_are_hugging_faces():
    block = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    expected |= {f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in block}
    assert set(Llama(SMALL).state_dict()) == expected


def test_tied_embeddings_have_no_second_name():
    tied = SMALL.model_copy(update={"tie_word_embeddings": True})
    assert "lm_head.weight" not in Llama(tied).state_dict()
    assert built(tied)(ids(1, 5)).shape == (1, 5, SMALL.vocab_size)


@pytest.mark.parametrize("config", [SMALL, MODEL_PRESETS["debug-3m"], MODEL_PRESETS["llama-3.1-8b"]])
def test_the_number_of_parameters_is_the_computed_one(config):
    with torch.device("meta"):
        model = Llama(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters


def test_a_token_changes_nothing_before_itself():
    model, tokens = built(SMALL), ids(1, 12)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % SMALL.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.allclose(before[0, 7:], after[0, 7:])


def test_the_norm_equals_its_formula():
    norm = RMSNorm(SMALL)
    values = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    weight = np.linspace(0.5, 1.5, 32, dtype=np.float32)
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(weight))
    expected = weight * values / np.sqrt((values**2).mean(-1, keepdims=True) + SMALL.rms_norm_eps)
    np.testing.assert_allclose(norm(torch.from_numpy(values)).detach().numpy(), expected, rtol=1e-5)


def test_rotation_turns_each_pair_as_a_complex_number():
    positions, width = 5, SMALL.head_dim
    values = np.random.default_rng(0).normal(size=(1, 1, positions, width)).astype(np.float32)
    pairs = values[..., : width // 2] + 1j * values[..., width // 2 :]
    speed = SMALL.rope_theta ** (-np.arange(0, width, 2) / width)
    turned = pairs * np.exp(1j * np.arange(positions)[:, None] * speed)
    cos, sin = Llama(SMALL).model.rotary.tables(positions, device=torch.device("cpu"), dtype=torch.float32)
    result = rotate(torch.from_numpy(values), cos, sin).numpy()
    np.testing.assert_allclose(result[..., : width // 2], turned.real, atol=1e-5)
    np.testing.assert_allclose(result[..., width // 2 :], turned.imag, atol=1e-5)


def test_llama_31_scaling_keeps_fast_pairs_stretches_slow_ones_and_blends_between():
    scaling = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
    config = SMALL.model_copy(update={"hidden_size": 512, "rope_theta": 500_000.0, "rope_scaling": scaling})
    plain = rotary_frequencies(config.model_copy(update={"rope_scaling": None})).tolist()
    for frequency, result in zip(plain, rotary_frequencies(config).tolist(), strict=True):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192 / 1:
            expected = frequency / 8
        else:
            blend = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - blend) * frequency / 8 + blend * frequency
        assert result == pytest.approx(expected, rel=1e-5)


def test_grouped_heads_equal_full_attention_with_repeated_keys_and_values():
    grouped, full_config = built(SMALL), SMALL.model_copy(update={"num_key_value_heads": 4})
    full = Llama(full_config)
    state = grouped.state_dict()
    for name in [name for name in state if "k_proj" in name or "v_proj" in name]:
        state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(full(ids(2, 9)), grouped(ids(2, 9)))


def test_a_model_built_on_meta_and_filled_equals_one_built_directly():
    with torch.device("meta"):
        model = Llama(SMALL)
    model.to_empty(device="cpu")
    fill(model, SMALL)
    assert torch.equal(model(ids(2, 8)), built(SMALL)(ids(2, 8)))


def test_an_initial_value_depends_on_seed_and_name_only():
    def value(name: str, seed: int) -> torch.Tensor:
        return full_initial_value(name, torch.Size((64, 64)), config=SMALL, seed=seed, device=torch.device("cpu"))

    first = value("model.layers.0.mlp.up_proj.weight", 1)
    torch.rand(100)  # nobody else's draws matter
    assert torch.equal(first, value("model.layers.0.mlp.up_proj.weight", 1))
    assert not torch.equal(first, value("model.layers.1.mlp.up_proj.weight", 1))
    assert not torch.equal(first, value("model.layers.0.mlp.up_proj.weight", 2))
    assert first.std().item() == pytest.approx(0.02, rel=0.05)
    residual = value("model.layers.0.mlp.down_proj.weight", 1)
    assert residual.std().item() == pytest.approx(0.02 / 2, rel=0.05)


def test_the_loss_is_the_mean_negative_log_likelihood():
    logits, labels = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    probabilities = F.softmax(logits, dim=-1)
    expected = -torch.stack([probabilities[b, t, labels[b, t]].log() for b in range(2) for t in range(3)]).mean()
    torch.testing.assert_close(next_token_loss(logits, labels), expected)


def test_the_model_learns_one_sequence_by_heart():
    model, tokens = built(SMALL), ids(1, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(SMALL.vocab_size), rel=0.1)
    assert losses[-1] < 0.1
