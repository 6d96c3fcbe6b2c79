"""`python -m jaxinfer`: the command line."""

import sys

from jaxinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
