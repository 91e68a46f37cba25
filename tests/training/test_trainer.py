"""Whole runs of real ranks through the trainer's own entry: exact resume, other world sizes, stopping."""

import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from training.checkpoint.durable import committed_steps
from training.checkpoint.saver import Saver
from training.config import (
    DONE_MARKER,
    EXIT_BAD_CONFIG,
    EXIT_NO_RESTART,
    EXIT_SIGTERM,
    NO_RESTART_MARKER,
    TrainConfig,
)
from training.events import EventLog, read_events
from training.faults import FaultInjector
from training.prepare_data import prepare
from training.resilience import RankMonitor
from training.stopping import StopRequest
from training.trainer import Process, run_attempt

MODEL = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
STEPS = 8


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Path]:
    """A corpus to train on and one to validate on."""
    root = tmp_path_factory.mktemp("corpora")
    for name, text in (("train", "the cat sat on the mat. "), ("held-out", "a dog lay under a tree. ")):
        (root / f"{name}-text").mkdir()
        for index in range(20):
            (root / f"{name}-text" / f"{index}.txt").write_text(text * (10 + index))
        prepare(root / f"{name}-text", "*.txt", root / name, tokenizer="bytes")
    return {name: root / name for name in ("train", "held-out")}


def settings(corpora, directory: Path, **changes) -> TrainConfig:
    values = {
        "run_name": "t",
        "model": MODEL,
        "run_directory": str(directory / "run"),
        "data": {"path": str(corpora["train"])},
        "seed": 5,
        "total_steps": STEPS,
        "seq_len": 32,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "optimizer": {"learning_rate": 1e-2},
        "parallelism": {"param_dtype": "float32"},
        "checkpoint": {
            "directory": str(directory / "checkpoints"),
            "interval_steps": 4,
            "keep_latest": 5,
            "commit_within_steps": 1,
        },
        "restarts": {"collective_timeout_seconds": 120},
        "deterministic": True,
    }
    return TrainConfig.model_validate({**values, **changes})


def attempt(rank: int, config: TrainConfig, told_to_stop_by: int | None = None) -> int:
    """One rank's whole process but its interpreter's start; returns its exit code."""
    world_size = dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()  # the fixture's; the trainer makes its own
    run_directory = Path(config.run_directory)
    stop_file = run_directory / f"stop-rank-{rank}"
    stop = StopRequest(config, stop_file)
    stop.listen()
    if told_to_stop_by == rank:
        stop_file.touch()
        os.kill(os.getpid(), signal.SIGTERM)
    torch.use_deterministic_algorithms(config.deterministic)
    events = EventLog(run_directory, rank=rank, cycle=0)
    process = Process(
        rank=rank,
        world_size=world_size,
        cycle=0,
        device=torch.device("cpu"),
        store=dist.PrefixStore("trainer", store),
        events=events,
        monitor=RankMonitor(enabled=False),
        faults=FaultInjector(config.faults, run_directory=run_directory, rank=rank, node=0, events=events),
        saver=Saver(rank=rank, device=torch.device("cpu")),
        stop=stop,
    )
    try:
        code = run_attempt(config, process, None)
    except SystemExit as error:
        code = int(error.code)
    process.saver.close()
    if dist.is_initialized():  # a run that gave up leaves it to the end of the process
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("end", store), rank=rank, world_size=world_size)
    return code


def train(run_ranks, config: TrainConfig, *, world_size: int = 2, codes=None, **arguments) -> list[dict]:
    """Train, to these exit codes of the ranks (all 0); returns the run's events."""
    Path(config.run_directory).mkdir(parents=True, exist_ok=True)
    assert run_ranks(attempt, config, *arguments.values(), world_size=world_size) == (codes or [0] * world_size)
    return read_events(Path(config.run_directory))


def losses(events: list[dict]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step" and event["rank"] == 0}


def of_kind(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def samples(events: list[dict]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in of_kind(events, "step"):
        found.setdefault(event["step"], []).extend(event["sample_ids"])
    return {step: sorted(ids) for step, ids in found.items()}


@pytest.fixture(scope="module")
def undisturbed(corpora, tmp_path_factory, module_run_ranks) -> tuple[Path, list[dict]]:
    """The folder and the events of a whole run of two ranks, with checkpoints of steps 4 and 8."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return directory, train(module_run_ranks, settings(corpora, directory))


def from_step_4(undisturbed, directory: Path) -> None:
    """Give the run in `directory` the undisturbed run's checkpoint of step 4."""
    (directory / "checkpoints").mkdir()
    shutil.copytree(undisturbed[0] / "checkpoints/step-00000004", directory / "checkpoints/step-00000004")


def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(run_ranks, corpora, undisturbed, tmp_path):
    from_step_4(undisturbed, tmp_path)

    events = train(run_ranks, settings(corpora, tmp_path))

    expected = losses(undisturbed[1])
    assert losses(events) == {step: expected[step] for step in range(5, STEPS + 1)}
    hashes = {event["params_sha256"] for event in of_kind([*events, *undisturbed[1]], "complete")}
    assert len(hashes) == 1
    assert None not in hashes
    assert (tmp_path / "run" / DONE_MARKER).exists()


# Sums over ranks are rounded in another order: losses of this model then agree to about 1e-6.
TOLERANCE = 1e-5


def test_two_ranks_resumed_as_one_take_the_same_batches_and_agree_to_rounding(
    run_ranks, corpora, undisturbed, tmp_path
):
    from_step_4(undisturbed, tmp_path)

    events = train(run_ranks, settings(corpora, tmp_path), world_size=1)

    expected = losses(undisturbed[1])
    assert losses(events) == pytest.approx({step: expected[step] for step in range(5, STEPS + 1)}, rel=TOLERANCE)
    all_samples = samples(undisturbed[1])
    assert samples(events) == {step: all_samples[step] for step in range(5, STEPS + 1)}
    assert of_kind(events, "settings_changed")[0]["changes"][-1] == "world size: 2 in the checkpoint, now 1"


def test_one_rank_resumed_as_two_takes_the_same_batches_and_agrees_to_rounding(
    run_ranks, corpora, undisturbed, tmp_path
):
    first = train(run_ranks, settings(corpora, tmp_path), world_size=1)
    assert losses(first) == pytest.approx(losses(undisturbed[1]), rel=TOLERANCE)
    shutil.rmtree(tmp_path / "checkpoints/step-00000008")

    events = train(run_ranks, settings(corpora, tmp_path, run_directory=str(tmp_path / "second")))

    expected = losses(undisturbed[1])
    assert losses(events) == pytest.approx({step: expected[step] for step in range(5, STEPS + 1)}, rel=TOLERANCE)
    assert samples(events) == {step: samples(undisturbed[1])[step] for step in range(5, STEPS + 1)}


def test_resuming_at_the_last_step_saves_nothing_and_is_complete(run_ranks, corpora, undisturbed, tmp_path):
    shutil.copytree(undisturbed[0] / "checkpoints", tmp_path / "checkpoints")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")}

    events = train(run_ranks, settings(corpora, tmp_path))

    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").rglob("*")} == before
    assert not of_kind(events, "step")
    assert {event["step"] for event in of_kind(events, "complete")} == {STEPS}
    assert (tmp_path / "run" / DONE_MARKER).exists()


def test_a_setting_that_breaks_the_run_is_refused_and_one_that_may_change_is_shown(
    run_ranks, corpora, undisturbed, tmp_path
):
    from_step_4(undisturbed, tmp_path)
    checkpoint = settings(corpora, tmp_path).checkpoint.model_dump() | {"interval_steps": 3}
    (tmp_path / "run").mkdir()

    refused = settings(corpora, tmp_path, seed=6, checkpoint=checkpoint)
    assert run_ranks(attempt, refused) == [EXIT_NO_RESTART] * 2
    reason = (tmp_path / "run" / NO_RESTART_MARKER).read_text()
    assert reason.startswith("the checkpoint was made with other settings: seed: 5 in the checkpoint, now 6; restore")

    evaluation = {"path": str(corpora["held-out"]), "interval_steps": 5, "sequences": 7}
    events = train(run_ranks, settings(corpora, tmp_path, checkpoint=checkpoint, evaluation=evaluation))
    (shown,) = of_kind(events, "settings_changed")
    assert "checkpoint.interval_steps: 4 in the checkpoint, now 3" in shown["changes"]
    assert losses(events)[STEPS] == losses(undisturbed[1])[STEPS]  # evaluating changed nothing
    validated = of_kind(events, "evaluation")
    assert [event["step"] for event in validated if event["rank"] == 0] == [5, STEPS]
    assert len({event["loss"] for event in validated}) == 2  # one per step, the same on both ranks


def test_a_tracker_without_its_checkpoint_is_an_error_not_step_0(run_ranks, corpora, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/latest_step.txt").write_text("4\n")
    (tmp_path / "run").mkdir()

    assert run_ranks(attempt, settings(corpora, tmp_path), world_size=1) == [EXIT_NO_RESTART]

    assert "says step 4, but" in (tmp_path / "run" / NO_RESTART_MARKER).read_text()


def test_sigterm_on_one_rank_saves_at_the_next_step_and_the_run_goes_on_bit_for_bit(
    run_ranks, corpora, undisturbed, tmp_path
):
    config = settings(corpora, tmp_path)

    # Rank 1's pod is to end; rank 0's launcher is to start its rank again, with another.
    events = train(run_ranks, config, codes=[EXIT_SIGTERM, 0], told_to_stop_by=1)

    assert [(event["step"], event["reason"]) for event in of_kind(events, "stopped")] == [(1, "sigterm")] * 2
    assert committed_steps(tmp_path / "checkpoints") == [1]
    assert not (tmp_path / "run" / DONE_MARKER).exists()
    assert not (tmp_path / "run" / NO_RESTART_MARKER).exists()
    again = train(run_ranks, config)
    assert losses(again) == losses(undisturbed[1])


def test_the_deadline_saves_stops_and_forbids_a_restart(run_ranks, corpora, tmp_path):
    now = datetime.datetime.now(datetime.UTC)
    # Over by the end of the first step, but not yet when training begins: that much the set-up may take.
    config = settings(corpora, tmp_path, stop_at=now + datetime.timedelta(seconds=60), total_steps=1_000_000)
    soon = config.model_copy(update={"stop_margin_seconds": 50.0})

    events = train(run_ranks, soon)

    stopped = of_kind(events, "stopped")
    assert {event["reason"] for event in stopped} == {"deadline"}
    assert committed_steps(tmp_path / "checkpoints")[-1] == stopped[0]["step"]
    assert max(event["t"] for event in of_kind(events, "checkpoint_committed")) < config.stop_at.timestamp()
    assert "set a later stop_at to go on" in (tmp_path / "run" / NO_RESTART_MARKER).read_text()
    assert run_ranks(attempt, soon) == [EXIT_NO_RESTART] * 2
    assert "is past or less than stop_margin_seconds 50 away" in (tmp_path / "run" / NO_RESTART_MARKER).read_text()


def test_settings_that_do_not_fit_the_job_leave_the_marker_that_stops_restarts(tmp_path):
    document = {
        "run_name": "t",
        "model": "debug-3m",
        "run_directory": str(tmp_path / "run"),
        "data": {"path": "/none"},
        "total_steps": 1,
        "seq_len": 8,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "checkpoint": {"directory": str(tmp_path / "c"), "interval_steps": 1},
    }
    (tmp_path / "train.json").write_text(json.dumps(document))
    finished = subprocess.run(
        [sys.executable, "-m", "training.train", "--config", str(tmp_path / "train.json")],
        env={**os.environ, "WORLD_SIZE": "3", "RANK": "0"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == EXIT_BAD_CONFIG
    assert finished.stderr.splitlines()[-1].startswith("error: global_batch_size 4 is not a multiple of")
    assert "choose a multiple of 3" in (tmp_path / "run" / NO_RESTART_MARKER).read_text()
