"""The timeline in characters: blocks at the times of their spans, above a ruler of seconds."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipar.cli.timeline_text import Block, Chart, axis, blocks
from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, IO, SERVER, UPLINK, Span


def _span(lane: str, kind: str, micro_batch: int, start: float, end: float) -> Span:
    owner = SERVER if lane == CORE else "device-1"
    return Span(owner, lane, kind, 1, 1, micro_batch, start, end)


#: Two micro-batches in 3.5 seconds from second 10 on, all at multiples of a twentieth of a second.
SPANS = [
    _span(IO, "load", 0, 9.0, 10.0),
    _span(COMPUTE, "fc", 1, 10.0, 10.5),
    _span(COMPUTE, "fc", 2, 10.5, 11.0),
    _span(UPLINK, "u", 1, 10.5, 11.25),
    _span(UPLINK, "u", 2, 11.25, 12.0),
    _span(CORE, "fs", 1, 11.25, 11.5),
    _span(CORE, "fs", 2, 12.0, 12.25),
    _span(DOWNLINK, "d", 1, 11.5, 11.75),
    _span(DOWNLINK, "d", 2, 12.25, 12.5),
    _span(COMPUTE, "bc", 1, 11.75, 12.5),
    _span(COMPUTE, "bc", 2, 12.5, 13.25),
    _span(COMPUTE, "step", 0, 13.25, 13.5),
]

PICTURE = """\
device   1>>>>>>>>>2>>>>>>>>>···············1<<<<<<<<<<<<<<2<<<<<<<<<<<<<<=====
uplink   ··········1^^^^^^^^^^^^^^2^^^^^^^^^^^^^^······························
server   ·························1####··········2####·························
downlink ······························1vvvv··········2vvvv····················
         |---------|---------|---------|---------|---------|---------|---------
         0 s       0.5       1         1.5       2         2.5       3
         > forward  < backward  ^ upload  # server  v download  = step  · idle
"""


def _drawn(spans: list[Span], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(Chart(spans))
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_a_picture_shows_every_stage_at_its_time() -> None:
    assert _drawn(SPANS, 80) == PICTURE


@pytest.mark.parametrize("columns", [70, 50, 110])
def test_blocks_start_and_end_at_the_columns_of_their_times(columns: int) -> None:
    shown = [span for span in SPANS if span.lane != IO]
    made = blocks(SPANS, columns)
    assert [(block.lane, block.kind, block.micro_batch) for block in made] == [
        (span.lane, span.kind, span.micro_batch) for span in shown
    ]
    for block, span in zip(made, shown, strict=True):
        assert abs(block.first / columns * 3.5 - (span.start - 10)) <= 0.501 * 3.5 / columns
        assert abs(block.end / columns * 3.5 - (span.end - 10)) <= 0.501 * 3.5 / columns


def test_a_block_too_short_for_a_column_is_visible() -> None:
    spans = [
        _span(COMPUTE, "fc", 1, 0.0, 10.0),
        _span(CORE, "fs", 1, 5.0, 5.001),
        _span(COMPUTE, "step", 0, 10.0, 10.0),
    ]
    assert [block.end - block.first for block in blocks(spans, 50)] == [50, 1, 1]
    rows = _drawn(spans, 60).splitlines()
    assert rows[0].endswith(">=")
    assert rows[2].count("#") == 1


def test_a_block_has_its_number_only_if_its_character_fits_after_it() -> None:
    assert Block(COMPUTE, "fc", 12, 0, 4).text == "12>>"
    assert Block(COMPUTE, "fc", 12, 0, 2).text == ">>"
    assert Block(COMPUTE, "step", 0, 0, 2).text == "=="


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_many_short_stages_do_not_hide_idle_time(share: float) -> None:
    uploads = [_span(UPLINK, "u", n, n / 10, (n + 1) / 10) for n in range(100)]
    served = [_span(CORE, "fs", n, n / 10, (n + share) / 10) for n in range(100)]
    rows = _drawn([*uploads, *served, _span(CORE, "step", 0, 9.9999, 10.0)], 80).splitlines()
    assert rows[1].count("^") == 70
    assert abs(rows[2].count("#") - 70 * share) <= 1.5
    assert rows[2].count("=") == 1
    assert rows[2].count("·") >= 70 * (1 - share) - 2.5
    assert rows[-1].strip() == "Stages shorter than a column are shown by their share of the time."
    assert max(map(len, rows)) <= 80


def test_alternating_kinds_on_one_lane_get_their_shares() -> None:
    spans = []
    for n in range(200):
        spans += [_span(COMPUTE, "fc", 1, n, n + 0.3), _span(COMPUTE, "bc", 1, n + 0.3, n + 0.9)]
    row = _drawn([*spans, _span(COMPUTE, "step", 0, 199.9, 200.0)], 80).splitlines()[0]
    assert [round(row.count(sign) / 7) for sign in "><·"] == [3, 6, 1]


def test_models_and_their_averaging_are_drawn() -> None:
    spans = [
        *(_span(COMPUTE, "fc", 1, 0.0, 4.0), _span(UPLINK, "model", 0, 4.0, 6.0)),
        *(_span(CORE, "aggregate", 0, 6.0, 7.0), _span(DOWNLINK, "model", 0, 7.0, 8.0)),
    ]
    rows = _drawn(spans, 90).splitlines()
    assert [rows[1].count("m"), rows[2].count("+"), rows[3].count("m")] == [20, 10, 10]
    assert "m model  + averaging" in rows[-1]


def test_a_devices_encoding_has_a_row_of_its_own_where_it_takes_time() -> None:
    coding = [_span(IO, "encode", 1, 10.5, 11.0), _span(IO, "decode", 1, 11.75, 12.0)]
    rows = _drawn([*SPANS, *coding], 80).splitlines()
    assert rows[1] == "coding   ··········1eeeeeeeee···············1dddd······························"
    assert [row.split() for row in rows[-1:]] == [["e", "encoding", "d", "decoding"]]
    assert rows[-2] == PICTURE.splitlines()[-1]
    short = [_span(IO, "encode", 1, 10.5, 10.51)]
    assert _drawn([*SPANS, *short], 80) == PICTURE


@pytest.mark.parametrize(("terminal", "drawn"), [(80, 79), (100, 99), (120, 119), (200, 119)])
def test_a_picture_takes_the_terminals_width_up_to_120_columns(terminal: int, drawn: int) -> None:
    assert max(map(len, _drawn(SPANS, terminal).splitlines())) == drawn


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 0.0123, 1.0, 59.9, 1e5])
@pytest.mark.parametrize("columns", [20, 70, 110])
def test_a_ruler_has_round_seconds_at_its_marks(columns: int, seconds: float) -> None:
    ruler, labels = axis(columns, seconds)
    assert len(ruler) == columns
    assert len(labels) <= columns
    written = labels.replace(" s", "").split()
    assert written[0] == "0"
    assert all(float(label).hex() == float(f"{float(label):.1g}").hex() or len(label) < 7 for label in written)
    for at, mark in enumerate(ruler):
        label = labels[at:].split(" ")[0] if mark == "|" and at else ""
        if label:
            assert abs(float(label) / seconds * columns - at) <= 0.5
