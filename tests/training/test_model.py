"""The model against independent computations: plain NumPy, the published formulas, and itself built another way."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from training.config_model import MODEL_PRESETS, ModelConfig, RopeScaling
from training.loss import next_token_loss
from training.model import (
    Attention,
    Llama,
    RMSNorm,
    Rotary,
    document_mask,
    full_initial_value,
    inverse_frequencies,
    rotate,
)

CPU = torch.device("cpu")


def make_config(**changes):
    values = {
        "vocab_size": 31,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**{**values, **changes})


def materialised(model, seed=0):
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(full_initial_value(name, parameter.shape, config=model.config, seed=seed, device=CPU))
    return model


def make_model(**changes):
    return materialised(Llama(make_config(**changes)))


def some_ids(batch=2, seq=10, vocab=31):
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(5))


def test_parameters_are_named_and_shaped_as_in_hugging_face():
    shapes = {name: tuple(parameter.shape) for name, parameter in Llama(make_config()).named_parameters()}

    assert shapes == {
        "model.embed_tokens.weight": (31, 24),
        "model.layers.0.self_attn.q_proj.weight": (24, 24),
        "model.layers.0.self_attn.k_proj.weight": (12, 24),
        "model.layers.0.self_attn.v_proj.weight": (12, 24),
        "model.layers.0.self_attn.o_proj.weight": (24, 24),
        "model.layers.0.mlp.gate_proj.weight": (40, 24),
        "model.layers.0.mlp.up_proj.weight": (40, 24),
        "model.layers.0.mlp.down_proj.weight": (24, 40),
        "model.layers.0.input_layernorm.weight": (24,),
        "model.layers.0.post_attention_layernorm.weight": (24,),
        "model.layers.1.self_attn.q_proj.weight": (24, 24),
        "model.layers.1.self_attn.k_proj.weight": (12, 24),
        "model.layers.1.self_attn.v_proj.weight": (12, 24),
        "model.layers.1.self_attn.o_proj.weight": (24, 24),
        "model.layers.1.mlp.gate_proj.weight": (40, 24),
        "model.layers.1.mlp.up_proj.weight": (40, 24),
        "model.layers.1.mlp.down_proj.weight": (24, 40),
        "model.layers.1.input_layernorm.weight": (24,),
        "model.layers.1.post_attention_layernorm.weight": (24,),
        "model.norm.weight": (24,),
        "lm_head.weight": (31, 24),
    }


def test_state_is_the_parameters_and_nothing_else():
    model = make_model()
    model(some_ids())

    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_tied_embeddings_are_one_parameter_used_at_both_ends():
    model = make_model(tie_word_embeddings=True)

    assert "lm_head.weight" not in model.state_dict()
    hidden = model.model(some_ids())
    assert torch.equal(model(some_ids()), hidden @ model.model.embed_tokens.weight.T)


@pytest.mark.parametrize("tied", [False, True])
def test_number_of_parameters_is_what_the_configuration_computes(tied):
    config = make_config(tie_word_embeddings=tied)

    assert sum(parameter.numel() for parameter in Llama(config).parameters()) == config.num_parameters


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
    ],
)
def test_a_preset_builds_on_meta_with_its_published_size(preset, parameters):
    with torch.device("meta"):
        model = Llama(MODEL_PRESETS[preset])

    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert MODEL_PRESETS[preset].num_parameters == parameters


def test_the_document_mask_is_the_naive_one():
    ids = torch.tensor([[5, 9, 5, 5, 9, 9, 5], [9, 5, 5, 5, 5, 5, 9]])
    expected = torch.zeros(2, 7, 7, dtype=torch.bool)
    for row in range(2):
        for query in range(7):
            for key in range(query + 1):
                expected[row, query, key] = 9 not in ids[row, key:query].tolist()

    assert torch.equal(document_mask(ids, 9)[:, 0], expected)


def test_masked_documents_are_computed_as_if_each_stood_alone():
    model = make_model()
    ids = some_ids(batch=1, seq=12)
    ids[ids == 7] = 8
    ids[0, [3, 4, 8]] = 7  # documents of 4, 1, 4 and 3 tokens

    together = model(ids, end_of_document=7)

    alone = [model(part) for part in ids.split([4, 1, 4, 3], dim=1)]
    torch.testing.assert_close(together, torch.cat(alone, dim=1))
    assert not torch.allclose(together, model(ids))


def test_the_loss_of_the_model_is_the_loss_of_its_logits():
    model, ids = make_model(), some_ids()
    inputs, labels = ids[:, :-1], ids[:, 1:]

    expected = next_token_loss(model(inputs), labels)

    assert torch.equal(model(inputs, labels), expected)
    per_token = model(inputs, labels, per_token=True)
    assert per_token.shape == labels.shape
    torch.testing.assert_close(per_token.mean(), expected)


@pytest.mark.parametrize("position", [1, 5, 9])
def test_no_logits_depend_on_later_tokens(position):
    model, ids = make_model(), some_ids()
    changed = ids.clone()
    changed[:, position] = (changed[:, position] + 1) % 31

    before, after = model(ids), model(changed)

    assert torch.equal(before[:, :position], after[:, :position])
    assert not torch.allclose(before[:, position], after[:, position])


def test_rms_norm_equals_its_formula():
    norm = RMSNorm(make_config(rms_norm_eps=1e-3))
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(2)) * 0.05  # small, so that eps counts

    values = x.double().numpy()
    expected = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-3) * norm.weight.detach().double().numpy()

    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-5)


def test_rotation_turns_each_pair_as_a_complex_number():
    config = make_config()  # head_dim 6
    heads = torch.randn(1, 1, 7, 6, generator=torch.Generator().manual_seed(3))

    pairs = heads[0, 0, :, :3].double().numpy() + 1j * heads[0, 0, :, 3:].double().numpy()
    angles = np.arange(7)[:, None] * 10_000.0 ** (-np.array([0, 2, 4]) / 6)
    turned = pairs * np.exp(1j * angles)

    found = rotate(heads, *Rotary(config).tables(7, CPU))[0, 0].numpy()
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], axis=-1), rtol=1e-4, atol=1e-6)


def test_llama_31_scaling_equals_its_published_rule():
    config = MODEL_PRESETS["llama-3.1-8b"]
    scaling = config.rope_scaling
    expected = []
    for i in range(0, config.head_dim, 2):  # per frequency, by wavelength, as in Meta's release
        frequency = 500_000.0 ** (-i / config.head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < scaling.original_max_position_embeddings / scaling.high_freq_factor:
            expected.append(frequency)
        elif wavelength > scaling.original_max_position_embeddings / scaling.low_freq_factor:
            expected.append(frequency / scaling.factor)
        else:
            smooth = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            expected.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)

    found = inverse_frequencies(config, CPU).numpy()

    np.testing.assert_allclose(found, expected, rtol=2e-5)
    plain = inverse_frequencies(config.model_copy(update={"rope_scaling": None}), CPU).numpy()
    ratio = plain / found
    assert np.isclose(ratio, 1).any()
    assert np.isclose(ratio, 8).any()
    assert ((ratio > 1.01) & (ratio < 7.99)).any(), "no frequency on the ramp: the test proves too little"


def test_scaling_changes_what_the_model_computes():
    scaling = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8)

    assert not torch.allclose(make_model()(some_ids()), make_model(rope_scaling=scaling)(some_ids()))


def test_rotary_tables_stay_fp32_in_a_bf16_model():
    model = make_model().to(torch.bfloat16)

    assert model(some_ids()).dtype == torch.bfloat16
    cos, _ = model.model.rotary.tables(10, CPU)
    assert cos.dtype == torch.float32


def test_rotary_tables_do_not_depend_on_which_length_came_first():
    config = make_config()
    grown, fresh = Rotary(config), Rotary(config)
    grown.tables(4, CPU)

    for length in (9, 3):
        for one, other in zip(grown.tables(length, CPU), fresh.tables(length, CPU), strict=True):
            assert torch.equal(one, other)
            assert one.shape == (length, 3)


def test_grouped_query_attention_equals_full_attention_with_repeated_heads():
    grouped_config, full_config = make_config(), make_config(num_key_value_heads=4)
    grouped, full = Attention(grouped_config), Attention(full_config)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        state[name] = state[name].view(2, 1, 6, 24).expand(2, 2, 6, 24).reshape(24, 24)
    full.load_state_dict(state)
    hidden = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(4))

    tables = Rotary(grouped_config).tables(9, CPU)
    torch.testing.assert_close(grouped(hidden, *tables), full(hidden, *tables))


def test_attention_equals_a_numpy_computation():
    config = make_config()
    attention = Attention(config)
    hidden = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(4))
    weights = {name: value.double().numpy() for name, value in attention.state_dict().items()}
    x = hidden[0].double().numpy()
    turn = np.exp(1j * np.arange(5)[:, None] * 10_000.0 ** (-np.array([0, 2, 4]) / 6))

    def turned(head):
        pairs = (head[:, :3] + 1j * head[:, 3:]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    outputs = []
    for head in range(4):
        kv = head // 2
        q = turned((x @ weights["q_proj.weight"].T)[:, 6 * head : 6 * head + 6])
        k = turned((x @ weights["k_proj.weight"].T)[:, 6 * kv : 6 * kv + 6])
        v = (x @ weights["v_proj.weight"].T)[:, 6 * kv : 6 * kv + 6]
        scores = np.where(np.tri(5, dtype=bool), q @ k.T / math.sqrt(6), -np.inf)
        odds = np.exp(scores)
        outputs.append(odds / odds.sum(-1, keepdims=True) @ v)
    expected = np.concatenate(outputs, axis=-1) @ weights["o_proj.weight"].T

    found = attention(hidden, *Rotary(config).tables(5, CPU))[0].detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_meta_computes_what_a_direct_one_does(tied):
    with torch.device("meta"):
        model = Llama(make_config(tie_word_embeddings=tied))
    model(some_ids().to("meta"))  # fills the rotary cache with meta tensors, which must not be kept
    model.to_empty(device=CPU)

    assert torch.equal(materialised(model)(some_ids()), make_model(tie_word_embeddings=tied)(some_ids()))


def test_initial_values_depend_on_name_and_seed_alone():
    config = make_config()

    def value(name, seed=0):
        return full_initial_value(name, torch.Size((24, 24)), config=config, seed=seed, device=CPU)

    q, k = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    first = value(q)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    value(k)

    assert torch.equal(value(q), first)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert not torch.equal(value(k), first)
    assert not torch.equal(value(q, seed=1), first)


def test_initial_values_have_the_spread_of_their_kind():
    config = make_config(num_hidden_layers=8)

    def value(name):
        return full_initial_value(name, torch.Size((300, 200)), config=config, seed=0, device=CPU)

    assert value("model.layers.0.mlp.up_proj.weight").std().item() == pytest.approx(0.02, rel=0.02)
    assert value("lm_head.weight").std().item() == pytest.approx(0.02, rel=0.02)
    for name in ("model.layers.3.self_attn.o_proj.weight", "model.layers.3.mlp.down_proj.weight"):
        assert value(name).std().item() == pytest.approx(0.02 / 4, rel=0.02)
    for name in ("model.norm.weight", "model.layers.3.input_layernorm.weight"):
        assert (value(name) == 1).all()


def test_loss_is_the_mean_surprise_in_nats_and_fp32():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    labels = torch.tensor([[0, 1, 2], [3, 4, 0]])

    loss = next_token_loss(logits, labels)

    values = logits.double().numpy().reshape(6, 5)
    chosen = values[np.arange(6), labels.numpy().ravel()]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((np.log(np.exp(values).sum(-1)) - chosen).mean(), rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_an_untrained_model_knows_nothing_and_learns_one_batch_by_heart(tied):
    model, ids = make_model(tie_word_embeddings=tied), some_ids(batch=2, seq=17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(40):
        loss = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[0] == pytest.approx(math.log(31), rel=0.02)
    assert losses[-1] < 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_sharding_block_by_block_changes_no_value(tied, tmp_path):
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    plain, ids = make_model(tie_word_embeddings=tied), some_ids()
    next_token_loss(plain(ids[:, :-1]), ids[:, 1:]).backward()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = make_model(tie_word_embeddings=tied)
        for layer in sharded.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        next_token_loss(sharded(ids[:, :-1]), ids[:, 1:]).backward()
        for (name, one), other in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), one.grad, msg=name)
    finally:
        distributed.destroy_process_group()
