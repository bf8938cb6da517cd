"""Networks that others wrote: which can be recorded, how many cuts they have, and whether a step through all is theirs.

They come from timm and transformers, small and with random weights. Both are installed only for this:

    pip install --target FOLDER --no-deps timm
    pip install --target FOLDER transformers
    rm -r FOLDER/numpy*
    PYTHONPATH=FOLDER python -m benchmarks any_network

timm imports torchvision for its image transforms, which are not used here: if there is none, an empty one takes its
place.
"""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.record import Claim
from pipar.cutting.stage_line import Line, line_of
from pipar.errors import ModelError
from pipar.networks.models import check_fits
from pipar.tasks.task import classification
from pipar.tensors.inputs import InputForm, Inputs

CLASSES = 5
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_TEXT = {**_SIZES, "vocab_size": 50, "num_labels": CLASSES, "max_position_embeddings": 32, "pad_token_id": 0}
_PICTURES = {
    "resnet18": {},
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "depth": 3},
    "convnext_atto": {},
    "mobilenetv3_small_100": {},
    "regnetx_002": {},
    "ghostnet_100": {},
}


@dataclass(frozen=True)
class Row:
    """One network: what became of it."""

    library: str
    network: str
    exported: bool
    cuts: int
    passed: bool
    most_tensors: int
    seconds: float
    reason: str = ""


class Logits(nn.Module):
    """A network of transformers that returns its logits alone; inputs have the names that it takes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.network(input_ids=input_ids, attention_mask=attention_mask).logits


class LastLogits(Logits):
    """A language model that predicts the token after a text."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return super().forward(input_ids, attention_mask)[:, -1]


def measure(folder: Path) -> tuple[list[Claim], dict[str, object]]:  # noqa: ARG001
    """Return how many of the networks have cuts, all of which pass the check."""
    rows = [*_of_transformers(), *_of_timm()]
    for row in rows:
        print(_shown(row), flush=True)
    cut = [row for row in rows if row.cuts]
    claims = [
        Claim("networks of others", len(rows), "", least=10),
        Claim("recorded", sum(row.exported for row in rows), "", least=10),
        Claim("recorded, with cuts", len(cut), "", least=8),
        Claim("with cuts at all of which a step is that of the uncut network", sum(row.passed for row in cut), "",
              least=len(cut)),
    ]  # fmt: skip
    return claims, {"rows": [asdict(row) for row in rows]}


def _shown(row: Row) -> str:
    return (
        f"{row.library:12} {row.network:34} {'yes' if row.exported else 'no':3} {row.cuts:3} cuts, at most "
        f"{row.most_tensors} tensors, {'passed' if row.passed else '-':6} {row.seconds:5.1f} s  {row.reason}"
    )


def _of_timm() -> list[Row]:
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_EmptyTorchvision())
    import timm

    side = torch.zeros(2, 3, 64, 64)

    def row(name: str, given: dict[str, Any]) -> Row:
        example = torch.zeros(2, 3, given["img_size"], given["img_size"]) if "img_size" in given else side
        make = lambda: timm.create_model(name, num_classes=CLASSES, **given)  # noqa: E731
        return tried("timm", name, make, example, CLASSES)

    return [row(name, given) for name, given in _PICTURES.items()]


def _of_transformers() -> list[Row]:
    import transformers as hf

    def classifier(family: str, **changes: Any) -> Callable[[], nn.Module]:
        config = getattr(hf, f"{family}Config")(**{**_TEXT, **changes})
        return lambda: Logits(getattr(hf, f"{family}ForSequenceClassification")(config))

    gpt2 = hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=32, num_labels=CLASSES)
    gpt2.pad_token_id = 0
    vit = hf.ViTConfig(**_SIZES, image_size=32, patch_size=8, num_labels=CLASSES)
    networks = {
        "BertForSequenceClassification": classifier("Bert"),
        "RobertaForSequenceClassification": classifier("Roberta", pad_token_id=1),
        "ElectraForSequenceClassification": classifier("Electra", embedding_size=16),
        "AlbertForSequenceClassification": classifier("Albert", embedding_size=16),
        "DistilBertForSequenceClassification": classifier("DistilBert", dim=32, n_layers=2, n_heads=2, hidden_dim=64),
        "GPT2ForSequenceClassification": lambda: Logits(hf.GPT2ForSequenceClassification(gpt2)),
        "GPT2LMHeadModel (tied weights)": lambda: LastLogits(hf.GPT2LMHeadModel(gpt2)),
        "LlamaForCausalLM": lambda: LastLogits(hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT, num_key_value_heads=2))),
    }
    ids = torch.arange(16).reshape(2, 8) + 2
    text: Inputs = {"input_ids": ids, "attention_mask": (torch.arange(8) < 6).long().expand(2, 8).clone()}
    rows = []
    for name, make in networks.items():
        classes = 50 if "LM" in name else CLASSES
        rows.append(tried("transformers", name, make, text, classes))
    rows.append(
        tried("transformers", "ViTForImageClassification", lambda: _Pictures(hf.ViTForImageClassification(vit)),
              torch.zeros(2, 3, 32, 32), CLASSES)
    )  # fmt: skip
    return rows


class _Pictures(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Any:
        return self.network(pixel_values=pixel_values).logits


def tried(library: str, name: str, make: Callable[[], nn.Module], example: Inputs, classes: int) -> Row:
    """Return what becomes of a network: every cut that is offered has passed the check."""
    torch.manual_seed(0)
    start = time.perf_counter()
    with warnings.catch_warnings(action="ignore"):
        network = make()
        try:
            check_fits(network, InputForm.of(example), classification(classes))
            line = line_of(network, example)
        except ModelError as error:
            return Row(library, name, exported=False, cuts=0, passed=False, most_tensors=0,
                       seconds=time.perf_counter() - start, reason=str(error))  # fmt: skip
    seconds = time.perf_counter() - start
    return Row(library, name, True, len(line) - 1, len(line) > 1, _most_tensors(line), seconds, _why_not(line))


def _most_tensors(line: Line) -> int:
    assert line.cuts is not None
    return max((len(cut.crossing) for cut in line.cuts.cuts), default=0)


def _why_not(line: Line) -> str:
    """Return why no cut is offered: the reason of most places; and whether a cut was withdrawn."""
    assert line.cuts is not None
    reasons: Counter[str] = Counter()
    for places in line.cuts.not_offered:
        reasons[places.reason] += places.places
    if len(line) == 1:
        return next(iter(dict(reasons.most_common(1))), "")
    differing = sum(count for reason, count in reasons.items() if "differs" in reason)
    return f"{differing} withdrawn after the check" if differing else ""


class _EmptyTorchvision:
    """Finds every module of torchvision: an empty one, any name of which is a class without content."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _EmptyClass(name, (), {})


class _EmptyClass(type):
    """A class whose members, such as those of an enumeration, are only names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"
