"""The form of samples that the configuration declares, where the samples themselves are on other machines."""

from __future__ import annotations

import torch

from pipar.settings.config import DataSection
from pipar.settings.sample_tensors import SampleTensor, sample_tensors
from pipar.tensors.inputs import InputForm, TensorForm


def declared_form(data: DataSection) -> InputForm | None:
    """Return the form of a factory's samples as `data.inputs` or `data.shape` says it; None if neither is given."""
    if data.inputs is None:
        return None if data.shape is None else InputForm.given(data.shape)
    said = sample_tensors(data.inputs)
    if isinstance(said, SampleTensor):
        return InputForm((_form(said),))
    if isinstance(said, dict):
        return InputForm(tuple(map(_form, said.values())), names=tuple(said))
    return InputForm(tuple(map(_form, said)), is_tuple=True)


def _form(said: SampleTensor) -> TensorForm:
    if said.dtype is None:
        return TensorForm(said.shape)
    dtype: torch.dtype = getattr(torch, said.dtype)
    return TensorForm(said.shape, dtype, said.lowest, said.highest)
