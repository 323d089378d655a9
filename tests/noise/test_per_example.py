"""Are the norms of whole models those of torch.func, whatever lies between, and is nothing else measured or changed?"""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from largebatch.errors import ConfigError
from largebatch.noise.per_example.check import check_independent
from largebatch.noise.per_example.collector import PerExampleCollector


class GPT(nn.Module):
    """Two steps through one block, so that every layer in it is called twice."""

    def __init__(self, *, tied=True, positions="(time,)", vocabulary=11, width=8, time=6):
        super().__init__()
        self.positions = positions
        self.tokens = nn.Embedding(vocabulary, width)
        if positions == "parameter":
            self.places = nn.Parameter(torch.randn(1, time, width))
        else:
            self.places = nn.Embedding(time, width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        steps = torch.arange(ids.shape[1])
        if self.positions == "(time,)":
            x = x + self.places(steps)
        elif self.positions == "(1, time)":
            x = self.places(steps[None]) + x
        elif self.positions == "(batch, time)":
            x = x + self.places(steps.expand(len(ids), -1))
        else:
            x = x + self.places
        for _ in range(2):
            x = x + self.down(functional.relu(self.up(self.norm(x)), inplace=True))
        return self.head(x)


class Patches(nn.Module):
    """A vision transformer's way in: patches, a class token, positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 5, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(functional.gelu(x)[:, 0])


class Gate(nn.Module):
    """A container with a parameter of its own that no broadcast gives away."""

    def __init__(self):
        super().__init__()
        self.fc, self.gain = nn.Linear(3, 3), nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

    def forward(self, x):
        return torch.tanh(self.fc(x) * self.gain)


class Scale(nn.Module):
    """A layer nobody has a rule for."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return torch.sin(x * self.factor)


def images(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


IDS = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))
SQUARE = torch.randint(11, (6, 6), generator=torch.Generator().manual_seed(0))
POSITIONS = ["(time,)", "(1, time)", "(batch, time)", "parameter"]
MODELS = {
    "cnn": lambda: (
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, groups=2),
            nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5), nn.Tanh(), nn.Linear(5, 3),
        ),
        images(5, 1, 8, 8),
    ),
    "linear over tokens, written into": lambda: (
        nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)), images(4, 9, 5),
    ),
    "norms": lambda: (
        nn.Sequential(
            nn.Conv1d(4, 6, 3), nn.GroupNorm(2, 6), nn.InstanceNorm1d(6, affine=True), nn.LayerNorm(7),
            nn.RMSNorm((6, 7)), nn.BatchNorm1d(6).eval(),
        ),
        images(4, 4, 9),
    ),
    "patches": lambda: (Patches(), images(3, 3, 4, 4)),
    "no rule": lambda: (nn.Sequential(nn.Linear(3, 4), Scale(), nn.PReLU(4), nn.Linear(4, 2)), images(4, 3)),
    "a gate": lambda: (nn.Sequential(nn.Linear(3, 3), Gate(), nn.Linear(3, 2)), images(4, 3)),
    "transposed": lambda: (nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Tanh()), images(3, 2, 4, 4)),
} | {
    f"gpt, {'tied' if tied else 'untied'}, places {positions}, {len(ids)} examples":
        lambda tied=tied, positions=positions, ids=ids: (GPT(tied=tied, positions=positions), ids)
    for tied in (True, False) for positions in POSITIONS for ids in (IDS, SQUARE)
}  # fmt: skip


def total(outputs):
    """A loss that is a sum over examples, and no symmetric function of an example's outputs."""
    weights = torch.linspace(0.5, 1.5, outputs[0].numel(), dtype=outputs.dtype).view(outputs.shape[1:])
    return (outputs.square() * weights).sum()


def by_torch_func(model, inputs):
    """|g_b|^2 by vmap(grad), (B,)."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, example):
        return total(functional_call(model, parameters, (example[None],)))

    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, inputs)
    return sum(gradient.reshape(len(inputs), -1).square().sum(1) for gradient in gradients.values())


def one_by_one(model, inputs):
    """|g_b|^2 by a backward for each example, (B,)."""
    norms = []
    for example in inputs:
        model.zero_grad()
        output = model(example[None])
        total(output[0] if isinstance(output, tuple) else output).backward()
        norms.append(sum(parameter.grad.square().sum() for parameter in model.parameters()))
    model.zero_grad()
    return torch.stack(norms)


def plain_gradients(model, inputs):
    model.zero_grad()
    total(model(inputs)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return gradients


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_those_of_torch_func_and_no_gradient_bit_changes(name):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model, inputs = model.to(dtype), inputs.to(dtype) if inputs.is_floating_point() else inputs
        truth = by_torch_func(copy.deepcopy(model).double(), inputs.double() if inputs.is_floating_point() else inputs)
        expected = plain_gradients(model, inputs)
        largest = max(gradient.abs().max().item() for gradient in expected)
        for fast in (False, True):
            collector = PerExampleCollector(model, fast=fast)
            total(model(inputs)).backward()
            (norms,) = collector.take()
            collector.close()
            assert norms.shape == (1, len(inputs))
            # Relative to the largest: as in the oracle tests.
            torch.testing.assert_close(norms[0].double(), truth, rtol=tolerance, atol=tolerance * truth.max().item())
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                if fast:
                    torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-6 * largest)
                else:
                    assert torch.equal(parameter.grad, gradient)
            model.zero_grad()


def test_the_fast_mode_makes_the_gradient_itself():
    layer, x = nn.Conv2d(2, 3, 3), images(4, 2, 6, 6)
    collector = PerExampleCollector(layer, fast=True)
    output = layer(x)
    assert [type(node).__name__ for node, _ in output.grad_fn.next_functions[-2:]] == ["AccumulateGrad"] * 2
    assert output.grad_fn.next_functions[0][0] is None, "autograd has a gradient to make through the convolution"
    assert all(parameter.requires_grad for parameter in layer.parameters())
    collector.close()


def test_the_fast_mode_thaws_a_layer_whose_forward_raises():
    layer = nn.Conv2d(2, 3, 3)
    collector = PerExampleCollector(layer, fast=True)
    with pytest.raises(RuntimeError):
        layer(images(4, 5, 6, 6))
    assert layer.weight.requires_grad and layer.bias.requires_grad
    layer(images(4, 2, 6, 6)).sum().backward()
    assert collector.take()[0].isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 4, batch_first=True, num_layers=2),
        lambda: nn.GRU(3, 4, batch_first=True, bidirectional=True),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    ],
    ids=["lstm", "gru", "attention"],
)
def test_layers_that_need_torch_func(make):
    torch.manual_seed(0)
    model = make().double()
    inputs = images(5, 6, 4 if isinstance(model, nn.TransformerEncoderLayer) else 3).double()
    truth = one_by_one(model, inputs)
    collector = PerExampleCollector(model)
    output = model(inputs)
    total(output[0] if isinstance(output, tuple) else output).backward()
    torch.testing.assert_close(collector.take()[0][0], truth, rtol=1e-10, atol=0)


def test_the_last_state_of_an_lstm_has_its_examples_in_dim_1():
    torch.manual_seed(0)
    lstm, inputs = nn.LSTM(3, 4, batch_first=True).double(), images(5, 6, 3).double()
    norms = []
    for example in inputs:
        lstm.zero_grad()
        lstm(example[None])[1][0].square().sum().backward()
        norms.append(sum(parameter.grad.square().sum() for parameter in lstm.parameters()))
    lstm.zero_grad()
    collector = PerExampleCollector(lstm)
    lstm(inputs)[1][0].square().sum().backward()
    torch.testing.assert_close(collector.take()[0][0], torch.stack(norms), rtol=1e-10, atol=0)


def test_groups_add_up_to_the_whole():
    torch.manual_seed(0)
    model = GPT().double()
    inputs = IDS
    truth = by_torch_func(model, inputs)
    collector = PerExampleCollector(model, group_of=lambda name: {"tokens.weight": 0, "up.weight": 2}.get(name, 1))
    total(model(inputs)).backward()
    (norms,) = collector.take()
    assert norms.shape == (3, 4)
    torch.testing.assert_close(norms.sum(0), truth, rtol=1e-10, atol=0)
    assert (norms > 0).all()


def test_norms_are_of_each_backward_and_a_mean_is_not_undone():
    layer = nn.Linear(2, 1, bias=False)
    collector = PerExampleCollector(layer)
    layer(torch.tensor([[3.0, 4.0], [0.0, 2.0]])).mean().backward()
    layer(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])).sum().backward()
    assert [norms.tolist() for norms in collector.take()] == [[[25 / 4, 1.0]], [[1.0, 1.0, 4.0]]]
    assert collector.take() == []


def test_probes_and_forwards_without_a_backward_leave_no_trace():
    torch.manual_seed(0)
    layer, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0], [0.0, 2.0]], requires_grad=True)
    collector = PerExampleCollector(layer)
    with torch.no_grad():
        layer(x)
    layer(x)
    torch.autograd.grad(layer(x).square().sum(), layer.weight)
    torch.autograd.grad(layer(x).square().sum(), x)
    loss = layer(x).sum()
    torch.autograd.grad(loss, layer.weight, retain_graph=True)
    loss.backward()
    torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)
    collector.enabled = False
    layer(x).sum().backward()
    collector.enabled = True
    assert [norms.tolist() for norms in collector.take()] == [[[25.0, 4.0]]]
    layer(x).sum().backward()
    collector.discard()
    assert collector.take() == []


def test_what_was_kept_is_freed_with_the_forward_and_with_the_backward():
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    collector = PerExampleCollector(model)
    kept = []
    model[2].register_forward_hook(lambda module, args, output: kept.append(StorageWeakRef(args[0].untyped_storage())))

    def told(grad):
        kept.append(StorageWeakRef(grad.untyped_storage()))

    gc.disable()  # no cycles: references alone free it
    try:
        model(torch.randn(4, 3))
        assert kept.pop().expired(), "no backward came"
        output = model(torch.randn(4, 3))
        output.register_hook(told)
        loss = output.square().sum()
        del output
        loss.backward()
        assert [ref.expired() for ref in kept] == [True, True], "the loss is still there, but its graph has been used"
        kept.clear()
        x = torch.randn(4, 3, requires_grad=True)
        output = model(x)
        output.register_hook(told)
        (_,) = torch.autograd.grad(output.square().sum(), x)
        del output
        assert [ref.expired() for ref in kept] == [True, True], "a probe is over"
        assert len(collector.take()) == 1
    finally:
        gc.enable()


def test_checkpointing_is_measured_once_and_saves_what_it_saves():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Dropout(0.0))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = block, nn.Linear(3, 2)

        def forward(self, x, how="plain"):
            x = self.block(x) if how == "plain" else checkpoint(self.block, x, use_reentrant=how == "reentrant")
            return self.head(x)

    model, x = Model().double(), images(4, 5, 3).double().requires_grad_()
    truth = by_torch_func(model, x.detach())
    kept = []
    block[1].register_forward_hook(lambda module, args, output: kept.append(StorageWeakRef(output.untyped_storage())))
    for fast in (False, True):
        collector = PerExampleCollector(model, fast=fast)
        kept.clear()
        output = model(x, "checkpoint")
        assert kept[0].expired(), "the input of block[2] is held though it will be computed again"
        total(output).backward()
        assert len(kept) == 2
        (norms,) = collector.take()
        torch.testing.assert_close(norms[0], truth, rtol=1e-10, atol=0)
        total(model(x, "reentrant")).backward()
        with pytest.raises(ConfigError, match="use_reentrant=False"):
            collector.take()
        collector.close()


def test_autocast_is_widened_before_squaring():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    x = images(6, 10, 16)
    truth = by_torch_func(model, x)
    for fast in (False, True):
        collector = PerExampleCollector(model, fast=fast)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = total(model(x).float())
            loss.backward()
        (norms,) = collector.take()
        collector.close()
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms[0], truth, rtol=0.05, atol=0)  # bfloat16 has 8 bits


def test_dropout_is_the_one_that_was_drawn():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1, bias=False))
    collector = PerExampleCollector(model)
    kept = []
    model[1].register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    model(images(3, 4)).sum().backward()
    torch.testing.assert_close(collector.take()[0][0], kept[0].square().sum(1))


def test_random_numbers_are_not_touched():
    model = nn.Sequential(nn.Linear(3, 4), Scale(), nn.Linear(4, 2))
    state = torch.get_rng_state()
    collector = PerExampleCollector(model)
    model(images(3, 3)).sum().backward()
    collector.take()
    assert torch.equal(torch.get_rng_state(), state)


def test_models_given_by_keyword_and_parts_called_by_themselves():
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(2, 3)

        def forward(self, *, x):
            return self.decoder(self.encoder(x))

    model, x = Auto().double(), images(4, 3).double()
    collector = PerExampleCollector(model)
    total(model(x=x)).backward()
    total(model.decoder(model.encoder(x))).backward()
    whole, parts = collector.take()
    assert torch.equal(whole, parts)


def test_only_norm_layers():
    torch.manual_seed(0)
    model = GPT().double()
    collector = PerExampleCollector(model, only="norm layers")
    full = PerExampleCollector(model, group_of=lambda name: int(name.startswith("norm.")))
    total(model(IDS)).backward()
    torch.testing.assert_close(collector.take()[0][0], full.take()[0][1], rtol=1e-12, atol=0)


def test_losses_that_compare_examples_are_told():
    outputs = images(6, 4).requires_grad_()
    targets = torch.randint(4, (6,), generator=torch.Generator().manual_seed(0))
    check_independent(functional.cross_entropy(outputs, targets, reduction="none"), outputs)
    unit = functional.normalize(outputs, dim=1)
    contrastive = functional.cross_entropy(unit @ unit.mT, torch.arange(6), reduction="none")
    with pytest.raises(ConfigError, match="6 of 6 rows"):
        check_independent(contrastive, outputs)
    with pytest.raises(ConfigError, match="reduction='none'"):
        check_independent(functional.cross_entropy(outputs, targets), outputs)
    assert outputs.grad is None
    inputs = images(6, 3).requires_grad_()
    with pytest.raises(ConfigError, match="compare examples"):
        check_independent(nn.BatchNorm1d(3)(inputs).pow(3).sum(1), inputs)
