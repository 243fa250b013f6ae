"""Namespaces of Linux: a machine's name of its own, and two hosts joined by a cable."""

import subprocess
import tempfile

HOSTS = ("10.77.41.1", "10.77.41.2")


def why_not() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    try:
        _do("ip", "netns", "add", "metadist-probe")
        _do("ip", "netns", "del", "metadist-probe")
        _do("unshare", "--uts", "--mount", "--net", "true")
    except FileNotFoundError as error:
        return f"{error.filename} is not installed (Debian: iproute2, util-linux)"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()} (it takes root)"
    return ""


def under_another_name(address: str = "10.77.42.1") -> list[str]:
    """A command's prefix: the host's name resolves to an address that is not loopback."""
    with tempfile.NamedTemporaryFile("w", delete=False, suffix=".hosts") as hosts:
        hosts.write(f"{address} metadist-elsewhere\n127.0.0.1 localhost\n")
    steps = (
        "hostname metadist-elsewhere && mount --bind $0 /etc/hosts && rm -f $0; "
        f"ip link set lo up && ip addr add {address}/32 dev lo && "
        'exec "$@"'
    )
    return ["unshare", "--uts", "--mount", "--net", "bash", "-c", steps, hosts.name]


class TwoHosts:
    """Context manager: two network namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = ("metadist-a", "metadist-b")

    def __enter__(self) -> "TwoHosts":
        self.__exit__()
        _do("ip", "link", "add", "md-a", "type", "veth", "peer", "name", "md-b")
        for name, cable, address in zip(self.names, ("md-a", "md-b"), HOSTS, strict=True):
            _do("ip", "netns", "add", name)
            _do("ip", "link", "set", cable, "netns", name)
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _do("ip", "-n", name, "link", "set", "lo", "up")
        self.link(up=True)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def prefix(self, host: int) -> list[str]:
        """What makes a command run on a host, under a name of its own."""
        names = "".join(f"{a} host-{i}\n" for i, a in enumerate(HOSTS))
        with tempfile.NamedTemporaryFile("w", delete=False, suffix=".hosts") as hosts:
            hosts.write(f"{names}127.0.0.1 localhost\n")
        steps = f'hostname host-{host} && mount --bind $0 /etc/hosts && rm -f $0; exec "$@"'
        inner = ["unshare", "--uts", "--mount", "bash", "-c", steps, hosts.name]
        return ["ip", "netns", "exec", self.names[host], *inner]

    def link(self, up: bool) -> None:
        """Plug the cable in, or pull it out, at both ends."""
        for name, cable in zip(self.names, ("md-a", "md-b"), strict=True):
            _do("ip", "-n", name, "link", "set", cable, "up" if up else "down")


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
