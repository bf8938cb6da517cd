"""ResNet-10-T as timm makes it, on the digits images that come with scikit-learn.

    pip install -c constraints.txt -e '.[timm]'
    pipar compare examples/timm_network.toml --methods fl,pipar --virtual

The page docs/examples/timm.md has what was measured.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def network() -> nn.Module:
    """Return the network for gray images and ten classes, with random weights."""
    model: nn.Module = _timm().create_model("resnet10t", num_classes=10, in_chans=1)
    return model


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ImportError("timm is missing: pip install -c constraints.txt -e '.[timm]'") from error
    return timm
