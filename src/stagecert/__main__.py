"""`python -m stagecert` is the program `stagecert`."""

from stagecert.cli import main

if __name__ == "__main__":
    main()
