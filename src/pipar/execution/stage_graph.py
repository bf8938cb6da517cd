"""The stage graph: the stages of a training, the lane that each runs on, and the stages that its data comes from.

    device   f_c 1  f_c 2 ... f_c N              b_c 1  b_c 2 ... b_c N
    uplink          u 1    u 2   ...  u N
    server                 f_s 1 b_s 1  f_s 2 b_s 2 ... f_s N b_s N
    downlink                         d 1          d 2   ...   d N

These six are the stages of the paper (III-C, table of stages). Loading, noise, encoding and decoding come between them;
models are exchanged between two epochs. A stage waits for its data, and for its lane, which runs one stage at a time:
the device's in the order of `schedule.device_order`, every other lane in the order in which data arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipar.execution.spans import COMPUTE, CORE, DOWNLINK, IO, NOISE, UPLINK

#: A kind of work on a kind of lane.
StageKind = tuple[str, str]

#: Where the data of a span comes from: earlier stages of its micro-batch, or of the exchange of models.
DATA_FROM: dict[StageKind, tuple[StageKind, ...]] = {
    (NOISE, "noise"): ((IO, "load"),),
    (COMPUTE, "fc"): ((NOISE, "noise"), (IO, "load")),
    (IO, "encode"): ((COMPUTE, "fc"),),
    (UPLINK, "u"): ((IO, "encode"), (COMPUTE, "fc")),
    (CORE, "decode"): ((UPLINK, "u"),),
    (CORE, "fs"): ((CORE, "decode"), (UPLINK, "u")),
    (CORE, "bs"): ((CORE, "fs"),),
    (CORE, "encode"): ((CORE, "bs"),),
    (DOWNLINK, "d"): ((CORE, "encode"), (CORE, "bs")),
    (IO, "decode"): ((DOWNLINK, "d"),),
    (COMPUTE, "bc"): ((IO, "decode"), (DOWNLINK, "d")),
    (UPLINK, "model"): ((COMPUTE, "pack"),),
    (CORE, "install"): ((UPLINK, "model"),),
    (CORE, "aggregate"): ((CORE, "install"), (UPLINK, "model")),
    (CORE, "pack"): ((CORE, "aggregate"),),
    (DOWNLINK, "model"): ((CORE, "pack"), (CORE, "aggregate")),
    (COMPUTE, "install"): ((DOWNLINK, "model"),),
}


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """One stage of one micro-batch; `str(Stage("fc", 3)) == "fc3"`."""

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"
