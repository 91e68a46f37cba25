"""A window of steps recorded by torch.profiler, and NVRx's straggler detection; both off unless configured."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from training.config_step import ProfilerConfig


class ProfilerWindow:
    """Records the configured steps of this rank into one Chrome trace (chrome://tracing, Perfetto)."""

    def __init__(self, config: ProfilerConfig | None, *, run_directory: Path, rank: int) -> None:
        self._config = config if config is not None and rank in config.ranks else None
        self._directory = run_directory / "profile"
        self._rank = rank
        self._profiler: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Call before `step`."""
        if self._config is not None and step == self._config.start_step:
            self._profiler = torch.profiler.profile()  # every activity that this build of torch can record
            self._profiler.start()

    def end(self, step: int) -> Path | None:
        """Call after `step`; returns the trace when the window is over."""
        if self._profiler is None or self._config is None:
            return None
        if step < self._config.start_step + self._config.steps - 1:
            return None
        self._profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rank-{self._rank:05d}-steps-{self._config.start_step}-{step}.json"
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        return path


class StragglerDetection(AbstractContextManager["StragglerDetection"]):
    """NVRx's detector for one attempt: it is one per process and must be shut down before a restart uses it again.

    Raises:
        ValueError: there is no GPU, or NVRx has no CUPTI module here.
    """

    def __init__(self, interval_seconds: float | None, *, device: torch.device) -> None:
        self._detector: Any = None
        if interval_seconds is None:
            return
        if device.type != "cuda":
            raise ValueError("metrics.straggler_interval_seconds needs GPUs, this is a CPU; leave it out")
        from nvidia_resiliency_ext.attribution.straggler import Detector

        try:
            Detector.initialize(report_time_interval=interval_seconds, gather_on_rank0=True)
        except ImportError as error:
            raise ValueError(
                f"metrics.straggler_interval_seconds needs NVRx's CUPTI module ({error}); "
                "it comes with NVRx's own wheel (Python 3.12, glibc 2.39), as in the image; or leave it out"
            ) from error
        self._detector = Detector

    def __exit__(self, *_exception: object) -> None:
        if self._detector is not None:
            self._detector.shutdown()
            self._detector = None

    def section(self) -> AbstractContextManager[None]:
        """Around each step: its GPU kernels are timed."""
        return nullcontext() if self._detector is None else self._detector.detection_section("step", profile_cuda=True)

    def report(self) -> list[int] | None:
        """Ranks whose GPU is slow (rank 0 knows all); None when it is not yet time for a report. Collective."""
        if self._detector is None:
            return None
        report = self._detector.generate_report_if_interval_elapsed()
        if report is None:
            return None
        found = report.identify_stragglers()
        return sorted({one.rank for one in found["straggler_gpus_relative"] | found["straggler_gpus_individual"]})
