"""The profiler's window, and NVRx's straggler detection across restarts."""

import json
import sys
import types

import pytest
import torch

from training.config_step import ProfilerConfig
from training.profiling import ProfilerWindow, StragglerDetection

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_the_window_records_its_steps_on_its_ranks(tmp_path):
    config = ProfilerConfig(start_step=2, steps=2, ranks=(1,))
    for rank in (0, 1):
        window = ProfilerWindow(config, run_directory=tmp_path, rank=rank)
        paths = []
        for step in range(1, 6):
            window.begin(step)
            torch.ones(8, 8) @ torch.ones(8, 8)
            paths.append(window.end(step))
        written = [path for path in paths if path is not None]
        assert len(written) == rank
    trace = json.loads((tmp_path / "profile" / "rank-00001-steps-2-3.json").read_text())
    assert sum(event.get("name") == "aten::mm" for event in trace["traceEvents"]) == 2


def test_straggler_detection_is_refused_by_name_without_a_gpu():
    with pytest.raises(ValueError, match=r"metrics.straggler_interval_seconds needs GPUs, this is a CPU; leave it out"):
        StragglerDetection(60.0, device=CPU)


def test_straggler_detection_is_refused_by_name_without_cupti(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvrx_cupti_module", None)
    with pytest.raises(ValueError, match="needs NVRx's CUPTI module"):
        StragglerDetection(60.0, device=GPU)


def test_without_the_setting_nothing_is_detected_and_nothing_imported():
    with StragglerDetection(None, device=CPU) as detection:
        with detection.section():
            pass
        assert detection.report() is None


class FakeCupti:
    """Stands in for NVRx's CUPTI module, which needs a GPU: it sees no kernels."""

    def __init__(self, *_arguments, **_settings) -> None:
        pass

    def initialize(self) -> None:
        pass

    start = stop = shutdown = reset = initialize

    def get_stats(self) -> dict:
        return {}


def attempts(rank: int) -> list:
    module = types.ModuleType("nvrx_cupti_module")
    module.CuptiProfiler = FakeCupti
    sys.modules["nvrx_cupti_module"] = module
    torch.cuda.synchronize = lambda *_: None  # the detector waits for a GPU, and sends its numbers over it
    torch.cuda.current_device = lambda: "cpu"
    from nvidia_resiliency_ext.attribution.straggler import Detector

    reports = []
    for _ in range(2):  # an in-process restart: the second attempt initialises the detector anew
        try:
            with StragglerDetection(1e-6, device=GPU) as detection:
                for _ in range(20):
                    with detection.section():
                        pass
                    reports.append(detection.report())
                raise InterruptedError
        except InterruptedError:
            assert not Detector.initialized
    return reports


def test_the_detector_is_shut_down_with_its_attempt_and_starts_again(run_ranks):
    first, second = run_ranks(attempts)
    assert [] in first, "rank 0 got no report"
    assert all(report is None or report == [] for report in second)
