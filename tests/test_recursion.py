"""One iteration of one device in virtual time is the paper's recursion T(r), stage by stage, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipar.config import Config, config_from, device_specs
from pipar.events import ignore
from pipar.job import Job
from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.planner.profile import LayerProfile, Profile
from pipar.protocol.messages import LABEL_BYTES, Kind, Message
from pipar.protocol.wire import cut_message, pack_frame
from pipar.schedule import cut_batch
from pipar.stages import KINDS, Stage, Work, all_stages, end_times, previous
from pipar.trace import Span
from pipar.virtual import train_without_mathematics

LAYERS, CUT = 3, 2
HEADER_BYTES = len(pack_frame(next(cut_message(Message(Kind.ACTIVATION), 1, 1))))


@dataclass(frozen=True)
class Instance:
    """One iteration: its batch, N, the rates of the link, and two machines."""

    batch: int
    micro_batches: int
    up_bps: float
    down_bps: float
    cores: int
    device_speed: float
    device: Profile
    server: Profile

    @property
    def pieces(self) -> list[int]:
        return cut_batch(self.batch, self.micro_batches)

    def seconds(self, stage: Stage, header_bytes: int) -> float:
        """Return t(r): compute from the profiles, communication from the bytes of a frame and the rate."""
        samples = self.pieces[stage.micro_batch - 1]
        at_the_cut = samples * self.device.output_bytes(CUT)
        match stage.kind:
            case "fc" | "bc":
                work = Work(stage.kind, first_layer=1, last_layer=CUT, samples=samples)
                return Costs(self.device, self.device_speed).seconds(work)
            case "fs" | "bs":
                work = Work(stage.kind, first_layer=CUT + 1, last_layer=LAYERS, samples=samples)
                return Costs(self.server).seconds(work)
            case "u":
                return (header_bytes + at_the_cut + samples * LABEL_BYTES) * 8 / self.up_bps
            case _:
                return (header_bytes + at_the_cut) * 8 / self.down_bps

    def config(self) -> Config:
        link = {"up": f"{self.up_bps!r}bit/s", "down": f"{self.down_bps!r}bit/s"}
        return config_from(
            {
                "run": {"epochs": 1, "batch_size": self.batch},
                "server": {"cores": self.cores},
                "devices": [{"name": "phone", "link": link, "speed": self.device_speed}],
            }
        )

    def job(self) -> Job:
        config = self.config()
        (spec,) = device_specs(config)
        assert (spec.link.up_bps, spec.link.down_bps) == (self.up_bps, self.down_bps)
        return Job(
            config=config,
            specs=(spec,),
            sizes={spec.name: self.batch},
            server_profile=self.server,
            device_profiles={spec.name: self.device},
            batch_statistics=False,
            dropout=False,
            plans={spec.name: Plan(CUT, self.micro_batches)},
            dataset="none",
            model="by hand",
        )


def run(instance: Instance) -> dict[Stage, Span]:
    """Return the span of each of the 6N stages of the instance in virtual time."""
    found: list[Span] = []
    train_without_mathematics(instance.job(), lambda _, spans: found.extend(spans), ignore)
    return {Stage(span.kind, span.micro_batch): span for span in found if span.kind in KINDS and not span.waiting}


def by_recursion(instance: Instance, start: float, header_bytes: int = HEADER_BYTES) -> dict[Stage, float]:
    """Return T(r) of an iteration that starts when the server's word to start has arrived, not at zero."""

    def seconds(stage: Stage) -> float:
        alone = instance.seconds(stage, header_bytes)
        return start + alone if stage == Stage("fc", 1) else alone

    return end_times(instance.micro_batches, seconds)


amounts = st.floats(1e-6, 10.0) | st.sampled_from([0.0, 0.1, 0.25, 1.0])
rates = st.floats(1e4, 1e9) | st.sampled_from([1e6, 1e7, 2.5e7])


@st.composite
def profiles(draw: st.DrawFn, batch: int) -> Profile:
    """Return a machine without overheads and a network without weights; times differ by batch size and layer."""
    measured = tuple(sorted(draw(st.sets(st.integers(1, batch), min_size=1, max_size=3))))
    times = st.tuples(*[amounts] * len(measured))
    layers = tuple(LayerProfile(f"layer{n}", draw(times), draw(times), 512, 0) for n in range(1, LAYERS + 1))
    return Profile("by hand", "float32", measured, layers)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    if draw(st.booleans()):  # divisible: all stages of a kind take as long
        n = draw(st.integers(1, 12))
        batch = n * draw(st.integers(1, 9))
    else:
        batch = draw(st.integers(1, 100))
        n = draw(st.integers(1, min(batch, 30)))
    device, server = draw(profiles(batch)), draw(profiles(batch))
    speed = draw(st.sampled_from([1.0, 0.05, 0.3]))
    return Instance(batch, n, draw(rates), draw(rates), draw(st.integers(1, 3)), speed, device, server)


@settings(max_examples=200, deadline=None)
@given(instances())
def test_every_stage_ends_when_the_recursion_says(instance: Instance) -> None:
    spans = run(instance)
    expected = by_recursion(instance, spans[Stage("fc", 1)].start)
    assert {stage: span.end for stage, span in spans.items()} == expected


@settings(deadline=None)
@given(instances())
@pytest.mark.slow
def test_every_stage_starts_when_the_last_it_waits_for_has_ended(instance: Instance) -> None:
    spans, n = run(instance), instance.micro_batches
    begin = spans[Stage("fc", 1)].start
    expected = {stage: max((spans[r].end for r in previous(stage, n)), default=begin) for stage in all_stages(n)}
    assert {stage: span.start for stage, span in spans.items()} == expected


@settings(deadline=None)
@given(instances())
@pytest.mark.slow
def test_frames_without_their_headers_would_be_seen(instance: Instance) -> None:
    spans = run(instance)
    begin = spans[Stage("fc", 1)].start
    assert spans[Stage("u", 1)].end != by_recursion(instance, begin, header_bytes=0)[Stage("u", 1)]


def test_recursion_worked_out_by_hand() -> None:
    """f_c = 2, b_c = 3, f_s = b_s = 0.5; u = d = 1 for both micro-batches, by the rate that makes it so."""
    layers = [(1.0, 2.0), (1.0, 1.0), (0.5, 0.5)]
    profile = Profile("by hand", "float32", (1,), tuple(LayerProfile(str(f), (f,), (b,), 512, 0) for f, b in layers))
    up, down = (HEADER_BYTES + 512 + LABEL_BYTES) * 8.0, (HEADER_BYTES + 512) * 8.0
    spans = run(Instance(2, 2, up, down, 1, 1.0, profile, profile))
    start = spans[Stage("fc", 1)].start
    ends = {str(stage): span.end - start for stage, span in spans.items()}
    assert ends == pytest.approx(
        {"fc1": 2, "fc2": 4, "u1": 3, "u2": 5, "fs1": 3.5, "bs1": 4, "fs2": 5.5, "bs2": 6}
        | {"d1": 5, "d2": 7, "bc1": 8, "bc2": 11}
    )
