"""The numbers that documents quote, from the results that are checked in: `python -m benchmarks.quoted` renews them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import prediction, privacy
from benchmarks.privacy_picture import picture
from benchmarks.record import RESULTS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PRIVACY = ROOT / "docs" / "explanation" / "privacy-costs.md"
PRIVACY_PICTURE = ROOT / "docs" / "images" / "privacy-costs.svg"


@dataclass(frozen=True)
class Quote:
    """A row of README: what it says, and the claims of one result whose values it shows."""

    text: str
    result: str
    claims: tuple[str, ...]
    form: str = "{:.4g}"
    unit: str = ""

    def row(self) -> str:
        values = {claim["what"]: claim["value"] for claim in _result(self.result)["claims"]}
        shown = ", ".join(self.form.format(values[what]) for what in self.claims)
        return f"| {self.text} | {shown}{self.unit} | {self.result} |"


_PREDICTED = "predicted / measured epoch, {} on {}"
_SHARE = "bytes up and down / raw float32, {}, P = 1, the worse of epochs 1 and 10"
QUOTES = (
    Quote(
        "VGG-5 on an emulated 4G link, 2 devices at speed 0.2, P=1 N=12: physical limit of the link / seconds an epoch",
        "efficiency",
        ("efficiency on 4g (bound / seconds), mean of 3 epochs",),
    ),
    Quote(
        "the same run: bytes that the kernel counted / bytes that pipar counted",
        "efficiency",
        ("kernel's bytes on the loopback / bytes counted",),
    ),
    Quote(
        "epoch seconds, real processes / virtual time, on 4G and on Wi-Fi",
        "agreement",
        ("epoch seconds on 4g, real / virtual", "epoch seconds on wifi, real / virtual"),
    ),
    Quote(
        "federated learning over gRPC with one device / a bare PyTorch loop over the same batches",
        "bare_loop",
        ("fl over gRPC / bare PyTorch loop, median of 5 pairs",),
    ),
    Quote(
        "bytes at the first cut / raw float32, same bits: VGG-5, VGG-16, ResNet-18, MobileNetV3-small",
        "exact_wire",
        tuple(_SHARE.format(model) for model in ("vgg5", "vgg16", "resnet18", "mobilenetv3_small")),
    ),
    Quote(
        "epoch with these / with raw bytes on 4G: VGG-5 real, VGG-5 virtual, VGG-16 virtual",
        "coded_epochs",
        (
            "epoch with auto / raw, vgg5 on 4g, real",
            "epoch with auto / raw, vgg5 on 4g, virtual",
            "epoch with auto / raw, vgg16 on 4g, virtual",
        ),
    ),
    Quote(
        "predicted / measured epoch of two real devices on 4G, 4G+ and Wi-Fi: VGG-5",
        "prediction",
        tuple(_PREDICTED.format("vgg5", link) for link in prediction.LINKS),
    ),
    Quote(
        "the same of MobileNetV3-Small",
        "prediction",
        tuple(_PREDICTED.format("mobilenetv3_small", link) for link in prediction.LINKS),
    ),
    Quote(
        "planning for 100 named boards takes at most, on one core",
        "selection",
        ("longest planning of 100 devices, CPU seconds of one core",),
        "{:.1f}",
        " s",
    ),
    Quote(
        "planning again while links change every minute, of the training's time: VGG-5, ResNet-18",
        "replanning",
        tuple(f"CPU seconds of planning / seconds of training, {model}" for model in ("vgg5", "resnet18")),
        "{:.2f}",
        " %",
    ),
    Quote(
        "epoch of 20 devices with a live page / without one: a browser watches, 8 browsers hang",
        "dashboard",
        (
            "epoch of 20 devices with a live page that is watched / without",
            "the same with 8 browsers that never read / without",
        ),
    ),
    Quote(
        "peak memory for a model of 600 MB, in sizes of the model: server with 2 devices, device",
        "large_model",
        ("peak memory of the server, in sizes of a model of 600 MB, 2 devices", "peak memory of a device, the same"),
    ),
    Quote(
        "server's memory for each of 200 devices that wait",
        "many_devices",
        ("server's memory for each idle device more",),
        unit=" MiB",
    ),
    Quote(
        "100 and 10,000 devices in virtual time, timing-only, an epoch of 5 iterations",
        "scale",
        ("100 devices, one epoch of 5 iterations, timing-only", "10,000 devices, the same"),
        unit=" s",
    ),
)


def _result(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return content


def measured_table() -> str:
    """Return README's table of measured numbers."""
    head = ["| what | measured | `python -m benchmarks` |", "|---|---|---|"]
    return "\n".join([*head, *(quote.row() for quote in QUOTES)])


def demo_table() -> str:
    """Return README's table of `make demo`."""
    return "\n".join(_demo_lines(_result("demo")["details"]["rows"]))


def _demo_lines(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    bases = ("fl", "sfl")
    against = " | ".join(f"against {base}" for base in bases)
    yield f"| method | plan | s/epoch | {against} | server idle s | device idle s | test accuracy | MB an epoch |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for method, row in rows.items():
        faster = " | ".join(f"{rows[base]['epoch_s'] / row['epoch_s']:.2f}x" for base in bases)
        numbers = f"{row['epoch_s']:.2f} | {faster} | {row['server_idle_s']:.2f} | {row['device_idle_s']:.2f} "
        numbers += f"| {100 * row['test_accuracy']:.1f} % | {row['megabytes']:.1f}"
        yield f"| {method} | {row['plan']} | {numbers} |"


def quoted(text: str) -> str:
    """Return README's text with the tables of the results that are there."""
    return _filled(text, {"demo": demo_table(), "measured": measured_table()})


def quoted_privacy(text: str) -> str:
    """Return the page about what privacy costs, likewise."""
    details = _result("privacy")["details"]
    cells = {"papers": privacy.papers_cells(details), "planned": privacy.planned_cells(details)}
    tables = {name: privacy.table(of) for name, of in cells.items()}
    return _filled(text, {"overheads": privacy.summary(details), **tables})


def privacy_picture() -> str:
    """Return its picture."""
    return picture(privacy.planned_cells(_result("privacy")["details"]), privacy.NETWORKS)


def _filled(text: str, tables: Mapping[str, str]) -> str:
    for name, table in tables.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, found, rest = text.partition(start)
        _, closed, behind = rest.partition(end)
        assert found, f"there is no place for {name}"
        assert closed, f"the place for {name} has no end"
        text = f"{before}{start}{table}\n{end}{behind}"
    return text


if __name__ == "__main__":
    README.write_text(quoted(README.read_text("utf-8")), "utf-8")
    PRIVACY.write_text(quoted_privacy(PRIVACY.read_text("utf-8")), "utf-8")
    PRIVACY_PICTURE.write_text(privacy_picture(), "utf-8")
