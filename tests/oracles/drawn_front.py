"""Steps to a goal of plain SGD on linear regression, by brute force in float64: the truth behind a drawn task.

Loss (1/2)(w.x - y)^2, momentum 0, weights from 0, one shuffle an epoch. Shares no code with largebatch.
"""

import numpy as np


def draw_problem(seed):
    """A data set with a random amount of noise: (inputs, targets, sigma)."""
    rng = np.random.default_rng(seed)
    dim, num_examples = 32, 2048
    sigma = float(np.exp(rng.uniform(np.log(2.0), np.log(4.0))))
    # Curvatures from 1 down to 0.04: a front of many steps, and directions that share the loss.
    stds = np.geomspace(1.0, 0.2, dim)
    inputs = rng.standard_normal((num_examples, dim)) * stds
    truth = rng.choice([-1.0, 1.0], dim) * rng.uniform(0.7, 1.3, dim) / stds
    targets = inputs @ truth + sigma * rng.standard_normal(num_examples)
    return inputs, targets, sigma


def losses_at(inputs, targets, weights):
    return 0.5 * np.mean((inputs @ weights - targets) ** 2)


def moments_at(inputs, targets, weights):
    """(tr(Sigma), |G|^2) of the empirical gradient, exact (McCandlish 2018, eq. 2.3)."""
    gradients = (inputs @ weights - targets)[:, None] * inputs
    mean = gradients.mean(0)
    return ((gradients - mean) ** 2).sum() / (len(inputs) - 1), float(mean @ mean)


def run(inputs, targets, batch, lr, rng, goals, goal_rows, max_steps):
    """First crossing of each goal by one SGD run, and the path of weights."""
    weights = np.zeros(inputs.shape[1])
    crossings, path = [None] * len(goals), [weights]
    order = np.empty(0, dtype=int)
    previous = losses_at(inputs[goal_rows], targets[goal_rows], weights)
    for step in range(1, max_steps + 1):
        while len(order) < batch:
            order = np.concatenate([order, rng.permutation(len(inputs))])
        rows, order = order[:batch], order[batch:]
        gradient = ((inputs[rows] @ weights - targets[rows])[:, None] * inputs[rows]).mean(0)
        weights = weights - lr * gradient
        path.append(weights)
        loss = losses_at(inputs[goal_rows], targets[goal_rows], weights)
        for index, goal in enumerate(goals):
            if crossings[index] is None and loss <= goal:
                share = (np.log(previous) - np.log(goal)) / (np.log(previous) - np.log(loss))
                crossings[index] = step - 1 + share
        previous = loss
        if all(found is not None for found in crossings) or not np.isfinite(loss):
            break
    return crossings, np.array(path)


def best_steps(inputs, targets, batch, goal, goal_rows, lrs, seeds, max_steps):
    """Fewest mean log steps over the learning rates (McCandlish 2018, A.2), as steps."""
    best = np.inf
    for lr in lrs:
        logs = []
        for seed in range(seeds):
            crossing = run(inputs, targets, batch, lr, np.random.default_rng(seed), (goal,), goal_rows, max_steps)[0][0]
            logs.append(np.log(crossing) if crossing is not None else np.log(2 * max_steps))
        best = min(best, float(np.exp(np.mean(logs))))
    return best


def critical_batch(batches, steps):
    """B_crit of log S = log(S_min + E_min / B) by least squares on a fine grid (McCandlish 2018, eq. 2.11, 2.12)."""
    batches, logs = np.asarray(batches, float), np.log(steps)
    grid = np.exp(np.linspace(np.log(batches.min() / 10), np.log(batches.max() * 10), 4001))
    shapes = np.log1p(grid[:, None] / batches[None, :])
    residuals = logs[None, :] - shapes
    residuals -= residuals.mean(1, keepdims=True)
    return float(grid[np.argmin((residuals**2).sum(1))])
