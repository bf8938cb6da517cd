"""The samples of a user's dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pipar.data.user_samples import dataset_images, factory_images
from pipar.errors import DataError


def test_float_tensors_are_not_changed() -> None:
    x = torch.rand(5, 2, 3, 3, dtype=torch.float64)
    images = dataset_images(TensorDataset(x, torch.arange(5)))
    assert torch.equal(images.images, x)
    assert torch.equal(next(images.batches(5, torch.float64))[0], x)
    assert images.labels.tolist() == [0, 1, 2, 3, 4]


def test_images_and_arrays_become_channels_first_bytes() -> None:
    picture = Image.new("RGB", (4, 2), (10, 20, 30))
    for sample in (picture, np.array(picture)):
        images = dataset_images([(sample, np.int64(3))])
        assert images.images.shape == (1, 3, 2, 4)
        assert images.images[0, :, 0, 0].tolist() == [10, 20, 30]
    assert dataset_images([(Image.new("L", (4, 2)), 0)]).images.shape == (1, 1, 2, 4)


def test_bytes_are_normalised_the_same_on_every_device() -> None:
    images = dataset_images([(torch.tensor([[[0, 255]]], dtype=torch.uint8), 0)])
    x, _ = next(images.batches(1, torch.float64))
    assert x.flatten().tolist() == [-1, 1]


def test_an_iterable_dataset_and_bfloat16_are_accepted() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([(torch.ones(2, dtype=torch.bfloat16), 1)] * 3)

    images = dataset_images(Stream())
    assert (len(images), images.images.dtype) == (3, torch.float32)


def test_integers_tuples_and_dictionaries_stay_as_they_are() -> None:
    numbers = dataset_images([(torch.tensor([3, -1]), 0), ([4, 5], 1)])
    assert (numbers.images.tolist(), str(numbers.form)) == ([[3, -1], [4, 5]], "2 (int64)")
    pairs = dataset_images([((torch.tensor([0.5]), np.array([True])), 0)] * 2)
    floats, flags = next(pairs.batches(2, torch.float64))[0]
    assert (floats.dtype, flags.dtype, str(pairs.form)) == (torch.float64, torch.bool, "(1, 1 (bool))")
    named = dataset_images([({"mask": [1, 0], "ids": torch.tensor([7, 8])}, 2), ({"ids": [9, 9], "mask": [1, 1]}, 2)])
    assert list(named.images) == ["ids", "mask"]
    assert named.take(np.array([1])).images["ids"].tolist() == [[9, 9]]
    assert (named.form.tensors[0].low, named.form.tensors[0].high) == (7, 9)


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        ([], "empty"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], "item 1 .* all items must have one dtype and shape"),
        ([torch.zeros(3)], "not a pair"),
        ([5], "not a pair"),
        ([(torch.zeros(2), "cat")], "the target of item 0 of the dataset is a str"),
        ([(torch.zeros(2), 1.5)], "item 0 of the dataset has the target 1.5, but cross_entropy takes"),
        ([(torch.zeros(2), -1)], "labels start at 0"),
        ([(torch.zeros(2, dtype=torch.complex64), 0)], "floating point, integers or bool"),
        ([("picture.png", 0)], "it must be of numbers"),
        ([({"ids": "some text"}, 0)], "'ids' in item 0 of the dataset is a str"),
        ([((torch.zeros(2, dtype=torch.uint8), torch.zeros(2)), 0)], "tensor 0 in item 0 of the dataset is uint8"),
        ([({"a": [1]}, 0), ({"b": [1]}, 0)], "item 1 of the dataset is b torch.int64"),
        ([({"a": [1]}, 0), ({"a": [1.0]}, 0)], "all items must have one dtype and shape"),
        ([({"a": [1]}, 0), (torch.zeros(1), 0)], "all items must have one dtype and shape"),
        ([((torch.zeros(1),), 0), (torch.zeros(1), 0)], "all items must have one dtype and shape"),
    ],
)
def test_unusable_items_are_refused(items: list[Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        dataset_images(items)


def test_a_loader_is_refused_because_pipar_makes_the_batches() -> None:
    with pytest.raises(DataError, match=r"a DataLoader is not a dataset: give its dataset \(loader\.dataset\)"):
        dataset_images(DataLoader(TensorDataset(torch.zeros(4, 2), torch.arange(4)), batch_size=2))


def test_a_factory_is_called_with_the_name_and_may_have_no_such_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data_of_a_test.py").write_text(
        "import torch\n"
        "def make(name):\n"
        "    return None if name == 'test' else [(torch.full((2,), float(len(name))), 1)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    images = factory_images("own_data_of_a_test:make", "pi-3")
    assert images is not None
    assert images.images.tolist() == [[4.0, 4.0]]
    assert factory_images("own_data_of_a_test:make", "test") is None


def test_a_network_that_overwrites_its_inputs_does_not_change_the_dataset() -> None:
    images = dataset_images([(torch.full((2,), -1.0), 0) for _ in range(3)])
    for batch in (*(inputs for inputs, _ in images.batches(2, torch.float32)), images.rows(slice(0, 2))):
        batch.relu_()
    assert torch.equal(images.images, torch.full((3, 2), -1.0))
