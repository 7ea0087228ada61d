"""`python -m midstride.flows`: the command line `midstride`."""

from midstride.flows.cli import main

if __name__ == "__main__":
    main()
