#: on this machine, as far as anybody has said
processes = 1


def initialize_multiprocess(local_rank: int, local_world_size: int) -> None:
    global processes
    processes = local_world_size
