"""The result of a run, as Python programs read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipar.errors import InputError
from pipar.storage import result_views

if TYPE_CHECKING:
    import pandas
    import torch
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run: its folder and the content of its result.json; a notebook shows it as a table.

    >>> result = pipar.run(world="timing-only", settings=SMALL)
    >>> result.content["method"], len(result.epochs)
    ('pipar', 2)
    """

    folder: Path
    content: Mapping[str, Any]
    #: Makes the network as it was before the training; None for a result that was read from its folder.
    make_network: Callable[[], torch.nn.Module] | None = field(default=None, repr=False, compare=False)

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The results of the epochs, in order."""
        return list(self.content["epochs"])

    @property
    def report(self) -> Path | None:
        """The HTML report of the run, if one was written."""
        page = self.folder / "report.html"
        return page if page.exists() else None

    @property
    def test_accuracy(self) -> float | None:
        """Share of the test set that the trained model classifies correctly; None without a test set."""
        accuracy = self.content["test_accuracy"]
        return None if accuracy is None else float(accuracy)

    @property
    def test_metrics(self) -> dict[str, float]:
        """The task's metrics on the test set, by name; empty without a test set or metrics.

        >>> task = ["task.metrics=['f1']"]
        >>> test = datasets[0]
        >>> result = pipar.run(world="virtual", model=model, datasets=datasets, test=test, settings=[*SMALL, *task])
        >>> list(result.test_metrics)
        ['f1']
        """
        return dict(self.content.get("test_metrics") or {})

    def __repr__(self) -> str:
        return result_views.result_line(self.content, self.folder)

    @property
    def seconds_per_epoch(self) -> float:
        """Mean duration of an epoch in seconds."""
        seconds = [float(epoch["seconds"]) for epoch in self.epochs]
        return sum(seconds) / len(seconds)

    def frame(self) -> pandas.DataFrame:
        """Return the epochs as a DataFrame of pandas, with their numbers as its index.

        >>> frame = pipar.run(world="timing-only", settings=SMALL).frame()
        >>> frame.index.tolist(), "utilisation.server" in frame.columns
        ([1, 2], True)
        """
        return result_views.frame(self.epochs, "epoch", "Result.frame()")

    @property
    def device_metrics(self) -> dict[str, Any]:
        """The kept model on each device's own samples, with mean and worst decile; empty if devices evaluate none.

        >>> settings = [*SMALL, "data.evaluate_on_devices=0.2"]
        >>> result = pipar.run(world="virtual", model=model, datasets=datasets, settings=settings)
        >>> list(result.device_metrics["mean"])
        ['loss', 'accuracy']
        """
        return dict(self.content.get("device_metrics") or {})

    def device_frame(self) -> pandas.DataFrame:
        """Return the kept model's values on each device's own samples as a DataFrame of pandas, with names as index.

        >>> settings = [*SMALL, "data.evaluate_on_devices=0.2"]
        >>> result = pipar.run(world="virtual", model=model, datasets=datasets, settings=settings)
        >>> result.device_frame().columns.tolist()
        ['samples', 'loss', 'accuracy']
        """
        return result_views.devices_frame(self.device_metrics, "Result.device_frame()")

    def plot(self) -> Figure:
        """Return a figure of matplotlib: losses, accuracy and metrics by epoch, or seconds if nothing was trained.

        >>> figure = pipar.run(world="timing-only", settings=SMALL).plot()
        >>> figure.axes[0].get_xlabel()
        'epoch'
        """
        return result_views.plot_epochs(self.content)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        seconds = self.seconds_per_epoch if self.epochs else None
        return result_views.result_html(self.content, self.folder, seconds)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the trained weights, under the names that they have in your own module.

        >>> result = pipar.run(world="virtual", model=model, datasets=datasets, settings=SMALL)
        >>> list(result.state_dict())
        ['0.bias', '0.weight', '2.bias', '2.weight']
        """
        import safetensors.torch  # imports torch, which a timing-only run does without

        file = self.folder / "model.safetensors"
        if not file.exists():
            raise InputError(f"There is no {file.name} in {self.folder}: a timing-only run trains no weights.")
        return safetensors.torch.load_file(file)

    def model(self) -> torch.nn.Module:
        """Return your module with the trained weights, in eval mode: a copy of the one that was given, or a new one.

        >>> result = pipar.run(world="virtual", model=model, datasets=datasets, settings=SMALL)
        >>> result.model()(torch.zeros(1, 8)).shape
        torch.Size([1, 3])
        """
        if self.make_network is None:
            raise InputError(
                f"The network of {self.folder} is not known here: load Result.state_dict() into your own module."
            )
        network, weights = self.make_network(), self.state_dict()
        network.load_state_dict(weights)
        return network.eval()
