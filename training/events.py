"""The run's append-only event log: one JSON line per thing that happened, one file per rank.

Every line has `t` (Unix seconds), `event`, `rank` (as the process was started), `pid`, `cycle` (in-job restarts so
far) and `iteration` (in-process restarts of this process so far). A line is one write() to a file opened with
O_APPEND, so it survives a SIGKILL that comes after it. Events and their own fields:

    process_start         created_t: when the kernel created the process; world_size; settings: train.json as
                          resolved (rank 0, else null)
    enter                 the training function was entered (again, when iteration > 0)
    process_group_ready
    model_ready
    restore_start
    restored              step: last step whose result is in the model, 0 for a fresh start; tier: memory | local |
                          durable | none; damaged: what was passed over, one line each
    fault                 kind, step, moment: written before the fault strikes
    settings_changed      changes: what differs from the run that saved the checkpoint, and may (rank 0)
    step                  step, started_t, loss, grad_norm, learning_rate, skipped: the gradient was not finite, so
                          there was no update; data_s, forward_backward_s, optimizer_s: seconds of its parts;
                          sample_ids: this rank's samples
    stall                 step, started_t, phase: save | finalize | final_save; training waited for the checkpoint
    evaluation            step, started_t, loss: of validation
    stragglers            step, ranks: whose GPU is slow, by NVRx's detector (rank 0)
    stopped               step: of the checkpoint; reason: sigterm | deadline; training ended before its last step
    checkpoint_committed  step, started_t, size_bytes (rank 0)
    checkpoint_replicated step: every rank has it on its node, and where so set on a peer's (rank 0)
    save_failed           step, reason: this save is lost, training goes on (rank 0)
    abort                 this rank was told to leave the training function (in-process restart)
    peer_lost             peer: the rank whose node is gone; this process ends, for in-job restart to begin
    refused               reason: settings, corpus or checkpoints do not fit; the job ends, no restart can mend it
    complete              step, loss, params_sha256: training is done on this rank
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVENTS_DIRECTORY = "events"


class EventLog:
    """Writes one rank's events. Safe to call from any thread."""

    def __init__(self, run_directory: Path, *, rank: int, cycle: int) -> None:
        directory = run_directory / EVENTS_DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory / f"rank-{rank:05d}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._common = {"rank": rank, "pid": os.getpid(), "cycle": cycle}
        self.iteration = 0

    def write(self, event: str, **fields: Any) -> None:
        """Append one event, stamped with the present time."""
        line = {"t": time.time(), "event": event, **self._common, "iteration": self.iteration, **fields}
        os.write(self._file, (json.dumps(line, separators=(",", ":")) + "\n").encode())


def read_events(run_directory: Path) -> list[dict[str, Any]]:
    """All events of a run, every rank's, in the order of time. A line cut off by a crash is left out."""
    paths = sorted((run_directory / EVENTS_DIRECTORY).glob("*.jsonl"))
    return sorted((event for path in paths for event in _lines(path)), key=lambda event: event["t"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # the write that a crash cut short
