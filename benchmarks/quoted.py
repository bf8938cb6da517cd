"""The numbers that documents quote from the checked-in results; `python -m benchmarks.quoted` updates the documents."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import examples, prediction, privacy
from benchmarks.privacy_picture import picture
from benchmarks.record import RESULTS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
PRIVACY = ROOT / "docs" / "explanation" / "privacy-costs.md"
PRIVACY_TABLES = ROOT / "docs" / "reference" / "privacy-cost-tables.md"
FOREIGN = ROOT / "docs" / "reference" / "foreign-networks.md"
#: By example, the page with its tables.
EXAMPLE_PAGES = {
    "diabetes": ROOT / "docs" / "how-to" / "regression.md",
    "unet": ROOT / "docs" / "examples" / "unet.md",
    "shakespeare": ROOT / "docs" / "examples" / "shakespeare.md",
    "minilm": ROOT / "docs" / "examples" / "minilm.md",
    "timm_network": ROOT / "docs" / "examples" / "timm.md",
}
PRIVACY_PICTURE = ROOT / "docs" / "images" / "privacy-costs.svg"


@dataclass(frozen=True)
class Quote:
    """A row of docs/measured.md: its text, and the claims of one result whose values it shows."""

    text: str
    result: str
    claims: tuple[str, ...]
    form: str = "{:.2f}"
    unit: str = ""
    in_readme: bool = False

    def row(self) -> str:
        values = {claim["what"]: claim["value"] for claim in _result(self.result)["claims"]}
        shown = ", ".join(self.form.format(values[what]) for what in self.claims)
        return f"| {self.text} | {shown}{self.unit} | {self.result} |"


_STARTED = ("`pipar --help`", "`import pipar`", "tiny timing-only run", "tiny virtual run", "tiny real run")
_DEFAULTS = ("to the first line of the training", "to the end of the first epoch")
_PREDICTED = "predicted / measured epoch, {} on {}"
_SHARE = "bytes up and down / raw float32, {}, P = 1, the worse of epochs 1 and 10"
QUOTES = (
    Quote(
        "VGG-5, 2 devices on emulated 4G, P=1 N=12: shortest epoch that the link allows / measured (1: best)",
        "efficiency",
        ("efficiency on 4g (bound / seconds), mean of 3 epochs",),
        in_readme=True,
    ),
    Quote(
        "same run: bytes counted by the kernel / by pipar (1: pipar counts all)",
        "efficiency",
        ("kernel's bytes on the loopback / bytes counted",),
    ),
    Quote(
        "epoch in real processes / in virtual time (1: equal): 4G, Wi-Fi",
        "agreement",
        ("epoch seconds on 4g, real / virtual", "epoch seconds on wifi, real / virtual"),
        in_readme=True,
    ),
    Quote(
        "time of federated learning over gRPC with one device / of a bare PyTorch loop (below 1: faster)",
        "bare_loop",
        ("fl over gRPC / bare PyTorch loop, median of 5 pairs",),
    ),
    Quote(
        "bytes at the first cut, lossless / raw float32 (less is better): VGG-5, VGG-16, ResNet-18, MobileNetV3-Small",
        "exact_wire",
        tuple(_SHARE.format(model) for model in ("vgg5", "vgg16", "resnet18", "mobilenetv3_small")),
    ),
    Quote(
        "epoch on 4G, lossless encodings / raw (less is better): VGG-5 real, VGG-5 virtual, VGG-16 virtual",
        "coded_epochs",
        (
            "epoch with auto / raw, vgg5 on 4g, real",
            "epoch with auto / raw, vgg5 on 4g, virtual",
            "epoch with auto / raw, vgg16 on 4g, virtual",
        ),
        in_readme=True,
    ),
    Quote(
        "predicted / measured epoch (1: exact), two real devices, VGG-5: 4G, 4G+, Wi-Fi",
        "prediction",
        tuple(_PREDICTED.format("vgg5", link) for link in prediction.LINKS),
    ),
    Quote(
        "the same for MobileNetV3-Small",
        "prediction",
        tuple(_PREDICTED.format("mobilenetv3_small", link) for link in prediction.LINKS),
    ),
    Quote(
        "longest planning for 100 named boards, on one core",
        "selection",
        ("longest planning of 100 devices, CPU seconds of one core",),
        "{:.1f}",
        " s",
        in_readme=True,
    ),
    Quote(
        "replanning while links change every minute, CPU time / training time (less is better): VGG-5, ResNet-18",
        "replanning",
        tuple(f"CPU seconds of planning / seconds of training, {model}" for model in ("vgg5", "resnet18")),
        "{:.2f}",
        " %",
    ),
    Quote(
        "epoch of 20 devices with a live page / without (1: no cost): one browser watching, 8 browsers that hang",
        "dashboard",
        (
            "epoch of 20 devices with a live page that is watched / without",
            "the same with 8 browsers that never read / without",
        ),
    ),
    Quote(
        "CPU time of the flight recorder / time of the training, 20 devices (less is better)",
        "recorder",
        ("CPU seconds of the recorder's thread / seconds",),
        "{:.4f}",
    ),
    Quote(
        "a recording of 100 rounds of 20 devices",
        "recorder",
        ("100 rounds of 20 devices",),
        "{:.2f}",
        " MB",
    ),
    Quote(
        "largest difference of a replayed epoch: plain, changing link, killed device",
        "recorder",
        tuple(
            f"largest difference of a replayed epoch of {count}, {name}"
            for count, name in ((6, "plain"), (6, "changing link"), (5, "killed device"))
        ),
        "{:.2f}",
        " %",
    ),
    Quote(
        "peak memory / model size (less is better), for a model of 600 MB: server with 2 devices, device",
        "large_model",
        (
            "peak memory of the server / size of a 600 MB model sent whole, 2 devices",
            "peak memory of a device / size of a 600 MB model sent whole",
        ),
    ),
    Quote(
        "server memory per idle device, 200 devices connected",
        "many_devices",
        ("server memory per additional idle device",),
        unit=" MiB",
    ),
    Quote(
        "real time to simulate an epoch of 5 iterations, timing-only: 100, 10,000 and 100,000 devices",
        "scale",
        (
            "100 devices, one epoch of 5 iterations, timing-only",
            "10,000 devices, the same",
            "100,000 devices, the same",
        ),
        "{:.1f}",
        " s",
        in_readme=True,
    ),
    *(
        quote
        for version, when in (("now", "this version"), ("before", "commit 292bbb2a, before start-up was made faster"))
        for quote in (
            Quote(
                f"`pipar --help`, `import pipar`, tiny timing-only, virtual and real runs; {when}",
                "startup",
                tuple(f"{name}, {version}" for name in _STARTED),
                unit=" s",
            ),
            Quote(
                "`pipar run` with no profile yet: to the first line of the training, to the end of the first epoch; "
                f"measuring VGG-5; {when}",
                "startup",
                (*(f"defaults, empty cache {end}, {version}" for end in _DEFAULTS), f"profiling VGG-5, {version}"),
                "{:.1f}",
                " s",
            ),
        )
    ),
)


def _result(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return content


def measured_table(quotes: Iterable[Quote]) -> str:
    """Return a table of measured numbers."""
    head = ["| what | measured | `python -m benchmarks` |", "|---|---|---|"]
    return "\n".join([*head, *(quote.row() for quote in quotes)])


def demo_table() -> str:
    """Return README's table of `make demo`."""
    return "\n".join(_demo_lines(_result("demo")["details"]["rows"]))


def _demo_lines(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    bases = ("fl", "sfl")
    against = " | ".join(f"vs {base}" for base in bases)
    yield f"| method | plan | s/epoch | {against} | server idle s | device idle s | test accuracy | MB per epoch |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for method, row in rows.items():
        faster = " | ".join(f"{rows[base]['epoch_s'] / row['epoch_s']:.2f}x" for base in bases)
        numbers = f"{row['epoch_s']:.2f} | {faster} | {row['server_idle_s']:.2f} | {row['device_idle_s']:.2f} "
        numbers += f"| {100 * row['test_accuracy']:.1f} % | {row['megabytes']:.1f}"
        yield f"| {method} | {row['plan']} | {numbers} |"


def quoted(text: str) -> str:
    """Return README's text with the tables of the checked-in results."""
    short = measured_table(quote for quote in QUOTES if quote.in_readme)
    return _filled(text, {"demo": demo_table(), "measured": short})


def quoted_measured(text: str) -> str:
    """Return the page of measured numbers with its tables."""
    return _filled(text, {"measured": measured_table(QUOTES)})


def quoted_privacy(text: str) -> str:
    """Return the page about the cost of privacy with its summary."""
    return _filled(text, {"overheads": privacy.summary(_result("privacy")["details"])})


def quoted_privacy_tables(text: str) -> str:
    """Return the page with every cell of the cost of privacy with its tables."""
    details = _result("privacy")["details"]
    cells = {"papers": privacy.papers_cells(details), "planned": privacy.planned_cells(details)}
    return _filled(text, {name: privacy.table(of) for name, of in cells.items()})


def quoted_foreign(text: str) -> str:
    """Return the page of networks of other libraries with its table."""
    return _filled(text, {"networks": "\n".join(_foreign_lines(_result("any_network")))})


def _foreign_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield "| library | network | recorded | cuts offered | check passed | tensors at a cut, at most | reason if not |"
    yield "|---|---|---|---:|---|---:|---|"
    for row in result["details"]["rows"]:
        reason = " ".join(row["reason"].replace("|", "/").split())
        recorded, passed = ("yes" if row[key] else "no" for key in ("exported", "passed"))
        yield (
            f"| {row['library']} | {row['network']} | {recorded} | {row['cuts']} | {passed} | {row['most_tensors']} "
            f"| {reason} |"
        )
    yield f"\nMeasured on {result['date']}: {result['machine']}, `{result['command']}`."


def quoted_example(name: str, text: str) -> str:
    """Return the page of an example with its tables."""
    found = _result("examples")["details"][name]
    tables = {"methods": examples.table(found)}
    if name == "minilm":
        tables["epochs"] = examples.epochs_table(found)
    return _filled(text, tables)


def privacy_picture() -> str:
    """Return the picture of the page about the cost of privacy."""
    return picture(privacy.planned_cells(_result("privacy")["details"]), privacy.NETWORKS)


def _filled(text: str, tables: Mapping[str, str]) -> str:
    for name, table in tables.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        assert found, f"there is no place for {name}"
        assert closed, f"the place for {name} has no end"
        text = f"{before}{start}{table}\n{end}{after}"
    return text


if __name__ == "__main__":
    README.write_text(quoted(README.read_text("utf-8")), "utf-8")
    MEASURED.write_text(quoted_measured(MEASURED.read_text("utf-8")), "utf-8")
    PRIVACY.write_text(quoted_privacy(PRIVACY.read_text("utf-8")), "utf-8")
    PRIVACY_TABLES.write_text(quoted_privacy_tables(PRIVACY_TABLES.read_text("utf-8")), "utf-8")
    FOREIGN.write_text(quoted_foreign(FOREIGN.read_text("utf-8")), "utf-8")
    PRIVACY_PICTURE.write_text(privacy_picture(), "utf-8")
    for example, page in EXAMPLE_PAGES.items():
        page.write_text(quoted_example(example, page.read_text("utf-8")), "utf-8")
