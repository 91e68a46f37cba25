"""The PID-1 supervisor, with real processes and signals."""

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import training.config
from training import supervisor

ROOT = Path(__file__).resolve().parents[2]


class Supervised:
    """One supervisor in a process of its own, running a line of Python."""

    def __init__(self, code, *options, cwd):
        self.ready = Path(cwd) / "ready"
        self.log = Path(cwd) / "termination-log"
        self.log.touch()
        command = [sys.executable, "-m", "training.supervisor", f"--termination-log={self.log}", *options, "--"]
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", code, str(cwd)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self):
        wait_for(self.ready.exists, "the command did not start")
        return self

    def end(self):
        self.out, self.err = self.process.communicate(timeout=30)
        return self.process.returncode

    @property
    def message(self):
        return self.log.read_text().strip()


def wait_for(condition, message, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.01)


@pytest.fixture
def supervise(tmp_path):
    started = []

    def start(code, *options):
        started.append(Supervised("import os, signal, subprocess, sys, time\n" + code, *options, cwd=tmp_path))
        return started[-1]

    yield start
    for supervised in started:
        if supervised.process.poll() is None:
            supervised.process.kill()
            supervised.process.communicate()


READY = "open(sys.argv[1] + '/ready', 'w').close()\n"
SLEEP = READY + "time.sleep(60)\n"
GRACEFUL = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + SLEEP


def marker(name):
    return f"open(sys.argv[1] + '/{name}', 'w').close()\n"


def test_its_constants_are_the_trainers():
    for name in (
        "EXIT_BAD_CONFIG",
        "EXIT_NO_RESTART",
        "EXIT_SIGTERM",
        "DONE_MARKER",
        "NO_RESTART_MARKER",
    ):
        assert getattr(supervisor, name) == getattr(training.config, name)


def test_exit_0_with_the_done_marker_is_success(supervise, tmp_path):
    supervised = supervise(marker("done"), f"--run-directory={tmp_path}")
    assert supervised.end() == 0
    assert supervised.message.startswith("exit 0:")


def test_the_done_marker_may_come_a_moment_after_the_commands_end(supervise, tmp_path):
    supervised = supervise(READY, f"--run-directory={tmp_path}").wait_until_ready()
    time.sleep(0.3)
    (tmp_path / "done").touch()
    assert supervised.end() == 0


def test_exit_0_without_the_done_marker_is_no_success(supervise, tmp_path):
    supervised = supervise("", f"--run-directory={tmp_path}")
    assert supervised.end() == 143
    assert "not complete" in supervised.message
    assert supervised.message in supervised.err


def test_a_done_marker_of_an_earlier_run_does_not_count(supervise, tmp_path):
    (tmp_path / "done").touch()
    assert supervise("", f"--run-directory={tmp_path}").end() == 143


def test_a_done_marker_written_again_counts(supervise, tmp_path):
    (tmp_path / "done").touch()
    assert supervise("os.remove(sys.argv[1] + '/done')\n" + marker("done"), f"--run-directory={tmp_path}").end() == 0


ASK_FOR_STOP = """
stop_file = os.environ["SUPERVISOR_STOP_FILE"]
asked = lambda: print(os.path.exists(stop_file), flush=True)
signal.signal(signal.SIGTERM, lambda *_: (asked(), sys.exit(0)))
asked()
print(stop_file, flush=True)
"""


def test_the_command_finds_the_stop_file_when_its_sigterm_is_the_supervisors(supervise):
    supervised = supervise(ASK_FOR_STOP + SLEEP).wait_until_ready()
    supervised.process.terminate()
    assert supervised.end() == 143
    before, name, after = supervised.out.split()
    assert (before, after) == ("False", "True")
    assert not Path(name).exists()


def test_the_command_finds_no_stop_file_when_its_sigterm_is_another(supervise):
    supervised = supervise(ASK_FOR_STOP + READY + "os.kill(os.getpid(), signal.SIGTERM)")
    assert supervised.end() == 0
    before, _, after = supervised.out.split()
    assert (before, after) == ("False", "False")


@pytest.mark.parametrize("code", [0, 1])
def test_the_no_restart_marker_is_93(supervise, tmp_path, code):
    supervised = supervise(marker("no-restart") + f"sys.exit({code})", f"--run-directory={tmp_path}")
    assert supervised.end() == 93


def test_a_no_restart_marker_of_an_earlier_run_does_not_count(supervise, tmp_path):
    (tmp_path / "no-restart").touch()
    assert supervise("sys.exit(1)", f"--run-directory={tmp_path}").end() == 1


@pytest.mark.parametrize("code", [1, 2, 7, 93])
def test_another_exit_code_is_passed_on(supervise, tmp_path, code):
    assert supervise(f"sys.exit({code})", f"--run-directory={tmp_path}").end() == code


def test_death_by_a_signal_is_128_plus_its_number(supervise, tmp_path):
    supervised = supervise("os.kill(os.getpid(), signal.SIGKILL)", f"--run-directory={tmp_path}")
    assert supervised.end() == 137
    assert "killed by SIGKILL" in supervised.message


@pytest.mark.parametrize(("received", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("code", [0, 1])
def test_a_stop_signal_reaches_the_command_and_is_never_success(supervise, tmp_path, received, expected, code):
    handler = f"signal.signal({int(received)}, lambda *_: sys.exit({code}))\n"
    supervised = supervise(handler + SLEEP, f"--run-directory={tmp_path}").wait_until_ready()
    supervised.process.send_signal(received)
    assert supervised.end() == expected
    assert received.name in supervised.message


def test_a_command_without_a_handler_dies_of_the_signal(supervise, tmp_path):
    supervised = supervise(SLEEP, f"--run-directory={tmp_path}").wait_until_ready()
    supervised.process.terminate()
    assert supervised.end() == 143


def test_training_that_completes_while_being_stopped_is_complete(supervise, tmp_path):
    code = "signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1] + '/done', 'w').close(), sys.exit(0)))\n" + SLEEP
    supervised = supervise(code, f"--run-directory={tmp_path}").wait_until_ready()
    supervised.process.terminate()
    assert supervised.end() == 0


def test_a_no_restart_verdict_outlives_a_stop_signal(supervise, tmp_path):
    supervised = supervise(marker("no-restart") + GRACEFUL, f"--run-directory={tmp_path}").wait_until_ready()
    supervised.process.terminate()
    assert supervised.end() == 93


def test_the_store_without_a_run_directory_succeeds_by_itself(supervise):
    assert supervise("").end() == 0


def test_the_store_that_is_told_to_stop_has_not_succeeded(supervise):
    supervised = supervise(GRACEFUL).wait_until_ready()
    supervised.process.terminate()
    assert supervised.end() == 143


LEAVE_BEHIND = """
daemon = '''
import os, sys, time
os.setsid() if os.getpid() != os.getsid(0) else None
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(60)
'''
for number in range(2):
    subprocess.Popen(
        [sys.executable, '-c', 'import subprocess, sys; subprocess.Popen(sys.argv[1:])',
         sys.executable, '-c', daemon, f'{sys.argv[1]}/pid-{number}'])
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
while not all(os.path.exists(f'{sys.argv[1]}/pid-{n}') and open(f'{sys.argv[1]}/pid-{n}').read() for n in (0, 1)):
    time.sleep(0.01)
"""


def test_nothing_outlives_the_command(supervise, tmp_path):
    supervised = supervise(LEAVE_BEHIND + "sys.exit(1)")
    assert supervised.end() == 1
    daemons = [int((tmp_path / f"pid-{number}").read_text()) for number in (0, 1)]
    assert not [pid for pid in daemons if psutil.pid_exists(pid)]
    assert "left behind" in supervised.message


def test_orphans_are_reaped_while_the_command_runs(supervise, tmp_path):
    orphan = "subprocess.Popen([sys.executable, '-c', 'import os; os.fork() or os._exit(0); os._exit(0)']).wait()\n"
    supervised = supervise(orphan + SLEEP).wait_until_ready()
    children = psutil.Process(supervised.process.pid).children

    def zombies():
        return [child for child in children() if child.status() == psutil.STATUS_ZOMBIE]

    wait_for(lambda: not zombies(), "a zombie stays")
    supervised.process.terminate()
    assert supervised.end() == 143


def test_a_command_that_is_not_there_is_one_line(tmp_path):
    finished = subprocess.run(
        [sys.executable, "-m", "training.supervisor", "--", "no-such-command"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 127
    assert finished.stderr == "supervisor: cannot start no-such-command (No such file or directory)\n"


@pytest.mark.parametrize("arguments", [[], ["--"], ["--no-such-option", "--", "true"]])
def test_wrong_usage_is_a_bad_config(arguments):
    finished = subprocess.run(
        [sys.executable, "-m", "training.supervisor", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == training.config.EXIT_BAD_CONFIG


def test_no_termination_log_is_made_where_the_kubelet_made_none(supervise, tmp_path):
    supervised = supervise("", f"--termination-log={tmp_path / 'none'}")
    assert supervised.end() == 0
    assert not (tmp_path / "none").exists()


def test_options_of_the_command_are_left_to_it(supervise):
    supervised = supervise("print(sys.argv)")
    assert supervised.end() == 0
    command = [sys.executable, "-m", "training.supervisor", "echo", "--run-directory=x", "--", "y"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert finished.stdout == "--run-directory=x -- y\n"


def test_it_starts_in_less_than_a_fifth_of_a_second():
    def measure():
        # Processor time, its own and its command's: the clock on the wall also counts what other processes do.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "training.supervisor", "--", "true"], cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(measure() for _ in range(5)) < 0.2


def test_the_command_runs_with_no_signal_blocked(supervise):
    supervised = supervise("print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))")
    assert supervised.end() == 0
    assert supervised.out == "set()\n"


def test_what_the_command_says_on_standard_error_is_passed_on(supervise):
    supervised = supervise("sys.stderr.write('x' * 300_000 + '\\nlast\\n')")
    assert supervised.end() == 0
    assert supervised.err.startswith("x" * 300_000 + "\nlast\nsupervisor: exit 0")


def test_the_last_error_is_in_the_message_warnings_after_it_or_not(supervise):
    supervised = supervise("sys.stderr.write('ValueError: wrong shape\\nUserWarning: a leak\\n')\nsys.exit(1)")
    assert supervised.end() == 1
    assert supervised.message.endswith("failed with 1; last error: ValueError: wrong shape")


def test_a_very_long_last_error_leaves_the_message_below_the_kubelets_limit(supervise):
    supervised = supervise("sys.stderr.write('error ' * 10_000)\nsys.exit(1)")
    assert supervised.end() == 1
    assert len(supervised.log.read_bytes()) < 4096


def test_a_launcher_that_may_not_restart_any_more_is_told_so(supervise):
    supervised = supervise("sys.stderr.write('Some rank(s) exited with non-zero exit code: {0: -9}\\n')\nsys.exit(1)")
    assert supervised.end() == 1
    assert "failed with 1: its restarts are used up; last error: Some rank(s)" in supervised.message


def test_the_trainers_reason_for_no_restart_is_in_the_message(supervise, tmp_path):
    code = "open(sys.argv[1] + '/no-restart', 'w').write('the corpus is missing\\n')\nsys.exit(1)"
    supervised = supervise(code, f"--run-directory={tmp_path}")
    assert supervised.end() == 93
    assert "(ended with 1): the corpus is missing" in supervised.message


def test_a_process_that_keeps_standard_error_open_does_not_hold_the_supervisor_up(supervise):
    supervised = supervise("subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nsys.exit(7)")
    started = time.monotonic()
    assert supervised.end() == 7
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("received", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_stops_nothing_is_passed_on_and_changes_no_exit_code(supervise, tmp_path, received):
    handler = f"signal.signal({int(received)}, lambda *_: (" + marker("done").strip() + ", sys.exit(0)))\n"
    supervised = supervise(handler + SLEEP, f"--run-directory={tmp_path}").wait_until_ready()
    supervised.process.send_signal(received)
    assert supervised.end() == 0
