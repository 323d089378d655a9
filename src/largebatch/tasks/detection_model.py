"""Of which parts is a Mask R-CNN made, at any width?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from largebatch.errors import ConfigError, MissingExtraError
from largebatch.tasks.detection_backbone import has_batch_norm, transfer

Norm = Literal["frozen", "group"]
"""frozen: batch norm as an affine map with a trained backbone's statistics; group: group norm everywhere."""

_STAGES = ("layer1", "layer2", "layer3", "layer4")
_GROUPS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorShape:
    """How large a Mask R-CNN is; the defaults are those of the Mask R-CNN paper with a feature pyramid.

    Source: He 2017 (Mask R-CNN), sec. 3 and 3.1; Lin 2017 (feature pyramid networks).
    """

    resnet: str = "resnet50"
    """torchvision's name of the ResNet."""
    min_size: int = 800
    """Pixels of a picture's shorter side after scaling."""
    max_size: int = 1333
    """Pixels of the longer side at most."""
    anchor_sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    """Pixels of the anchors' side on each of the five levels; each has ratios 1:2, 1:1, 2:1."""
    fpn_channels: int = 256
    """Channels of the pyramid."""
    box_features: int = 1024
    """Width of the box head's two layers."""
    mask_channels: tuple[int, ...] = (256, 256, 256, 256)
    """Channels of the mask head's convolutions."""
    proposals: int = 2000
    """Proposals kept by the region proposal network in training; half as many in evaluation."""
    anchors_sampled: int = 256
    """Anchors in the proposal loss of each picture."""
    rois_sampled: int = 512
    """Regions in the box loss of each picture, a quarter of them positive at most."""
    detections: int = 100
    """Objects found in a picture at most."""


def make_detector(
    shape: DetectorShape,
    num_classes: int,
    *,
    weights: dict[str, Tensor] | None = None,
    source: Path | str = "",
    norm: Norm | None = None,
) -> nn.Module:
    """Make a Mask R-CNN on a ResNet with a feature pyramid.

    Live batch norm over 2 pictures is wrong, so there is none: statistics are frozen with weights that come with
    them (first convolution and first stage are frozen too), and without them group norm is trained from scratch.

    Args:
        shape: how large.
        num_classes: classes, without the background.
        weights: of a classification run; None starts from random ones.
        source: what an error calls them.
        norm: None takes "frozen" for weights with batch norm, else "group".

    Raises:
        ConfigError: the weights are of another architecture, or there are none to freeze.
        MissingExtraError: torchvision is not installed.

    Source: He 2017 (Mask R-CNN); Wu 2018 (group norm); He 2018 (Rethinking ImageNet pre-training) for training from
    scratch with it.
    """
    try:
        from torchvision.models.detection import MaskRCNN
        from torchvision.models.detection.anchor_utils import AnchorGenerator
        from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
        from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
    except ImportError as error:
        raise MissingExtraError("torchvision", "vision", "a detector") from error
    fitting = "frozen" if weights is not None and has_batch_norm(weights) else "group"
    norm = norm or fitting
    if norm == "frozen" and fitting != "frozen":
        raise ConfigError(
            "frozen batch norm needs the statistics of a trained backbone, and there are none. Give --backbone with a "
            "batch-norm checkpoint, or use norm='group'."
        )
    pyramid = _pyramid(shape, weights, source, norm)
    width, masks = shape.fpn_channels, shape.mask_channels
    return MaskRCNN(
        pyramid,
        min_size=shape.min_size,
        max_size=shape.max_size,
        rpn_anchor_generator=AnchorGenerator(
            tuple((size,) for size in shape.anchor_sizes), ((0.5, 1.0, 2.0),) * len(shape.anchor_sizes)
        ),
        rpn_pre_nms_top_n_train=shape.proposals,
        rpn_pre_nms_top_n_test=shape.proposals // 2,
        rpn_post_nms_top_n_train=shape.proposals,
        rpn_post_nms_top_n_test=shape.proposals // 2,
        rpn_batch_size_per_image=shape.anchors_sampled,
        box_head=TwoMLPHead(width * 7**2, shape.box_features),
        box_predictor=FastRCNNPredictor(shape.box_features, num_classes + 1),
        box_batch_size_per_image=shape.rois_sampled,
        box_detections_per_img=shape.detections,
        mask_head=MaskRCNNHeads(width, masks, 1, norm_layer=_group_norm if norm == "group" else None),
        mask_predictor=MaskRCNNPredictor(masks[-1], masks[-1], num_classes + 1),
    )


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(min(_GROUPS, channels), channels)


def _pyramid(shape: DetectorShape, weights: dict[str, Tensor] | None, source: Path | str, norm: Norm) -> nn.Module:
    from torchvision.models import get_model
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.ops import FrozenBatchNorm2d

    layer: Callable[[int], nn.Module] = FrozenBatchNorm2d if norm == "frozen" else _group_norm
    try:
        make: Callable[..., Any] = partial(get_model, shape.resnet, weights=None)
        body: Any = make(norm_layer=layer, zero_init_residual=norm == "group")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"there is no ResNet {shape.resnet!r} in torchvision: {error}.") from error
    channels: int = body.fc.in_features
    body.fc = nn.Identity()
    if weights is not None:
        transfer(weights, body, source)
    if norm == "frozen":
        for name, parameter in body.named_parameters():
            if name.startswith(("conv1", "layer1")):
                parameter.requires_grad_(False)
    return BackboneWithFPN(
        body,
        {stage: str(level) for level, stage in enumerate(_STAGES)},
        [channels // 2**level for level in (3, 2, 1, 0)],
        shape.fpn_channels,
        norm_layer=_group_norm if norm == "group" else None,
    )


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Generator[None]:
    """The model in training or evaluation mode, each module back in its own afterwards."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training
