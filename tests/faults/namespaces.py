"""Linux namespaces: another host name, and two hosts joined by a virtual Ethernet pair."""

import subprocess
import tempfile

HOSTS = ("10.77.41.1", "10.77.41.2")


def unavailable_reason() -> str:
    """Why namespaces cannot be created here; "" if they can."""
    try:
        _run("ip", "netns", "add", "metadist-probe")
        _run("ip", "netns", "del", "metadist-probe")
        _run("unshare", "--uts", "--mount", "--net", "true")
    except FileNotFoundError as error:
        return f"{error.filename} is not installed (Debian: iproute2, util-linux)"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()} (needs root)"
    return ""


def renamed_host(address: str = "10.77.42.1") -> list[str]:
    """The prefix of a command for which the host name resolves to a non-loopback address."""
    with tempfile.NamedTemporaryFile("w", delete=False, suffix=".hosts") as hosts:
        hosts.write(f"{address} metadist-elsewhere\n127.0.0.1 localhost\n")
    script = (
        "hostname metadist-elsewhere && mount --bind $0 /etc/hosts && rm -f $0; "
        f"ip link set lo up && ip addr add {address}/32 dev lo && "
        'exec "$@"'
    )
    return ["unshare", "--uts", "--mount", "--net", "bash", "-c", script, hosts.name]


class TwoHosts:
    """Context manager: two network namespaces joined by a veth pair."""

    def __init__(self) -> None:
        self.names = ("metadist-a", "metadist-b")

    def __enter__(self) -> "TwoHosts":
        self.__exit__()
        _run("ip", "link", "add", "md-a", "type", "veth", "peer", "name", "md-b")
        for name, interface, address in zip(self.names, ("md-a", "md-b"), HOSTS, strict=True):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "set", interface, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", interface)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self.link(up=True)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def prefix(self, host: int) -> list[str]:
        """The prefix of a command that runs on a host, with the host's own name."""
        names = "".join(f"{a} host-{i}\n" for i, a in enumerate(HOSTS))
        with tempfile.NamedTemporaryFile("w", delete=False, suffix=".hosts") as hosts:
            hosts.write(f"{names}127.0.0.1 localhost\n")
        script = f'hostname host-{host} && mount --bind $0 /etc/hosts && rm -f $0; exec "$@"'
        inner = ["unshare", "--uts", "--mount", "bash", "-c", script, hosts.name]
        return ["ip", "netns", "exec", self.names[host], *inner]

    def link(self, up: bool) -> None:
        """Set both ends of the pair up or down."""
        for name, interface in zip(self.names, ("md-a", "md-b"), strict=True):
            _run("ip", "-n", name, "link", "set", interface, "up" if up else "down")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
