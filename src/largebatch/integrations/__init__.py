"""The monitor inside other people's loops: `lightning`, `transformers` and `accelerate`, each imported by its name.

Nothing is imported here, so that no one needs a package that another loop uses.
"""
