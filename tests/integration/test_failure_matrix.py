"""The failure matrix of docs/operations.md, with the rendered manifests' own commands: launchers, ranks and store.

The test plays the JobSet and Job controllers: it starts pods and, after they ended, puts others in their place.
"""

import signal

import psutil
import pytest

from drills.local_cluster import tree
from tests.integration.conftest import INTERVAL
from tests.integration.manifest_cluster import failure_action
from training.config import EXIT_NO_RESTART, EXIT_SIGTERM


def steps(events, *, cycle=None, after=0.0):
    return [e for e in events if e["event"] == "step" and e["t"] > after and cycle in (None, e["cycle"])]


def cycle_of(cluster):
    return max(event["cycle"] for event in cluster.events())


def train_in(cluster, cycle):
    """Wait until both ranks train in this cycle."""
    cluster.wait_for(lambda events: len({e["rank"] for e in steps(events, cycle=cycle)}) == 2, f"no step in {cycle}")


def train_past_a_checkpoint(cluster):
    cluster.wait_for(lambda events: [e for e in events if e["event"] == "checkpoint_committed"], "no checkpoint")


def replace(cluster, index):
    """Start the pod that takes a lost one's place, and wait until it stands by at the rendezvous."""
    log = cluster.logs / f"worker-{index}.log"
    joining = "attempts to join the next round"

    def joins():
        return log.read_text(errors="replace").count(joining)

    before = joins()
    cluster.start("worker", index)
    cluster.wait_for(lambda _: joins() > before, f"worker-{index} does not come")


def launcher(cluster, index):
    """The supervisor's child."""
    supervisor = psutil.Process(cluster.pods[f"worker-{index}"].pid)
    return next(child.pid for child in supervisor.children() if "ft_launcher" in " ".join(child.cmdline()))


def launchers(cluster, *, but):
    return {index: launcher(cluster, index) for index in range(cluster.jobs["worker"]["completions"]) if index != but}


def assert_same_losses(events):
    """A step that was trained again, in another cycle and by other processes, had the same loss to the last bit."""
    losses = {}
    for event in events:
        if event["event"] == "step":
            losses.setdefault((event["rank"], event["step"]), set()).add(event["loss"])
    assert any(step == 1 and cycle_losses for (_, step), cycle_losses in losses.items())
    assert not {key: values for key, values in losses.items() if len(values) > 1}


def test_pods_are_lost_one_after_another_and_no_survivor_ends(cluster):
    with cluster(spare_count=1) as running:
        running.start_all()
        train_in(running, 0)

        # The spare. Nobody else notices: the ranks are the same processes, and go on.
        ranks = rank_pids(running)
        spare = ({0, 1, 2} - {running.index_of_rank(0), running.index_of_rank(1)}).pop()
        running.kill("worker", spare)
        replace(running, spare)
        assert cycle_of(running) == 0
        assert rank_pids(running) == ranks

        # Rank 1's pod, then rank 0's: the spare takes over, the replacement is the new spare, the survivor's pod stays.
        for cycle, rank in ((1, 1), (2, 0)):
            victim = running.index_of_rank(rank)
            before = launchers(running, but=victim)
            running.kill("worker", victim)
            assert running.pods[f"worker-{victim}"].returncode == -signal.SIGKILL
            train_in(running, cycle)
            assert victim not in {running.index_of_rank(0), running.index_of_rank(1)}
            assert launchers(running, but=victim) == before
            replace(running, victim)

        # A drain: the supervisor's 143 is no success, so the index gets a new pod.
        victim = running.index_of_rank(0)
        before = launchers(running, but=victim)
        running.pods[f"worker-{victim}"].terminate()
        assert running.pods[f"worker-{victim}"].wait(timeout=60) == EXIT_SIGTERM
        assert "was stopped by SIGTERM" in running.message("worker", victim)
        assert failure_action(running.jobs["worker"], EXIT_SIGTERM, disrupted=True) == "Ignore"
        assert failure_action(running.jobs["worker"], EXIT_SIGTERM) == "Count"
        train_in(running, 3)
        assert launchers(running, but=victim) == before
        assert_same_losses(running.events())


def test_training_that_finishes_ends_every_pod_with_0(cluster):
    with cluster(spare_count=1, total_steps=3) as running:
        running.start_all()
        codes = running.exit_codes()
        # The Job is complete with succeededCount of them; the spare ends in order, too.
        assert list(codes.values()).count(0) >= running.jobs["worker"]["successPolicy"]["rules"][0]["succeededCount"]
        assert codes == {0: 0, 1: 0, 2: 0}
        assert running.exit_codes("control") == {0: 0}
        assert all(running.message("worker", index) == "exit 0: ft_launcher is complete" for index in codes)


def rank_pids(cluster):
    """Processes of the ranks that live now."""
    started = {event["pid"] for event in cluster.events() if event["event"] == "process_start"}
    return {pid for pid in started if psutil.pid_exists(pid)}


def test_the_store_is_lost_and_a_new_generation_goes_on_from_the_last_checkpoint(cluster):
    with cluster(spare_count=1) as running:
        running.start_all()
        train_past_a_checkpoint(running)
        running.kill("control", 0)
        codes = running.exit_codes(seconds=30)
        assert codes == {0: 1, 1: 1, 2: 1}
        assert failure_action(running.jobs["worker"], 1) == "Count"
        trained = max(event["step"] for event in steps(running.events()))

        # BlockingRecreate: all pods of the old generation are gone, then the new one starts.
        before = max(event["t"] for event in running.events())
        running.start_all()
        running.wait_for(lambda events: steps(events, after=before), "the new generation does not train")
        restored = [e for e in running.events() if e["event"] == "restored" and e["t"] > before]
        assert all(trained - INTERVAL - 1 <= event["step"] <= trained for event in restored)
        assert all(event["step"] % INTERVAL == 0 and event["step"] > 0 for event in restored)


def test_a_lost_node_without_a_spare_is_waited_for(cluster):
    with cluster(spare_count=0) as running:
        running.start_all()
        train_in(running, 0)
        victim = running.index_of_rank(1)
        before = launchers(running, but=victim)
        running.kill("worker", victim)
        running.start("worker", victim)
        train_in(running, 1)
        assert launchers(running, but=victim) == before


def kill_rank(cluster, rank, *, cycle):
    """SIGKILL of a rank's process, once it trains in this cycle."""
    cluster.wait_for(lambda events: steps(events, cycle=cycle), f"no step in cycle {cycle}")
    pid = next(
        e["pid"] for e in cluster.events() if (e["event"], e["rank"], e["cycle"]) == ("process_start", rank, cycle)
    )
    psutil.Process(pid).kill()


def test_used_up_restarts_end_every_pod_with_1_and_say_so(cluster):
    with cluster(spare_count=0, max_restarts=1) as running:
        running.start_all()
        kill_rank(running, 1, cycle=0)
        kill_rank(running, 0, cycle=1)
        assert running.exit_codes() == {0: 1, 1: 1}
        # Each index is tried again by its Job, and after that the JobSet starts a new generation.
        assert failure_action(running.jobs["worker"], 1) == "Count"
        assert any("restarts are used up" in running.message("worker", index) for index in (0, 1))


def test_a_crash_loop_without_progress_is_93_and_final(cluster):
    with cluster(spare_count=0, max_no_progress_cycles=2) as running:
        running.start_all()
        train_past_a_checkpoint(running)
        # From here on, killed in every cycle before it can save anything.
        kill_rank(running, 0, cycle=0)
        for cycle in (1, 2):
            restored = running.wait_for(
                lambda events, cycle=cycle: [
                    e for e in events if (e["event"], e["cycle"], e["rank"]) == ("restore_start", cycle, 0)
                ],
                f"no restart {cycle}",
            )
            psutil.Process(restored[0]["pid"]).kill()
        assert running.exit_codes() == {0: EXIT_NO_RESTART, 1: EXIT_NO_RESTART}
        assert failure_action(running.jobs["worker"], EXIT_NO_RESTART) == "FailJob"
        assert all("no_progress" in running.message("worker", index) for index in (0, 1))


def test_what_no_restart_can_mend_is_93_on_every_pod(cluster):
    with cluster(spare_count=1) as running:
        tracker = running.fsx / "runs" / "local" / "checkpoints" / "latest_step.txt"
        tracker.parent.mkdir(parents=True)
        tracker.write_text("40\n")  # as a half-restored volume has it
        running.start_all()
        codes = running.exit_codes()
        assert set(codes.values()) == {EXIT_NO_RESTART}
        assert "says step 40, but" in running.message("worker", 0)


def test_nothing_outlives_a_pod(cluster):
    with cluster(spare_count=0) as running:
        running.start_all()
        running.wait_for(steps, "no step")
        processes = [process for pod in running.pods.values() for process in tree(pod.pid)]
        assert len(processes) > 8
        for pod in running.pods.values():
            pod.terminate()
        assert set(running.exit_codes().values()) == {EXIT_SIGTERM}
        assert set(running.exit_codes("control").values()) == {EXIT_SIGTERM}
        assert not [process for process in processes if process.is_running()]


@pytest.mark.parametrize("code", [2, EXIT_NO_RESTART])
def test_the_manifests_give_up_on_final_codes_for_workers_and_store(cluster, code):
    jobs = cluster().jobs
    assert {failure_action(job, code) for job in jobs.values()} == {"FailJob"}
