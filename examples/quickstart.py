"""Train your own network on your own datasets, one for each device, with five lines of Python.

python examples/quickstart.py
"""

import torch
from torch.utils.data import Dataset, TensorDataset

import pipar


def half_moons(seed: int) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return 400 points on two half moons; any torch Dataset of (sample, label) pairs works."""
    random = torch.Generator().manual_seed(seed)
    angle, label = torch.rand(400, generator=random) * torch.pi, torch.arange(400) % 2
    moon = torch.stack([angle.cos() + label, (0.5 - label) * 2 * angle.sin() + 0.5 * label], dim=1)
    return TensorDataset(moon + 0.1 * torch.randn(400, 2, generator=random), label)


# The network can be cut after each child of the nn.Sequential.
model = torch.nn.Sequential(
    torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU()),
    torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()),
    torch.nn.Linear(32, 2),
)
datasets = [half_moons(seed) for seed in range(3)]  # three devices

settings = {"run": {"name": "quickstart", "epochs": 5, "batch_size": 100}, "optimizer": {"learning_rate": 0.1}}
result = pipar.run(settings, world="virtual", model=model, datasets=datasets, test=half_moons(99))
print(f"accuracy {result.test_accuracy:.1%}, {result.seconds_per_epoch:.3f} s per epoch: {result.folder}")
trained = result.model()  # a copy of the network, with the trained weights
print(f"prediction of the trained model: {trained(torch.tensor([[0.0, 1.0]])).argmax().item()}")
