"""Where rank 0's measurements go besides the event log: standard output, TensorBoard, a Prometheus endpoint.

The libraries are imported only where the settings ask for them: they are no part of a restarted rank's way back.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from training.config import MetricsConfig, TrainConfig
from training.metrics import StepMetrics

# Writes scalars, by name, of one step.
Sink = Callable[[dict[str, float], int], None]


class MetricSinks(AbstractContextManager["MetricSinks"]):
    """Open for one attempt; rank 0 has the sinks that the settings name, other ranks have none.

    Raises:
        ValueError: a library is missing or the port is taken.
    """

    def __init__(self, config: TrainConfig, *, rank: int, start_step: int) -> None:
        self._total_steps = config.total_steps
        self._line_interval = config.metrics.line_interval_steps if rank == 0 else None
        self._sinks: list[Sink] = []
        self._closing = ExitStack()
        if rank == 0:
            with self._closing:  # closed again if the second one can't be opened
                self._open(config.metrics, Path(config.run_directory), start_step)
                self._closing = self._closing.pop_all()

    def _open(self, config: MetricsConfig, run_directory: Path, start_step: int) -> None:
        if config.tensorboard:
            sink, close = _tensorboard(run_directory / "tensorboard", start_step)
            self._sinks.append(sink)
            self._closing.callback(close)
        if config.prometheus_port is not None:
            sink, close = _prometheus(config.prometheus_port)
            self._sinks.append(sink)
            self._closing.callback(close)

    def __exit__(self, *_exception: object) -> None:
        self._closing.close()

    def write_step(self, metrics: StepMetrics) -> None:
        """Hand one step's measurements to every sink."""
        if self._line_interval is not None and (
            metrics.step % self._line_interval == 0 or metrics.step == self._total_steps
        ):
            print(metrics.line(self._total_steps), flush=True)
        self._write(metrics.scalars(), metrics.step)

    def write_evaluation(self, loss: float, step: int) -> None:
        """Hand a validation loss to every sink."""
        if self._line_interval is not None:
            print(f"step {step}/{self._total_steps}  validation loss {loss:.4f}", flush=True)
        self._write({"validation_loss": loss}, step)

    def _write(self, scalars: dict[str, float], step: int) -> None:
        for sink in self._sinks:
            sink(scalars, step)


def _tensorboard(directory: Path, start_step: int) -> tuple[Sink, Callable[[], None]]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            f"metrics.tensorboard needs tensorboard, which can't be imported ({error}); install it or set it to false"
        ) from error
    # purge_step: what an earlier attempt wrote of the steps that now come again is hidden.
    writer = SummaryWriter(str(directory), purge_step=start_step + 1)

    def write(scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(f"train/{name}", value, step)

    return write, writer.close


def _prometheus(port: int) -> tuple[Sink, Callable[[], None]]:
    try:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server
    except ImportError as error:
        raise ValueError(
            f"metrics.prometheus_port needs prometheus_client, which can't be imported ({error}); "
            "install it or leave the port out"
        ) from error
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise ValueError(f"metrics.prometheus_port {port}: {error.strerror}; choose another port") from error

    def write(scalars: dict[str, float], step: int) -> None:
        for name, value in {**scalars, "step": float(step)}.items():
            if name not in gauges:
                gauges[name] = Gauge(f"training_{name}", name.replace("_", " "), registry=registry)
            gauges[name].set(value)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return write, close
