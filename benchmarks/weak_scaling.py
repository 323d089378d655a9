"""Is a DDP step on 1, 2, 4, 8 and 16 hosts what the simulator says, from a table of all-reduces on the same hosts?

Work: as in overlap.py, with buckets of 2 MiB and layers of 60 ms, the same on each host, so that the ideal step does
not grow with the hosts. Efficiency: the step of one host over the step of n. All hosts share this machine's cores: what
they cannot follow at 8 and 16 hosts counts as network here, and says nothing of real hosts.
"""

from __future__ import annotations

from _harness import arguments, claim
from _hosts import NoHostsError, hosts
from _overlap_worker import Measured, Work, measure

CLAIM = "the simulator predicts the step of 1, 2, 4, 8 and 16 hosts with the pipelined hook within 10 %"
GOAL = "predicted over measured 0.9 to 1.1 at each number of hosts"
NUM_HOSTS = (1, 2, 4, 8, 16)


def main() -> None:
    """Measure each number of hosts on one network."""
    options = arguments(__doc__)
    repeats = 2 if options.quick else 6
    work = Work(num_buckets=6, bucket_bytes=2 << 20, layer_s=0.06, repeats=repeats)
    found: dict[int, Measured] = {}
    try:
        with hosts(max(NUM_HOSTS), "1gbit") as network:
            for num_hosts in NUM_HOSTS:
                found[num_hosts] = network.run(1, measure, work, num_hosts=num_hosts, seconds=300)[0]
    except NoHostsError as error:
        claim(CLAIM, value=None, goal=GOAL, holds=False, peers={}, how=f"not measured: {error}")
    value = {f"{num_hosts} hosts": row(each, found[1]) for num_hosts, each in found.items()}
    claim(
        CLAIM,
        value=value,
        goal=GOAL,
        holds=all(0.9 <= each.predicted_s["hook"] / each.steps_s["hook"] <= 1.1 for each in found.values()),
        peers={"DDP's own": {f"{num} hosts": efficiency(each, found[1], "ddp") for num, each in found.items()}},
        how={
            "method": "medians; every measure from a common start until the last rank is done; one rank a host, links "
            "of 1 Gbit/s; predicted from all-reduces alone and two at once in the same job",
            "repeats": repeats,
        },
    )  # fmt: skip


def row(each: Measured, one: Measured) -> dict[str, float | str]:
    """Milliseconds, and efficiency against one host, measured and predicted."""
    return {
        "step_ms": round(1000 * each.steps_s["hook"], 1),
        "predicted_ms": round(1000 * each.predicted_s["hook"], 1),
        "efficiency": efficiency(each, one, "hook"),
        "predicted_efficiency": round(one.predicted_s["hook"] / each.predicted_s["hook"], 3),
        "compute_alone_ms": round(1000 * each.steps_s["compute alone"], 1),
        "algorithm": each.algorithm,
    }


def efficiency(each: Measured, one: Measured, name: str) -> float:
    """The step of one host over this one."""
    return round(one.steps_s[name] / each.steps_s[name], 3)


if __name__ == "__main__":
    main()
