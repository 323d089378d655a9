"""Does the optimizer have what it should, and does weight decay touch what it should not?"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

from largebatch.audit.findings import Finding
from largebatch.audit.look_setup import Setup, some, trained_groups
from largebatch.recipe.decay import is_bias, is_norm


def look(setup: Setup) -> Iterator[Finding]:
    """Find LB101, LB102 and LB109."""
    yield from _decay(setup)
    yield from _missing(setup)


def _decay(setup: Setup) -> Iterator[Finding]:
    decay_of = {id(p): float(group.get("weight_decay") or 0.0) for group, p in trained_groups(setup.optimizer)}
    norms, biases = list[str](), list[str]()
    decays = dict[str, float]()
    seen = set[int]()
    for path, module in setup.model.named_modules():
        norm = is_norm(module)
        for name, parameter in module.named_parameters(recurse=False):
            decay = decay_of.get(id(parameter), 0.0)
            if decay > 0 and id(parameter) not in seen and (norm or is_bias(name)):
                full = f"{path}.{name}" if path else name
                (norms if norm else biases).append(full)
                decays[full] = decay
                seen.add(id(parameter))
    if norms:
        amount = _amount(norms, decays)
        yield Finding(
            code="LB101",
            seen=f"{len(norms)} parameters of {_kinds(setup.model)} have weight decay {amount}: {some(norms)}.",
        )
    if biases and (setup.recipe is None or setup.recipe.exclude_biases):
        amount = _amount(biases, decays)
        yield Finding(
            code="LB102",
            seen=f"{len(biases)} biases of layers that are no norm have weight decay {amount}: {some(biases)}.",
        )


def _amount(names: list[str], decays: dict[str, float]) -> str:
    values = sorted({decays[name] for name in names})
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"


def _kinds(model: nn.Module) -> str:
    kinds = sorted({type(module).__name__ for module in model.modules() if is_norm(module)})
    return some(kinds)


def _missing(setup: Setup) -> Iterator[Finding]:
    owned = {id(parameter) for group in setup.optimizer.param_groups for parameter in group["params"]}
    missing = [(n, p) for n, p in setup.model.named_parameters() if p.requires_grad and id(p) not in owned]
    if missing:
        num_weights = sum(parameter.numel() for _, parameter in missing if not is_lazy(parameter))
        yield Finding(
            code="LB109",
            seen=f"{len(missing)} trainable parameters ({num_weights} weights) are in no group of the optimizer: "
            f"{some([name for name, _ in missing])}.",
        )
