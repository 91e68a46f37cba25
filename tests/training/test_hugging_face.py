"""The model against transformers' LlamaForCausalLM on the same random weights: logits and one step's gradients."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="a dev dependency: requirements-dev.txt")

from training.config_model import ModelConfig, RopeScaling  # noqa: E402
from training.loss import next_token_loss  # noqa: E402
from training.model import Llama  # noqa: E402

SCALING = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=16)
END = 3


def configuration(**changes) -> ModelConfig:
    values = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # large, so that attention is not nearly uniform
    }
    return ModelConfig(**{**values, **changes})


def pair(config: ModelConfig):
    """Our model and theirs with the same weights."""
    settings = config.model_dump()
    settings["rope_scaling"] = {"rope_type": "llama3", **settings["rope_scaling"]} if config.rope_scaling else None
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**settings, attn_implementation="eager", pad_token_id=None)
    ).float()
    ours = Llama(config)
    loaded = ours.load_state_dict(
        {name: value for name, value in theirs.state_dict().items() if name != "lm_head.weight" or ours.lm_head},
        strict=True,
    )
    assert not loaded.missing_keys
    return ours, theirs


def token_ids():
    return torch.randint(4, 61, (2, 33), generator=torch.Generator().manual_seed(2))


SWITCHES = {
    "llama 2": {},
    "grouped queries": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "llama 3.1 scaling": {"num_key_value_heads": 2, "rope_theta": 500_000.0, "rope_scaling": SCALING},
    "llama 3.2": {"tie_word_embeddings": True, "num_key_value_heads": 2, "rope_theta": 500.0, "rope_scaling": SCALING},
    "another epsilon": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("chunk_tokens", [None, 10])
def test_logits_and_gradients_equal_transformers(changes, chunk_tokens):
    ours, theirs = pair(configuration(**changes))
    ours.loss_chunk_tokens = chunk_tokens
    ids = token_ids()
    logits = theirs(ids[:, :-1]).logits
    next_token_loss(logits, ids[:, 1:]).backward()

    torch.testing.assert_close(ours(ids[:, :-1]), logits, rtol=1e-4, atol=1e-4)
    ours(ids[:, :-1], ids[:, 1:]).backward()

    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-3, atol=1e-6, msg=name)


def test_masked_documents_equal_transformers_with_the_same_mask():
    ours, theirs = pair(configuration(num_key_value_heads=2))
    ids = token_ids()
    ids[0, [4, 5, 20]] = END
    allowed = torch.ones(2, 1, 33, 33, dtype=torch.bool).tril()
    for row, ends in enumerate(([4, 5, 20], [])):
        for end in ends:  # what comes after an end does not see it, nor what was before
            allowed[row, 0, end + 1 :, : end + 1] = False
    bias = torch.zeros(2, 1, 33, 33).masked_fill(~allowed, torch.finfo(torch.float32).min)

    expected = theirs(ids, attention_mask=bias).logits

    torch.testing.assert_close(ours(ids, end_of_document=END), expected, rtol=1e-4, atol=1e-4)


def test_the_published_scaling_gives_transformers_frequencies():
    from training.config_model import MODEL_PRESETS
    from training.model import inverse_frequencies

    for name, config in MODEL_PRESETS.items():
        settings = config.model_copy(update={"num_hidden_layers": 1, "vocab_size": 8}).model_dump()
        settings["rope_scaling"] = {"rope_type": "llama3", **settings["rope_scaling"]} if config.rope_scaling else None
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
            transformers.LlamaConfig(**settings, pad_token_id=None)
        )
        torch.testing.assert_close(inverse_frequencies(config, torch.device("cpu")), rotary.inv_freq, msg=name)
