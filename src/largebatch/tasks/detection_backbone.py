"""Which weights of a classification run go into a detector, and do they fit?"""

from __future__ import annotations

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_OURS = b"largebatch checkpoint "
_DIGEST_BYTES = 32
_WRAPPERS = ("module.", "_orig_mod.", "backbone.body.")
"""What DistributedDataParallel, torch.compile and a detector put before a weight's name."""
_CONTAINERS = ("model", "state_dict", "model_state_dict")
_SHOWN = 3


def read_weights(path: Path) -> dict[str, Tensor]:
    """The named weights in a file: `model.pt` of `largebatch train`, or a state dict that `torch.save` wrote.

    Args:
        path: the file; a dict around the state dict ("model", "state_dict") is opened, wrappers' prefixes are cut.

    Returns:
        Name -> tensor, on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or holds no weights.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"backbone {path} cannot be read: {error.strerror}.") from error
    if content.startswith(_OURS):
        start = content.find(b"\n") + 1
        digest, content = content[start : start + _DIGEST_BYTES], content[start + _DIGEST_BYTES :]
        if hashlib.sha256(content).digest() != digest:
            raise CheckpointError(f"backbone {path} is damaged: its checksum does not match its content.")
    try:
        found: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        said = " ".join(str(error).split())[:120]
        raise CheckpointError(
            f"backbone {path} cannot be read as weights ({said}). Give model.pt of `largebatch train`, or a state dict."
        ) from error
    for name in _CONTAINERS:
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"backbone {path} holds no state dict: names with tensors are needed.")
    return {_plain(str(name)): value for name, value in found.items()}


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name


def has_batch_norm(weights: dict[str, Tensor]) -> bool:
    """Whether the weights come with the running statistics of batch norm, which a detector freezes."""
    return any(name.endswith("running_mean") for name in weights)


def transfer(weights: dict[str, Tensor], body: nn.Module, source: Path | str) -> None:
    """Copy `weights` into `body`, every tensor of it; the classifier (`fc.*`) is left behind.

    Args:
        weights: what `read_weights` found.
        body: the network without its classifier.
        source: what the message calls the weights.

    Raises:
        ConfigError: a tensor is missing, of another shape, or left over: it is another architecture.
    """
    wanted = body.state_dict()
    # A counter of batch norm's updates; statistics that stay as they are do not count.
    ours = {name: value for name, value in weights.items() if not name.endswith("num_batches_tracked")}
    wanted = {name: value for name, value in wanted.items() if not name.endswith("num_batches_tracked")}
    left = [name for name in ours if name not in wanted and not name.startswith("fc.")]
    differing = [f"{name} is missing" for name in wanted if name not in ours]
    differing += [
        f"{name} is {_shape(ours[name])}, not {_shape(value)}"
        for name, value in wanted.items()
        if name in ours and ours[name].shape != value.shape
    ]
    differing += [f"{name} has no place" for name in left]
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise ConfigError(
            f"the weights in {source} are not those of this detector's backbone: "
            f"{'; '.join(differing[:_SHOWN])}{more}. Use a checkpoint of the same architecture."
        )
    body.load_state_dict({name: ours[name] for name in wanted}, strict=False)
    behind = sorted(name for name in ours if name not in wanted)
    logger.info("backbone from %s: all %d tensors copied, left behind: %s", source, len(wanted),
                ", ".join(behind) or "nothing")  # fmt: skip


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
