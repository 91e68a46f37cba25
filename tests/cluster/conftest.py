"""A real API server: the control plane from KUBEBUILDER_ASSETS, or a cluster kept for such tests.

KUBEBUILDER_ASSETS is a folder with etcd, kube-apiserver and kubectl, as setup-envtest makes it. Instead,
CLUSTER_TEST_KUBECONFIG names the kubeconfig of a cluster in which namespaces and a priority class may be made. With
neither, every test here is skipped by name. KUBECONFIG alone does nothing: it may be somebody's production.

An API server alone knows no controllers: where a test needs kube-controller-manager or kube-scheduler, it says so and
is skipped unless that binary is in the folder, too. A given cluster has the first; made-up nodes are not put into it.
"""

import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

READY_SECONDS = 60


class Cluster:
    """kubectl against one API server."""

    def __init__(self, kubectl, kubeconfig, *, controllers, scheduler):
        self._command = [kubectl, f"--kubeconfig={kubeconfig}"]
        self.controllers = controllers
        self.scheduler = scheduler

    def run(self, *arguments, manifest=None, check=True):
        done = subprocess.run(
            [*self._command, *arguments],
            input=None if manifest is None else json.dumps(manifest),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def apply(self, manifest, *, dry_run=False, check=True):
        dry = ["--dry-run=server"] if dry_run else []
        return self.run("apply", "--server-side", "--validate=strict", *dry, "-f", "-", manifest=manifest, check=check)

    def get(self, *arguments):
        return json.loads(self.run("get", *arguments, "-o", "json").stdout)

    def patch_status(self, kind, name, namespace, status):
        self.run("patch", kind, name, "-n", namespace, "--subresource=status", "--type=merge", "-p", json.dumps(status))

    def wait_for(self, condition, what):
        deadline = time.monotonic() + READY_SECONDS
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: not after {READY_SECONDS} s"
            time.sleep(0.5)
        return found


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    assets, kubeconfig = os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("CLUSTER_TEST_KUBECONFIG")
    if assets:
        with _ControlPlane(Path(assets), tmp_path_factory.mktemp("control-plane")) as cluster:
            yield cluster
    elif kubeconfig:
        yield Cluster(shutil.which("kubectl") or "kubectl", kubeconfig, controllers=True, scheduler=False)
    else:
        pytest.skip("needs an API server: set KUBEBUILDER_ASSETS or CLUSTER_TEST_KUBECONFIG")


@pytest.fixture
def controllers(cluster):
    """The cluster, with the Job controller at work."""
    if not cluster.controllers:
        pytest.skip("needs the Job controller: put kube-controller-manager into KUBEBUILDER_ASSETS")
    return cluster


@pytest.fixture
def scheduler(controllers):
    """The cluster, with controllers and a scheduler."""
    if not controllers.scheduler:
        pytest.skip("needs kube-scheduler in KUBEBUILDER_ASSETS")
    return controllers


class _ControlPlane:
    """etcd and kube-apiserver, and the other two where they are there; ended with the `with` block."""

    def __init__(self, assets, folder):
        self._assets = assets
        self._folder = folder
        self._processes = []

    def __enter__(self):
        try:
            return self._start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self):
        client, peer, secure = _free_port(), _free_port(), _free_port()
        etcd = f"http://127.0.0.1:{client}"
        self._spawn(
            "etcd",
            f"--data-dir={self._folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
        )
        key = self._folder / "service-account.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        tokens = self._folder / "tokens.csv"
        tokens.write_text('secret,admin,admin,"system:masters"\n')
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--secure-port={secure}",
            f"--cert-dir={self._folder / 'certificates'}",
            f"--token-auth-file={tokens}",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC",
            # No controller makes accounts here, and no kubelet says that a node is ready.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        )
        kubeconfig = self._folder / "kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(secure)))
        cluster = Cluster(
            str(self._assets / "kubectl"),
            kubeconfig,
            controllers=self._is_there("kube-controller-manager"),
            scheduler=self._is_there("kube-scheduler"),
        )
        cluster.wait_for(lambda: cluster.run("get", "--raw=/readyz", check=False).returncode == 0, "API server")
        if cluster.controllers:
            # Not the one that watches nodes: without kubelets it would take all for lost.
            wanted = (
                "job-controller,namespace-controller,garbage-collector-controller,persistentvolume-binder-controller"
            )
            self._spawn(
                "kube-controller-manager",
                f"--kubeconfig={kubeconfig}",
                "--leader-elect=false",
                f"--controllers={wanted}",
            )
        if cluster.scheduler:
            self._spawn("kube-scheduler", f"--kubeconfig={kubeconfig}", "--leader-elect=false")
        return cluster

    def _is_there(self, binary):
        return (self._assets / binary).exists()

    def _spawn(self, binary, *arguments):
        with (self._folder / f"{binary}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen([str(self._assets / binary), *arguments], stdout=log, stderr=subprocess.STDOUT)
            )


def _kubeconfig(port):
    server = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": server}],
        "users": [{"name": "admin", "user": {"token": "secret"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "current-context": "test",
    }


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
