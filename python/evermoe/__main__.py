"""Entry point of `python -m evermoe`, the command `evermoe`."""

import sys

from evermoe.cli.main import main

sys.exit(main())
