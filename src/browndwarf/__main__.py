"""``python -m browndwarf`` is the same as the command ``browndwarf``."""

from browndwarf.cli import main

if __name__ == "__main__":
    main()
