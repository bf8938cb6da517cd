"""The models that a finished training saves: the one that run.keep asks for, and the last one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pipar.errors import InputError
from pipar.events import Observer, SaveFailed
from pipar.storage.run_folder import RunFolder

if TYPE_CHECKING:  # a timing-only run does without torch
    from pipar.nn.learner import TorchLearner
    from pipar.wire.messages import Body


def final_files(folder: RunFolder, learner: TorchLearner, observe: Observer) -> Callable[[], dict[str, Any]]:
    """Return the function that writes the final files of a training; the learner then has the model that is kept."""
    last, last_sha256 = learner.packed_state(), learner.sha256()
    best = _read_best(folder, observe)
    if best is not None:
        _take(learner, best, folder, observe)
    sha256 = last_sha256 if best is None else learner.sha256()
    if sha256 == last_sha256:
        return partial(folder.finish, weights=last, weights_sha256=sha256)
    models = {"weights_sha256": sha256, "last_sha256": last_sha256}
    return partial(folder.finish, weights=learner.packed_state(), last=last, **models)


def _read_best(folder: RunFolder, observe: Observer) -> Body | None:
    try:
        return None if folder.best is None else folder.best.read()
    except OSError as error:
        _report(folder, error.strerror or str(error), observe)
        return None


def _take(learner: TorchLearner, best: Body, folder: RunFolder, observe: Observer) -> None:
    try:
        learner.take_model(best)
    except InputError as error:
        _report(folder, str(error), observe)


def _report(folder: RunFolder, reason: str, observe: Observer) -> None:
    sentence = f"The best model in {folder.path} cannot be read: {reason.rstrip('.')}. The last one is kept instead."
    observe(SaveFailed(len(folder.round_log), sentence))
