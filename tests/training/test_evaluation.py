"""The validation loss: of the right samples, and the same at every world size."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from training.config import TrainConfig
from training.data import TokenizedCorpus
from training.evaluation import Evaluation
from training.parallelism import build_mesh, build_sharded_model
from training.prepare_data import prepare

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    (tmp_path / "text").mkdir()
    for index in range(6):
        (tmp_path / "text" / f"{index}.txt").write_text("a dog lay under a tree. " * (5 + index))
    prepare(tmp_path / "text", "*.txt", tmp_path / "corpus", tokenizer="bytes")
    return TrainConfig.model_validate(
        {
            "run_name": "t",
            "model": {
                "vocab_size": 257,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            },
            "run_directory": "/none",
            "data": {"path": "/none"},
            "total_steps": 10,
            "seq_len": 32,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "parallelism": {"param_dtype": "float32"},
            "evaluation": {"path": str(tmp_path / "corpus"), "interval_steps": 5, "sequences": 7},
            "checkpoint": {"directory": "/none", "interval_steps": 1},
        }
    )


def build(config: TrainConfig):
    mesh = build_mesh(config.parallelism, world_size=dist.get_world_size(), device=CPU)
    return build_sharded_model(config, mesh=mesh, device=CPU)


def evaluated(rank: int, config: TrainConfig) -> tuple:
    model = build(config)
    evaluation = Evaluation(config, config.evaluation)
    loss = evaluation.loss(model, device=CPU)
    again = evaluation.loss(model, device=CPU)
    gathered = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "placements")]
    return loss, again, gathered


def test_the_validation_loss_is_the_same_at_any_world_size_and_on_every_rank(run_ranks, config):
    ((alone, again, _),) = run_ranks(evaluated, config, world_size=1)
    two = run_ranks(evaluated, config, world_size=2)

    assert alone == again
    assert len({loss for loss, _, _ in two}) == 1
    assert two[0][0] == pytest.approx(alone, rel=1e-6)
    assert [gathered for _, _, gathered in two] == [[], []]  # every parameter is a shard again


def by_hand(rank: int, config: TrainConfig) -> float:
    model, corpus = build(config), TokenizedCorpus(Path(config.evaluation.path))
    losses = []
    for sample in range(7):
        tokens = torch.from_numpy(corpus.tokens(sample, 32))[None]
        logits = model(tokens[:, :-1])[0].detach()
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).item())
    return sum(losses) / 7


def test_it_is_the_mean_over_the_first_samples(run_ranks, config):
    assert run_ranks(evaluated, config, world_size=1)[0][0] == pytest.approx(
        run_ranks(by_hand, config, world_size=1)[0], rel=1e-5
    )


def test_too_small_a_validation_corpus_is_refused(config):
    settings = config.evaluation.model_copy(update={"sequences": 10_000})
    with pytest.raises(ValueError, match=r"evaluation.sequences 10000 exceeds the \d+ samples of seq_len 32"):
        Evaluation(config, settings)
