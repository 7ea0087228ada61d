"""Prefect flows, and the command line that runs them.

train           the flow that trains: prepare, launch, evaluate, report
nightly         the flow of a night: train on new data, promote the result if it is better
run_states      names, tags and final states of flow runs
log_filters     what the log of a flow run shows of our errors
cli             the command line `midstride`
terminal        a flow on a terminal: one bar while it runs, one panel when it ends
deployment      a flow, a resolved job and a schedule, as Prefect's server keeps them
serve           runs that are due, in processes of this one
detach          a flow that another process started outlives it
server          Prefect's server: the one that is configured, or one started for one command
server_setup    what a self-hosted server lacks for unattended runs
prefect_internals  privates of Prefect, named here alone
rollback_event  tells the server of `midstride champion rollback`

Tests: tests/unit/flows, tests/flows
"""
