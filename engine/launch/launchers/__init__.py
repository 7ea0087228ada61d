"""Launchers: start the processes of a world.

base        base class of launchers: the command that starts a world, and its environment
build       launchers by name: nothing is imported until its name is asked for
horovodrun  horovodrun, on this machine and over ssh on others
inline      one process, without anything in between
join        other machines, on each of which `midstride join` was started
spawn       ranks on this machine, without an agent in between: the quickest way to a first step
torchrun    torchrun on this node
"""
