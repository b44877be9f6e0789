"""python -m slipstream: the command `slipstream`."""

from slipstream.cli import main

if __name__ == "__main__":
    main()
