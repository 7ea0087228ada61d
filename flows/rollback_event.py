"""What Prefect's server hears of `midstride champion rollback`, which itself needs no Prefect."""

from midstride.engine.registry.registry import Champion, ModelRegistry

__all__ = ["emit_rollback"]

_TELLING_S = 10.0


def emit_rollback(registry: ModelRegistry, left: Champion, back: Champion) -> None:
    """Let automations know which champion is back, where a server is configured; the roll-back is done in any case."""
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
    EventsWorker.drain_all(timeout=_TELLING_S)
