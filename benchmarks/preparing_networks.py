"""ResNet-50 as torchvision writes it: for `benchmarks.preparing`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """Three convolutions, and a skip that is added in place."""

    def __init__(self, inplanes: int, planes: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, 4 * planes, 1, bias=False), nn.BatchNorm2d(4 * planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        activated: Tensor = self.relu(out)
        return activated


class ResNet50(nn.Module):
    """25.6 million parameters, for images of any size."""

    def __init__(self, classes: int = 200) -> None:
        super().__init__()
        self.inplanes = 64
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = self._layer(64, 3, 1), self._layer(128, 4, 2)
        self.layer3, self.layer4 = self._layer(256, 6, 2), self._layer(512, 3, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(2048, classes)

    def _layer(self, planes: int, blocks: int, stride: int) -> nn.Sequential:
        convolution = nn.Conv2d(self.inplanes, 4 * planes, 1, stride, bias=False)
        first = Bottleneck(self.inplanes, planes, stride, nn.Sequential(convolution, nn.BatchNorm2d(4 * planes)))
        self.inplanes = 4 * planes
        return nn.Sequential(first, *(Bottleneck(self.inplanes, planes, 1, None) for _ in range(1, blocks)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits
