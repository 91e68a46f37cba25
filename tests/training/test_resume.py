"""Which settings may differ from a checkpoint's, and how a refusal reads."""

import pytest

from training.config import TrainConfig
from training.resume import check_continues, describe_run


def config(**changes) -> TrainConfig:
    values = {
        "run_name": "t",
        "model": "debug-3m",
        "run_directory": "/fsx/runs/t",
        "data": {"path": "/fsx/data"},
        "total_steps": 100,
        "seq_len": 64,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "checkpoint": {"directory": "/fsx/c", "interval_steps": 5},
    }
    return TrainConfig.model_validate({**values, **changes})


def manifest(saved: TrainConfig, step: int = 40) -> dict:
    return {"step": step, **describe_run(saved, corpus="abc")}


def test_the_same_settings_continue_without_a_word():
    assert check_continues(manifest(config()), config(), corpus="abc") == []


MAY_CHANGE = {
    "run_directory": "/fsx/other",
    "data": {"path": "/fsx/moved"},
    "micro_batch_size": 4,
    "deterministic": True,
    "checkpoint": {"directory": "/fsx/d", "interval_steps": 7},
    "metrics": {"line_interval_steps": 10, "tensorboard": True},
    "evaluation": {"path": "/fsx/v", "interval_steps": 5},
    "parallelism": {"activation_checkpointing": "full", "loss_chunk_tokens": 512, "dp_replicate": 2},
    "optimizer": {"max_skipped_steps": 9},
    "stop_at": "2026-12-01T17:30:00Z",
    "restarts": {"job": {"max_restarts": 1}},
}


@pytest.mark.parametrize(("name", "value"), MAY_CHANGE.items())
def test_what_does_not_touch_the_result_may_change_and_is_told(name, value):
    changes = check_continues(manifest(config()), config(**{name: value}), corpus="abc")
    assert changes
    assert all(change.startswith(name) and " in the checkpoint, now " in change for change in changes)


MAY_NOT = {
    "model": "llama-3.2-1b",
    "seed": 1,
    "seq_len": 32,
    "global_batch_size": 16,
    "total_steps": 101,
    "schedule": {"warmup_steps": 3},
    "optimizer": {"learning_rate": 1e-5},
    "data": {"path": "/fsx/data", "mask_documents": True},
    "parallelism": {"param_dtype": "float32"},
}


@pytest.mark.parametrize(("name", "value"), MAY_NOT.items())
def test_what_makes_it_another_run_is_refused_with_both_values(name, value):
    with pytest.raises(ValueError, match=f"made with other settings: .*{name}.* in the checkpoint, now .*restore them"):
        check_continues(manifest(config()), config(**{name: value}), corpus="abc")


def test_another_corpus_at_the_same_path_is_refused():
    with pytest.raises(ValueError, match=r"other settings: the content of data.path; restore"):
        check_continues(manifest(config()), config(), corpus="another")


def test_a_wsd_run_may_grow_before_its_decay_and_not_after():
    def wsd(total_steps: int) -> TrainConfig:
        return config(total_steps=total_steps, schedule={"kind": "wsd", "decay_steps": 20})

    assert check_continues(manifest(wsd(100), step=80), wsd(200), corpus="abc") == [
        "total_steps: 100 in the checkpoint, now 200"
    ]
    with pytest.raises(ValueError, match="total_steps: 100 in the checkpoint, now 200"):
        check_continues(manifest(wsd(100), step=85), wsd(200), corpus="abc")


def test_settings_newer_than_the_checkpoint_count_as_their_defaults():
    old = manifest(config())
    del old["settings"]["metrics"]
    assert check_continues(old, config(), corpus="abc") == []


def test_settings_that_this_version_does_not_know_are_refused():
    newer = manifest(config())
    newer["settings"]["warp"] = 9
    with pytest.raises(ValueError, match="can't be read by this version: warp: unknown key"):
        check_continues(newer, config(), corpus="abc")


def test_the_manifest_holds_the_settings_and_their_hash():
    described = describe_run(config(), corpus="abc")
    assert described["settings"] == config().model_dump(mode="json")
    assert described["settings_sha256"] != describe_run(config(seed=1), corpus="abc")["settings_sha256"]
