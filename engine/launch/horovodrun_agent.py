"""horovodrun without its final traceback: `... .horovodrun_agent ARGUMENTS SESSION`."""

import sys
from pathlib import Path

from midstride.engine.processes.loopback import ADDRESS

__all__ = ["main"]


def main() -> None:
    """Run horovodrun on the command line's arguments; end with 1 if the world did not end well."""
    # Only here: the processes that horovodrun starts read this file again.
    from horovod.runner.http import http_server
    from horovod.runner.launch import run_commandline

    if "--network-interfaces" in sys.argv:  # given to a world of this machine alone
        find_port = http_server.find_port  # horovodrun's own store listens on every interface
        http_server.find_port = lambda serve: find_port(lambda address: serve((ADDRESS, address[1])))

    try:
        run_commandline()
    except RuntimeError as error:
        # It names the rank that it heard of first, often a victim; the ranks' outcomes name the right one.
        if not any(Path(sys.argv[-1]).glob("heartbeat-rank-*")):
            print(f"horovodrun: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
