"""Every message of every worker, one after another: when is an all-reduce done? Shares nothing with src.

A worker goes through its steps in order. In a step it sends some messages and takes some; one that is taken may be
added up. A message's bytes flow when the sender is in that step, its earlier messages have left, `latency` has passed
and the receiver is in its own step and done with its earlier ones. Sending and receiving do not hinder each other.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Step(NamedTuple):
    gives: list  # (receiver, bytes)
    takes: list  # (sender, bytes, whether it is added up)


def ring(size, num_bytes):
    part = num_bytes / size
    steps = [True] * (size - 1) + [False] * (size - 1)
    return [
        [Step([((rank + 1) % size, part)], [((rank - 1) % size, part, adds)]) for adds in steps] for rank in range(size)
    ]


def tree(size, num_bytes):
    programs = [[] for _ in range(size)]
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    for distance, adds in [(d, True) for d in distances] + [(d, False) for d in reversed(distances)]:
        for rank in range(0, size, 2 * distance):
            other = rank + distance
            if other < size:
                child, root = Step([(rank, num_bytes)], []), Step([], [(other, num_bytes, adds)])
                if not adds:
                    child, root = Step([], [(rank, num_bytes, adds)]), Step([(other, num_bytes)], [])
                programs[other].append(child)
                programs[rank].append(root)
    return programs


def halving_doubling(size, num_bytes):
    programs = [[] for _ in range(size)]
    blocks, first = [], 0
    for bit in reversed(range(size.bit_length())):
        if size & (1 << bit):
            blocks.append((first, 1 << bit))
            first += 1 << bit
    for first, count in blocks:
        distance = 1
        while distance < count:
            part = num_bytes / (2 * distance)
            for place in range(count):
                peer = first + (place ^ distance)
                programs[first + place].append(Step([(peer, part)], [(peer, part, True)]))
            distance *= 2
    pairs = list(itertools.pairwise(blocks))
    for adds in (True, False):
        for (large, many), (small, few) in reversed(pairs) if adds else pairs:
            part = num_bytes / many
            for place in range(few):  # the ranks of the larger block that own parts of this one's
                owners = [large + place * (many // few) + index for index in range(many // few)]
                if adds:
                    programs[small + place].append(Step([(owner, part) for owner in owners], []))
                else:
                    programs[small + place].append(Step([], [(owner, part, False) for owner in owners]))
                for owner in owners:
                    take, give = [(small + place, part, True)], [(small + place, part)]
                    programs[owner].append(Step([], take) if adds else Step(give, []))
    for first, count in blocks:
        distance = count // 2
        while distance:
            part = num_bytes / (2 * distance)
            for place in range(count):
                peer = first + (place ^ distance)
                programs[first + place].append(Step([(peer, part)], [(peer, part, False)]))
            distance //= 2
    return programs


def doubling(size, num_bytes):
    levels = size.bit_length() - 1
    half = 1 << levels
    programs = []
    for rank in range(size):
        if rank >= half:
            programs.append([Step([(rank - half, num_bytes)], []), Step([], [(rank - half, num_bytes, False)])])
            continue
        beyond = [rank + half] if rank + half < size else []
        program = [Step([], [(other, num_bytes, True)]) for other in beyond]
        for level in range(levels):
            program.append(Step([(rank ^ 1 << level, num_bytes)], [(rank ^ 1 << level, num_bytes, True)]))
        programs.append(program + [Step([(other, num_bytes)], []) for other in beyond])
    return programs


PROGRAMS = {"ring": ring, "halving_doubling": halving_doubling, "doubling": doubling, "tree": tree}


def finish(programs, start, latency, per_byte, reduce_per_byte=0.0):
    """When each worker is done; `start` and `per_byte` are one number a worker, and the slower link counts."""
    size = len(programs)
    at = [0] * size  # the step each worker is in
    begin, out_free, in_free, reduced = list(start), list(start), list(start), list(start)
    given, taken = [0] * size, [0] * size
    progress = True
    while progress:
        progress = False
        for rank in range(size):
            while at[rank] < len(programs[rank]):
                step = programs[rank][at[rank]]
                moved = False
                if given[rank] < len(step.gives):
                    peer, num_bytes = step.gives[given[rank]]
                    other = programs[peer][at[peer]] if at[peer] < len(programs[peer]) else Step([], [])
                    if taken[peer] < len(other.takes) and other.takes[taken[peer]][0] == rank:
                        adds = other.takes[taken[peer]][2]
                        flows = max(max(begin[rank], out_free[rank]) + latency, begin[peer], in_free[peer])
                        seconds = num_bytes * max(per_byte[rank], per_byte[peer])
                        out_free[rank], in_free[peer] = flows - latency + seconds, flows + seconds
                        reduced[peer] = max(reduced[peer], in_free[peer] + adds * num_bytes * reduce_per_byte)
                        given[rank] += 1
                        taken[peer] += 1
                        moved = progress = True
                if given[rank] == len(step.gives) and taken[rank] == len(step.takes):
                    end = max(begin[rank], out_free[rank], in_free[rank], reduced[rank])
                    begin[rank] = out_free[rank] = in_free[rank] = reduced[rank] = end
                    at[rank] += 1
                    given[rank] = taken[rank] = 0
                    moved = progress = True
                if not moved:
                    break
    assert all(place == len(program) for place, program in zip(at, programs, strict=True)), "a deadlock"
    return begin
