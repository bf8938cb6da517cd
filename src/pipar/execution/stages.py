"""The stages of one training iteration and what each waits for; paper III-C, table of stages.

    device   f_c 1  f_c 2 ... f_c N              b_c 1  b_c 2 ... b_c N
    uplink          u 1    u 2   ...  u N
    server                 f_s 1 b_s 1  f_s 2 b_s 2 ... f_s N b_s N
    downlink                         d 1          d 2   ...   d N

Only `previous` is data; the following stages are derived from it. (The paper's table prints b_s n+1 as the next stage
of f_s n; its own recursion needs b_s n.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipar.errors import PlanError

#: The six kinds, in the order in which a micro-batch passes them.
KINDS = ("fc", "u", "fs", "bs", "d", "bc")


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """One stage of one micro-batch; `str(Stage("fc", 3)) == "fc3"` and `Stage.parse` reads it back."""

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Stage:
        match = re.fullmatch(r"(fc|u|fs|bs|d|bc)([1-9][0-9]*)", text)
        if match is None:
            raise PlanError(f"'{text}' is not a stage; a stage is one of {', '.join(KINDS)} and a number, like 'fc3'.")
        return cls(match[1], int(match[2]))


def previous(stage: Stage, micro_batches: int) -> tuple[Stage, ...]:
    """Return the stages that have to end before this one starts, with N micro-batches in the iteration."""
    n = stage.micro_batch
    match stage.kind:
        case "fc":
            needed = [Stage("fc", n - 1)]
        case "u":
            needed = [Stage("u", n - 1), Stage("fc", n)]
        case "fs":
            needed = [Stage("u", n), Stage("bs", n - 1)]
        case "bs":
            needed = [Stage("fs", n)]
        case "d":
            needed = [Stage("d", n - 1), Stage("bs", n)]
        case "bc":
            # The first backward waits for the last forward: all forwards first.
            needed = [Stage("bc", n - 1) if n > 1 else Stage("fc", micro_batches), Stage("d", n)]
        case _:
            raise PlanError(f"'{stage.kind}' is not a kind of stage; there are {', '.join(KINDS)}.")
    return tuple(before for before in needed if before.micro_batch >= 1)


def all_stages(micro_batches: int) -> list[Stage]:
    """Return the 6N stages of an iteration, each after all the stages that it waits for."""
    order = [Stage("fc", n) for n in range(1, micro_batches + 1)]
    for n in range(1, micro_batches + 1):
        order += [Stage(kind, n) for kind in ("u", "fs", "bs", "d", "bc")]
    return order


def following(stage: Stage, micro_batches: int) -> tuple[Stage, ...]:
    """Return the stages that wait for this one: the table's third column, derived from its second."""
    return tuple(later for later in all_stages(micro_batches) if stage in previous(later, micro_batches))


#: Identifies a micro-batch: epoch, iteration, its number, and more where that is not unique.
Place = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of work on a lane: the name of its span, and everything that its cost can depend on.

    Besides the compute stages there are load, noise (on inputs), encode, decode, step (optimiser), protect (clip an
    update and add noise), pack (a model into bytes), install (bytes into a model), aggregate and validate.
    """

    kind: str
    epoch: int = 0
    iteration: int = 0
    micro_batch: int = 0
    first_layer: int = 1
    last_layer: int = 0
    samples: int = 0
    size_bytes: int = 0  # before encoding, or after decoding
    device: str = ""
    encoding: str = "raw"  # of encode and decode
    chunks: int = 1  # decoded one after another
