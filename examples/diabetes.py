"""Regression: the progress of diabetes after a year, from ten measurements of each patient of three clinics."""

from __future__ import annotations

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import TensorDataset

PATIENTS = {"clinic-1": 118, "clinic-2": 118, "clinic-3": 118, "validation": 44, "test": 44}


def samples(name: str) -> TensorDataset:
    """Return the patients of a clinic or a held-out set; their order is the same everywhere."""
    data = load_diabetes()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    first = sum(count for other, count in PATIENTS.items() if list(PATIENTS).index(other) < list(PATIENTS).index(name))
    rows = order[first : first + PATIENTS[name]]
    # Both with a deviation of about 1; targets are from 25 to 346.
    inputs, targets = torch.tensor(20 * data.data), torch.tensor((data.target - 152) / 77)
    return TensorDataset(inputs[rows].float(), targets[rows].float())


def network() -> nn.Sequential:
    """Return a network that gives one number for each patient."""
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
