"""Is it seen who decides the order of the data, through all that loaders are wrapped in?"""

import accelerate
import lightning
import pytest
import timm.data.loader
from accelerate.data_loader import prepare_data_loader
from timm.data.distributed_sampler import OrderedDistributedSampler, RepeatAugSampler
from torch import nn
from torch.optim import SGD
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from largebatch.audit.inspect import inspect
from largebatch.audit.look_order import order_of
from largebatch.recipe.batch_sampler import ShuffledLoader

DATA = list(range(64))
MODEL = nn.Linear(2, 2)


def seen(loader, model: nn.Module = MODEL, **given) -> dict[str, str]:
    return {f.code: f.seen for f in inspect(model, SGD(MODEL.parameters(), lr=0.1), loader, **given)}


def dealt(num_examples: int = 64, world: int = 4, rank: int = 0, **given) -> DataLoader:
    data = list(range(num_examples))
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, world, rank, **given))


class TestOverlap:
    # Goyal 2017, remark 4: one shuffle an epoch, dealt out to the workers.
    def test_every_worker_shuffling_for_itself(self):
        loader = DataLoader(DATA, batch_size=8, shuffle=True)
        assert seen(loader, world_size=4) == {
            "LB302": "there are 4 workers, and RandomSampler gives each of them all 64 examples in an order of its own."
        }
        assert seen(loader) == {}
        assert seen(loader, world_size=1) == {}

    def test_in_stored_order_it_is_worse(self):
        assert set(seen(DataLoader(DATA, batch_size=8), world_size=4)) == {"LB302", "LB304"}

    def test_a_distributed_sampler_deals(self):
        assert seen(dealt()) == {}
        assert seen(dealt(rank=2), rank=2, world_size=4) == {}

    def test_to_another_number_of_workers_or_to_another_worker(self):
        assert seen(dealt(world=4), world_size=8) == {
            "LB302": "DistributedSampler deals the data to 4 workers, and there are 8."
        }
        assert seen(dealt(rank=0), world_size=4, rank=2) == {
            "LB302": "DistributedSampler deals to worker 0, and this is worker 2: two workers have the same part."
        }

    @pytest.mark.parametrize(
        "sampler", [WeightedRandomSampler([1.0] * 64, 64), SubsetRandomSampler(range(16)), RandomSampler(DATA, True)]
    )
    def test_draws_with_replacement_and_subsets_may_be_meant_for_a_worker(self, sampler):
        assert seen(DataLoader(DATA, batch_size=8, sampler=sampler), world_size=4) == {}

    def test_a_batch_sampler_of_an_unknown_kind_is_not_judged(self):
        class Mine(BatchSampler):
            pass

        # DataLoader puts a SequentialSampler beside a batch sampler, which nothing uses.
        loader = DataLoader(DATA, batch_sampler=Mine(SequentialSampler(DATA), 8, False))
        assert isinstance(loader.sampler, SequentialSampler)
        assert seen(loader, world_size=4) == {}
        assert seen(DataLoader(DATA, batch_sampler=[[1, 2], [3, 4]]), world_size=4) == {}

    def test_a_stream_is_not_judged(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(DATA)

        assert seen(DataLoader(Stream(), batch_size=8), world_size=4) == {}
        assert seen(DataLoader(Stream(), batch_size=None), world_size=4, epochs=3) == {}


class TestPadding:
    def test_examples_are_repeated_where_the_workers_do_not_divide_them(self):
        assert seen(dealt(62)) == {
            "LB303": "DistributedSampler deals 62 examples to 4 workers and repeats 2 of them in every epoch."
        }
        assert seen(dealt(62, drop_last=True)) == {}
        assert seen(dealt(64)) == {}

    def test_timms_ordered_sampler_pads_too_and_its_repeats_are_meant(self):
        data = list(range(62))
        ordered = DataLoader(data, batch_size=8, sampler=OrderedDistributedSampler(data, 4, 0))
        assert set(seen(ordered)) == {"LB303"}
        repeated = DataLoader(data, batch_size=8, sampler=RepeatAugSampler(data, 4, 0))
        assert seen(repeated) == {}

    @pytest.mark.parametrize(("num_examples", "padded"), [(64, 0), (60, 4), (33, 31)])
    def test_accelerate_fills_its_last_step(self, num_examples: int, padded: int):
        loaders = [
            prepare_data_loader(
                DataLoader(list(range(num_examples)), batch_size=8, shuffle=True),
                num_processes=4, process_index=rank, put_on_device=False,
            )
            for rank in range(4)
        ]  # fmt: skip
        drawn = sum(len(batch) for loader in loaders for batch in loader.batch_sampler)
        assert drawn == num_examples + padded
        found = seen(loaders[1])
        assert set(found) == ({"LB303"} if padded else set())
        assert not padded or f"with {padded} examples" in found["LB303"]


class TestStoredOrder:
    def test_is_seen_with_and_without_workers(self):
        assert seen(DataLoader(DATA, batch_size=8)) == {
            "LB304": "SequentialSampler goes through 64 examples in their stored order."
        }
        assert set(seen(dealt(shuffle=False))) == {"LB304"}
        assert seen(DataLoader(DATA, batch_size=8, shuffle=True)) == {}


class TestWrappers:
    def test_our_own_deals_whole_steps(self):
        loader = ShuffledLoader(DATA, batch=32, seed=0, rank=1, world_size=4, microbatch=4)
        order = order_of(loader)
        assert (order.batch, order.local_batch, order.num_workers, order.rank) == (32, 4, 4, 1)
        assert seen(loader, world_size=4, rank=1) == {}
        assert set(seen(loader, world_size=8)) == {"LB302"}
        # The batch is known from it, and its accumulation is not to be given again.
        assert set(seen(loader, reference_batch=8, reference_lr=0.1)) == {"LB104"}
        assert seen(loader, reference_batch=32, reference_lr=0.1) == {}

    def test_accelerates_shards_deal(self):
        loader = DataLoader(DATA, batch_size=8, shuffle=True)
        shard = prepare_data_loader(loader, num_processes=4, process_index=2, put_on_device=False)
        order = order_of(shard)
        assert (order.num_workers, order.rank, order.local_batch, order.num_examples) == (4, 2, 8, 64)
        assert seen(shard, world_size=4, rank=2) == {}
        assert set(seen(shard, world_size=8)) == {"LB302"}
        split = prepare_data_loader(loader, num_processes=4, process_index=2, put_on_device=False, split_batches=True)
        assert order_of(split).local_batch == 2

    def test_what_accelerate_prepared_on_one_process_is_dealt_out_on_several(self):
        loader = accelerate.Accelerator(cpu=True).prepare(DataLoader(DATA, batch_size=8, shuffle=True))
        assert seen(loader, world_size=4) == {}

    def test_lightning_puts_in_a_sampler_of_its_own(self):
        class Lit(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = MODEL

        assert seen(DataLoader(DATA, batch_size=8, shuffle=True), Lit(), world_size=4) == {}

    def test_timms_endless_loader_is_followed(self):
        loader = timm.data.loader.MultiEpochsDataLoader(DATA, batch_size=8)
        assert order_of(loader).local_batch == 8
        assert set(seen(loader)) == {"LB304"}
        sampler = DistributedSampler(DATA, 4, 1)
        loader = timm.data.loader.MultiEpochsDataLoader(DATA, batch_size=8, sampler=sampler)
        assert order_of(loader).num_workers == 4
        assert seen(loader, world_size=4, rank=1) == {}

    def test_a_grouping_batch_sampler_over_a_distributed_sampler_deals(self):
        class Grouped(BatchSampler):  # torchvision's references/detection
            pass

        loader = DataLoader(DATA, batch_sampler=Grouped(DistributedSampler(DATA, 4, 0), 8, False))
        assert seen(loader, world_size=4, rank=0) == {}
        assert set(seen(loader, world_size=2)) == {"LB302"}
