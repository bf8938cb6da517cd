"""A profile survives its file to the last bit, and a broken file is one sentence that names it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipar.errors import ConfigError
from pipar.profiling.comparison import NetworkSizes, check_network
from pipar.profiling.profile import FORMAT, CodingTimes, LayerProfile, Profile

PROFILE = Profile(
    model="vgg5",
    dtype="float32",
    batch_sizes=(3, 25, 100),
    layers=(
        LayerProfile("conv1", (0.001, 0.007, 0.03), (0.002, 0.01, 0.04), 32768, 3840, (), 65536, 9000),
        LayerProfile("fc2", (0.0, 0.1, 0.2), (0.0, 0.1, 0.3), 40, 1000),
    ),
    load_s=1e-5,
    encode_s_per_byte=1e-10,
    decode_s_per_byte=2e-10,
    step_s_per_byte=3e-10,
    pack_s_per_byte=4e-10,
    install_s_per_byte=5e-10,
    aggregate_s_per_byte=6e-10,
    noise_s_per_byte=7e-10,
    machine="a processor",
    how="by hand",
)
amounts = st.floats(0, 1e6)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    sizes = tuple(sorted(draw(st.sets(st.integers(1, 1000), min_size=1, max_size=4))))
    times = st.tuples(*[amounts] * len(sizes))
    counts = st.integers(0, 2**40)
    shares = st.dictionaries(st.sampled_from(["planes", "topk"]), st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)))
    layer = st.builds(
        LayerProfile, st.text(), times, times, counts, counts, times, counts, counts, st.booleans(), shares
    )
    layers = draw(st.lists(layer, min_size=1, max_size=4))
    overheads = {name: draw(amounts) for name in ("load_s", "encode_s_per_byte", "pack_s_per_byte")}
    total = draw(st.sampled_from([0, len(layers), len(layers) + 3]))
    changed = replace(PROFILE, model=draw(st.text()), batch_sizes=sizes, layers=tuple(layers), total_layers=total)
    coding = draw(st.dictionaries(st.sampled_from(["sparse", "int8"]), st.builds(CodingTimes, *[amounts] * 4)))
    return replace(changed, coding=coding, **overheads)  # type: ignore[arg-type]


@pytest.mark.slow
@given(profiles())
def test_a_profile_reads_back_from_json_unchanged(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def test_a_named_board_with_several_threads_reads_back() -> None:
    board = replace(PROFILE, threads=4)  # its times on one thread are not known
    assert Profile.from_json(board.to_json()) == board


def test_a_profile_reads_back_from_its_file_unchanged(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE


def test_the_file_has_sorted_keys_and_a_format_number() -> None:
    tree = json.loads(PROFILE.to_json())
    assert list(tree) == sorted(tree)
    assert tree["format"] == FORMAT


#: What a file of this format had when the format was new.
FIRST_FIELDS = """
aggregate_s aggregate_s_per_byte backward_at_cut_s batch_sizes changes_share coding crowd crowded decode_s
decode_s_per_byte dtype encode_s encode_s_per_byte format how install_s install_s_per_byte layers load_s machine model
noise_s_per_byte pack_s pack_s_per_byte step_s step_s_per_byte total_layers
"""


def test_fields_that_came_later_may_be_missing_and_are_written_only_if_they_say_more() -> None:
    first = set(FIRST_FIELDS.split())
    assert set(json.loads(PROFILE.to_json())) == first
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    unusual = replace(PROFILE, threads=2, one_thread=(1.0, 1.5, 2.0), accelerator="a GPU", autocast="bf16")
    assert set(json.loads(unusual.to_json())) == first | {"threads", "one_thread", "accelerator", "autocast"}
    assert Profile.from_json(unusual.to_json()) == unusual


def test_layers_are_counted_from_one() -> None:
    assert PROFILE.output_bytes(1) == 32768
    assert PROFILE.parameter_bytes(1, 1) == 3840
    assert PROFILE.parameter_bytes(1, 2) == 4840
    assert PROFILE.parameter_bytes(3, 2) == 0


def test_a_share_is_measured_or_else_follows_from_the_encodings_format() -> None:
    conv = replace(PROFILE.layers[0], shares={"planes": (0.8, 0.9)})
    profile = replace(PROFILE, layers=(conv, PROFILE.layers[1]))
    assert (profile.share(1, "up", "planes"), profile.share(1, "down", "planes")) == (0.8, 0.9)
    assert profile.share(1, "up", "raw") == profile.share(2, "up", "planes") == 1.0
    assert profile.share(2, "down", "fp16") == 0.5
    assert replace(profile, dtype="float64").share(2, "down", "fp16") == 0.25


def _changed(change: dict[str, Any]) -> str:
    return json.dumps({**json.loads(PROFILE.to_json()), **change})


def _layer_changed(change: dict[str, Any]) -> str:
    tree = json.loads(PROFILE.to_json())
    tree["layers"][1].update(change)
    return json.dumps(tree)


_TIMES = {"encode_s": 0.0, "encode_s_per_byte": 0.0, "decode_s": 0.0, "decode_s_per_byte": 0.0}
BROKEN = {
    "not JSON": ("{", "not valid JSON"),
    "not an object": ("[]", f"format is missing, not {FORMAT}"),
    "another format": (_changed({"format": 4}), f"format is 4, not {FORMAT}"),
    "no format": (json.dumps({"model": "vgg5"}), f"format is None, not {FORMAT}"),
    "an unknown key": (_changed({"colour": 1}), "colour"),
    "a missing key": (json.dumps({"format": FORMAT, "model": "x"}), "batch_sizes"),
    "no layers": (_changed({"layers": []}), "no layers"),
    "layers that are a word": (_changed({"layers": "two"}), "layers is not a list"),
    "a layer that is a number": (_changed({"layers": [1]}), "backward_s"),
    "sizes out of order": (_changed({"batch_sizes": [100, 25, 3]}), "ascending"),
    "a size of zero": (_changed({"batch_sizes": [0, 25, 100]}), "ascending"),
    "sizes that are lists": (_changed({"batch_sizes": [[1], [2], [3]]}), "ascending"),
    "a time missing": (
        _layer_changed({"forward_s": [0.1, 0.2]}),
        "forward_s of layer 'fc2' is 2 times, not one for each of 3",
    ),
    "a negative time": (
        _layer_changed({"backward_s": [0.1, 0.2, -1]}),
        "backward_s of layer 'fc2' is -1 at a batch of 100, not a",
    ),
    "a time that is not a number": (_layer_changed({"backward_s": [0.1, 0.2, float("nan")]}), "backward_s"),
    "a time that is true": (_layer_changed({"backward_s": [0.1, 0.2, True]}), "backward_s"),
    "a size that is a fraction": (
        _layer_changed({"output_bytes": 1.5}),
        "output_bytes of layer 'fc2' is 1.5, not a number of bytes",
    ),
    "a negative size": (_layer_changed({"parameter_bytes": -4}), "parameter_bytes of layer 'fc2' is -4, not a number"),
    "a negative memory": (_layer_changed({"saved_bytes": -4}), "saved_bytes of layer 'fc2' is -4, not a number"),
    "a memory that is a word": (_layer_changed({"working_bytes": "1"}), "working_bytes of layer 'fc2' is '1', not"),
    "fewer layers in all than here": (_changed({"total_layers": 1}), "total_layers is 1, but 2 layers are here"),
    "layers in all below zero": (_changed({"total_layers": -1}), "total_layers is -1, but 2 layers are here"),
    "a negative overhead": (_changed({"load_s": -0.5}), "load_s is -0.5, which is not a number of seconds"),
    "an overhead that is a word": (_changed({"load_s": "fast"}), "load_s is 'fast', which is not a number"),
    "an overhead without end": (_changed({"pack_s_per_byte": float("inf")}), "pack_s_per_byte"),
    "noise that takes negative time": (_changed({"noise_s_per_byte": -1e-9}), "noise_s_per_byte"),
    "noise of ages a byte": (_changed({"noise_s_per_byte": 2e6}), "noise_s_per_byte"),
    "the format before": (_changed({"format": 9}), f"format is 9, not {FORMAT}"),
    "shares of nothing": (
        _layer_changed({"shares": {"planes": [0.0, 0.5]}}),
        "shares of 'planes' in layer 'fc2' are [0.0, 0.5], not two numbers above 0 and up to 1",
    ),
    "shares above one": (_layer_changed({"shares": {"planes": [0.5, 1.1]}}), "shares of 'planes' in layer 'fc2'"),
    "shares one way": (_layer_changed({"shares": {"planes": [0.5]}}), "are [0.5], not two numbers"),
    "shares of an unknown encoding": (
        _layer_changed({"shares": {"zip": [0.5, 0.5]}}),
        "shares of layer 'fc2' are of 'zip', which is none of sparse, planes",
    ),
    "shares that are a list": (_layer_changed({"shares": [0.5]}), "shares is not an object"),
    "a cut that is rectified by a number": (
        _layer_changed({"rectified": 1}),
        "rectified of layer 'fc2' is 1, not true",
    ),
    "a negative coding time": (
        _changed({"coding": {"planes": {**_TIMES, "encode_s": -1.0}}}),
        "encode_s of coding 'planes' is -1.0, which is not a number of seconds",
    ),
    "a coding time missing": (_changed({"coding": {"planes": {"encode_s": 1.0}}}), "missing or unknown: decode_s"),
    "times of an unknown encoding": (_changed({"coding": {"zip": _TIMES}}), "coding has times of 'zip', which is none"),
    "coding that is a word": (_changed({"coding": "fast"}), "coding is not an object"),
    "a machine that is a number": (_changed({"machine": 5}), "machine is not text"),
}


@pytest.mark.parametrize(("text", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_sentence_that_names_it(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as raised:
        Profile.load(path)
    assert str(path) in str(raised.value)
    assert says in str(raised.value)
    assert str(raised.value).endswith("Write it again with 'pipar profile -o FILE'.")
    assert "\n" not in str(raised.value)


def test_a_missing_file_or_one_without_text_is_one_sentence_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read the profile .*gone\.json: No such file"):
        Profile.load(tmp_path / "gone.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.json is not a profile"):
        Profile.load(tmp_path / "binary.json")


def test_a_profile_made_in_code_is_checked_by_the_same_rules() -> None:
    with pytest.raises(ConfigError, match="batch_sizes"):
        replace(PROFILE, batch_sizes=())


# --- the first layers only, and other networks


def test_a_profile_of_the_first_layers_has_the_number_of_all_layers() -> None:
    assert (PROFILE.whole, PROFILE.network_layers) == (True, 2)
    assert replace(PROFILE, total_layers=2).whole
    first = replace(PROFILE, layers=PROFILE.layers[:1], total_layers=2)
    assert (first.whole, first.network_layers) == (False, 2)


NETWORK = NetworkSizes.of(PROFILE)


def _with_layer(number: int, **change: Any) -> Profile:
    layers = list(PROFILE.layers)
    layers[number] = replace(layers[number], **change)
    return replace(PROFILE, layers=tuple(layers))


def test_a_profile_of_the_network_or_of_its_first_layers_is_accepted() -> None:
    first = replace(PROFILE, layers=PROFILE.layers[:1], total_layers=2)
    assert check_network(PROFILE, NETWORK, "here") is PROFILE
    assert check_network(first, NETWORK, "here") is first


OTHERS = {
    "fewer layers that do not say so": (replace(PROFILE, layers=PROFILE.layers[:1]), "with 1 layers, but vgg5 has 2"),
    "more layers": (replace(PROFILE, total_layers=16), "with 16 layers, but vgg5 has 2"),
    "another dtype": (replace(PROFILE, dtype="float64"), "in float64, but vgg5 is trained in float32"),
    "another name": (_with_layer(1, name="conv2"), "whose layer 2 is 'conv2', but that of vgg5 is 'fc2'"),
    "other outputs": (_with_layer(0, output_bytes=5), "with 5 output_bytes in layer 1 'conv1', but vgg5 has 32768"),
    "other parameters": (
        _with_layer(1, parameter_bytes=6),
        "with 6 parameter_bytes in layer 2 'fc2', but vgg5 has 1000",
    ),
}


@pytest.mark.parametrize(("other", "says"), OTHERS.values(), ids=OTHERS)
def test_a_profile_of_another_network_is_one_sentence(other: Profile, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_network(other, NETWORK, "board.json")
    assert str(raised.value).startswith(f"The profile board.json is of vgg5 {says}")
    assert str(raised.value).endswith(": write another with 'pipar profile'.")


def test_a_file_from_before_there_were_other_optimisers_is_of_sgd() -> None:
    tree = json.loads(PROFILE.to_json())
    assert not {"optimizer", "state_copies"} & tree.keys()
    assert Profile.from_json(json.dumps(tree)).state_copies == 1.0
    adam = replace(PROFILE, optimizer="adam", state_copies=2.0)
    assert Profile.from_json(adam.to_json()) == adam
