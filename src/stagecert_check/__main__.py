"""`python -m stagecert_check` is the command `stagecert-check`."""

import sys

from stagecert_check.command import main

if __name__ == "__main__":
    sys.exit(main())
