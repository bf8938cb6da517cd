"""Certificates that expire soon are announced by sentences that name the file, the day and the remedy."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from pipar.cli.doctor_checks import check_certificates
from pipar.execution.clock import run_virtually
from pipar.transport import expiry
from pipar.transport.certificates import expiry_of, make_authority, make_device
from pipar.transport.expiry import announce_expiry, expiring_files


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a device's certificate that is valid for 40 days."""
    path = tmp_path_factory.mktemp("certs") / "pi-1.pem"
    path.write_bytes(make_device(make_authority(), "pi-1", days=40).certificate_pem)
    return path


def in_days(days: float) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


@pytest.mark.parametrize(
    ("after_days", "sentence"),
    [
        (0, None),
        (9.5, None),
        (10.5, "expires on {end}, in 29 days: renew it with `pipar certs`."),
        (38.5, "expires on {end}, in 1 day: renew it with `pipar certs`."),
        (39.5, "expires on {end}, within a day: renew it with `pipar certs`."),
        (41, "expired on {end}: renew it with `pipar certs`."),
    ],
)
def test_a_certificate_is_announced_in_its_last_month(
    certificate: Path, after_days: float, sentence: str | None
) -> None:
    end = f"{expiry_of(certificate.read_bytes(), certificate):%Y-%m-%d}"
    expected = [] if sentence is None else [f"The certificate in {certificate} {sentence.format(end=end)}"]
    assert expiring_files([None, certificate], in_days(after_days)) == expected


def test_files_that_hold_no_certificate_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "other.pem").write_text("nothing")
    assert expiring_files([tmp_path / "missing.pem", tmp_path / "other.pem"]) == []


def test_a_program_announces_it_every_day(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "SOON", timedelta(days=60))
    said: list[str] = []

    async def run_for_a_while() -> None:
        announcing = asyncio.create_task(announce_expiry(partial(expiring_files, [None, certificate]), said.append))
        await asyncio.sleep(2.5 * 24 * 3600)
        announcing.cancel()

    run_virtually(run_for_a_while())
    assert len(said) == 3
    assert len(set(said)) == 1


def test_a_program_without_certificates_announces_nothing() -> None:
    assert expiring_files([None, None]) == []


def test_the_doctor_names_certificates_that_end_soon(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_certificates(certificate.parent / "none") == []
    (fine,) = check_certificates(certificate.parent)
    assert (fine.state, fine.advice) == ("ok", "")
    monkeypatch.setattr(expiry, "SOON", timedelta(days=60))
    (soon,) = check_certificates(certificate.parent)
    assert soon.state == "advice"
    assert "pi-1.pem expires on" in soon.advice
