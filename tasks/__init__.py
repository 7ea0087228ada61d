"""Prefect tasks: one verb of the engine each, with retries, events and artifacts.

prepare         make the data, once for a run however often its flow is retried
launch          run one training world to its end
monitor         a world as the orchestrator sees it while it runs
progress        how far a world is: a bar, and a line of text under it
validations     what a validation found, in a line
snapshot        snapshots as the orchestrator sees them, checked from outside
curves          the curves of a run while it trains
evaluate        what the best weights of a run are worth
compare         whether a challenger becomes champion
report          what a run came to, as text and as a picture
nightly_report  what a night came to
events          what automations may listen to
credentials     from a Prefect block: in the environment while a flow needs them
without_retries  Prefect's client asks once, where a world would wait for it
resources       names under which Prefect keeps what belongs to a run

Tests: tests/unit/tasks, tests/flows
"""
