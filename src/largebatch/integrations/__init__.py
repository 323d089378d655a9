"""Is my batch size right, in a loop that someone else wrote?

`lightning`, `transformers` and `accelerate` put the monitor inside it, `tensorboard` and `metrics` pass its numbers
on; each is imported by its name. Nothing is imported here, so that no one needs a package that another loop uses.
"""
