"""TensorBoard and Prometheus get what the steps measured, on rank 0 only, and are closed with the attempt."""

import socket
import sys
import urllib.request

import pytest

from training.config import TrainConfig
from training.device import DeviceLimits
from training.metric_sinks import MetricSinks
from training.metrics import step_metrics
from training.step import StepResult


def config(tmp_path, **metrics) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "run_name": "t",
            "model": "debug-3m",
            "run_directory": str(tmp_path),
            "data": {"path": "/none"},
            "total_steps": 60,
            "seq_len": 128,
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "metrics": metrics,
            "checkpoint": {"directory": "/none", "interval_steps": 5},
        }
    )


def measured(settings: TrainConfig, step: int, loss: float):
    return step_metrics(
        settings,
        StepResult(loss, 0.5, 1e-3, False, None, 0.1, 0.2, 0.1),
        step=step,
        world_size=2,
        limits=DeviceLimits("CPU", None, None),
        skipped_steps=0,
        memory_peak_bytes=1,
        checkpoint_stall_seconds=0.0,
    )


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scraped(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}


def test_prometheus_serves_the_latest_step_and_the_port_is_free_for_the_next_attempt(tmp_path, port):
    settings = config(tmp_path, prometheus_port=port)
    for attempt in range(2):
        with MetricSinks(settings, rank=0, start_step=0) as sinks:
            sinks.write_step(measured(settings, 1, 3.0))
            sinks.write_step(measured(settings, 2, 2.0 + attempt))
            sinks.write_evaluation(1.5, 2)
            found = scraped(port)
        assert found["training_step"] == 2
        assert found["training_loss"] == 2.0 + attempt
        assert found["training_validation_loss"] == 1.5
        assert found["training_tokens_per_second"] == pytest.approx(8 * 128 / 0.4)


def test_a_port_that_is_taken_is_refused(tmp_path, port):
    with socket.socket() as other:
        other.bind(("0.0.0.0", port))
        other.listen()
        with pytest.raises(ValueError, match=f"metrics.prometheus_port {port}: Address already in use; choose another"):
            MetricSinks(config(tmp_path, prometheus_port=port), rank=0, start_step=0)


def test_tensorboard_gets_every_measurement_and_a_replay_hides_what_came_before(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = config(tmp_path, tensorboard=True)
    for start_step, losses in ((0, {1: 3.0, 2: 2.0, 3: 1.0}), (1, {2: 2.5})):
        with MetricSinks(settings, rank=0, start_step=start_step) as sinks:
            for step, loss in losses.items():
                sinks.write_step(measured(settings, step, loss))
    accumulator = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("train/loss")] == [(1, 3.0), (2, 2.5)]
    assert {"train/grad_norm", "train/tokens_per_second", "train/memory_peak_bytes"} <= set(
        accumulator.Tags()["scalars"]
    )


def test_lines_come_in_their_interval_and_at_the_last_step(tmp_path, capsys):
    settings = config(tmp_path, line_interval_steps=50)
    with MetricSinks(settings, rank=0, start_step=0) as sinks:
        for step in (1, 49, 50, 51, 60):
            sinks.write_step(measured(settings, step, 1.0))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["50/60", "60/60"]


def test_other_ranks_have_no_sinks(tmp_path, port, capsys):
    settings = config(tmp_path, prometheus_port=port, tensorboard=True)
    with MetricSinks(settings, rank=1, start_step=0) as sinks:
        sinks.write_step(measured(settings, 1, 1.0))
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize(
    ("module", "metrics", "message"),
    [
        ("torch.utils.tensorboard", {"tensorboard": True}, "metrics.tensorboard needs tensorboard"),
        ("prometheus_client", {"prometheus_port": 9400}, "metrics.prometheus_port needs prometheus_client"),
    ],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, module, metrics, message):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ValueError, match=message):
        MetricSinks(config(tmp_path, **metrics), rank=0, start_step=0)
