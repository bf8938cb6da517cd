"""The known datasets: their sizes, their download files, and where they are on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipar.errors import DataError

#: Samples of synthetic data per device unless configured: each device's share of CIFAR-10 in the paper.
SYNTHETIC_SAMPLES = 500
#: Classes in Tiny ImageNet's archive; the paper uses the first 100 of them.
TINY_IMAGENET_CLASSES = 200


@dataclass(frozen=True)
class RemoteFile:
    """One file as its publisher serves it. Publishers state MD5; SHA-256 protects against tampering."""

    url: str
    size_bytes: int
    md5: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def is_archive(self) -> bool:
        return self.name.endswith((".tar.gz", ".zip"))


@dataclass(frozen=True)
class DatasetInfo:
    """One known dataset. `train` and `test` are the sizes of the publisher's parts; 0 means any size."""

    name: str
    title: str
    train: int
    test: int
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str
    # A mirrored photograph is still a photograph; a mirrored digit or letter is not.
    flip: bool = False
    layout: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    files: tuple[RemoteFile, ...] = ()
    found: Path | None = None

    @property
    def builtin(self) -> bool:
        """True when nothing has to be downloaded."""
        return not self.files


def data_folder(path: Path | None = None) -> Path:
    """Return where datasets are looked for: the given path, else $PIPAR_DATA, else ~/.cache/pipar/data."""
    if path is not None:
        return path.expanduser()
    given = os.environ.get("PIPAR_DATA")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "pipar" / "data"


def known_datasets(path: Path | None = None) -> list[DatasetInfo]:
    """Return every known dataset, with `found` set to its folder where it is complete on this machine."""
    folder = data_folder(path)
    return [replace(info, found=find(info, folder)) for info in CATALOG]


def dataset_info(name: str) -> DatasetInfo:
    """Return the entry of this name."""
    for info in CATALOG:
        if info.name == name:
            return info
    names = ", ".join(info.name for info in CATALOG)
    raise DataError(f"there is no dataset {name!r}: choose one of {names}.")


def find(info: DatasetInfo, folder: Path) -> Path | None:
    """Return the folder that holds all of the dataset's files; None if there is none, and for built-in datasets."""
    if info.builtin:
        return None
    for place in _places(info.layout, folder):
        if all((place / need).exists() or (place / f"{need}.gz").exists() for need in info.needs):
            return place
    return None


def locate(info: DatasetInfo, path: Path | None) -> Path:
    """Return the folder that holds the dataset; the error says where it was expected and how to get it."""
    folder = data_folder(path)
    place = find(info, folder)
    if place is None:
        wanted = folder.joinpath(*info.layout)
        where = "set PIPAR_DATA to" if path is None else "give"
        elsewhere = "" if path is None else f" --path {path}"
        raise DataError(
            f"{info.name} is not complete in {wanted}: it needs {', '.join(info.needs)}. "
            f"Run `pipar data get {info.name}{elsewhere}`, or {where} the folder that holds {info.layout[0]}."
        )
    return place


def _places(layout: tuple[str, ...], folder: Path) -> Iterator[Path]:
    """Yield where the files may be: `folder` may be the data folder, the dataset's folder or one in between."""
    for depth in range(len(layout) + 1):
        if depth == 0 or folder.parts[-depth:] == layout[:depth]:
            yield folder.joinpath(*layout[depth:])


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
# torchvision uses the S3 copy too; the original server refuses downloads.
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
_KRIZHEVSKY = "https://www.cs.toronto.edu/~kriz/"
_CIFAR_NOTE = (
    "The publisher states no licence. Cite A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009."
)

CATALOG: tuple[DatasetInfo, ...] = (
    DatasetInfo(
        name="digits",
        title="scikit-learn's handwritten digits, resized from 8x8; in every installation",
        train=1197,
        test=600,
        shape=(1, 32, 32),
        classes=10,
        mean=(0.3051,),
        std=(0.3237,),
        note="CC BY 4.0. Cite E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.",
    ),
    DatasetInfo(
        name="mnist",
        title="handwritten digits",
        train=60_000,
        test=10_000,
        shape=(1, 28, 28),
        classes=10,
        mean=(0.1307,),
        std=(0.3081,),
        note="No licence text comes with the data. Cite Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based "
        "learning applied to document recognition, 1998.",
        layout=("MNIST", "raw"),
        needs=_IDX,
        files=(
            RemoteFile(
                _MNIST + "train-images-idx3-ubyte.gz",
                9_912_422,
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            RemoteFile(
                _MNIST + "train-labels-idx1-ubyte.gz",
                28_881,
                "d53e105ee54ea40749a09fcbcd1e9432",
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            RemoteFile(
                _MNIST + "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "9fb629c4189551a2d022fa330f9573f3",
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            RemoteFile(
                _MNIST + "t10k-labels-idx1-ubyte.gz",
                4_542,
                "ec29112dd5afa0611ce80d1b7f02629c",
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
    ),
    DatasetInfo(
        name="fashion_mnist",
        title="grey photographs of clothes",
        train=60_000,
        test=10_000,
        shape=(1, 28, 28),
        classes=10,
        mean=(0.2860,),
        std=(0.3530,),
        note="MIT licence. Cite H. Xiao, K. Rasul, R. Vollgraf, Fashion-MNIST, arXiv:1708.07747, 2017.",
        layout=("FashionMNIST", "raw"),
        needs=_IDX,
        files=(
            RemoteFile(
                _FASHION + "train-images-idx3-ubyte.gz",
                26_421_880,
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            RemoteFile(
                _FASHION + "train-labels-idx1-ubyte.gz",
                29_515,
                "25c81989df183df01b3e8a0aad5dffbe",
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            RemoteFile(
                _FASHION + "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "bef4ecab320f06d8554ea6380940ec79",
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            RemoteFile(
                _FASHION + "t10k-labels-idx1-ubyte.gz",
                5_148,
                "bb300cfdad3c16e7a12a480ee83cd310",
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
    ),
    DatasetInfo(
        name="cifar10",
        title="colour photographs of vehicles and animals",
        train=50_000,
        test=10_000,
        shape=(3, 32, 32),
        classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        note=_CIFAR_NOTE,
        flip=True,
        layout=("cifar-10-batches-bin",),
        needs=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
        files=(
            RemoteFile(
                _KRIZHEVSKY + "cifar-10-binary.tar.gz",
                170_052_171,
                "c32a1d4ab5d03f1284b67883e8d87530",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
    ),
    DatasetInfo(
        name="cifar100",
        title="colour photographs, 100 fine classes",
        train=50_000,
        test=10_000,
        shape=(3, 32, 32),
        classes=100,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        note=_CIFAR_NOTE,
        flip=True,
        layout=("cifar-100-binary",),
        needs=("train.bin", "test.bin"),
        files=(
            RemoteFile(
                _KRIZHEVSKY + "cifar-100-binary.tar.gz",
                168_513_733,
                "03b5dce01913d631647c71ecec9e9cb8",
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
    ),
    DatasetInfo(
        name="tiny_imagenet",
        title="colour photographs; the paper's 100-class subset of the archive's 200 classes",
        train=50_000,
        test=5_000,
        shape=(3, 64, 64),
        classes=100,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        note="Images from ImageNet, whose terms allow non-commercial research and education. Cite Y. Le, X. Yang, "
        "Tiny ImageNet Visual Recognition Challenge, Stanford CS231N, 2015.",
        flip=True,
        layout=("tiny-imagenet-200",),
        needs=("wnids.txt", "train", "val/val_annotations.txt", "val/images"),
        files=(
            RemoteFile(
                "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
                248_100_043,
                "90528d7ca1a48142e341f4ef8d21d0de",
                "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            ),
        ),
    ),
    DatasetInfo(
        name="synthetic",
        title="a pattern per class under noise, of any size, shape and number of classes; for timing and tests",
        train=0,
        test=0,
        shape=(3, 32, 32),
        classes=10,
        mean=(0.5, 0.5, 0.5),
        std=(0.2, 0.2, 0.2),
        note="Made by pipar; nothing to cite.",
    ),
)
