"""``python -m shardconv``."""

from shardconv.cli import main

if __name__ == "__main__":
    main()
