"""One attempt, as its launcher and its ranks see it. Needs no torch.

agreement       how ranks find a boundary that all of them have still before them, silent until one of them has
                to
attempts        the attempts of a run: one file per attempt, and whether another attempt makes sense
events          what happens in a world, one JSON line per event, in a local file that the launcher names
heartbeat       what a rank is doing, in a few numbers of shared memory that its launcher reads
lasting_output  standard output for as long as it takes what is written: a training does not end with its reader or
                its disk
liveness        where each rank was last seen: said in the store in which the ranks met, and read when one of
                them is lost
outcome         how a rank, and a world, ended
private_file    files in a folder that others can write to, such as that for temporary files: only this user's
                own are read
request         what a process is asked for from outside: a snapshot, or to stop
script_exit     how a script ends that lets an error of the engine pass
session         the session of a world: the small local folder in which its ranks and its launcher meet
signals         a signal to one process becomes something that every rank does at the same boundary
terminal_view   a world on a terminal: its output, and a progress bar
"""
