"""`python -m router` is `warmroute`."""

from router.cli import main

if __name__ == "__main__":
    main()
