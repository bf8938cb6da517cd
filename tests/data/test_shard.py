"""One device's batches: samples are the same however the epoch is cut."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipar.data.datasets import load_dataset
from pipar.data.images import Images
from pipar.data.shard import SamplePrivacy, Shard
from pipar.errors import DataError


def photographs(count: int = 40, *, flip: bool = True) -> Images:
    pixels = torch.randint(1, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Images(pixels, torch.arange(count) % 10, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), flip)


def shard(images: Images, *, augment: bool = True, device: str = "pi", seed: int = 0) -> Shard:
    return Shard(images, np.arange(30)[::-1].copy(), device, seed, augment, torch.float64)


def test_order_is_a_permutation_that_changes_with_epoch_device_and_seed() -> None:
    images = photographs()
    orders = [
        shard(images).order(0),
        shard(images).order(1),
        shard(images, device="phone").order(0),
        shard(images, seed=1).order(0),
    ]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert np.array_equal(orders[0], shard(images).order(0))


def test_noised_bytes_count_only_inputs_with_noise() -> None:
    plain = shard(photographs())
    assert plain.noised_bytes == replace(plain, privacy=SamplePrivacy(1, label_epsilon=1.0)).noised_bytes == 0
    assert replace(plain, privacy=SamplePrivacy(1, pixel_scale=0.2)).noised_bytes == 3 * 8 * 8 * 8  # float64


def test_a_sample_looks_the_same_for_any_cuts_of_the_epoch() -> None:
    one = shard(photographs())
    order = one.order(2)
    whole, labels = one.batch(2, order)
    for size in (1, 7, 30):
        pieces = [shard(photographs()).batch(2, order[at : at + size]) for at in range(0, 30, size)]
        assert torch.equal(torch.cat([x for x, _ in pieces]), whole)
        assert torch.equal(torch.cat([y for _, y in pieces]), labels)


def test_epochs_may_be_requested_in_any_order() -> None:
    one, positions = shard(photographs()), np.arange(5)
    first, _ = one.batch(0, positions)
    other, _ = one.batch(1, positions)
    again, _ = one.batch(0, positions)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_without_augmentation_a_batch_is_the_normalised_rows() -> None:
    images = photographs()
    x, y = shard(images, augment=False).batch(0, np.array([0, 3]))
    mean, std = (torch.tensor(v, dtype=torch.float64).view(3, 1, 1) for v in (images.mean, images.std))
    rows = torch.tensor([29, 26])
    assert torch.allclose(x, (images.images[rows].double() / 255 - mean) / std, rtol=0, atol=1e-14)
    assert torch.equal(y, images.labels[rows])


def crops(image: np.ndarray) -> list[np.ndarray]:
    padded = np.pad(image, ((0, 0), (4, 4), (4, 4)))
    height, width = image.shape[1:]
    return [padded[:, y : y + height, x : x + width] for y in range(9) for x in range(9)]


@pytest.mark.parametrize("flip", [False, True])
def test_augmentation_is_one_of_the_81_crops_and_mirrors_photographs_only(flip: bool) -> None:
    images = photographs(flip=flip)
    plain = Images(images.images.double(), images.labels, flip=flip)
    x, _ = shard(plain).batch(0, np.arange(30))
    offsets, mirrored = set(), 0
    for sample, row in zip(x.numpy(), range(29, -1, -1), strict=True):
        image = plain.images[row].numpy()
        straight = [at for at, crop in enumerate(crops(image)) if np.array_equal(crop, sample)]
        turned = [at for at, crop in enumerate(crops(image)) if np.array_equal(crop[:, :, ::-1], sample)]
        assert len(straight) + len(turned) == 1
        offsets.update(straight + turned)
        mirrored += len(turned)
    assert len(offsets) > 15
    assert (5 < mirrored < 25) if flip else mirrored == 0


def test_a_materialised_shard_gives_the_same_batches_and_holds_only_its_own_rows() -> None:
    images = photographs()
    shared, own = shard(images), shard(images).materialised()
    order = shared.order(0)
    assert own.images.images.shape[0] == 30
    assert np.array_equal(own.order(0), order)
    for a, b in zip(shared.batch(0, order[:7]), own.batch(0, order[:7]), strict=True):
        assert torch.equal(a, b)


def test_shards_share_the_images_without_copying_and_batches_do_not_change_them() -> None:
    images = photographs()
    before = images.images.clone()
    one, other = shard(images), shard(images, device="phone")
    assert one.images.images.data_ptr() == other.images.images.data_ptr()
    one.batch(0, np.arange(30))[0].zero_()
    floats = Images(images.images.double(), images.labels)
    shard(floats, augment=False).batch(0, np.arange(30))[0].zero_()
    assert torch.equal(images.images, before)
    assert torch.equal(floats.images, before.double())


def test_augmenting_samples_that_are_not_images_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be cropped"):
        shard(Images(torch.zeros(30, 5), torch.zeros(30, dtype=torch.int64)))


def test_a_shard_prints_short() -> None:
    assert len(repr(shard(photographs()))) < 300


def test_a_batch_of_100_colour_images_takes_less_than_5_ms_on_one_core() -> None:
    one = Shard(load_dataset("synthetic", train_samples=500).train, np.arange(500), "pi", 0, True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = [_seconds(one, at) for at in range(0, 400, 20)]
    finally:
        torch.set_num_threads(threads)
    # The best of twenty: it measures the code, not other load on the machine.
    assert min(taken) < 0.005


def _seconds(one: Shard, at: int) -> float:
    start = time.thread_time()
    one.batch(0, np.arange(at, at + 100))
    return time.thread_time() - start
