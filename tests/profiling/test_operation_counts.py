"""The stored counts are those that torch counts, so that the file cannot be stale."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from pipar.networks.blocks import NORMS
from pipar.profiling.operation_counts import counts_key, known_counts

_MAKER = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "count_networks.py"))
FILE, as_text, cases, counted = (_MAKER[name] for name in ("FILE", "as_text", "cases", "counted"))
KEPT = json.loads(FILE.read_text("utf-8"))
ALL = list(cases())


def test_the_file_has_every_network_norm_and_image_and_is_small() -> None:
    assert list(KEPT) == [counts_key(*case) for case in ALL]
    assert len(ALL) == 69
    assert FILE.stat().st_size < 500_000
    assert as_text(KEPT) == FILE.read_text("utf-8")


def counted_again() -> list[Any]:
    """Return every network with every image, norms in turn: a change affects all similar cases."""
    images = {model: list(dict.fromkeys(shape for name, _, shape in ALL if name == model)) for model, _, _ in ALL}
    return [case for case in ALL if case[1] == NORMS[images[case[0]].index(case[2]) % len(NORMS)]]


def test_every_norm_and_every_image_of_every_network_is_counted_again() -> None:
    for part in (lambda case: case[:2], lambda case: (case[0], case[2])):
        assert {part(case) for case in counted_again()} == {part(case) for case in ALL}


@pytest.mark.slow
@pytest.mark.parametrize("case", counted_again(), ids=str)
def test_the_file_holds_what_torch_counts(case: Any) -> None:
    assert counted(case) == KEPT[counts_key(*case)]


def test_every_network_has_shares_for_each_cut_and_sparse_ones_only_after_a_relu() -> None:
    for model, norm, shape in ALL:
        counts = known_counts(model, norm, shape, 10)
        assert counts is not None
        *cuts, last = counts
        assert last.shares == {}
        for layer in cuts:
            exact = {"planes", "sparse", "sparse-planes"} if layer.rectified else {"planes"}
            assert set(layer.shares) == exact | {"fp16", "bf16", "int8", "topk"}, (model, norm, layer.name)
            assert all(0 < share <= 1 for both in layer.shares.values() for share in both)
