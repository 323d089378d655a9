"""What does `python -m largebatch` do? The same as `largebatch`: torchrun starts modules, not commands."""

from __future__ import annotations

from largebatch.cli.__main__ import main

if __name__ == "__main__":
    main()
