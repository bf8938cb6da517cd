"""Which cells the benchmark of deployments trains, and the namespaces in which it does."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.deployment_cell import Cell, Choice, names
from benchmarks.shaped_namespaces import SERVER_HOST, ShapedLink, inside, namespaces, why_unavailable
from pipar.errors import InputError


@pytest.mark.parametrize("text", ["10/25", "1.5/5", "unlimited"])
def test_a_link_prints_as_it_is_written(text: str) -> None:
    assert str(ShapedLink.parse(text)) == text


@pytest.mark.parametrize("text", ["10", "0/5", "fast/slow", ""])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="10/25"):
        ShapedLink.parse(text)


def test_choices_print_what_is_fixed() -> None:
    assert str(Choice()) == "auto"
    assert str(Choice("fl")) == "fl auto"
    assert str(Choice("pipar", 1, 8, "raw")) == "pipar P=1 N=8 raw"


def test_certificates_for_more_devices_serve_fewer() -> None:
    assert names(Cell(2, ShapedLink())) == names(Cell(9, ShapedLink()))[:2]


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason="needs root, ip and tc")
def test_devices_reach_the_server_over_their_own_links_until_the_end() -> None:
    with namespaces(["pi-1", "pi-2"], ShapedLink(10, 25)) as spaces:
        for namespace in spaces.devices.values():
            route = subprocess.run(
                inside(namespace, ["ip", "route", "get", SERVER_HOST]), capture_output=True, text=True, check=True
            )
            assert "dev wan0" in route.stdout
        assert spaces.tcp_bytes().keys() == {"pi-1", "pi-2"}
        made = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        assert spaces.server in made
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert spaces.server not in left
