"""Pods as processes: what is ended with them, and what is not."""

import subprocess
import sys

import psutil

from drills.local_cluster import Pods


def test_processes_that_were_there_before_are_left_alone(tmp_path):
    before = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pods = Pods(tmp_path / "logs")
    pods.open()
    pod = pods.start("pod", [sys.executable, "-c", "import time; time.sleep(60)"], {})
    try:
        pods.close()
        assert not psutil.pid_exists(pod.pid)
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()
