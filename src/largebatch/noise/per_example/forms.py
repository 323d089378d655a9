"""How long is one example's gradient, when it is known as a sum of products?

A layer's gradient is a sum over positions (tokens, pixels) of one vector, or of the product of two. Written so,
its squared norm costs no more than the gradient itself, and often far less: this is the arithmetic; which
layer has which form is told by `largebatch.noise.per_example.rules`.

Shapes: B examples, T positions, G groups, O rows and I columns of a weight (of one group of it).

Source: Goodfellow 2015 (arXiv:1510.01799) for T = 1; Gray et al. 2024 (arXiv:2411.00999), section 3, for the
two ways with T > 1, of which the cheaper one is taken by size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from largebatch.noise.collect.norms import CHUNK, sq_norm

WORKSPACE = 2**21
"""Elements of a temporary; examples are taken in as many parts as keep it, and at least one by one."""


class Probe(NamedTuple):
    """A random direction u v^T in the space of one parameter, shape (O, rest)."""

    rows: Tensor
    """u, shape (parameter.shape[0],)."""
    columns: Tensor
    """v, shape (the product of the other dims,); 1 where that is 1."""

    @classmethod
    def draw(cls, parameter: Tensor, generator: torch.Generator) -> Probe:
        """Draw a normal direction for a parameter; `generator` is on the CPU, and nobody else's."""
        rows = parameter.shape[0] if parameter.dim() > 1 else parameter.numel()
        columns = parameter.numel() // rows if rows else 0
        u = torch.randn(rows, generator=generator)
        v = torch.randn(columns, generator=generator) if columns > 1 else torch.ones(columns)
        dtype = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
        return cls(u.to(parameter.device, dtype), v.to(parameter.device, dtype))

    def double(self) -> Probe:
        """The same direction in float64."""
        return Probe(self.rows.double(), self.columns.double())

    def of(self, gradient: Tensor) -> Tensor:
        """<gradient, u v^T>, 0-dim; `gradient` has the parameter's shape and may be sparse."""
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = self.rows[gradient.indices()[0]], gradient.values().to(self.rows.dtype)
            return torch.dot(rows, values.flatten(1) @ self.columns)
        gradient = gradient.to(self.rows.dtype)
        if self.columns.shape[0] == 1:
            return torch.dot(self.rows, gradient.reshape(-1))
        return torch.dot(self.rows, gradient.reshape(self.rows.shape[0], -1) @ self.columns)


class Measured(NamedTuple):
    """What one parameter got from the examples."""

    sq_norms: Tensor
    """Squared norm of each example's gradient, shape (B,)."""
    projected: Tensor
    """<sum of them, u v^T>, 0-dim: equal to the gradient's own projection if nothing was missed."""
    sq_terms: Tensor | None = None
    """Sum of squares of the terms of `projected`, 0-dim: what its rounding is to be held against. Only if asked for."""


class Form(Protocol):
    """One parameter's per-example gradients, not yet formed."""

    def measure(self, probe: Probe, *, careful: bool) -> Measured:
        """Squared norms (B,), and the projection of the sum; its terms only if `careful`."""
        ...

    def dense(self) -> Tensor:
        """The gradients themselves, shape (B, parameter.numel())."""
        ...

    def double(self) -> Form:
        """The same in float64, whose squares hold whatever float32 holds."""
        ...


@dataclass(frozen=True, slots=True)
class Summed:
    """The sum over positions of vectors: biases, scales of norms, and whatever was differentiated by torch.func."""

    values: Tensor
    """Shape (B, T, numel)."""

    def measure(self, probe: Probe, *, careful: bool) -> Measured:
        """As `Form.measure`: sum, then square."""
        dense = self.dense()
        if not careful:
            return Measured(row_dots(dense), probe.of(dense.sum(0)))
        size = (probe.rows.shape[0], probe.columns.shape[0])
        terms = (self.values.unflatten(-1, size) @ probe.columns) * probe.rows
        return Measured(row_dots(dense), terms.sum(), sq_norm(terms))

    def sum_and_measure(self, probe: Probe) -> tuple[Tensor, Measured]:
        """As `Factored.sum_and_measure`."""
        dense = self.dense()
        return _derived(dense.sum(0), row_dots(dense), probe)

    def dense(self) -> Tensor:
        """As `Form.dense`."""
        return self.values.squeeze(1) if self.values.shape[1] == 1 else self.values.sum(1)

    def double(self) -> Summed:
        """As `Form.double`."""
        return Summed(self.values.double())


@dataclass(frozen=True, slots=True)
class Factored:
    """The sum over positions of outer products, rows (x) columns: what Linear layers and convolutions have."""

    rows: Tensor
    """Gradient of the output, shape (B, G, T, O)."""
    columns: Callable[[slice], Tensor]
    """From a range of examples to their inputs, shape (b, G, T, I), as the weight meets them."""
    num_columns: int
    """I."""

    def measure(self, probe: Probe, *, careful: bool) -> Measured:
        """As `Form.measure`, in the cheapest of three ways: product of norms, gradients, Gram matrices."""
        _, num_groups, num_positions, num_rows = self.rows.shape
        u, v = probe.rows.view(num_groups, -1), probe.columns.expand(num_groups, -1)
        direct = prefer_direct(num_positions, num_rows, self.num_columns)
        measured: list[Measured] = []
        for rows, columns in self._parts(direct):
            left, right = along(rows, u).flatten(), along(columns, v).flatten()
            if num_positions == 1:
                norms = (rows.square().sum(-1) * columns.square().sum(-1)).sum((1, 2))
            elif direct:
                norms = row_dots(_products(rows, columns).flatten(1))
            else:
                norms = row_dots((rows @ rows.mT).flatten(1), (columns @ columns.mT).flatten(1))
            measured.append(Measured(norms, torch.dot(left, right), sq_norm(left * right) if careful else None))
        return measured[0] if len(measured) == 1 else _together(measured, torch.cat([one.sq_norms for one in measured]))

    def dense(self) -> Tensor:
        """As `Form.dense`."""
        return torch.cat([(rows.mT @ columns).flatten(1) for rows, columns in self._parts(True)])

    def double(self) -> Factored:
        """As `Form.double`."""
        return Factored(self.rows.double(), lambda part: self.columns(part).double(), self.num_columns)

    def sum_and_measure(self, probe: Probe) -> tuple[Tensor, Measured]:
        """The weight's gradient, shape (G O, I), as the sum of the examples' own, and what `measure` gives."""
        _, num_groups, _, num_rows = self.rows.shape
        totals, norms = [], []
        for rows, columns in self._parts(True):
            gradients = _products(rows, columns)
            totals.append(gradients.sum(0))
            norms.append(row_dots(gradients.flatten(1)))
        total = sum_of(totals)
        total = (total if num_rows <= self.num_columns else total.mT).reshape(num_groups * num_rows, -1)
        return _derived(total, torch.cat(norms), probe)

    def _parts(self, direct: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and columns of so many examples at a time as the workspace holds."""
        num_examples, num_groups, num_positions, num_rows = self.rows.shape
        each = num_positions * self.num_columns
        if num_positions > 1:
            each = max(each, num_rows * self.num_columns if direct else 2 * num_positions**2)
        for part in parts(num_examples, num_groups * each):
            yield self.rows[part], self.columns(part)


@dataclass(frozen=True, slots=True)
class Scattered:
    """The sum over positions of vectors, each into its own row: what an Embedding has."""

    ids: Tensor
    """Row of each position, shape (B, T)."""
    columns: Tensor
    """Gradient of the output, 0 where it is padding, shape (B, T, I)."""
    num_rows: int
    """O."""

    def measure(self, probe: Probe, *, careful: bool) -> Measured:
        """As `Form.measure`: positions are sorted by row, and those of one row summed."""
        num_examples, num_positions, _ = self.columns.shape
        left, right = probe.rows[self.ids].flatten(), (self.columns @ probe.columns).flatten()
        projected, sq_terms = torch.dot(left, right), sq_norm(left * right) if careful else None
        if num_positions == 1:
            return Measured(self.columns.square().sum((1, 2)), projected, sq_terms)
        ids, order = self.ids.sort(dim=1)
        slots = torch.zeros_like(ids)
        slots[:, 1:] = (ids[:, 1:] != ids[:, :-1]).cumsum(1)
        places = torch.empty_like(slots).scatter_(1, order, slots)
        places += torch.arange(num_examples, device=ids.device)[:, None] * num_positions
        sums = torch.zeros_like(self.columns).flatten(0, 1).index_add_(0, places.flatten(), self.columns.flatten(0, 1))
        return Measured(row_dots(sums.view(num_examples, -1)), projected, sq_terms)

    def dense(self) -> Tensor:
        """As `Form.dense`."""
        num_examples, _, num_columns = self.columns.shape
        sums = self.columns.new_zeros(num_examples, self.num_rows, num_columns)
        index = self.ids.unsqueeze(-1).expand_as(self.columns)
        return sums.scatter_add_(1, index, self.columns).flatten(1)

    def double(self) -> Scattered:
        """As `Form.double`."""
        return Scattered(self.ids, self.columns.double(), self.num_rows)


@dataclass(frozen=True, slots=True)
class Known:
    """A form whose measurement was made on the way (the fast mode)."""

    form: Form
    measured: Measured

    def measure(self, probe: Probe, *, careful: bool) -> Measured:
        """What was measured."""
        return self.measured

    def dense(self) -> Tensor:
        """As `Form.dense`."""
        return self.form.dense()

    def double(self) -> Known:
        """As it is: whoever measured it did so in the precision that was asked for."""
        return self


def prefer_direct(num_positions: int, num_rows: int, num_columns: int) -> bool:
    """Whether T products of O x I cost no more than two of T x T: O I T <= T^2 (O + I).

    >>> prefer_direct(196, 64, 288), prefer_direct(64, 2048, 128)
    (True, False)
    """
    return num_rows * num_columns <= num_positions * (num_rows + num_columns)


def combine(forms: Sequence[Form], probe: Probe, *, careful: bool) -> Measured:
    """Measure the sum of several uses of one parameter: tied weights, a layer called more than once.

    |a + b|^2 = |a|^2 + |b|^2 + 2<a, b>, per example. Uses of one kind are one sum over more positions; an
    Embedding and a Linear (token embedding and output layer) meet in a T x T product; the rest is formed.
    """
    known = {id(form.form): form.measured for form in forms if isinstance(form, Known)}
    forms = [form.form if isinstance(form, Known) else form for form in forms]
    summed = [form for form in forms if isinstance(form, Summed)]
    factored = [form for form in forms if isinstance(form, Factored)]
    scattered = [form for form in forms if isinstance(form, Scattered)]
    merged: list[Form] = []
    if summed:
        merged.append(Summed(torch.cat([form.values for form in summed], 1)))
    if factored:
        merged.append(_join(factored))
    if scattered:
        ids, columns = [form.ids for form in scattered], [form.columns for form in scattered]
        merged.append(Scattered(torch.cat(ids, 1), torch.cat(columns, 1), scattered[0].num_rows))
    measured = [known[id(form)] if id(form) in known else form.measure(probe, careful=careful) for form in merged]
    if len(merged) == 1:
        return measured[0]
    if len(merged) == 2 and isinstance(merged[0], Factored) and isinstance(merged[1], Scattered):
        cross = _inner(merged[0], merged[1])
        return _together(measured, sum_of([one.sq_norms for one in measured]) + 2 * cross)
    return _together(measured, row_dots(sum_of([form.dense() for form in merged])))


def _together(measured: Sequence[Measured], sq_norms: Tensor) -> Measured:
    """The parts of one gradient, whose norms are known together."""
    terms = [one.sq_terms for one in measured if one.sq_terms is not None]
    return Measured(sq_norms, sum_of([one.projected for one in measured]), sum_of(terms) if terms else None)


def _join(forms: Sequence[Factored]) -> Factored:
    """One sum over the positions of all."""
    if len(forms) == 1:
        return forms[0]
    return Factored(
        torch.cat([form.rows for form in forms], 2),
        lambda part: torch.cat([form.columns(part) for form in forms], 2),
        forms[0].num_columns,
    )


def _inner(factored: Factored, scattered: Scattered) -> Tensor:
    """<a, b> per example, (B,): sum over s, t of rows[s, id_t] <columns[s], gradient[t]>."""
    products: list[Tensor] = []
    num_examples, _, num_positions, _ = factored.rows.shape
    for part in parts(num_examples, 2 * num_positions * scattered.ids.shape[1]):
        ids = scattered.ids[part].unsqueeze(1).expand(-1, num_positions, -1)
        rows = factored.rows[part].squeeze(1).gather(2, ids)
        columns = factored.columns(part).squeeze(1) @ scattered.columns[part].mT
        products.append(row_dots(rows.flatten(1), columns.flatten(1)))
    return torch.cat(products)


def parts(num_examples: int, each: int) -> Iterator[slice]:
    """Ranges of examples of `each` elements, as many at a time as the workspace holds.

    >>> [(part.start, part.stop) for part in parts(5, WORKSPACE // 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, WORKSPACE // max(1, each))
    return (slice(start, min(start + step, num_examples)) for start in range(0, num_examples, step))


def _derived(total: Tensor, sq_norms: Tensor, probe: Probe) -> tuple[Tensor, Measured]:
    """A gradient that is the sum of its examples' by construction: what is left to find out is what was added to it."""
    return total, Measured(sq_norms, probe.of(total), sq_norms.sum())


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """Each example's gradient, (b, G, O, I), or (b, G, I, O) where O > I: the longer dim last is faster."""
    return rows.mT @ columns if rows.shape[-1] <= columns.shape[-1] else columns.mT @ rows


def along(tensor: Tensor, vectors: Tensor) -> Tensor:
    """<tensor[b, g, t], vectors[g]>; shapes (b, G, T, n) and (G, n) -> (b, G, T). Read in the order of memory."""
    if tensor.stride(-1) != 1 and tensor.stride(-2) == 1:
        if vectors.shape[0] == 1:
            return vectors[0] @ tensor.mT
        return (vectors.unsqueeze(1) @ tensor.mT).squeeze(2)
    if vectors.shape[0] == 1:
        return tensor @ vectors[0]
    return (tensor @ vectors.unsqueeze(2)).squeeze(3)


def row_dots(left: Tensor, right: Tensor | None = None) -> Tensor:
    """<left[b], right[b]> for each b; shapes (B, n) -> (B,). Without `right`, squared norms.

    >>> row_dots(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).tolist()
    [25.0, 4.0]
    """
    right = left if right is None else right
    if left.shape[1] <= CHUNK:
        return (left * right).sum(1)
    pairs = zip(left.split(CHUNK, 1), right.split(CHUNK, 1), strict=True)
    return sum_of([(a * b).sum(1) for a, b in pairs])


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def wide(tensor: Tensor) -> Tensor:
    """In float32 where it was narrower."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
