"""One iteration of one device in virtual time is the paper's recursion T(r), stage by stage, to the last bit.

The paper's estimate, in closed form, is the same for every N that divides the batch, if nothing is there that it does
not know: machines without overheads, times in proportion to samples, and headers and labels added to its bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.recursion import KINDS, all_stages, closed_form_s, end_times, previous, recursion_s, stage_times

from pipar.events import ignore
from pipar.execution.schedule import cut_batch
from pipar.execution.spans import Span
from pipar.execution.stage_graph import Stage
from pipar.execution.work import Work
from pipar.job.job import Job
from pipar.launch.virtual import train_timing_only
from pipar.methods import Plan
from pipar.planner.costs import Costs
from pipar.planner.paper_selection import StageTimes, iteration_s
from pipar.profiling.machines import MACHINES, machine_profile
from pipar.profiling.operation_counts import known_counts
from pipar.profiling.profile import LayerProfile, Profile
from pipar.settings.config import Config, device_specs
from pipar.settings.config_file import config_from
from pipar.settings.links import Link
from pipar.wire.frames import CHUNK_BYTES, cut_message, pack_frame
from pipar.wire.messages import LABEL_BYTES, Kind, Message

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
    train_timing_only(instance.job(), lambda _, spans: found.extend(spans), ignore)
    return {Stage(span.kind, span.micro_batch): span for span in found if span.kind in KINDS and not span.waiting}


def by_recursion(instance: Instance, start: float, header_bytes: int = HEADER_BYTES) -> dict[Stage, float]:
    """Return T(r) of an iteration that starts when the server's START message has arrived, not at zero."""

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
    if draw(st.booleans()):  # divisible: all stages of a kind take the same time
        n = draw(st.integers(1, 12))
        batch = n * draw(st.integers(1, 9))
    else:
        batch = draw(st.integers(1, 100))
        n = draw(st.integers(1, min(batch, 30)))
    device, server = draw(profiles(batch)), draw(profiles(batch))
    speed = draw(st.sampled_from([1.0, 0.05, 0.3]))
    return Instance(batch, n, draw(rates), draw(rates), draw(st.integers(1, 3)), speed, device, server)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(instances())
def test_every_stage_ends_when_the_recursion_says(instance: Instance) -> None:
    check_ends(instance)


@settings(max_examples=300, deadline=None)
@given(instances())
@pytest.mark.slow
def test_every_stage_ends_when_the_recursion_says_in_many_more_instances(instance: Instance) -> None:
    check_ends(instance)


def check_ends(instance: Instance) -> None:
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
def test_frames_without_their_headers_would_be_detected(instance: Instance) -> None:
    spans = run(instance)
    begin = spans[Stage("fc", 1)].start
    assert spans[Stage("u", 1)].end != by_recursion(instance, begin, header_bytes=0)[Stage("u", 1)]


def test_the_recursion_gives_the_times_computed_by_hand() -> None:
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


# --- the paper's estimate for the six networks

NETWORKS = {"vgg5": 5, "resnet18": 10, "mobilenetv3_small": 15, "vgg16": 16, "resnet101": 35, "mobilenetv3_large": 19}
BATCH = 20


def proportional(machine: str, network: str) -> Profile:
    """Return a machine's profile of a network's layers only, with times proportional to samples."""
    counts = known_counts(network, "none", (3, 32, 32), 10)
    assert counts is not None
    whole = machine_profile(MACHINES[machine], counts, model=network, dtype="float32", batch_size=BATCH)
    layers = tuple(
        replace(layer, forward_s=layer.forward_s[-1:], backward_s=layer.backward_s[-1:]) for layer in whole.layers
    )
    return Profile(network, "float32", (BATCH,), layers)


def alone(device: Profile, server: Profile, plan: Plan, link: Link) -> float:
    """Return the length of an iteration of one device on one core, from a timing-only run."""
    rates = {"up": f"{link.up_bps!r}bit/s", "down": f"{link.down_bps!r}bit/s"}
    config = config_from(
        {
            "run": {"epochs": 1, "batch_size": BATCH},
            "server": {"cores": 1},
            "devices": [{"name": "phone", "link": rates, "speed": 1.0}],
        }
    )
    job = Job(
        config=config,
        specs=device_specs(config),
        sizes={"phone": BATCH},
        server_profile=server,
        device_profiles={"phone": device},
        batch_statistics=False,
        dropout=False,
        plans={"phone": plan},
        dataset="none",
        model=device.model,
    )
    found: list[Span] = []
    train_timing_only(job, lambda _, spans: found.extend(spans), ignore)
    computed = [span for span in found if span.kind in ("fc", "bc") and not span.waiting]
    return max(span.end for span in computed) - min(span.start for span in computed)


def with_wire_bytes(times: StageTimes, size_bytes: int, samples: int, link: Link) -> StageTimes:
    """Return the times with the bytes that the paper does not count: frame headers, and labels on the uplink."""
    assert link.up_bps is not None
    assert link.down_bps is not None
    labels = samples * LABEL_BYTES
    up_headers, down_headers = (
        HEADER_BYTES * max(1, math.ceil(size / CHUNK_BYTES)) for size in (size_bytes + labels, size_bytes)
    )
    return replace(
        times,
        u=times.u + (labels + up_headers) * 8 / link.up_bps,
        d=times.d + down_headers * 8 / link.down_bps,
    )


def check_estimate(network: str, plan: Plan, link: Link) -> None:
    device, server = proportional("raspberry-pi-3b", network), proportional("i7-11850h", network)
    n, paper = plan.micro_batches, stage_times(device, server, plan, BATCH, link)
    times = paper
    if plan.split_point < len(device.layers):
        samples = BATCH // n
        times = with_wire_bytes(paper, samples * device.output_bytes(plan.split_point), samples, link)
    lasted = alone(device, server, plan, link)
    assert closed_form_s(times, n) == pytest.approx(lasted, rel=1e-9)
    assert recursion_s(times, n) == iteration_s(times, n) == pytest.approx(lasted, rel=1e-9)
    # What the paper leaves out is one header and the labels of each micro-batch: N (header + labels) at the most.
    left_out = n * (times.u - paper.u + times.d - paper.d)
    assert -1e-9 <= lasted - closed_form_s(paper, n) <= left_out + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_the_estimate_is_an_iteration_in_virtual_time_for_every_n_that_divides_the_batch(network: str) -> None:
    layers = len(proportional("raspberry-pi-3b", network).layers)
    assert layers == NETWORKS[network]
    for p in sorted({1, layers // 2, layers - 1, layers}):
        for n in [n for n in range(1, BATCH + 1) if BATCH % n == 0 and (n == 1 or p < layers)]:
            uplink_bound, downlink_bound = Link(up_bps=1e7, down_bps=2.5e7), Link(up_bps=5e7, down_bps=5e5)
            check_estimate(network, Plan(p, n), uplink_bound if (p + n) % 2 else downlink_bound)
