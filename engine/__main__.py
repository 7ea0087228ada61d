"""`python -m midstride.engine`: the commands that need no Prefect."""

from midstride.engine.cli.app import main

if __name__ == "__main__":
    main()
