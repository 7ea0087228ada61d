"""The event that `midstride champion rollback`, which itself needs no Prefect, emits on Prefect's server."""

from midstride.engine.registry.registry import Champion, ModelRegistry

__all__ = ["emit_rollback"]

_EMIT_TIMEOUT_S = 10.0


def emit_rollback(registry: ModelRegistry, left: Champion, back: Champion) -> None:
    """Emit an event about the champion that is back, if a server is configured; errors do not affect the roll-back."""
    from midstride.flows.terminal import quiet_prefect

    quiet_prefect()
    from prefect.events.worker import EventsWorker
    from prefect.settings import get_current_settings

    from midstride.flows.server import ServerError, need_server
    from midstride.tasks.events import ModelRolledBack, emit
    from midstride.tasks.resources import model

    if get_current_settings().api.url is None:
        return
    try:
        need_server()
    except ServerError as error:
        print(f"no event says so: {error}")
        return
    emit(ModelRolledBack(run=back.run, weights=registry.weights_url(back), after=left.run), model(registry.name))
    EventsWorker.drain_all(timeout=_EMIT_TIMEOUT_S)
