"""A leakage file is read back unchanged or refused in one sentence, and a limit rules out cuts by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.leakages import LEAKS, cut, table, written

from pipar.errors import ConfigError, InputError, PlanError
from pipar.leakage.limit import LeakageLimit
from pipar.leakage.table import CutLeakage, LeakageTable, RebuildQuality, Subject, as_csv, as_markdown
from pipar.settings.config import Config
from pipar.settings.config_file import config_from

LAYERS = table().layers


def test_a_table_is_read_back_unchanged(tmp_path: Path) -> None:
    assert LeakageTable.load(written(tmp_path)) == table()


def test_the_leakage_of_a_cut_is_that_of_its_strongest_attack_and_never_below_0() -> None:
    assert (cut(1, 0.9).strongest, cut(1, 0.9).leakage) == ("decoder", 0.9)
    assert (cut(1, -0.2).strongest, cut(1, -0.2).leakage) == ("small", 0.0)
    assert table().leakage == LEAKS


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(table().to_json()), **changes})


def with_cut(**changes: Any) -> str:
    first, *others = json.loads(table().to_json())["cuts"]
    return changed(cuts=[{**first, **changes}, *others])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "its format is missing"),
        (changed(format=7), "its format is 7, not 1"),
        (changed(more=1), "missing or unknown: more"),
        (changed(seed="x"), "seed is 'x', not a whole number"),
        (changed(model=3), "model is not text"),
        (changed(layers=[]), "layers are not the names"),
        (changed(input_shape=[0]), "input_shape is not the shape"),
        (changed(pixel_scale=-1), "pixel_scale is -1"),
        (changed(guess=float("nan")), "guess is nan"),
        (changed(attacks={"small": "x"}), "the attacks of the cut at P=1 are small, decoder, but"),
        (changed(attacks=[]), "attacks is not an object"),
        (changed(cuts={}), "cuts is not a list"),
        (with_cut(split_point=5), "not numbers from 1 to 4 in ascending order"),
        (with_cut(split_point=2), "not numbers from 1 to 4 in ascending order"),
        (with_cut(distance_correlation=1.5), "distance_correlation of the cut at P=1 is 1.5"),
        (with_cut(attacks={"small": 1, "decoder": 2}), "missing or unknown: pixel_correlation, psnr_db"),
        (with_cut(attacks={name: {"pixel_correlation": 2, "psnr_db": 1} for name in table().attacks}), "is 2, not"),
        (with_cut(attacks={name: {"pixel_correlation": 1, "psnr_db": 1e9} for name in table().attacks}), "100 dB"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_refused_in_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "leakage.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as raised:
        LeakageTable.load(path)
    assert says in str(raised.value)
    assert str(path) in str(raised.value)
    assert str(raised.value).endswith("Measure it with 'pipar leakage'.")


def test_readable_tables_have_every_cut_and_call_none_safe() -> None:
    assert as_csv(table()).splitlines()[1] == "1,conv1,0.700,0.450,10.0,0.900,20.0"
    text = as_markdown(table())
    assert "| 4 | fc4 | 0.700 | 0.100 | 10.0 | 0.200 | 20.0 |" in text
    assert "- small: a few steps." in text
    assert "not that a cut is safe" in text


# --- the limit


def limited(folder: Path, most: float = 0.5, *, file: dict[str, Any] | None = None, **tree: Any) -> Config:
    path = written(folder, **(file or {}))
    privacy = {"max_leakage": most, "leakage": str(path), **tree.pop("privacy", {})}
    return config_from({"privacy": privacy, **tree})


def subject(**changes: Any) -> Subject:
    return Subject(**{"model": "vgg5", "norm": "group", "dataset": "digits", "input_shape": (1, 32, 32), **changes})


def leaky(config: Config, of: Subject | None = None, layers: tuple[str, ...] = LAYERS) -> dict[int, float]:
    limit = LeakageLimit.of(config, of or subject())
    assert limit is not None
    return limit.leaky_cuts(layers)


def test_a_limit_rules_out_cuts_that_leak_more_but_not_those_that_leak_as_much(tmp_path: Path) -> None:
    assert leaky(limited(tmp_path, 0.5)) == {1: 0.9, 2: 0.6}
    assert leaky(limited(tmp_path, 0.0)) == LEAKS
    assert leaky(limited(tmp_path, 1.0)) == {}
    assert LeakageLimit.of(Config(), subject()) is None


def test_a_cut_without_a_measurement_counts_as_leaking_everything_if_it_cannot_be_chosen(tmp_path: Path) -> None:
    given = limited(tmp_path, 0.7, file={"leaks": {2: 0.6}}, plan={"split_point": 2})
    assert leaky(given) == {1: 1.0, 3: 1.0, 4: 1.0}
    alone = limited(tmp_path, 0.7, file={"leaks": {}}, run={"method": "fl"})
    assert leaky(alone) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}


def test_a_limit_needs_a_measurement_with_the_strongest_attack(tmp_path: Path) -> None:
    weak = tuple(CutLeakage(p, 0.7, {"small": RebuildQuality(0.1, 10.0)}) for p in LEAKS)
    with pytest.raises(ConfigError, match=r"with small only, but a limit needs the strongest attack, decoder"):
        leaky(limited(tmp_path, file={"attacks": {"small": "a few steps"}, "cuts": weak}))


def test_more_noise_than_was_measured_with_is_allowed_and_less_is_not(tmp_path: Path) -> None:
    noisy = {"pixel_epsilon": 1.0}  # a scale of 0.25
    assert leaky(limited(tmp_path, file={"pixel_scale": 0.2}, privacy=noisy)) == {1: 0.9, 2: 0.6}
    with pytest.raises(ConfigError, match=r"with noise of 0.3 on the inputs, but this training has 0.25"):
        leaky(limited(tmp_path, file={"pixel_scale": 0.3}, privacy=noisy))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "vgg16"}, "but this training is of vgg16 (norm group) on digits"),
        (
            {"norm": "batch"},
            "for vgg5 (norm group) on digits with samples of 1x32x32, but this training is of vgg5 (norm batch)",
        ),
        ({"dataset": "mnist"}, "but this training is of vgg5 (norm group) on mnist"),
        ({"input_shape": (3, 32, 32)}, "with samples of 3x32x32"),
    ],
)
def test_a_file_for_another_training_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        leaky(limited(tmp_path), subject(**changes))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("tree", "error", "says"),
    [
        ({"file": {"leaks": {1: 0.9, 2: 0.6}}}, ConfigError, "has no measurement for the split points 3, 4, which"),
        ({"file": {"leaks": {1: 0.9}}, "plan": {"split_point": 2}}, ConfigError, "for the split point 2,"),
        ({"plan": {"split_point": 1}}, PlanError, "device-1 has the split point 1, which leaks 0.900, more than "
         "privacy.max_leakage = 0.5: choose one of 3, 4, 5 or 'auto', or raise the limit."),
        ({"plan": {"split_point": 1}, "run": {"method": "fl"}}, PlanError, "device-1 has the split point 1"),
        ({"devices": [{"name": "phone", "split_point": 2}, {"name": "board"}]}, PlanError, "phone has"),
    ],
)  # fmt: skip
def test_a_training_that_cannot_keep_the_limit_is_refused(
    tree: dict[str, Any], error: type[InputError], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as raised:
        leaky(limited(tmp_path, **tree))
    assert says in str(raised.value)


def test_the_whole_network_on_the_device_is_always_allowed(tmp_path: Path) -> None:
    assert leaky(limited(tmp_path, 0.0, plan={"split_point": 5})) == LEAKS


def test_a_file_for_a_network_with_other_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with the layers conv1, conv2, conv3, fc4, fc5, but this one has a, b"):
        leaky(limited(tmp_path), layers=("a", "b"))
