from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from pier_node.base.address import parse_address
from pier_node.base.errors import PierError
from pier_node.wire.addresses import choose_address


def addresses_here() -> set[str]:
    return {address.address for found in psutil.net_if_addrs().values() for address in found}


def test_what_the_user_says_is_taken() -> None:
    choice = choose_address(["10.0.0.1:7700"], "site.example.org:99", "0.0.0.0:7801")
    assert (choice.address, choice.interface) == ("site.example.org:99", "")
    assert choice.why == "others reach this site at site.example.org:99: as --advertise says"


def test_a_host_alone_is_advertised_with_the_port_that_listens() -> None:
    assert choose_address([], "127.0.0.1", "0.0.0.0:7801").address == "127.0.0.1:7801"
    assert choose_address([], "::1", "[::]:7801").address == "[::1]:7801"


def test_listening_on_one_address_leaves_no_choice() -> None:
    choice = choose_address(["10.0.0.1:7700"], None, "127.0.0.1:7801")
    assert choice.address == "127.0.0.1:7801"
    assert choice.interface.startswith("lo")
    assert "--listen" in choice.why


def test_the_way_to_the_first_peer_decides() -> None:
    choice = choose_address(["127.0.0.1:7700", "10.0.0.1:7700"], None, "0.0.0.0:7801")
    assert choice.address == "127.0.0.1:7801"
    assert choice.why == (
        f"others reach this site at 127.0.0.1:7801 ({choice.interface}): "
        "the way to 127.0.0.1:7700; --advertise HOST:PORT chooses another"
    )


def test_a_peer_whose_name_is_not_known_is_passed_over() -> None:
    choice = choose_address(["no-such-host.invalid:7700", "127.0.0.1:7700"], None, "0.0.0.0:7801")
    assert choice.address == "127.0.0.1:7801"


def test_without_peers_it_is_an_address_of_this_machine() -> None:
    choice = choose_address([], None, "0.0.0.0:7801")
    host, port = parse_address(choice.address)
    assert port == 7801
    assert host in addresses_here()
    assert choice.interface in psutil.net_if_addrs()


@pytest.mark.parametrize(
    ("peers", "advertise", "listen"), [(["a b"], None, "0.0.0.0:1"), ([], "x:y", "0.0.0.0:1"), ([], None, "?")]
)
def test_a_malformed_address_is_refused(peers: list[str], advertise: str | None, listen: str) -> None:
    with pytest.raises(PierError, match="is not HOST:PORT"):
        choose_address(peers, advertise, listen)


@pytest.fixture
def two_networks() -> Iterator[str]:
    """A network namespace with two networks, and no way out of them."""
    if os.getuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    name = f"pier-test-{os.getpid()}"
    ip = ["ip", "-n", name]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run([*ip, "link", "set", "lo", "up"], check=True)
        for number in (1, 2):
            pair = [f"net{number}", "type", "veth", "peer", "name", f"far{number}"]
            subprocess.run([*ip, "link", "add", *pair], check=True)
            subprocess.run([*ip, "address", "add", f"10.98.{number}.5/24", "dev", f"net{number}"], check=True)
            for end in (f"net{number}", f"far{number}"):
                subprocess.run([*ip, "link", "set", end, "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.netns
def test_of_two_networks_the_peers_one_is_advertised(two_networks: str) -> None:
    script = (
        "from pier_node.wire.addresses import choose_address as choose\n"
        "for peers in (['10.98.2.9:7700'], ['10.98.1.9:7700'], ['172.16.0.1:7700'], []):\n"
        "    choice = choose(peers, None, '0.0.0.0:7700')\n"
        "    print(choice.address, choice.interface)\n"
    )
    command = ["ip", "netns", "exec", two_networks, sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:4] == ["10.98.2.5:7700 net2", "10.98.1.5:7700 net1"] + ["127.0.0.1:7700 lo"] * 2
