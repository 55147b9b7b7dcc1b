"""A 1 Gbit/s link on this machine: a pair of veth devices into a network namespace, each end limited by a token bucket."""

import contextlib
import os

from processes import RunFailed, run

RATE = "1gbit"
# The server listens on ours; theirs is in the namespace, where the client runs.
OURS, THEIRS = "10.213.77.1", "10.213.77.2"


def sent_and_received(device="lo"):
    """Bytes that the device has sent and received; on loopback both are the same bytes."""
    def told(name):
        with open(f"/sys/class/net/{device}/statistics/{name}_bytes") as file:
            return int(file.read())

    return told("tx") + (told("rx") if device != "lo" else 0)


@contextlib.contextmanager
def made():
    """The link: the name of our device, and the command prefix that runs a command at its far end."""
    name = f"rf-{os.getpid()}"
    near, far = f"{name}-a", f"{name}-b"
    inside = ["ip", "netns", "exec", name]
    bucket = ["root", "tbf", "rate", RATE, "burst", "128kb", "latency", "50ms"]
    if os.geteuid() != 0:
        raise RunFailed("a link needs a network namespace: run as root, or leave out this row (--rows)")
    run(["ip", "netns", "add", name])
    try:
        run(["ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name])
        run(["ip", "address", "add", f"{OURS}/30", "dev", near])
        run(["ip", "link", "set", near, "up"])
        run([*inside, "ip", "address", "add", f"{THEIRS}/30", "dev", far])
        run([*inside, "ip", "link", "set", far, "up"])
        run(["tc", "qdisc", "add", "dev", near, *bucket])
        run([*inside, "tc", "qdisc", "add", "dev", far, *bucket])
        yield near, inside
    finally:
        # Removing the namespace removes its end, and with it the whole pair.
        run(["ip", "netns", "delete", name])
