"""Is everything whose gradients cannot be read refused, with the reason and what to do instead?"""

import pytest
import torch
from torch import nn

from largebatch.errors import ConfigError
from largebatch.noise.monitor import NoiseScaleMonitor
from workers import WorkerError, on_workers


def two_backwards(model, *inputs):
    for _ in range(2):
        model(*(inputs or (torch.ones(3, 2),))).sum().backward()


def test_data_parallel_is_refused():
    with pytest.raises(ConfigError, match=r"DataParallel.*Use DistributedDataParallel"):
        NoiseScaleMonitor(nn.DataParallel(nn.Linear(2, 1)), microbatch=1)


@pytest.mark.filterwarnings("ignore")
def fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    NoiseScaleMonitor(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), microbatch=1)


def test_fsdp1_is_refused():
    with pytest.raises(WorkerError, match=r"ConfigError: FSDP1 .* Use fully_shard"):
        on_workers(2, fsdp1)


def tensor_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    NoiseScaleMonitor(model, microbatch=1)


def test_tensor_parallelism_is_refused():
    with pytest.raises(WorkerError, match=r"ConfigError: .*tensor parallelism.*fully_shard over the whole model"):
        on_workers(2, tensor_parallel)


def pipeline_stage(rank):
    from torch.distributed.pipelining import PipelineStage

    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    messages = []
    for model in (stage, stage.submod):
        try:
            NoiseScaleMonitor(model, microbatch=1)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_pipeline_parallelism_is_refused():
    for stage, module in on_workers(2, pipeline_stage):
        assert stage == "model is a torch.nn.Module; got PipelineStage."
        assert "pipeline stages?" in module


def test_deepspeed_is_refused_by_its_engine_and_by_its_parameters():
    """DeepSpeed itself is not installed: what it is known by (its module path, `ds_id` of ZeRO-3) is made here."""
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(2, 1)
    zero3 = nn.Linear(2, 1)
    zero3.weight.ds_id = 0
    for model in (engine, zero3):
        with pytest.raises(ConfigError, match=r"DeepSpeed.*Use DistributedDataParallel or fully_shard"):
            NoiseScaleMonitor(nn.Sequential(model), microbatch=1)


def test_an_optimizer_that_steps_inside_the_backward_is_refused():
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    with NoiseScaleMonitor(model, microbatch=1, every=1) as monitor:
        two_backwards(model)
        with pytest.raises(ConfigError, match="steps inside the backward"):
            monitor.step()


def test_sparse_gradients_are_refused_when_the_layer_says_so_and_when_they_come():
    embedding = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(ConfigError, match=r"Embedding\(sparse=True\).*sparse=False"):
        NoiseScaleMonitor(embedding, microbatch=1)
    dense = nn.Embedding(5, 2)
    with NoiseScaleMonitor(dense, microbatch=1, every=1) as monitor:
        dense.sparse = True
        two_backwards(dense, torch.tensor([1, 2]))
        with pytest.raises(ConfigError, match="sparse gradient"):
            monitor.step()


def test_gradients_that_were_left_over_are_refused():
    model = nn.Linear(2, 1)
    with NoiseScaleMonitor(model, microbatch=1, every=1) as monitor:
        two_backwards(model)
        monitor.step()
        two_backwards(model)
        with pytest.raises(ConfigError, match="call zero_grad"):
            monitor.step()


@pytest.mark.parametrize("model", [None, [nn.Linear(2, 1)], nn.Linear(2, 1).parameters()])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(ConfigError, match=r"model is a torch\.nn\.Module"):
        NoiseScaleMonitor(model, microbatch=1)


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(ConfigError, match="nothing to measure"):
        NoiseScaleMonitor(nn.Linear(2, 1).requires_grad_(False), microbatch=1)


def test_parameters_without_values_are_refused():
    with pytest.raises(ConfigError, match="Run the model once"):
        NoiseScaleMonitor(nn.LazyLinear(2), microbatch=1)
    with pytest.raises(ConfigError, match="meta"):
        NoiseScaleMonitor(nn.Linear(2, 2, device="meta"), microbatch=1)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1, "0.1", True])
def test_a_share_that_is_none_is_refused(bad):
    with pytest.raises(ConfigError, match="overhead is a share between 0 and 1"):
        NoiseScaleMonitor(nn.Linear(2, 2), microbatch=1, overhead=bad)


@pytest.mark.parametrize("state", [{}, None, {"running": 3}, "state"])
def test_a_state_that_is_none_is_refused(state):
    from largebatch.errors import CheckpointError

    with NoiseScaleMonitor(nn.Linear(2, 2), microbatch=1) as monitor:
        before = monitor.state_dict()
        with pytest.raises(CheckpointError, match="no state of a NoiseScaleMonitor"):
            monitor.load_state_dict(state)
        assert monitor.state_dict() == before
