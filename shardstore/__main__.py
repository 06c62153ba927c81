"""`python -m shardstore` is the command line."""

from __future__ import annotations

from shardstore.cli import main

if __name__ == "__main__":
    main()
