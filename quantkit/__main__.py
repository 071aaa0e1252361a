"""`python -m quantkit` is the `quantkit` command."""

from quantkit.cli.main import main

if __name__ == "__main__":
    main()
