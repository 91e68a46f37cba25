"""Settings of a run: what is refused, and that the message says field, value, rule and fix."""

import json
import typing

import pytest
from pydantic import BaseModel, ValidationError

from training.config import MODEL_PRESETS, FaultSpec, RestartsConfig, TrainConfig, describe_errors, load_train_json


def document(**changes) -> dict:
    return {
        "run_name": "t",
        "model": "debug-3m",
        "run_directory": "/fsx/runs/t",
        "data": {"path": "/fsx/data"},
        "total_steps": 20,
        "seq_len": 64,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "checkpoint": {"directory": "/fsx/runs/t/checkpoints", "interval_steps": 5},
        **changes,
    }


def errors_of(**changes) -> str:
    with pytest.raises(ValidationError) as caught:
        TrainConfig.model_validate(document(**changes))
    return describe_errors(caught.value)


def test_an_unknown_key_is_refused_by_name():
    assert "total_step: unknown key" in errors_of(total_step=3)


def test_an_unknown_preset_lists_the_known_ones():
    assert (
        "model: unknown model preset 'llama-9'; known: debug-3m, llama-2-7b, llama-3.1-70b, llama-3.1-8b, "
        "llama-3.2-1b, llama-3.2-3b (given 'llama-9')" in errors_of(model="llama-9")
    )


def test_a_sequence_longer_than_the_model_allows_is_refused():
    assert "seq_len 4096 exceeds model.max_position_embeddings 2048" in errors_of(seq_len=4096)


def test_a_fault_after_the_last_step_is_refused():
    assert "sigkill@21:rank0 comes after the last step 20" in errors_of(
        faults=[{"kind": "sigkill", "step": 21, "rank": 0}]
    )


def test_all_errors_are_reported_together():
    assert len(errors_of(total_steps=0, seq_len=-1, typo=1).splitlines()) == 3


def test_a_batch_that_does_not_divide_names_the_multiple():
    config = TrainConfig.model_validate(document())
    config.check_world_size(2)
    assert config.gradient_accumulation_steps(2) == 2
    with pytest.raises(ValueError, match="choose a multiple of 6"):
        config.check_world_size(3)


def test_a_fault_on_a_rank_that_does_not_exist_is_refused():
    config = TrainConfig.model_validate(document(faults=[{"kind": "exception", "step": 3, "rank": 2}]))
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        config.check_world_size(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_process": {"soft_timeout_seconds": 95}}, "soft_timeout_seconds 95 must be below in_process.hard_timeout"),
        ({"collective_timeout_seconds": 80}, "hard_timeout_seconds 90 must be below collective_timeout_seconds 80"),
        ({"in_job": {"step_section_timeout_seconds": 60}}, "must be below in_job.step_section_timeout_seconds 60"),
        ({"in_job": {"term_timeout_seconds": 20}}, "workers_stop_timeout_seconds 30 must be below in_job.term_timeout"),
    ],
)
def test_timeouts_that_do_not_nest_are_refused(changes, message):
    with pytest.raises(ValidationError) as caught:
        RestartsConfig.model_validate(changes)
    assert message in describe_errors(caught.value)


def test_in_process_timeouts_are_free_when_that_layer_is_off():
    RestartsConfig.model_validate({"in_process": {"enabled": False, "hard_timeout_seconds": 9000}})


def test_the_pod_outlives_the_launchers_own_term_timeout():
    restarts = RestartsConfig()
    assert restarts.termination_grace_period_seconds > restarts.in_job.term_timeout_seconds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": {"directory": "/fsx/c", "interval_steps": 0}}, "checkpoint.interval_steps: Input should be"),
        ({"schedule": {"kind": "wsd"}}, "schedule: kind wsd needs decay_steps"),
        ({"schedule": {"decay_steps": 3}}, "schedule: decay_steps is for kind wsd, kind is cosine; remove it"),
        ({"schedule": {"kind": "wsd", "warmup_steps": 15, "decay_steps": 6}}, "exceed total_steps 20; lower them"),
        ({"parallelism": {"float8": "rowwise", "param_dtype": "float32"}}, "float8 needs param_dtype bfloat16"),
        ({"parallelism": {"float8": "rowwise"}}, "float8 without compile: inductor is slower"),
        ({"metrics": {"profiler": {"start_step": 19}}}, "metrics.profiler records steps 19 to 21, the last step is 20"),
        ({"metrics": {"prometheus_port": 70_000}}, "metrics.prometheus_port: Input should be less than or equal to"),
        ({"stop_at": "2026-12-01T17:30:00"}, "stop_at: Input should have timezone info (given '2026-12-01T17:30:00')"),
        ({"evaluation": {"path": "/fsx/v", "interval_steps": 0}}, "evaluation.interval_steps: Input should be greater"),
    ],
)
def test_wrong_values_and_combinations_are_refused_with_their_path(changes, message):
    assert message in errors_of(**changes)


def test_float8_needs_widths_in_tiles():
    model = MODEL_PRESETS["llama-3.2-1b"].model_dump() | {"intermediate_size": 8190}
    settings = {"float8": "tensorwise", "compile": "inductor"}
    assert "model.intermediate_size 8190 is no multiple; unset float8" in errors_of(model=model, parallelism=settings)


def test_a_mesh_that_does_not_divide_the_world_is_refused():
    config = TrainConfig.model_validate(document(parallelism={"dp_replicate": 3}))
    with pytest.raises(ValueError, match="dp_replicate 3 does not divide 4 ranks; choose a divisor"):
        config.check_world_size(4)


def test_every_setting_says_what_it_means():
    unexplained = [
        f"{section.__name__}.{name}"
        for section in set(_sections(TrainConfig)) - {FaultSpec}
        for name, field in section.model_fields.items()
        if not field.description and not _sections_in(field.annotation)
    ]
    assert unexplained == []


def _sections(section):
    """`section` and all sections inside it; each is explained by its class, each other setting by its description."""
    yield section
    for field in section.model_fields.values():
        for inner in _sections_in(field.annotation):
            yield from _sections(inner)


def _sections_in(kind) -> list:
    return [one for one in (kind, *typing.get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]


def test_train_json_comes_back_as_the_same_settings(tmp_path):
    config = TrainConfig.model_validate(document())
    (tmp_path / "train.json").write_text(config.model_dump_json())
    assert load_train_json(tmp_path / "train.json") == config


def test_a_missing_a_broken_and_a_wrong_train_json_each_give_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\)"):
        load_train_json(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_train_json(tmp_path / "broken.json")
    (tmp_path / "wrong.json").write_text(json.dumps(document(seq_len="long")))
    with pytest.raises(ValueError, match=r"seq_len: .*given 'long'"):
        load_train_json(tmp_path / "wrong.json")
