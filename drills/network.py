"""A network of the drill's own, so that a node can lose it: a namespace per node, linked to a bridge (Linux, root)."""

import os
import shutil
import subprocess


class Network:
    """Nodes have `prefix`.2 and so on, the bridge's side, with the rendezvous store, `prefix`.1."""

    prefix = "10.213.0"
    interface = "drill0"

    def __init__(self, nodes: int) -> None:
        self._hub = f"drill-{os.getpid()}-hub"
        self._nodes = [f"drill-{os.getpid()}-{node}" for node in range(nodes)]

    @staticmethod
    def problem() -> str | None:
        """Why no such network can be made here, None if it can."""
        if os.geteuid() != 0:
            return "network_loss needs root, to make network namespaces; run as root, or choose node_death"
        if shutil.which("ip") is None:
            return "network_loss needs the `ip` command (iproute2); install it, or choose node_death"
        return None

    def open(self) -> None:
        """Make the namespaces and the links between them."""
        self._namespace(self._hub)
        _ip("-n", self._hub, "link", "add", self.interface, "type", "bridge")
        self._address(self._hub, 1)
        for node, namespace in enumerate(self._nodes):
            self._namespace(namespace)
            link = _link(node)
            peer = ("peer", "name", self.interface, "netns", namespace)
            _ip("-n", self._hub, "link", "add", link, "type", "veth", *peer)
            _ip("-n", self._hub, "link", "set", link, "master", self.interface, "up")
            self._address(namespace, node + 2)

    def _namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _address(self, namespace: str, host: int) -> None:
        _ip("-n", namespace, "address", "add", f"{self.prefix}.{host}/24", "dev", self.interface)
        _ip("-n", namespace, "link", "set", self.interface, "up")

    def inside(self, node: int | None) -> list[str]:
        """What to put before a command so that it runs on a node, or beside the bridge."""
        return ["ip", "netns", "exec", self._hub if node is None else self._nodes[node]]

    def cut(self, node: int) -> None:
        """Take a node's link down: what is sent to it is lost without a word."""
        _ip("-n", self._hub, "link", "set", _link(node), "down")

    def mend(self, node: int) -> None:
        """Bring it up again."""
        _ip("-n", self._hub, "link", "set", _link(node), "up")

    def close(self) -> None:
        """Remove all of it; links go with their namespaces."""
        for namespace in (*self._nodes, self._hub):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def _link(node: int) -> str:
    return f"node{node}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
