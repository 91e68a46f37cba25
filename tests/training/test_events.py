"""The event log: what a reader finds after a crash."""

import os
import signal
import subprocess
import sys

from training.events import EventLog, read_events


def test_events_of_all_ranks_come_back_in_the_order_of_time(tmp_path):
    logs = [EventLog(tmp_path, rank=rank, cycle=0) for rank in (0, 1)]
    logs[1].write("enter")
    logs[0].write("enter")
    logs[1].iteration = 1
    logs[1].write("step", step=3, loss=1.5)
    events = read_events(tmp_path)
    assert [(event["rank"], event["event"], event["iteration"]) for event in events] == [
        (1, "enter", 0),
        (0, "enter", 0),
        (1, "step", 1),
    ]
    assert events[2]["loss"] == 1.5
    assert events[2]["pid"] == os.getpid()


def test_a_second_process_of_a_rank_appends(tmp_path):
    EventLog(tmp_path, rank=0, cycle=0).write("enter")
    EventLog(tmp_path, rank=0, cycle=1).write("enter")
    assert [event["cycle"] for event in read_events(tmp_path)] == [0, 1]


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    EventLog(tmp_path, rank=0, cycle=0).write("enter")
    with (tmp_path / "events" / "rank-00000.jsonl").open("a") as file:
        file.write('{"t": 1.0, "event": "st')
    assert [event["event"] for event in read_events(tmp_path)] == ["enter"]


def test_an_event_written_before_a_sigkill_is_there_after_it(tmp_path):
    code = (
        "import os, pathlib, sys; from training.events import EventLog;"
        "EventLog(pathlib.Path(sys.argv[1]), rank=0, cycle=0).write('fault'); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [event["event"] for event in read_events(tmp_path)] == ["fault"]
